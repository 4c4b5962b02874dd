"""The papers' numbers: every value equals the project's own copy of the tables, and the report says whose they are."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from tasks import conf
from tasks.report import printed
from tasks.report.claims import CLAIMS
from tasks.report.study import complete
from tasks.report.table import Results, build, markdown
from tasks.store import DataError, read_json, write_json
from tests import shipped
from tests.papers import golden
from tests.skips import SHARED, needs_shared

ROOT = Path(__file__).parents[2]
FILE = ROOT / "conf" / printed.FILE
TABLES = SHARED / "papers" / "results.csv"

# (method, variant) of the tables -> policy. Search-R1 without an algorithm is PPO where the cells are those of the
# Search-R1 paper's PPO rows or its public checkpoints (StepSearch, PiCA, SLATE). R-Search trained its own Search-R1
# with the training parameters of its method, which is GRPO.
STEPS = "StepSearch"
POLICY_OF = {
    ("Search-R1", "main"): "search_r1_ppo",
    ("Search-R1", "baseline"): "search_r1_ppo",
    ("Search-R1", "PPO, reported"): "search_r1_ppo",
    ("Search-R1", "GRPO, reported"): "search_r1_grpo",
    ("Search-R1", "GRPO, retrained"): "search_r1_grpo_subem",
    ("PPO (answer-F1 reward only)", "PPO"): "ppo_f1",
    ("GRPO (answer-F1 reward only)", "GRPO"): "grpo_f1",
    (STEPS, "main"): "stepsearch",
    (STEPS, "StePPO"): "stepsearch",
    (STEPS, "w/o key reward"): "stepsearch_ow_steps",
    (STEPS, "w/o penalty"): "stepsearch_wo_penalty",
    (STEPS, "w/o info gain"): "stepsearch_wo_info_gain",
    (STEPS, "w/o steps reward"): "stepsearch_ow_key",
    (STEPS, "ow key reward"): "stepsearch_ow_key",
    (STEPS, "ow penalty"): "stepsearch_ow_penalty",
    (STEPS, "ow info gain"): "stepsearch_ow_info_gain",
    (STEPS, "ow steps reward"): "stepsearch_ow_steps",
    (STEPS, "ow sub-answer"): "stepsearch_ow_sub_answer",
    ("R-Search", "main"): "r_search",
    ("R-Search", "GRPO"): "r_search",
    ("R-Search", "GRPO, full"): "r_search",
    ("R-Search", "GRPO, w/o evidence"): "r_search_wo_evidence",
    ("R-Search", "PPO"): "r_search_ppo",
    ("DSPO", "full"): "dspo",
    ("DSPO", "w/o dynamic filter (= GSPO)"): "gspo",
    ("DSPO", "w/o sequence-level opt. (= DAPO)"): "dapo",
    ("ReSearch", "main"): "research",
    ("R1", "main"): "r1",
    ("MT-PPO", "main"): "mt_ppo",
    ("TIPS", "main"): "tips",
    ("ZeroSearch", "main"): "zerosearch",
    ("SFT", "main"): "sft",
    ("PiCA", "main"): "pica",
    ("PiCA", "vs outcome-only PPO"): "pica",
    ("SLATE", "main"): "slate",
    ("SLATE", "full"): "slate",
    ("SLATE", "(a) w/o truncated sampling"): "slate_wo_truncation",
    ("SLATE", "(b) w/o LLM-judge rewards"): "slate_wo_judge",
    ("SLATE", "(c) truncated + EM reward only"): "slate_em_only",
    ("SLATE", "k=1"): "slate_k1",
    ("SLATE", "k=3"): "slate_k3",
    ("SLATE", "k=5 (default)"): "slate",
    ("SLATE", "k=7"): "slate_k7",
}


def derived() -> list[list[str]]:
    """What the file must hold: the printed cells of this family's systems, in the order of the tables."""
    lines = []
    with TABLES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            policy = POLICY_OF.get((row["method"], row["variant"]))
            if row["paper"] == "R-Search" and row["method"] == "Search-R1":
                policy = "search_r1_grpo"
            if policy and row["value"] and not row["metric"].startswith("relative_"):  # A share of another row.
                lines.append([policy, *(row[name] for name in printed.COLUMNS[1:])])
    return lines


def test_the_papers_own_arithmetic():
    """DSPO's gain of 34.1% is over the quoted number; over the retrained one it would be 40.8%."""
    quoted, retrained = golden("dspo", "Printed gain")
    rows = [row for row in printed.read(FILE) if (row.paper, row.dataset) == ("DSPO", "Avg") and "7B" in row.model]
    averages = {row.policy: row.value for row in rows}
    for row, policy in ((quoted, "search_r1_grpo"), (retrained, "search_r1_grpo_subem")):
        assert (averages["dspo"], averages[policy]) == (row["DSPO"], row["over"])
        assert averages["dspo"] / averages[policy] - 1 == pytest.approx(row["gain"], abs=1e-6)


def test_every_average_is_that_of_its_row():
    """What is copied by hand is checked by the papers' own arithmetic, wherever a row is printed with its average."""
    tables: dict[tuple[str, ...], dict[str, float]] = {}
    for row in printed.read(FILE):
        key = (row.policy, row.paper, row.table, row.model, row.retriever_or_corpus, row.metric)
        tables.setdefault(key, {})[row.dataset] = row.value
    whole = {key: values for key, values in tables.items() if "Avg" in values and len(values) > 1}
    assert len(whole) > 20
    misprints = []
    for key, values in whole.items():
        average = values["Avg"]
        cells = [value for dataset, value in values.items() if not dataset.startswith("Avg")]
        if cells and average != pytest.approx(statistics.mean(cells), abs=0.0011):
            misprints.append((key[1], average))
    # Printed so: the means of these rows' numbers are 0.3836, 0.4059, 0.3757 and 0.309.
    assert misprints == [("PiCA", 0.385), ("DSPO", 0.396), ("DSPO", 0.385), ("DSPO", 0.313)]


def test_the_methods_with_printed_numbers_and_no_others_name_their_rows_of_the_papers():
    rows = {path.stem: conf.read_yaml(path).get("paper_rows", []) for path in shipped.files("conf/method", "*.yaml")}
    claims = {(method, variant, name) for name, pairs in rows.items() for method, variant in pairs}
    without_cells = {
        ("Search-R1", "main", "search_r1_grpo"),  # PPO and GRPO runs are printed under one name.
        ("Search-R1", "PPO, retrained", "search_r1_ppo_subem"),  # DSPO's table leaves these cells empty.
        ("ZeroSearch", "repository_image", "zerosearch"),  # In a picture of StepSearch's repository, in no paper.
    }
    in_file = {(*pair, policy) for pair, policy in POLICY_OF.items()}
    assert claims == in_file | without_cells
    assert {row.policy for row in printed.read(FILE)} == {name for _, _, name in in_file}


@needs_shared(TABLES)
def test_every_number_is_that_of_the_papers_tables():
    with FILE.open(encoding="utf-8", newline="") as file:
        found = list(csv.reader(file))[1:]
    assert found == derived()
    assert {line[0] for line in found} == set(POLICY_OF.values())


def test_numbers_known_by_heart():
    rows = printed.read(FILE)

    def value(policy: str, table: str, model: str, dataset: str, metric: str) -> list[float]:
        return [
            row.value
            for row in rows
            if (row.policy, row.table, row.model, row.dataset, row.metric) == (policy, table, model, dataset, metric)
        ]

    assert value("dspo", "1", "Qwen2.5-7B-Instruct", "Avg", "subem") == [0.531]
    assert value("gspo", "1", "Qwen2.5-7B-Instruct", "Avg", "subem") == [0.313]
    assert value("stepsearch_ow_penalty", "3", "Qwen2.5-3B-Base", "MuSiQue", "f1") == [0.177]
    assert value("ppo_f1", "3", "Qwen2.5-3B-Base", "HotpotQA", "em") == [0.228]


def test_every_policy_that_is_spoken_of_is_a_method():
    named = {row.policy for row in printed.read(FILE)} | {name for one in CLAIMS for name in one.systems}
    assert named <= set(shipped.names("method"))


HEADER = ",".join(printed.COLUMNS)
GOOD = "dspo,DSPO,1,7B,BM25,NQ,subem,0.5"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["policy,paper", GOOD], r"row 1: expected the columns policy, paper, table"),
        ([HEADER, GOOD, GOOD.replace("0.5", "53.1")], r"row 3: value='53.1', expected a fraction"),
        ([HEADER, GOOD.replace("0.5", "high")], r"row 2: value='high'"),
        ([HEADER, GOOD.replace("0.5", "nan")], r"row 2: value='nan'"),
        ([HEADER, GOOD.replace("subem", "em_mean")], r"row 2: metric='em_mean', expected one of em, f1"),
        ([HEADER, GOOD.replace("DSPO", "")], r"row 2: found \['dspo', ''"),
        ([HEADER, GOOD + ",7"], r"row 2: found"),
        ([HEADER, GOOD, GOOD.replace("0.5", "0.6")], r"row 3: dspo, DSPO, .* stands here a second time"),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_row(tmp_path: Path, lines: list[str], words: str):
    (tmp_path / "printed.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"printed\.csv: " + words):
        printed.read(tmp_path / "printed.csv")


def test_nothing_stands_beside_the_papers_where_the_split_is_ours(results: Results, artifacts: Path):
    rows = [printed.Printed("search_r1_ppo", "PiCA", "1", "3B", "E5", "Avg", "em", 0.325)]
    path = artifacts / "data/manifest.json"
    before = path.read_bytes()
    try:
        write_json(path, {**read_json(path), "resplit": {"shares": {"train": 0.6}}})
        plain = build(artifacts, results.policies, results.seeds, results.reference, 100)
    finally:
        path.write_bytes(before)
    own = complete(plain, artifacts, 100, rows)
    assert printed.section(own, rows) is None
    sentence = "Our own split of published rows; not comparable with papers."
    text = markdown(own)
    assert sentence in text[: text.index("| policy")]
    claimed = [section.lead for section in own.sections if section.id == "claims"]
    assert all(lead.startswith(sentence) for lead in claimed)
    assert claimed or not any(one.systems <= set(results.policies) for one in CLAIMS)
    assert sentence not in markdown(complete(results, artifacts, 100, rows))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"none\.csv: the file is missing"):
        printed.read(tmp_path / "none.csv")


def test_ours_stand_beside_the_papers_and_are_told_apart(results: Results, artifacts: Path):
    rows = [
        printed.Printed("search_r1_ppo", "PiCA", "1", "3B", "E5", "HotpotQA", "em", 0.324),
        printed.Printed("search_r1_ppo", "PiCA", "1", "3B", "E5", "Avg", "em", 0.325),
        printed.Printed("dspo", "DSPO", "1", "7B", "BM25", "Avg", "subem", 0.531),
    ]
    found = printed.section(results, rows)
    assert found is not None
    ours, theirs = found.rows  # No policy of this run is dspo.
    em = results.find("search_r1_ppo", "em")
    assert em is not None
    assert ours[:3] == ["Search-R1-PPO", "this run, all questions", f"{em.value:.3f} [{em.low:.3f}, {em.high:.3f}]"]
    assert theirs == ["", "paper, other scale: PiCA, Table 1, 3B; E5", "Avg 0.325, HotpotQA 0.324", "", ""]
    assert printed.section(results, rows[2:]) is None
    whole = complete(results, artifacts, 100, rows)
    assert "paper, other scale: PiCA, Table 1" in markdown(whole)
    assert complete(results, artifacts, 100).cells == whole.cells  # results.csv knows nothing of the papers.
