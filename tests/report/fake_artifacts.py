"""A small, realistic artifact tree for tests of the table and the page: every number is made up.

`write_artifacts(root)` fills `root/artifacts` and `root/.scratch/ledger` for a start policy and two methods.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from pathlib import Path
from typing import Any

from tasks.records import systems
from tasks.records.systems import SystemRecord
from tasks.store import write_json, write_jsonl

Row = dict[str, Any]

METHODS = ("search_r1_ppo", "search_r1_grpo")
SYSTEMS = ("base", *METHODS)
TITLES = {"search_r1_ppo": "Search-R1-PPO", "search_r1_grpo": "Search-R1-GRPO"}
COMPARED = ("bm25", "dense", "hybrid")
SKILL = {"base": 0.16, "search_r1_ppo": 0.5, "search_r1_grpo": 0.72}
DATA = hashlib.sha256(b"data").hexdigest()
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u2028&amp;'

_SYLLABLES = ["bal", "dor", "ven", "mir", "tas", "lun", "qua", "ori", "sel", "ka"]
CONFIG = {"config_sha256": "c" * 64}


def write_artifacts(
    root: Path,
    seeds: tuple[int, ...] = (0, 1),
    num_questions: int = 40,
    steps: int = 40,
    datasets: tuple[str, ...] = ("world",),
    hostile: bool = False,
    methods: tuple[str, ...] = METHODS,
) -> Path:
    """Fill `root` and return `root/artifacts`. `hostile` plants markup in every text a model or corpus supplies."""
    artifacts = root / "artifacts"
    questions = [_question(i, datasets[i % len(datasets)], hostile) for i in range(num_questions)]
    write_json(artifacts / "data" / "manifest.json", _manifest(questions))
    write_jsonl(artifacts / "data" / "questions.jsonl", map(_question_row, questions))
    write_json(artifacts / "recall.json", {"datasets": {name: _recall(i) for i, name in enumerate(datasets)}, **CONFIG})
    write_json(
        artifacts / "retrievers.json",
        {
            "retrievers": {name: _compared(i, datasets) for i, name in enumerate(COMPARED)},
            "differences": {"dense - bm25": _difference(_compared(1, datasets)["datasets"])},
            **CONFIG,
        },
    )
    write_json(artifacts / "validation.json", _validation())
    write_json(artifacts / "augment" / "summary.json", augmentation())
    for seed in seeds:
        write_jsonl(artifacts / "base" / str(seed) / "metrics.jsonl", _base_metrics(seed))
        for policy in ("base", *methods):
            _evaluation(artifacts / "evaluate" / f"{policy}-{seed}", policy, seed, questions, hostile)
            write_system(artifacts, policy, seed, is_trained=policy in methods)
            if policy in methods:
                _training(artifacts / "train" / f"{policy}-{seed}", policy, seed, questions, steps, hostile)
    return artifacts


def write_system(
    artifacts: Path, name: str, seed: int, is_trained: bool, kind: str = "policy", policy_sha256: str = ""
) -> None:
    """What is played under a name: a trained policy, or the start policy."""
    record = SystemRecord(
        name=name,
        seed=seed,
        kind=kind,
        policy="artifacts/policy",
        policy_sha256=policy_sha256 or hashlib.sha256(f"{name}-{seed}".encode()).hexdigest(),
        made_by=f"train@{name}-{seed}" if is_trained else f"base@{seed}",
        is_trained=is_trained,
    )
    systems.write(artifacts / "train" / f"{name}-{seed}", record)


def ledger(seeds: tuple[int, ...], seconds: float = 30.0) -> dict[str, Row]:
    """What was measured on a machine, by stage: facts that must never reach `results.csv`."""
    stages = ["data", "validate", "index", "recall", "augment", "retrievers"]
    for seed in seeds:
        stages += [f"base@{seed}", *(f"evaluate@{p}-{seed}" for p in ("base", *METHODS))]
        stages += [f"train@{method}-{seed}" for method in METHODS]
    return {
        stage: {
            "stage": stage,
            "seconds": seconds + 3.7 * number,
            "mlflow_run_id": hashlib.md5(stage.encode()).hexdigest(),
            "git_commit": "4f6f0d9c1b7a4e51a3c8c5a1f21a35b07a0c9a11",
            "git_dirty": False,
            "libraries": {"torch": "2.13.0+cpu", "numpy": "2.3.5"},
            "ended": f"2026-11-21T10:{number:02d}:00+00:00",
            "peak_rss_mb": 512 + number,
        }
        for number, stage in enumerate(stages)
    }


def _name(generator: random.Random) -> str:
    return "".join(generator.choice(_SYLLABLES) for _ in range(3)).capitalize()


def _question(number: int, dataset: str, hostile: bool) -> Row:
    generator = random.Random(number)
    hops = 1 + number % 3
    names = [_name(generator) for _ in range(hops + 1)]
    inner = names[0]
    for relation in ("founder", "birthplace", "river")[: hops - 1]:
        inner = f"the {relation} of {inner}"
    return {
        "id": f"{dataset}-test-{number:04d}",
        "dataset": dataset,
        "question": f"What is the capital of {inner}?" + (HOSTILE if hostile else ""),
        "answer": names[-1] + (HOSTILE if hostile else ""),
        "hops": hops,
        "names": names,
        "gold": [f"p{number:04d}-{hop}" for hop in range(hops)],
    }


def _question_row(question: Row) -> Row:
    names = ("id", "dataset", "question", "hops")
    more = {"split": "test", "answers": [question["answer"]], "gold_passage_ids": question["gold"]}
    return {**{name: question[name] for name in names}, **more, "gold_method": "annotated", "gold_complete": True}


def _scores(policy: str, seed: int, mode: str, question: Row) -> Row:
    generator = random.Random(f"{policy} {seed} {mode} {question['id']}")
    skill = SKILL.get(policy, 0.6) - 0.09 * (question["hops"] - 2) - (0.05 if mode == "sampled" else 0)
    right = generator.random() < skill
    searches = max(1, question["hops"] - (0 if right else generator.randint(0, 1)))
    actions = searches + 1
    return {
        "question_id": question["id"],
        "dataset": question["dataset"],
        "split": "test",
        "hops": question["hops"],
        "type": None,
        "mode": mode,
        "em": float(right),
        "f1": 1.0 if right else round(generator.random() * 0.3, 3),
        "subem": float(right or generator.random() < 0.05),
        "searches": searches,
        "actions": actions,
        "valid_actions": actions - (generator.random() < 0.1),
        "recall": min(1.0, searches / question["hops"]) if not question["id"].endswith("9") else None,
        "answer_in_passage": float(right or searches == question["hops"]),
        "answer_shown": float(right or (searches == question["hops"] and searches > 1)),
        "status": "answered" if right or generator.random() < 0.9 else "open",
        "generated_tokens": 22 * actions + generator.randint(0, 9),
        "prefill_tokens": 40 + 120 * searches,
        "answer": question["answer"] if right else _name(generator),
    }


def _evaluation(folder: Path, policy: str, seed: int, questions: list[Row], hostile: bool) -> None:
    rows = [_scores(policy, seed, mode, question) for mode in ("greedy", "sampled") for question in questions]
    rows.sort(key=lambda row: (row["question_id"], row["mode"]))
    write_jsonl(folder / "scores.jsonl", rows)
    by_id = {question["id"]: question for question in questions}
    write_jsonl(
        folder / "trajectories.jsonl",
        [_trajectory(policy, seed, row, by_id[row["question_id"]], None, hostile) for row in rows],
    )
    summary = {
        "policy": policy,
        "seed": seed,
        "num_questions": len(questions),
        "data_sha256": DATA,
        "policy_sha256": hashlib.sha256(f"{policy}-{seed}".encode()).hexdigest(),
        **CONFIG,
        "settings": {"top_k": 3, "max_turns": 4, "splits": ["dev", "test"], "temperature": {"sampled": 1.0}},
    }
    write_json(folder / "summary.json", summary)


def _training(folder: Path, policy: str, seed: int, questions: list[Row], steps: int, hostile: bool) -> None:
    generator = random.Random(f"train {policy} {seed}")
    goal = SKILL.get(policy, 0.6)
    rows, generated, prefill, searches = [], 0, 0, 0.0
    for step in range(1, steps + 1):
        done = 1 / (1 + math.exp(-(step / steps - 0.45) * 9))
        em = min(1.0, max(0.0, 0.16 + (goal - 0.1) * done + generator.gauss(0, 0.035)))
        generated += int(64 * (48 + 25 * done))
        prefill += int(64 * (100 + 180 * done))
        searches += 64 * (1.1 + 0.9 * done)
        metrics = {
            "reward_mean": em,
            "em_mean": em,
            "loss": generator.gauss(0, 0.02),
            "kl": 0.002 + 0.06 * done + abs(generator.gauss(0, 0.004)),
            "entropy": 0.9 - 0.5 * done + generator.gauss(0, 0.02),
            "clip_fraction": abs(generator.gauss(0.02, 0.01)),
            "grad_norm": abs(generator.gauss(0.8 - 0.3 * done, 0.1)),
            "num_searches": 1.1 + 0.9 * done + generator.gauss(0, 0.05),
            "response_tokens": 48 + 25 * done + generator.gauss(0, 2),
            "generated_tokens_total": generated,
            "prefill_tokens_total": prefill,
            "valid_action_rate": 0.9 + 0.09 * done,
            "share_with_signal": 0.5 + 0.4 * done * (1 - done) * 2,
            "logprob_gap_mean": 1e-6 * abs(generator.gauss(1, 0.3)),
            "logprob_gap_max": 1e-5 * abs(generator.gauss(1, 0.3)),
            "truncated_rate": 0.04 * (1 - done),
            "failed": 0.0,
            "ratio_mean": 1 + generator.gauss(0, 0.003),
        }
        if policy.endswith("ppo"):
            metrics["value_loss"] = 0.2 * (1 - done) + abs(generator.gauss(0, 0.01))
        if step % 8 == 0 or step == steps:
            metrics["validation_em"] = min(1.0, max(0.0, em + generator.gauss(0, 0.02)))
        rows.append({"step": step, "metrics": metrics})
    write_jsonl(folder / "metrics.jsonl", rows)
    played = []
    for number in range(0, min(len(questions), 18)):
        question, step = questions[number], 1 + number * (steps - 1) // 17
        for sample in range(2):
            row = _scores(policy, seed + 100 * sample, "sampled", question)
            row["generated_tokens"] += sample
            played.append(_trajectory(policy, seed, row, question, step, hostile))
    write_jsonl(folder / "trajectories.jsonl", played)
    summary = {
        "method": policy,
        "seed": seed,
        "steps": steps,
        "generated_tokens": generated,
        "prefill_tokens": prefill,
        "searches": int(searches),
        "num_trajectories": 64 * steps,
        "settings": {"group_size": 8, "learning_rate": 2e-5, "clip_low": 0.2, "clip_high": 0.2, "kl_coefficient": 1e-3},
        "data_sha256": DATA,
        "policy_sha256": hashlib.sha256(f"{policy}-{seed}".encode()).hexdigest(),
        **CONFIG,
    }
    write_json(folder / "summary.json", summary)


def _trajectory(policy: str, seed: int, row: Row, question: Row, step: int | None, hostile: bool) -> Row:
    generator = random.Random(f"{policy} {seed} {row['mode']} {question['id']} {step}")
    bad = HOSTILE if hostile else ""
    turns = []
    for number in range(row["searches"]):
        name = question["names"][number]
        text = f"<think>I need to find out about {name}{bad}.</think> <search>capital of {name}</search>"
        hits = [_hit(question, number, rank, generator, bad) for rank in range(3)]
        documents = " ".join(f'Doc {i + 1}(Title: "{hit["title"]}") {hit["text"]}' for i, hit in enumerate(hits))
        observation = f"\n\n<information>{documents}</information>\n\n"
        turns.append(_turn("search", f"capital of {name}", text, True, 0.0, step, generator, observation, hits))
    if row["status"] == "answered":
        text = f"<think>Now I know it.</think> <answer>{row['answer']}</answer>"
        turns.append(_turn("answer", row["answer"], text, False, row["em"], step, generator, "", []))
    else:
        notice = "My previous action is invalid. Let me try again."
        turns.append(_turn("invalid", "", "<think>Hm, I am lost and", False, 0.0, step, generator, notice, []))
    return {
        "question_id": question["id"],
        "question": question["question"],
        "answers": [question["answer"]],
        "gold_passage_ids": question["gold"],
        "dataset": question["dataset"],
        "hops": question["hops"],
        "policy": policy,
        "seed": seed,
        "step": step,
        "mode": row["mode"],
        "status": row["status"],
        "answer": row["answer"] if row["status"] == "answered" else None,
        "prompt": "Answer the given question. Reason inside <think> and </think>, search with <search> query "
        f"</search>, answer inside <answer> and </answer>. Question: {question['question']}\n",
        "outcome": row["em"],
        "turns": turns,
    }


def _turn(
    kind: str, content: str, text: str, executed: bool, reward: float, step: int | None,
    generator: random.Random, observation: str, hits: list[Row],
) -> Row:  # fmt: skip
    tokens = re.findall(r"\s*</?\w+>|\s*\w+|\s*[^\w\s]|\s+", text)
    tilt = generator.choice([-0.7, 0.9])
    return {
        "kind": kind,
        "content": content,
        "executed": executed,
        "reward": reward,
        "tokens": tokens,
        "advantages": [tilt + generator.gauss(0, 0.25) for _ in tokens] if step is not None else None,
        "logprobs": [-abs(generator.gauss(0, 0.4)) for _ in tokens],
        "observation": observation,
        "hits": hits,
    }


def _hit(question: Row, hop: int, rank: int, generator: random.Random, bad: str) -> Row:
    is_gold = rank == 0 and hop < len(question["gold"])
    name = question["names"][hop] if is_gold else _name(generator)
    return {
        "passage_id": question["gold"][hop] if is_gold else f"d{generator.randint(0, 9999):04d}",
        "title": name + bad,
        "text": f"{name} is a town on the river {_name(generator)}. Its capital is {_name(generator)} and it was "
        f"founded by {_name(generator)} in {generator.randint(900, 1990)}.{bad}",
        "score": round(12.5 - 2.1 * rank, 4),
        "is_gold": is_gold,
    }


def _base_metrics(seed: int) -> list[Row]:
    generator = random.Random(seed)
    return [
        {"step": step, "metrics": {"loss": 3.5 * math.exp(-step / 120) + 0.1 + abs(generator.gauss(0, 0.02))}}
        for step in range(10, 501, 10)
    ]


def _recall(number: int) -> Row:
    if number == 2:  # A dataset whose gold passages are not known.
        return {"num_questions": 38, "answer@3": 0.5, "answer@5": 0.6, "answer@10": 0.7}
    recalls = {"recall@3": 0.81 - 0.1 * number, "recall@5": 0.9, "recall@10": 0.962, "all_gold@10": 0.925}
    return {"num_questions": 40 - number, **recalls, "answer@3": 0.55, "answer@5": 0.6, "answer@10": 0.675}


def _difference(rows: Row) -> Row:
    """The dense retriever is 0.03 below the other in all."""
    figure = {"value": -0.03, "low": -0.05, "high": 0.015}
    return {
        dataset: {name: value if name == "num_questions" else figure for name, value in row.items()}
        for dataset, row in rows.items()
    }


def _compared(number: int, datasets: tuple[str, ...]) -> Row:
    """A retriever whose figures are those of `_recall` and a little more for each number."""

    def figure(value: float) -> Row:
        value += 0.01 * number
        return {"value": round(value, 6), "low": round(value - 0.02, 6), "high": round(value + 0.015, 6)}

    rows = {dataset: _recall(i) for i, dataset in enumerate(datasets)}
    return {
        "backend": "bm25",
        "settings_digest": f"{number:016x}",
        "datasets": {
            dataset: {name: value if name == "num_questions" else figure(value) for name, value in row.items()}
            for dataset, row in rows.items()
        },
    }


def augmentation() -> Row:
    """What the stage `augment` tells of 2000 questions."""
    dropped = {"blank": 0, "duplicate": 4800, "surplus": 0}
    return {
        "questions": {
            "read": 2000, "without_decomposition": 5, "written": 1995, "kept": 1990, "rejected": {"final_answer": 5},
        },
        "hops": {"kept": 4900, "without_query": 2},
        "queries": {
            "written": 14700, **dropped, "checked": 9900, "valid": {"index": 9890, "bm25_exact": 9800},
            "too_few_sources": 10, "kept": 9890, "mean_a_hop": 2.018367,
        },
        "writer": "rules",
    }  # fmt: skip


def _manifest(questions: list[Row]) -> Row:
    return {
        "kind": "world",
        "data_sha256": DATA,
        "corpus": {"rows": 3120},
        "questions": {"world": {"rows": 2140, "split": {"train": 2000, "dev": 100, "test": len(questions)}}},
        "leakage": {"policy": "fail", "train_rows_dropped": []},
        "faulty_rows": {
            "policy": "skip_and_report",
            "by_reason": {"not_utf8": 2, "damaged_gzip": 1},
            "lost_tails": [{"file": "corpus.jsonl.gz", "from_row": 3118}],
        },
    }


def _validation() -> Row:
    rules = [
        ("ExpectColumnValuesToBeUnique", "id", "an id names one row"),
        ("ExpectColumnValuesToNotBeNull", "text", "there is something to read"),
    ]
    return {
        kind: {
            "kind": kind,
            "file": f"{kind}.jsonl",
            "rows": rows,
            "expectations": [
                {"expectation": rule, "column": column, "meaning": meaning, "rows": rows, "success": True}
                for rule, column, meaning in rules
            ],
        }
        for kind, rows in (("passages", 3120), ("questions", 2140))
    }
