"""Rows that go on when their own search has returned play the same trajectories, whatever the searches' delays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tasks.agent.rollout import Player, RolloutConf
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.generate.rows import RowsGenerator, RowsSession
from tasks.retrieval import RetrievalError
from tasks.types import Hit, Trajectory
from tests.tiny import PLACES, PROMPT, Script, hit, make_grammar, make_model, question

CONF = RolloutConf(
    max_turns=3, max_prompt_tokens=40, max_call_tokens=24, max_observation_tokens=30, max_total_tokens=200, top_k=2,
    batch_rows=64, search_retries=0,
)  # fmt: skip


@dataclass
class Slow:
    """A retriever whose hits depend on the query, and whose searches take times drawn by a seed."""

    longest_s: float
    seed: int
    failing: str = "nothing"
    searches: list[int] = field(default_factory=list)
    at_once: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            number = len(self.searches)
            self.searches.append(len(queries))
        time.sleep(random.Random(f"{self.seed}/{number}").uniform(0, self.longest_s))
        with self.lock:
            self.at_once -= 1
        if any(self.failing in query for query in queries):
            raise RetrievalError("the index is away")
        return [
            [hit(f"{PLACES[len(query) % 8]} rules .", number=len(query) + i) for i in range(top_k)] for query in queries
        ]


def eager(tokenizer: Any) -> Any:
    """A random model that often writes tags."""
    model = make_model(tokenizer, seed=3)
    bias = torch.zeros(model.get_output_embeddings().weight.shape[0])
    for tag, weight in {" <search>": 4.0, " </search>": 4.5, " <answer>": 2.0, " </answer>": 3.5}.items():
        (token,) = tokenizer.encode(tag)
        bias[token] = weight
    head = model.get_output_embeddings()
    model.get_output_embeddings = lambda: lambda states: head(states) + bias
    return model


def play(
    generator: Any, tokenizer: Any, retriever: Any, overlap: int, rows: int = 64
) -> tuple[list[Trajectory], Player, list[int]]:
    conf, grammar = replace(CONF, overlap_searches=overlap, batch_rows=rows), make_grammar("search_r1", tokenizer)
    player = Player(conf, generator, tokenizer, retriever, grammar, PROMPT)
    seen: list[int] = []
    played = player.play([question(i) for i in range(6)], 4, Sampling(1.0, 1.0, (), 7), seen.append)
    return played, player, seen


def test_delays_change_no_bit(tokenizer: Any) -> None:
    generator = RowsGenerator(eager(tokenizer), tokenizer)
    wanted, lock_step, _ = play(generator, tokenizer, Slow(0, 0), 0)
    assert {t.status for t in wanted} >= {"answered", "open"}
    assert sum(t.num_searches for t in wanted) > 10
    assert play(generator, tokenizer, Slow(0, 0), 0, rows=8)[0] == wanted, "the size of a batch is no part of a result"
    for seed, rows in enumerate((64, 4, 9, 1)):
        retriever = Slow(0.05, seed)
        found, player, seen = play(generator, tokenizer, retriever, 1 + 4 * seed, rows)
        assert found == wanted
        assert player.cost == lock_step.cost
        assert seen == sorted(seen)
        assert seen[-1] == len(wanted)
        assert retriever.most <= 1 + 4 * seed


def test_rows_write_while_others_search_and_other_questions_begin(tokenizer: Any) -> None:
    retriever, generator = Slow(0.1, 1), RowsGenerator(eager(tokenizer), tokenizer)
    opened: list[int] = []
    extend = RowsSession.extend

    def counted(self: RowsSession, *prompts: Any) -> list[int]:
        opened.append(len(self._rows))
        return extend(self, *prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowsSession, "extend", counted)
        found, player, _ = play(generator, tokenizer, retriever, 16, rows=8)
    assert len(found) == 24
    assert player.cost.searches == sum(retriever.searches) >= sum(t.num_searches for t in found) > 10
    assert retriever.most > 1
    assert max(opened) > 0, "a question begins while others play"
    assert max(opened) <= 4, "eight rows are open at most"


def test_a_generator_whose_rows_are_not_free_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"overlap_searches=4: expected 0 \(none\) with this generator"):
        play(PlainGenerator(eager(tokenizer), tokenizer), tokenizer, Slow(0, 0), 4)


def test_a_failed_search_fails_its_row_alone(tokenizer: Any) -> None:
    generator = RowsGenerator(eager(tokenizer), tokenizer)
    wanted, _, _ = play(generator, tokenizer, Slow(0, 0), 0)
    (word, *_) = [turn.action.searches[0] for t in wanted for turn in t.turns if turn.action.searches]
    assert word
    found, _, _ = play(generator, tokenizer, Slow(0.02, 3, failing=word), 8)
    failed = [t for t in found if t.status == "failed"]
    assert failed
    assert all(t.error == "the index is away" for t in failed)
    for mine, other in zip(found, wanted, strict=True):
        if mine.status != "failed":
            assert mine == other


def test_an_error_of_a_search_ends_the_play(tokenizer: Any) -> None:
    class Broken:
        def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        play(RowsGenerator(eager(tokenizer), tokenizer), tokenizer, Broken(), 4)


def test_a_stray_tag_does_not_end_a_call(tokenizer: Any) -> None:
    lines: list[list[str | list[int]]] = [
        ["</answer> so", " <search> Avenor </search>", "<answer> Bristow </answer>"],
        ["<answer> Calmere </answer>"],
    ]
    generator = Script(tokenizer, lines)
    player = Player(
        replace(CONF, overlap_searches=2),
        generator,
        tokenizer,
        Slow(0, 0),
        make_grammar("search_r1", tokenizer),
        PROMPT,
    )
    found = player.play([question(0), question(1)], 1, Sampling(0.0, 1.0, (), 0))
    assert [t.answer for t in found] == ["Bristow", "Calmere"]
    assert found[0].num_searches == 1
