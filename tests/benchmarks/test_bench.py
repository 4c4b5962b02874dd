"""The benchmark's arithmetic and grammar, and the benchmark at its smallest size; `make bench` runs it in full."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.types import Action
from tests.benchmarks.bench_trl import ROOT, Measured, Meter, run_ours, same_work, table
from tests.benchmarks.workload import END, SMALLEST, ToolCallGrammar, Workload, prepare, reward

CHAT_TEMPLATE = (
    "<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

OURS = Measured(cpu_s=4.0, generated=1000.0, prefilled=2000.0, positions=3000.0, searches=50.0, rollouts=64)
PEER = Measured(cpu_s=10.0, generated=1050.0, prefilled=10000.0, positions=12000.0, searches=52.0, rollouts=64)


@given(st.text())
def test_the_tool_call_grammar_reads_back_what_it_renders(query: str) -> None:
    grammar = ToolCallGrammar()
    text = grammar.render(Action("search", query)) + END
    assert grammar.parse(text) == Action("search", query)


@pytest.mark.parametrize("text", ["Paris", "<tool_call>\n{]\n</tool_call>", '<tool_call>\n{"name": "x"}\n</tool_call>'])
def test_a_call_without_a_readable_tool_call_is_the_answer(text: str) -> None:
    assert ToolCallGrammar().parse(text) == Action("answer", text)


def test_the_verdict_takes_the_less_favourable_order() -> None:
    text, met = table([("ours", OURS), ("trl", PEER), ("trl", PEER), ("ours", OURS)])
    assert met
    assert "0.400" in text
    assert "0.200" in text
    slow = dataclasses.replace(OURS, cpu_s=5.1)
    text, met = table([("ours", OURS), ("trl", PEER), ("trl", PEER), ("ours", slow)])
    assert not met
    assert "0.510" in text
    assert not table([("ours", dataclasses.replace(OURS, prefilled=2501.0)), ("trl", PEER)] * 2)[1]


def test_unequal_work_is_no_comparison() -> None:
    assert same_work(OURS, PEER)
    assert not same_work(dataclasses.replace(OURS, generated=900.0), PEER)
    assert not table([("ours", dataclasses.replace(OURS, searches=40.0)), ("trl", PEER)] * 2)[1]


def test_the_warm_up_is_left_out() -> None:
    workload = Workload(warm_up=1, measured=2)
    meter = Meter(marks=[(0.0, 0, 0, 0, 0), (100.0, 9, 9, 9, 9), (101.0, 19, 19, 19, 19), (104.0, 29, 39, 49, 59)])
    assert meter.measured(workload) == Measured(2.0, 10.0, 15.0, 20.0, 25.0, workload.rollouts)


def test_the_reward_differs_where_queries_differ() -> None:
    assert (reward([]), reward(["ab z"]), reward(["A", "z"])) == (0.0, 2 / 3, 0.5)


@pytest.mark.slow
def test_our_side_runs(tmp_path: Path) -> None:
    """A fitted policy plays one step, asks the tool and learns; TRL is not needed for that."""
    prepare(tmp_path / "workload", SMALLEST, CHAT_TEMPLATE)
    measured = run_ours(tmp_path / "workload", SMALLEST)
    assert measured.rollouts == 4
    assert min(measured.cpu_s, measured.generated, measured.prefilled, measured.searches) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="no TRL: `make bench` installs it")
@pytest.mark.parametrize("options", [[], ["--separate-prefixes"]])
def test_both_sides_run_to_the_table(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.bench_trl", "--smallest", "--folder", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: a bound that means nothing at this size is not met.
    assert "run 2 of 2: trl" in done.stdout, done.stderr
    assert "prefilled tokens" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(("met", "NOT met: see the bounds above"))
