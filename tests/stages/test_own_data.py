"""Folders that users bring: FlashRAG's rows, HotpotQA's published rows by the recipe of the docs, rows of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import retrieval
from tasks.agent.rollout import RolloutConf
from tasks.base.demonstrations import Renderer, expert_plan
from tasks.base.make import _usable
from tasks.base.vocabulary import known
from tasks.data.records import read_passages, read_questions
from tasks.plan import RunSettings
from tasks.report import printed, start_policy, table
from tasks.runner import record
from tasks.stages import data
from tasks.store import read_json
from tests import shipped
from tests.base.small import SMALL, small_tokenizer

HOUSE = Path(__file__).parents[2]
TOWNS = ("Lyon", "Basel", "Chur", "Ulm", "Linz", "Sion", "Bern", "Wien", "Turin", "Arles", "Brig", "Visp")
ASKED = "Are the rivers that flow through {} and {} both longer than five hundred kilometres, as the older atlas says?"
Row = dict[str, Any]


def _recipe(name: str) -> str:
    text = (HOUSE / "docs/data.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def _write(path: Path, rows: list[Row], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + end for row in rows), encoding="utf-8")


def _asked(count: int) -> list[Row]:
    pairs = [(a, b) for a in TOWNS for b in TOWNS if a < b]
    return [
        {"id": f"dev_{n}", "question": ASKED.format(*pairs[n]), "golden_answers": ["no"], "metadata": {"level": "hard"}}
        for n in range(count)
    ]


def _contents(line_end: str = "\n") -> list[Row]:
    return [
        {"id": str(n), "contents": f'"{town}"{line_end}{town} is a town on a river that is {60 * n} kilometres long.'}
        for n, town in enumerate(TOWNS)
    ]


def flashrag_rows(root: Path) -> Path:
    """No split, and lines that end as on another system."""
    _write(root / "mine/questions.jsonl", _asked(40))
    _write(root / "mine/corpus.jsonl", _contents("\r\n"))
    return root / "mine"


def flashrag_files(root: Path) -> Path:
    """Two sets whose ids repeat; one has no test."""
    files = {"nq": ("train", "test"), "hotpotqa": ("train", "dev")}
    for number, (name, splits) in enumerate(files.items()):
        for at, split in enumerate(splits):
            rows = _asked(60)[30 * number + 15 * at :][:15]
            _write(
                root / f"FlashRAG_datasets/{name}/{split}.jsonl",
                [r | {"id": f"{split}_{n}"} for n, r in enumerate(rows)],
            )
    exec(compile(_recipe("flashrag"), "docs/data.md", "exec"), {})
    _write(root / "my-data/corpus.jsonl", _contents())
    return root / "my-data"


def hotpotqa_rows(root: Path) -> Path:
    """As published; one supporting page is not in its row."""
    rows = []
    for n, row in enumerate(_asked(40)):
        context = [[town, [f"{town} is a town.", " It lies on a river."]] for town in TOWNS[n % 10 :][:2]]
        facts = [[context[0][0], 0], [context[1][0] if n else "Nowhere", 1]]
        about = {"question": row["question"], "answer": "no", "type": "comparison", "level": "hard"}
        rows.append({"_id": f"5a{n}", **about, "supporting_facts": facts, "context": context})
    (root / "hotpot_dev_distractor_v1.json").write_text(json.dumps(rows), encoding="utf-8")
    exec(compile(_recipe("hotpotqa"), "docs/data.md", "exec"), {})
    return root / "hotpotqa"


def own_rows(root: Path) -> Path:
    """The fewest fields, in another script."""
    asked, place = (
        "\u0412 \u043a\u0430\u043a\u043e\u0439 \u0441\u0442\u0440\u0430\u043d\u0435",
        "\u0421\u0442\u0440\u0430\u043d\u0430",
    )
    rows = [{"question": f"{asked} {place} {n}?", "answers": [f"{place} {n}"]} for n in range(40)]
    _write(root / "own/questions.jsonl", rows)
    _write(root / "own/corpus.jsonl", [{"text": f"\u0413\u043e\u0440\u043e\u0434 {n}."} for n in range(20)])
    return root / "own"


TOO_SMALL = {
    "max_call_tokens": {"max_call_tokens": 4},
    "max_total_tokens": {"max_prompt_tokens": 120, "max_total_tokens": 121},
}
FOLDERS = [flashrag_rows, flashrag_files, hotpotqa_rows, own_rows]


@dataclass(frozen=True)
class Read:
    """A folder after stage `data`: what it printed and wrote, and the settings of its run."""

    run: RunSettings
    root: Path
    manifest: Any
    printed: str


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Read]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(HOUSE / "conf")

    def make(folder: Callable[[Path], Path], scale: str = "smoke") -> Read:
        chosen = replace(shipped.settings(), scale=scale, data="folder", data_folder=str(folder(tmp_path)))
        run = RunSettings(tmp_path, chosen)
        track = record.Track("data", tmp_path)
        ctx: Any = SimpleNamespace(settings=data.settings(run), root=tmp_path, log=lambda *_: None, track=track)
        data.body(ctx)
        return Read(run, tmp_path, read_json(tmp_path / "artifacts/data/manifest.json"), capsys.readouterr().out)

    return make


def _renderer(found: Read, rollout: RolloutConf) -> tuple[Renderer, list[Any]]:
    out = found.root / "artifacts/data"
    questions = list(read_questions(out / "questions.jsonl"))
    settings = data.settings(found.run)
    assert settings.vocabulary is not None
    tokenizer = settings.vocabulary.learned(
        [q for q in questions if q.split == "train"], read_passages(out / "corpus.jsonl")
    )
    retrieval.build(out / "corpus.jsonl", found.root / "index", retrieval.load_settings("bm25", HOUSE))
    index = retrieval.open_retriever(found.root / "index", out / "corpus.jsonl")
    prompt, grammar = found.run.model_prompting
    assert prompt is not None
    assert grammar is not None
    return Renderer(rollout, tokenizer, index, grammar.fitted(tokenizer), prompt), questions


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_ordinary_questions_fit_the_budgets_of_a_first_run(
    read: Callable[..., Read], folder: Callable[[Path], Path], scale: str
) -> None:
    found = read(folder, scale)
    renderer, questions = _renderer(found, found.run.rollout())
    plans = [expert_plan(question) for question in questions]
    for example in _usable(renderer.render(questions, plans), renderer, questions, plans):
        assert "<answer>" in renderer.tokenizer.decode(example.response_ids)  # Not cut: search, observation, answer.

    for name, budgets in TOO_SMALL.items():
        rollout = replace(found.run.rollout(), **budgets)
        tight, said = replace(renderer, conf=rollout), rf"fits {name}={budgets[name]}: .* takes \d+ to \d+ tokens"
        with pytest.raises(ValueError, match=said) as refused:
            _usable([], tight, questions, plans)
        enough = int(re.findall(rf"{name}: (\d+)", str(refused.value))[0])
        mended = replace(renderer, conf=replace(rollout, **{name: enough}))
        assert all(any(one.loss_mask) for one in mended.render(questions, plans))


def test_the_generated_world_keeps_its_budgets() -> None:
    plain = shipped.settings()
    for scale, data_name in (("laptop", "world"), ("smoke", "smoke")):
        world = RunSettings(HOUSE, replace(plain, scale=scale, data=data_name)).rollout()
        own = RunSettings(HOUSE, replace(plain, scale=scale, data="folder", data_folder="x")).rollout()
        assert (world.max_prompt_tokens, own.max_prompt_tokens) == (256, 512)
        assert world.max_call_tokens == {"laptop": 64, "smoke": 12}[scale]


def test_rows_without_a_split_say_so_in_run_and_report(read: Callable[..., Read]) -> None:
    found = read(flashrag_rows)
    said = "No row of the questions names a split; it is our own"
    for text in (found.printed, " ".join(table.notes(found.manifest))):
        assert said in text
        assert "40 questions say neither `hops` nor `decomposition`" in text
        assert "No question names gold passages" in text
        assert "Brought into one spelling (composed letters, line ends): 12 passages." in text
    paper = printed.Printed("p", "Table 1", "m", "c", "x", "nq", "em", 0.5)
    results: Any = SimpleNamespace(manifest=found.manifest, policies=("x",), find=lambda *_: None, title=str)
    results = SimpleNamespace(**vars(results) | {"policies": (paper.policy,)})
    assert printed.section(results, [paper]) is None
    results.manifest = {**found.manifest, "filled_in": {}}
    assert printed.section(results, [paper]) is not None


def test_each_dataset_is_evaluated_on_test_or_else_on_dev_and_the_head_says_so(read: Callable[..., Read]) -> None:
    found = read(flashrag_files)
    assert "15 ids, such as 'train_0', stand in more than one dataset" in found.printed
    assert "names a split" not in found.printed
    from tasks.data.sample import choose

    questions = list(read_questions(found.root / "artifacts/data/questions.jsonl"))
    played = choose(questions, found.run.data.evaluate_splits, 0)
    assert {(q.dataset, q.split) for q in played} == {("nq", "test"), ("hotpotqa", "dev")}
    assert {q.id for q in played} == {f"nq/test_{n}" for n in range(15)} | {f"hotpotqa/dev_{n}" for n in range(15)}
    runs = [SimpleNamespace(scores={"greedy": played}, policy="base", training=None)]
    results: Any = SimpleNamespace(
        runs=runs, manifest=found.manifest, policies=("base",), validation_split="dev", title=str
    )
    assert table.asked(results) == "30 held-out questions (test of nq; dev of hotpotqa)"
    results.manifest = {"kind": "world"}
    assert table.asked(results) == "30 held-out questions"


def test_the_recipe_keeps_what_hotpotqa_says_of_its_passages(read: Callable[..., Read]) -> None:
    found = read(hotpotqa_rows)
    counts = found.manifest["questions"]["hotpotqa"]
    assert (counts["rows"], counts["with_gold"], counts["gold_complete"], counts["hops"]) == (40, 40, 39, {"2": 40})


def test_a_run_says_which_words_the_tiny_policy_knows(read: Callable[..., Read]) -> None:
    found = read(own_rows)
    said = re.search(
        r"The tiny policy knows (\d\.\d\d) of the words in the questions and .*MODEL=smollm2-135m", found.printed
    )
    assert said
    out = found.root / "artifacts/data"
    words = known(small_tokenizer(), read_questions(out / "questions.jsonl"), read_passages(out / "corpus.jsonl"))
    assert words.questions < 0.5  # The generated world's vocabulary and another script.

    from tasks.data import world

    own = known(small_tokenizer(), world.questions(SMALL), world.passages(SMALL))
    assert min(own.questions, own.passages) > 0.95
    _write(found.root / "artifacts/base/0/words.json", [{"questions": words.questions, "passages": words.passages}])
    assert start_policy.notes(found.root / "artifacts", [0], found.manifest) == (words.sentence(),)
    assert start_policy.notes(found.root / "artifacts", [0], {"kind": "world"}) == ()
