"""Hand-checked cells, bytes that depend on the artifacts alone, and refusals of artifacts that do not fit."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.report import table
from tasks.report.compared import write_metrics
from tasks.report.study import complete
from tasks.report.table import Results, build, compared_table, markdown, write_csv
from tasks.report.terminal import fitted
from tasks.store import DataError, read_json, read_jsonl, write_json, write_jsonl
from tests.report.fake_artifacts import (
    COMPARED,
    DATA,
    SYSTEMS,
    TITLES,
    augmentation,
    write_artifacts,
    write_system,
)


def row(question: str, em: float, hops: int = 1, mode: str = "greedy", **over: object) -> dict[str, object]:
    values = {
        "question_id": question,
        "dataset": "world",
        "split": "test",
        "hops": hops,
        "type": None,
        "mode": mode,
        "em": em,
        "f1": em,
        "subem": em,
        "searches": 2,
        "actions": 4,
        "valid_actions": 3,
        "recall": None,
        "answer_in_passage": None,
        "answer_shown": None,
        "status": "answered",
        "generated_tokens": 10,
        "prefill_tokens": 100,
        "answer": "x",
    }
    return values | over


def tiny(root: Path, scores: dict[str, list[dict[str, object]]]) -> Path:
    """Artifacts of the runs named `<policy>-<seed>`; everything but the scores is filled in."""
    artifacts = root / "artifacts"
    write_json(artifacts / "data" / "manifest.json", {"data_sha256": DATA})
    write_json(artifacts / "recall.json", {"datasets": {}, "config_sha256": "of recall"})
    write_json(artifacts / "retrievers.json", {"retrievers": {}, "differences": {}, "config_sha256": ""})
    write_json(artifacts / "validation.json", {})
    write_json(artifacts / "augment" / "summary.json", augmentation())
    for name, rows in scores.items():
        policy, _, seed = name.rpartition("-")
        write_jsonl(artifacts / "evaluate" / name / "scores.jsonl", rows)
        summary = {"policy": policy, "seed": int(seed), "num_questions": len(rows), "settings": {}}
        hashes = {"data_sha256": DATA, "policy_sha256": f"hash of {name}", "config_sha256": f"evaluation of {name}"}
        write_json(artifacts / "evaluate" / name / "summary.json", summary | hashes)
        write_system(artifacts, policy, int(seed), policy != "base", policy_sha256=f"hash of {name}")
        if policy != "base":
            counts = {"steps": 5, "num_trajectories": 40, "generated_tokens": 1000 * (1 + int(seed)), "searches": 60}
            training = {"method": policy, "seed": int(seed), "prefill_tokens": 9000, "settings": {}}
            hashes |= {"config_sha256": f"training of {name}"}
            write_json(artifacts / "train" / name / "summary.json", counts | training | hashes)
    return artifacts


def value(results: Results, *key: str, **more: object) -> float:
    cell = results.find(*key, **more)  # type: ignore[arg-type]
    assert cell is not None
    return cell.value


@pytest.fixture
def small(tmp_path: Path) -> Results:
    # em by question (a, b, c, d): base seed 0: 0 0 0 1, seed 1: 0 0 1 1; grpo seed 0: 1 1 0 1, seed 1: 1 0 1 1.
    ems = {"base-0": "0001", "base-1": "0011", "grpo-0": "1101", "grpo-1": "1011"}
    hops = {"a": 1, "b": 2, "c": 2, "d": 2}
    rows = {
        name: [row(q, float(em), hops[q]) for q, em in zip("abcd", digits, strict=True)] for name, digits in ems.items()
    }
    rows["grpo-0"][0] |= {"recall": 0.5, "actions": 0, "valid_actions": 0, "status": "failed"}
    return build(tiny(tmp_path, rows), ["base", "grpo"], [0, 1], "base", 500, {"grpo": "GRPO"})


def test_means_are_over_questions_and_seeds(small: Results):
    assert value(small, "base", "em") == 3 / 8
    assert value(small, "base", "em", seed=1) == 2 / 4
    assert value(small, "grpo", "em") == 6 / 8
    assert value(small, "grpo", "em", hops=1) == 1.0
    assert value(small, "grpo", "em", hops=2) == 4 / 6
    assert value(small, "grpo", "em", dataset="world") == 6 / 8


def test_difference_pairs_seed_and_question(small: Results):
    # Seed 0: 1 1 0 0; seed 1: 1 0 0 0. By question: 1, .5, 0, 0; mean .375.
    assert value(small, "grpo", "em_minus_base") == 0.375
    assert value(small, "grpo", "em_minus_base", seed=0) == 0.5
    assert value(small, "grpo", "em_minus_base", hops=1) == 1.0
    assert small.find("base", "em_minus_base") is None


def test_any_system_may_be_the_reference(tmp_path: Path):
    artifacts = write_artifacts(tmp_path, num_questions=12, steps=3)
    found = build(artifacts, SYSTEMS, (0, 1), "search_r1_ppo", 100, TITLES)
    usual = build(artifacts, SYSTEMS, (0, 1), "base", 100, TITLES)
    assert value(found, "base", "em_minus_search_r1_ppo") == -value(usual, "search_r1_ppo", "em_minus_base")
    assert found.find("search_r1_ppo", "em_minus_search_r1_ppo") is None
    assert not [cell for cell in found.cells if "minus_base" in cell.metric]
    assert "| EM - Search-R1-PPO |" in markdown(found)


def test_two_seeds_show_the_paired_difference_first_and_themselves(small: Results):
    """By question grpo - base is 1, .5, 0, 0 over both seeds: all 4^4 draws of these questions give the interval."""
    draws = sorted(sum(draw) / 4 for draw in itertools.product([1.0, 0.5, 0.0, 0.0], repeat=4))
    cell = small.find("grpo", "em_minus_base")
    assert cell is not None
    assert (cell.low, cell.high) == (draws[math.floor(0.025 * 256)], draws[math.ceil(0.975 * 256) - 1])
    assert cell.interval_over == "questions"
    text = markdown(small)
    assert "Brackets: 95% interval over questions, resampled 500 times, with both seeds together" in text
    assert "it does not include the variance between training runs" in text
    names = ["policy", "seeds", "questions", "EM - base", "EM - base, seed 0", "EM - base, seed 1"]
    assert f"| {' | '.join([*names, 'EM, seed 0', 'EM, seed 1', 'EM', 'F1'])} |" in text
    # Each seed by its own questions: of seed 0, where half are won, some draws win none and some win all.
    assert f"| GRPO | 2 | 4 | +0.375 [+{cell.low:.3f}, +{cell.high:.3f}] | +0.500 [+0.000, +1.000] | +0.250 " in text


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_no_interval_that_holds_everything_is_shown_anywhere(tmp_path: Path, seeds: tuple[int, ...]):
    """Of two questions one is right, by seeds that agree in nothing: nothing is excluded of any mean or difference."""
    rows = {}
    for seed in seeds:
        rows[f"base-{seed}"] = [row("a", float(seed != 1), 1), row("b", float(seed == 1), 2)]
        rows[f"grpo-{seed}"] = [row("a", float(seed == 1), 1), row("b", float(seed != 1), 2)]
    found = complete(build(tiny(tmp_path, rows), ["base", "grpo"], seeds, "base", 400), tmp_path / "artifacts", 400)
    limits = {"em": (0, 1), "f1": (0, 1), "subem": (0, 1), "em_minus_base": (-1, 1), "f1_minus_base": (-1, 1)}
    asked = [cell for cell in found.cells if cell.metric in limits]
    assert len(asked) > 20
    for cell in asked:
        assert cell.ends is None or (cell.low, cell.high) != limits[cell.metric], cell
        assert (cell.interval_over == "") == (cell.ends is None)
    assert found.find("base", "em", seed=0).ends is None  # type: ignore[union-attr]

    write_csv(tmp_path / "results.csv", found.cells)
    write_metrics(tmp_path / "metrics", found)
    files = [path.read_text() for path in (tmp_path / "results.csv", *(tmp_path / "metrics").iterdir())]
    shown = markdown(found) + "".join(files) + fitted(markdown(found), 80)
    for whole in ("[0.000, 1.000]", "[-1.000, +1.000]", "0.000000,1.000000", "-1.000000,1.000000"):
        assert whole not in shown
    assert "0.500" in shown


def test_a_system_without_tokens_of_its_own_shows_none(tmp_path: Path):
    """One that asks a service: a mean of 0 tokens would be a false number."""
    none = {"generated_tokens": 0, "prefill_tokens": 0}
    rows = {"base-0": [row("a", 0.0), row("b", 1.0)], "asked-0": [row(name, 1.0, **none) for name in "ab"]}
    found = build(tiny(tmp_path, rows), ["base", "asked"], [0], "base", 100)
    assert value(found, "base", "generated_tokens") == 10
    for metric in none:
        assert found.find("asked", metric) is None
    line = next(line for line in markdown(found).splitlines() if line.startswith("| asked |"))
    assert line.endswith("| 2.00 | 0.750 |  |  |  |")


def test_names_of_datasets_are_no_markup(tmp_path: Path):
    rows = [row(name, 1.0, dataset="a|b <script>alert(1)</script>\n# c") for name in "ab"]
    found = build(tiny(tmp_path, {"base-0": rows}), ["base"], [0], "base", 100)
    notes = ("of a|b <script> and\n# c",)
    shown = markdown(replace(found, manifest={**found.manifest, "kind": "folder"}, notes=notes))
    assert "(test of a\\|b &lt;script>alert(1)&lt;/script> # c), seeds 0" in shown
    assert "<script" not in shown
    assert "\n# c" not in shown


def test_questions_without_a_value_are_not_counted(small: Results):
    recall = small.find("grpo", "recall")
    assert recall is not None
    assert (recall.value, recall.num_questions) == (0.5, 1)
    assert small.find("base", "recall") is None
    # Question a of seed 0 took no action, so that seed 1 alone speaks for it: 3 of 4 everywhere.
    assert value(small, "grpo", "valid_action_rate") == 0.75
    assert value(small, "grpo", "failed") == 1 / 8


def test_training_cost_is_the_mean_over_seeds(small: Results):
    assert value(small, "grpo", "generated_tokens", mode="training") == 1500
    assert value(small, "grpo", "generated_tokens", seed=1, mode="training") == 2000
    assert small.find("base", "generated_tokens", mode="training") is None


def test_every_cell_appears_once(results: Results):
    keys = [(c.policy, c.seed, c.dataset, c.hops, c.mode, c.metric) for c in results.cells]
    assert len(keys) == len(set(keys))
    assert all(c.low is None or c.low <= c.value <= c.high for c in results.cells if c.high is not None)


def test_csv_has_fixed_columns_and_numbers(small: Results, tmp_path: Path):
    write_csv(tmp_path / "results.csv", small.cells)
    text = (tmp_path / "results.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert list(rows[0])[:7] == ["policy", "seed", "dataset", "hops", "mode", "metric", "value"]
    assert list(rows[0])[-1] == "interval_over"
    found = next(r for r in rows if (r["policy"], r["seed"], r["hops"], r["metric"]) == ("grpo", "0", "all", "em"))
    assert found["value"] == "0.750000"
    assert found["num_questions"] == "4"
    assert found["policy_sha256"] == "hash of grpo-0"
    whole = next(r for r in rows if (r["policy"], r["seed"], r["metric"]) == ("grpo", "all", "em"))
    assert whole["policy_sha256"] == "hash of grpo-0;hash of grpo-1"
    assert whole["config_sha256"] == "evaluation of grpo-0;evaluation of grpo-1"
    steps = next(r for r in rows if (r["policy"], r["seed"], r["metric"]) == ("grpo", "1", "steps"))
    assert (steps["policy_sha256"], steps["config_sha256"]) == ("hash of grpo-1", "training of grpo-1")


def test_csv_quotes_what_csv_needs(small: Results, tmp_path: Path):
    odd = table.Cell('a,"b"', "0", "x\ny", "all", "greedy", "em", -0.0, None, None, None, "d", "p", "c")
    write_csv(tmp_path / "odd.csv", [odd])
    with (tmp_path / "odd.csv").open(newline="") as file:
        found = list(csv.reader(file))[1]
    assert found[:4] == ['a,"b"', "0", "x\ny", "all"]
    assert found[6:10] == ["0.000000", "", "", ""]


@pytest.mark.parametrize("text", ["=1+1", '=HYPERLINK("http://x")', "@SUM(1)", "+1", "-1", "\t=1"])
def test_a_spreadsheet_computes_no_text_of_the_csv(small: Results, tmp_path: Path, text: str):
    write_csv(tmp_path / "odd.csv", [replace(small.cells[0], policy=text, value=-0.5)])
    with (tmp_path / "odd.csv").open(newline="") as file:
        found = list(csv.reader(file))[1]
    assert found[0] == f"'{text}"
    assert found[6] == "-0.500000"


def test_files_do_not_depend_on_the_place(tmp_path: Path):
    texts = []
    for name in ("one", "two"):
        artifacts = write_artifacts(tmp_path / name, num_questions=12, steps=6)
        found = build(artifacts, SYSTEMS, (0, 1), "base", 200, TITLES)
        write_csv(tmp_path / name / "results.csv", found.cells)
        texts.append((tmp_path / name / "results.csv").read_bytes() + markdown(found).encode())
    assert texts[0] == texts[1]
    assert str(tmp_path).encode() not in texts[0]


def test_markdown_shows_titles_intervals_and_breakdowns(results: Results):
    text = markdown(results)
    assert "| Search-R1-GRPO | 2 | 40 |" in text
    assert "## Exact match by number of hops" in text
    cell = results.find("search_r1_grpo", "em")
    assert cell is not None
    assert f"{cell.value:.3f} [{cell.low:.3f}, {cell.high:.3f}]" in text


def test_failed_searches_are_named_where_there_are_any(small: Results, results: Results):
    line = "Searches failed, and these questions count as wrong: GRPO 1 of 8 greedy."
    assert markdown(small).splitlines().count(line) == 1
    assert "failed" not in markdown(results)


def test_failed_searches_of_every_policy_and_mode_are_counted(tmp_path: Path):
    failed = {"status": "failed"}
    rows = {
        "base-0": [
            row("a", 0.0, **failed),
            row("b", 1.0),
            row("a", 0.0, mode="sampled"),
            row("b", 0.0, mode="sampled"),
        ],
        "grpo-0": [row("a", 1.0), row("b", 1.0), *(row(q, 0.0, mode="sampled", **failed) for q in "ab")],
    }
    found = build(tiny(tmp_path, rows), ["base", "grpo"], [0], "base", 100)
    assert ": base 1 of 2 greedy; grpo 2 of 2 sampled." in markdown(found)


@pytest.mark.parametrize(
    ("split", "select", "is_said"), [("dev", "best", True), ("dev", "last", False), ("test", "best", False)]
)
def test_questions_that_chose_a_policy_are_not_called_held_out(tmp_path: Path, split: str, select: str, is_said: bool):
    rows = [row("a", 0.0, split=split), row("b", 1.0)]
    artifacts = tiny(tmp_path, {"base-0": rows, "grpo-0": rows})
    path = artifacts / "train/grpo-0/summary.json"
    write_json(path, read_json(path) | {"settings": {"train": {"select": select}}})
    found = replace(build(artifacts, ["base", "grpo"], [0], "base", 100, {"grpo": "GRPO"}), validation_split="dev")
    line = (
        "1 of 2 questions are of the split dev, on which the best step of each trained policy was chosen: results on "
        "them, and on all questions together, are too high for GRPO."
    )
    text = markdown(found)
    assert (line in text, "2 held-out questions" in text) == (is_said, not is_said)


def test_a_number_of_a_retriever_names_the_settings_of_its_own_stage(tmp_path: Path):
    artifacts = write_artifacts(tmp_path, (0,), num_questions=3, steps=2)
    for name in ("recall", "retrievers"):
        path = artifacts / f"{name}.json"
        write_json(path, read_json(path) | {"config_sha256": f"of {name}"})
    cells = build(artifacts, ["base"], [0], "base", 100).cells
    compared = {f"retriever:{name}": "of retrievers" for name in (*COMPARED, "dense - bm25")}
    found = {(c.policy, c.config_sha256) for c in cells if c.policy.startswith("retriever")}
    assert found == {("retriever", "of recall"), *compared.items()}
    assert {c.data_sha256 for c in cells} == {DATA}


def test_datasets_have_their_own_rows(tmp_path: Path):
    artifacts = write_artifacts(tmp_path, num_questions=18, steps=3, datasets=("one", "two", "three"))
    found = build(artifacts, SYSTEMS, (0, 1), "base", 100)
    counts = [found.find("base", "em", dataset=name) for name in ("one", "two", "three")]
    assert [cell.num_questions for cell in counts if cell] == [6, 6, 6]
    assert found.find("retriever", "recall@3", dataset="two", mode="search") is not None
    assert found.find("retriever", "recall@3", dataset="three", mode="search") is None
    assert found.title("search_r1_grpo") == "search_r1_grpo"


def change_json(name: str, **values: object) -> Callable[[Path], None]:
    def change(artifacts: Path) -> None:
        path = artifacts / name
        write_json(path, json.loads(path.read_text()) | values)

    return change


def change_row(name: str, **values: object) -> Callable[[Path], None]:
    def change(artifacts: Path) -> None:
        rows = [found for _, found in read_jsonl(artifacts / name)]
        rows[1] |= values
        write_jsonl(artifacts / name, rows)

    return change


def test_compared_retrievers_have_a_line_each_with_intervals(tmp_path: Path):
    results = build(
        write_artifacts(tmp_path, num_questions=6, steps=3, datasets=("world", "nq", "trivia")),
        SYSTEMS,
        (0, 1),
        "base",
        100,
    )
    header, rows = compared_table(results)
    assert header == [
        "dataset",
        "retriever",
        "questions",
        "recall@3",
        "recall@5",
        "recall@10",
        "all_gold@10",
        "answer@10",
    ]
    names = ["bm25", "dense", "hybrid", "dense - bm25"]
    assert [row[:2] for row in rows[:5]] == [*(["nq", name] for name in names), ["trivia", "bm25"]]
    assert rows[2][2:4] == ["39", "0.730 [0.710, 0.745]"]
    assert rows[3][2:4] == ["39", "-0.030 [-0.050, +0.015]"]
    assert rows[4][3:] == ["", "", "", "", "0.700 [0.680, 0.715]"]  # No gold there.
    text = markdown(results)
    assert "## Retrievers compared" in text
    assert "Faulty rows: 3 (1 damaged_gzip, 2 not_utf8)." in text
    assert "Damaged: corpus.jsonl.gz, row 3118 and all after it are lost." in text
    write_csv(tmp_path / "results.csv", results.cells)
    assert (
        "retriever:hybrid,all,nq,all,search,recall@3,0.730000,0.710000,0.745000,39,"
        in (tmp_path / "results.csv").read_text()
    )


def test_a_retriever_whose_interval_excludes_nothing_has_none(tmp_path: Path):
    artifacts = write_artifacts(tmp_path, (0,), num_questions=3, steps=2)
    path = artifacts / "retrievers.json"
    found = read_json(path)
    found["retrievers"]["dense"]["datasets"]["world"]["recall@3"] |= {"low": None, "high": None}
    write_json(path, found)
    results = build(artifacts, ["base"], [0], "base", 100)
    cell = results.find("retriever:dense", "recall@3", dataset="world", mode="search")
    assert cell is not None
    assert (cell.ends, cell.interval_over) == (None, "")
    assert compared_table(results)[1][1][3] == f"{cell.value:.3f}"


def test_nothing_compared_and_nothing_rejected_is_not_mentioned(small: Results):
    assert "compared" not in markdown(small)
    assert "aulty" not in markdown(small)


SCORES = "evaluate/search_r1_ppo-1/scores.jsonl"
SYSTEM = "train/search_r1_ppo-1/system.json"
SUMMARY = "evaluate/search_r1_ppo-1/summary.json"
TRAINED = "train/search_r1_ppo-1/summary.json"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda a: (a / "recall.json").unlink(), r"recall\.json: the file is missing"),
        (lambda a: (a / SCORES).unlink(), r"scores\.jsonl: the file is missing"),
        (lambda a: (a / SCORES).write_text(""), "no row of mode 'greedy'"),
        (lambda a: (a / SCORES).write_text("{"), "row 1: column 2: not JSON"),
        (lambda a: (a / SUMMARY).write_text("[]"), "found list, expected a JSON object"),
        (change_row(SCORES, em="yes"), "row 2: em: found 'yes', expected a number"),
        (change_row(SCORES, hops=None), "row 2: hops: found None, expected a whole number"),
        (change_row(SCORES, em=True), "row 2: em: found True, expected a number"),
        (change_row(SCORES, question_id="other"), "other questions"),
        (change_row(SCORES, mode="greedy"), "appears twice"),
        (change_json(SUMMARY, data_sha256="stale"), "evaluated on different data"),
        (
            change_json(SUMMARY, policy_sha256="stale"),
            r"policy_sha256='stale', but .*system\.json has '\w+': another policy",
        ),
        (change_json(TRAINED, policy_sha256="stale"), r"but .*train/search_r1_ppo-1/summary\.json has 'stale'"),
        (
            lambda a: (a / SUMMARY).write_text(
                '{"policy": "search_r1_ppo", "seed": 1, "data_sha256": "", "policy_sha256": ""}'
            ),
            "key 'config_sha256' is missing",
        ),
        (lambda a: (a / "recall.json").write_text('{"datasets": {}}'), "key 'config_sha256' is missing"),
        (change_json(SUMMARY, seed=0), "seed=0, expected 1"),
        (change_json("data/manifest.json", data_sha256="new"), "manifest.json: data_sha256='new'"),
        (change_json("recall.json", datasets={"world": {"num_questions": 3, "recall@3": 7}}), "recall@3=7"),
        (change_json("recall.json", datasets=[]), "expected"),
        (lambda a: (a / "retrievers.json").unlink(), r"retrievers\.json: the file is missing"),
        (change_json("retrievers.json", retrievers=[]), "expected {'retrievers'"),
        (
            change_json(
                "retrievers.json", retrievers={"a": {"datasets": {"w": {"num_questions": 1, "recall@3": 0.5}}}}
            ),
            r"a: w: recall@3=0\.5, expected low <= value <= high",
        ),
        (lambda a: (a / "train/search_r1_ppo-1/summary.json").write_text("{}"), "key 'method' is missing"),
        (lambda a: (a / "train/search_r1_ppo-1/summary.json").unlink(), r"summary\.json: the file is missing"),
        (lambda a: (a / SYSTEM).unlink(), r"system\.json: the file is missing"),
        (change_json(SYSTEM, is_trained="no"), r"system\.json: is_trained: found 'no', expected true or false"),
        (change_json(SYSTEM, seed=0), r"system\.json: found search_r1_ppo-0, expected search_r1_ppo-1"),
    ],
)
def test_artifacts_that_do_not_fit_are_refused(tmp_path: Path, break_it: Callable[[Path], None], words: str):
    artifacts = write_artifacts(tmp_path, num_questions=6, steps=3)
    break_it(artifacts)
    with pytest.raises(DataError, match=words):
        build(artifacts, SYSTEMS, (0, 1), "base", 100)
