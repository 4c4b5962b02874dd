"""What the code cites stands on the pages of `docs/methods`, and the pages know where they are cited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import shipped
from tests.papers import PAGES, ROOT, Citation, citations, tables

NAMES = sorted(path.stem for path in shipped.files("docs/methods", "*.md"))
METHOD_PAGES = [name for name in NAMES if name not in ("README", "decisions", "printed")]
CITING = sorted(
    path for folder in ("tasks", "conf") for path in shipped.files(folder) if path.suffix in (".py", ".yaml", ".md")
)
# Readers of the report see these texts, so they name papers and tables and no page of this repository.
SHOWN = {"tasks/report/claims.py"}
PART = re.compile(r"^PART = ", re.MULTILINE)
# Documents that a reader of this repository cannot open, in the forms in which they used to be cited.
OUTSIDE = re.compile(
    r"\b(?:search_r1|stepsearch|dspo|pica|slate|r_search),? (?:sections? \d|pitfall)|\bsystems\.md|\bdecision \d"
    r"|\b[Pp]itfalls? \d|\b[Ss]ection \d+, \d"
)


def places(page: str) -> dict[Citation, list[str]]:
    """Every place that the page describes, and the files that it names for it."""
    sources, stands = tables(page)[:2]
    assert sources.columns == ("name", "what", "id"), f"{page}: the first table says what is cited"
    assert stands.columns == ("place", "what it defines", "here"), f"{page}: the second table says where it stands"
    ids: dict[str, list[str]] = {}
    for row in sources.rows:
        ids.setdefault(row["name"], []).append(row["id"])

    found = {}
    for row in stands.rows:
        name, _, place = row["place"].partition(" ")
        is_code = ".py" in place or ".sh" in place
        (id_,) = [one for one in ids[name] if one.startswith(("arXiv ", "doi ")) != is_code]
        found[Citation(name, place, id_, page)] = re.findall(r"`([^`]+)`", row["here"])
    return found


def cited(path: Path) -> set[Citation]:
    return set(citations(path.read_text(encoding="utf-8")))


PLACES = {citation: files for page in METHOD_PAGES for citation, files in places(page).items()}


@pytest.mark.parametrize("path", CITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_citation_stands_on_its_page_and_the_page_names_the_file(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for citation in cited(path):
        assert citation in PLACES, f"{citation} stands nowhere in docs/methods/{citation.page}.md"
        if path.suffix != ".md":
            assert name in PLACES[citation], f"docs/methods/{citation.page}.md: {citation.place}: {name} is not named"


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_page_names_files_that_cite_it(page: str) -> None:
    for citation, files in places(page).items():
        for file in files:
            assert (ROOT / file).is_file(), f"{page}: {citation.place}: there is no {file}"
            assert citation in cited(ROOT / file), f"{page}: {file} does not cite {citation.name} {citation.place}"


@pytest.mark.parametrize("path", CITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_papers_are_cited_in_one_form(path: Path) -> None:
    """An arXiv number or a page outside the form would be checked by nobody."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md" and str(path.relative_to(ROOT)) not in SHOWN:
        whole = {(found.id, found.page) for found in citations(text)}
        printed = {id_ for id_, _ in whole if id_.startswith(("arXiv ", "doi "))}
        assert set(re.findall(r"arXiv:? ?\d{4}\.\d{5}|doi[: ]10\.[^;\s]+", text)) == printed
        assert set(re.findall(r"docs/methods/(\w+)\.md", text)) == {page for _, page in whole}


def test_nothing_outside_the_repository_is_cited() -> None:
    files = [*CITING, *(path for folder in ("flows", "tests", "docs") for path in shipped.files(folder, "*.*"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in files
        if path.suffix in (".py", ".yaml", ".md") and path != Path(__file__)
        for match in OUTSIDE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


PARTS = [path for path in CITING if path.suffix == ".py" and PART.search(path.read_text(encoding="utf-8"))]
FORMULAS = [path for path in PARTS if path.relative_to(ROOT).parts[1] in ("rl", "rewards")]


@pytest.mark.parametrize("path", FORMULAS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_part_of_a_reward_or_a_loss_cites_its_paper(path: Path) -> None:
    """Or says that there is none."""
    has_none = "No paper:" in path.read_text(encoding="utf-8")
    assert bool(cited(path)) != has_none, f"{path.relative_to(ROOT)}: cite a paper as docs/methods/README.md says"


def test_every_method_cites_its_paper_itself_or_by_the_file_it_extends() -> None:
    def cites(path: Path) -> bool:
        extended = re.search(r"^extends: (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        return bool(cited(path)) or bool(extended and cites(path.with_stem(extended[1])))

    assert all(cites(path) for path in shipped.files("conf/method", "*.yaml"))


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+)\.md\)", (PAGES / "README.md").read_text(encoding="utf-8")))
    assert linked == set(NAMES) - {"README"}


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in shipped.files("docs/methods", "*.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve() if target else page
            assert linked.is_file(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]


def test_every_golden_table_is_read_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    unread = []
    for page in METHOD_PAGES:
        text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        headings = re.findall(r"^### (.+)$", text.partition("\n## Golden values\n")[2], re.MULTILINE)
        unread += [f"{page}: {one}" for one in headings if f'"{page}", "{one}"' not in tests]
    assert not unread, "\n".join(unread)


@pytest.mark.parametrize(
    "text",
    [
        "see StepSearch Eq. 7 (arXiv 2505.15107; docs/methods/stepsearch.md).",
        "StepSearch Eq. 7\n    (arXiv 2505.15107;\n    # docs/methods/stepsearch.md)",
    ],
)
def test_a_citation_is_found_over_line_ends(text: str) -> None:
    assert citations(text) == [Citation("StepSearch", "Eq. 7", "arXiv 2505.15107", "stepsearch")]


@pytest.mark.parametrize(
    "text", ["dspo section 10", "search_r1, sections 4", "systems.md", "Pitfall 6", "Section 12, 5"]
)
def test_the_outside_forms_are_recognised(text: str) -> None:
    assert OUTSIDE.search(text)
