"""What the documents name exists: paths, links, names in files, examples; and each page has the form it promises."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tasks import conf, planned
from tasks.data import ingest
from tasks.methods import loader
from tasks.runner import Context
from tasks.stages import retrievers
from tests import shipped
from tests.docs.documents import LINK, ROOT, Document, documents
from tests.systems import asked_model

DOCUMENTS = documents()
by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.path))
MADE = ("artifacts", "reports", ".scratch", ".venv", ".dvc", "models")
"""Folders that a fresh clone does not have."""
PLACEHOLDER = re.compile(r"<[\w-]+>")
FILE = re.compile(r"^\.?[\w<>@*-]+(/[\w.<>@*-]*)+$|^[\w-]+\.(yaml|md|py|toml)$")
OWN = {"my-model.yaml", "<kind>_worker.py"}
"""Files that a reader makes."""


def _stage_outputs() -> set[str]:
    """The first two folders of what stages write; an output that has options is a mapping of one key."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values()
    outs = [out for stage in stages for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]
    return {"/".join(Path(next(iter(out)) if isinstance(out, dict) else out).parts[:2]) for out in outs}


@by_name
def test_every_path_exists(document: Document) -> None:
    tracked_folders = {path.name for path in ROOT.iterdir()}
    wrong = []
    for span in document.spans:
        if not FILE.match(span) or Path(span).name in OWN:
            continue
        first = Path(span).parts[0]
        if first in ("artifacts", "reports"):
            parts = Path(span).parts
            is_known = first == "reports" or len(parts) == 1 or "/".join(parts[:2]) in _stage_outputs()
        elif first in MADE:
            is_known = True
        elif first not in tracked_folders and ("/" in span or "methods" in document.path.parts):
            continue  # No path: a word with a stroke in it, or a file of a paper's released code.
        else:
            pattern = PLACEHOLDER.sub("*", span).rstrip("/")
            near = ROOT / document.path.parent if "/" not in span else ROOT
            is_known = any(any(place.glob(pattern)) for place in (ROOT, near, ROOT / "tests", ROOT / "tasks"))
            is_known = is_known or ("/" not in span and any(ROOT.glob(f"t*/*/{pattern}")))
        if not is_known:
            wrong.append(span)
    assert not wrong, f"{document.path} names what is not there: {wrong}"


@by_name
def test_every_link_resolves(document: Document) -> None:
    pages = {(ROOT / one.path).resolve(): one for one in DOCUMENTS}
    wrong = []
    for link in LINK.findall(document.prose):
        if link.startswith(("https://", "http://127.0.0.1")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / document.path.parent / name).resolve() if name else (ROOT / document.path).resolve()
        is_here = target.exists() and ROOT in [target, *target.parents]
        if not is_here or (anchor and anchor not in pages[target].anchors):
            wrong.append(link)
    assert not wrong, f"{document.path}: {wrong}"


@by_name
def test_a_name_in_a_file_is_in_that_file(document: Document) -> None:
    """ "`name` in `file.py`" is how the documents point to a function or a setting."""
    for name, path in re.findall(r"`(\w+)(?:: [^`]*)?` in `([\w/.-]+\.\w+)`", document.prose.replace("\n", " ")):
        assert name in (ROOT / path).read_text(encoding="utf-8"), f"{document.path}: {name} in {path}"


def test_every_page_that_code_and_settings_name_exists() -> None:
    wrong = []
    for folder in ("tasks", "flows", "conf", "infra", "tests"):
        for path in (path for path in shipped.files(folder, "*.*") if path.suffix in (".py", ".yaml")):
            pages = set(re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")))
            wrong += [f"{path.relative_to(ROOT)}: {page}" for page in pages if not (ROOT / page).is_file()]
    assert not wrong, "\n".join(wrong)


def test_sizes_and_titles() -> None:
    by_path = {str(document.path): document for document in DOCUMENTS}
    assert len(by_path["README.md"].text.split()) <= 1000
    assert len(by_path["CONTRIBUTING.md"].text.split()) <= 1500
    for path, document in by_path.items():
        if Path(path).parent == Path("docs"):
            assert document.text.splitlines()[0].endswith("?"), f"{path}: its title is the question that it answers"


def test_the_index_lists_every_page() -> None:
    index = next(document for document in DOCUMENTS if document.path == Path("docs/README.md"))
    linked = {Path(link).name for link in LINK.findall(index.prose)}
    assert {path.name for path in (ROOT / "docs").glob("*.md") if shipped.is_shipped(path)} - linked <= {"README.md"}


def test_the_tree_of_folders_names_every_room() -> None:
    page = next(document for document in DOCUMENTS if document.path == Path("docs/path.md"))
    tree = next(block for block in page.blocks("text") if "\n  rewards/" in block)
    rooms = {
        path.relative_to(ROOT).parts[1] for path in shipped.files("tasks", "*.py") if path.parent != ROOT / "tasks"
    }
    named = set(re.findall(r"([\w-]+)/", tree))
    assert rooms <= named, rooms - named
    assert all(any(ROOT.glob(f"{path}")) or any(ROOT.glob(f"*/{path}")) for path in named), named


def test_the_page_about_provenance_says_how_settings_are_hashed(tmp_path: Path) -> None:
    """Its expression gives the hash that a stage writes, from nothing but the stage's plan file."""
    settings = retrievers.Settings({"ü": {"backend": "bm25", "k1": 1.5, "b": None}, "a": {"backend": "dense"}})
    planned.write(tmp_path, "retrievers", planned.Plan(conf.plain(settings), {}, ""))
    plan = json.loads((tmp_path / "retrievers.json").read_text(encoding="utf-8"))
    page = next(document for document in DOCUMENTS if document.path == Path("docs/provenance.md"))
    (expression,) = re.findall(r"^    (sha256\(.+)$", page.text, re.MULTILINE)
    known = {"sha256": hashlib.sha256, "json": json, "plan": plan}
    assert eval(expression, known) == Context("retrievers", tmp_path, settings, "world", None).config_sha256


def test_example_rows_are_data(tmp_path: Path) -> None:
    """The fewest fields come first; a single question cannot be trained on and evaluated, so more are added."""
    page = next(document for document in DOCUMENTS if document.path == Path("docs/data.md"))
    passage, question, *full = page.blocks("json")
    more = [question.replace("France", f"France {n}").replace("Lyon?", f"Lyon {n}?") for n in range(40)]
    for example, blocks in (("fewest", (passage, question + "".join(more))), ("full", full)):
        folder = tmp_path / example
        folder.mkdir()
        for name, block in zip(("corpus", "questions"), blocks, strict=True):
            (folder / f"{name}.jsonl").write_text(block, encoding="utf-8")
        ingest.ingest(folder, folder / "data")
        for name, block in zip(("corpus", "questions"), blocks, strict=True):
            rows = (folder / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            assert len(rows) == len(block.splitlines())


def test_example_methods_can_be_loaded(tmp_path: Path) -> None:
    """A block of YAML that begins with the name of its file is that file."""
    examples = [
        block for document in DOCUMENTS for block in document.blocks("yaml") if block.startswith("# conf/method/")
    ]
    assert examples
    shutil.copytree(ROOT / conf.CONF, tmp_path / conf.CONF)
    for block in examples:
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.write_text(block, encoding="utf-8")
        assert loader.load(path.stem, "laptop", tmp_path)["title"]


def test_the_example_of_a_system_fits_its_kind() -> None:
    blocks = [block for document in DOCUMENTS for block in document.blocks("yaml")]
    (block,) = (block for block in blocks if block.startswith("# conf/system/"))
    settings = yaml.safe_load(block)
    assert (settings.pop("kind"), settings.pop("title")) == ("asked_model", "Asked model")
    assert tuple(settings.pop("services")) == asked_model.PART.services
    assert conf.fill(asked_model.PART, settings, "the example").prompt.format(passages="p", question="q")
