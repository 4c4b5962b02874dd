"""Benchmark runs: every question is played and scored once, chunks survive a kill, a limit is fair to datasets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.agent.grammars.tool_call import ToolCallGrammar
from tasks.agent.rollout import Player
from tasks.data.sample import choose
from tasks.evaluate.play import Evaluation, evaluate, score_row
from tasks.generate.plain import PlainGenerator
from tasks.records.schema import plain
from tasks.records.usage import Usage
from tasks.retrieval import RetrievalError
from tasks.store import DataError
from tasks.systems.policy import PolicySystem
from tasks.types import Action, Cost, Episode, Hit, Question, Trajectory, Turn
from tests.tiny import make_player

QUESTIONS = [
    Question(f"d/{i:02d}", "d", "test", f"Who rules Avenor {i}", (f"Bristow {i}",), 1 + i % 3, type=f"t{i % 2}")
    for i in range(11)
]


def _hit(name: str) -> Hit:
    return Hit(name, 1.0, name, f"text of {name}")


def _trajectory(**changes: Any) -> Trajectory:
    """Prompt of 3; a search of 4 tokens that shows 2, an answer of 2 tokens."""
    turns = (
        Turn(Action("search", "x"), 0, 4, 6, executed=True, hits=(_hit("p1"), _hit("p7"))),
        Turn(Action("answer", "the Bristow"), 6, 8, 8),
    )
    mask = (True,) * 4 + (False,) * 2 + (True,) * 2
    given = Trajectory("d/1", "d/1#0", (1, 2, 3), (5,) * 8, mask, (0.0,) * 8, turns, "answered", "the Bristow")
    return replace(given, **changes)


def _question(**changes: Any) -> Question:
    given = Question(
        "d/1", "d", "test", "Who", ("Bristow", "Bristow Town"), 2, "bridge",
        gold_passage_ids=("p1", "p2", "p3"), gold_method="annotated", gold_complete=True,
    )  # fmt: skip
    return replace(given, **changes)


def test_scores_of_an_answered_question_by_hand() -> None:
    assert plain(score_row(_trajectory(), _question(), "greedy")) == {
        "question_id": "d/1",
        "dataset": "d",
        "split": "test",
        "hops": 2,
        "type": "bridge",
        "mode": "greedy",
        "em": 1.0,  # the article is dropped
        "f1": 1.0,
        "subem": 1.0,
        "searches": 1,
        "actions": 2,
        "valid_actions": 2,
        "recall": pytest.approx(1 / 3),  # p1 of p1, p2, p3
        "answer_in_passage": 0.0,  # "p1 text of p1" and "p7 text of p7"
        "answer_shown": 0.0,
        "status": "answered",
        "generated_tokens": 6,
        "prefill_tokens": 5,  # 3 of the prompt, 2 of the observation
        "answer": "the Bristow",
    }


def test_partial_answers_and_failures_by_hand() -> None:
    row = plain(score_row(_trajectory(answer="Bristow Town Hall"), _question(), "sampled"))
    assert (row["em"], row["f1"], row["subem"], row["mode"]) == (0.0, pytest.approx(2 * 2 / 5), 1.0, "sampled")
    failed = _trajectory(status="failed", answer=None, turns=(Turn(Action("search", "x"), 0, 4, 4),))
    row = plain(score_row(failed, _question(), "greedy"))
    assert [row[key] for key in ("em", "f1", "subem", "recall", "searches", "actions")] == [0.0, 0.0, 0.0, 0.0, 0, 1]
    assert (row["status"], row["answer"]) == ("failed", None)


def test_a_failed_episode_scores_0_whatever_it_found_and_answered_before() -> None:
    """The same turns and answer as in the first test, which score 1 and a recall of 1/3."""
    row = score_row(_trajectory(status="failed", error="the server is gone"), _question(), "greedy")
    assert (row.em, row.f1, row.subem, row.recall) == (0.0, 0.0, 0.0, 0.0)
    assert (row.status, row.answer, row.searches) == ("failed", "the Bristow", 1)


def test_invalid_actions_count_as_actions_only() -> None:
    turns = (Turn(Action("invalid"), 0, 4, 6), Turn(Action("invalid"), 6, 8, 8))
    row = score_row(_trajectory(turns=turns, status="open", answer=None), _question(), "greedy")
    assert (row.actions, row.valid_actions, row.searches) == (2, 0, 0)


@pytest.mark.parametrize(
    "question",
    [
        _question(gold_passage_ids=(), gold_method="none", gold_complete=False),
        _question(gold_complete=False),  # Some are unknown: a share of the known ones would flatter.
    ],
)
def test_recall_is_null_where_gold_is_not_known(question: Question) -> None:
    assert score_row(_trajectory(), question, "greedy").recall is None


def _found(answers: tuple[str, ...], title: str, passage: str, observation: str = "") -> tuple[float | None, ...]:
    """`answer_in_passage` and `answer_shown` where one search returned this passage."""
    hit, nothing = Hit("p1", 1.0, title, passage), Hit("p2", 0.5, "Other", "Nothing of interest.")
    search = Turn(Action("search", "x"), 0, 4, 6, executed=True, hits=(nothing, hit), observation=observation)
    row = score_row(_trajectory(turns=(search,)), _question(answers=answers), "greedy")
    return row.answer_in_passage, row.answer_shown


@pytest.mark.parametrize(
    ("answers", "title", "passage", "is_found"),
    [
        (("Bristow",), "Avenor", "It is ruled by the Bristow family.", 1.0),
        (("The U.S.A.",), "Avenor", "A town in the USA, far away.", 1.0),  # Normalised alike.
        (("Bristow Town",), "BRISTOW, Town", "A river.", 1.0),  # In the title alone.
        (("Bristow Town",), "Avenor", "A town near Bristow.", 0.0),  # The words, but not in this order.
        (("Bristow",), "Bristows", "Unbristowed and Bristow-like.", 0.0),  # Parts of words.
        (("Zürich",), "Schweiz", "Sie liegt bei Zürich.", 1.0),
        (("Nowhere", "Bristow"), "Avenor", "Ruled by Bristow.", 1.0),  # An alias.
        (("United States", "US"), "Avenor", "It pleased us.", 0.0),  # An alias of two letters stands anywhere.
        (("yes",), "Avenor", "yes, yes and no.", None),
        (("No", "Nope"), "Avenor", "Nope.", None),
        (("7",), "Avenor", "It has 7 gates.", None),
        (("---", "Bristow"), "Avenor", "Ruled by Bristow.", None),  # The main answer normalises to nothing.
    ],
)
def test_an_answer_is_in_a_passage_as_whole_words(
    answers: tuple[str, ...], title: str, passage: str, is_found: float | None
) -> None:
    assert _found(answers, title, passage) == (is_found, is_found)


def test_an_answer_that_the_observation_cuts_off_is_in_a_passage_and_not_shown() -> None:
    passage = "It has a river, and is ruled by Bristow."
    assert _found(("Bristow",), "Avenor", passage, 'Doc 1(Title: "Avenor") It has a river, and') == (1.0, 0.0)
    assert _found(("Bristow",), "Avenor", passage, f'Doc 1(Title: "Avenor") {passage}') == (1.0, 1.0)
    # What stands in no passage was not found, whatever else an observation says.
    assert _found(("Bristow",), "Avenor", "A town.", "Bristow") == (0.0, 0.0)


def test_an_answer_behind_a_line_break_inside_json_is_shown() -> None:
    observation = ToolCallGrammar().body(Action("search", "x"), [[Hit("p", 1.0, "Avenor", "Bristow rules it.")]])
    assert "\\nBristow" in observation
    assert _found(("Bristow",), "Avenor", "Bristow rules it.", observation) == (1.0, 1.0)


def test_nothing_is_found_without_a_search_or_where_one_failed() -> None:
    hit = Hit("p1", 1.0, "Bristow", "Bristow.")
    search = Turn(Action("search", "x"), 0, 4, 6, executed=True, hits=(hit,))
    for episode in (_trajectory(turns=()), _trajectory(turns=(search,), status="failed", answer=None)):
        assert score_row(episode, _question(), "greedy").answer_in_passage == 0.0
    assert score_row(_trajectory(turns=(search,)), _question(), "greedy").answer_in_passage == 1.0


def _evaluate(tokenizer: Any, model: Any, scratch: Path, sampled: bool = True, **changes: Any) -> Evaluation:
    settings = {"questions": QUESTIONS, "name": "m", "seed": 3, "num_recorded": 4, "batch_rows": 4, **changes}
    player = make_player(
        PlainGenerator(model, tokenizer), tokenizer, batch_rows=settings.pop("batch_rows"), max_call_tokens=8
    )
    scratch.mkdir(exist_ok=True)
    return evaluate(PolicySystem(player), sampled=sampled, scratch=scratch, **settings)


def test_every_question_is_played_once_a_mode_last_chunk_included(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, float]] = []
    found = _evaluate(tokenizer, model, tmp_path, progress=lambda *said: seen.append(said))
    expected = [(q.id, mode) for q in QUESTIONS for mode in ("greedy", "sampled")]
    assert [(row.question_id, row.mode) for row in found.scores] == expected
    assert [said[:2] for said in seen] == [(mode, done) for mode in ("greedy", "sampled") for done in (4, 8, 11)]
    for mode, done, em in seen:
        played = [
            row.em for row in found.scores if row.mode == mode and row.question_id in {q.id for q in QUESTIONS[:done]}
        ]
        assert (len(played), em) == (done, sum(played) / done)
    by_id = {q.id: q for q in QUESTIONS}
    for row in found.scores:
        question = by_id[row.question_id]
        assert (row.hops, row.type, row.split) == (question.hops, question.type, "test")
    assert {row.mode for row in _evaluate(tokenizer, model, tmp_path / "g", sampled=False).scores} == {"greedy"}


def test_recorded_trajectories_are_spread_over_the_questions(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    found = _evaluate(tokenizer, model, tmp_path)
    ids = [row.question_id for row in found.trajectories if row.mode == "greedy"]
    assert ids == ["d/00", "d/02", "d/05", "d/08"]  # i * 11 // 4
    assert ids == [row.question_id for row in found.trajectories if row.mode == "sampled"]
    scores = {(row.question_id, row.mode): row for row in found.scores}
    for row in found.trajectories:
        score = scores[row.question_id, row.mode]
        assert (row.policy, row.seed, row.step) == ("m", 3, None)
        assert (row.outcome, row.answer, row.status) == (score.em, score.answer, score.status)
        assert len(row.turns) == score.actions
        assert sum(len(turn.tokens or ()) for turn in row.turns) == score.generated_tokens
    many = _evaluate(tokenizer, model, tmp_path / "many", num_recorded=60, sampled=False)
    assert [row.question_id for row in many.trajectories] == [q.id for q in QUESTIONS]
    assert _evaluate(tokenizer, model, tmp_path / "none", num_recorded=0).trajectories == []


def test_the_same_run_gives_the_same_rows_and_another_seed_other_draws(
    tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    first = _evaluate(tokenizer, model, tmp_path / "a")
    assert _evaluate(tokenizer, model, tmp_path / "b") == first
    other = _evaluate(tokenizer, model, tmp_path / "c", seed=4)

    def drawn(found: Evaluation, mode: str) -> list[Any]:
        return [row.turns for row in found.trajectories if row.mode == mode]

    assert drawn(other, "greedy") == drawn(first, "greedy")
    assert drawn(other, "sampled") != drawn(first, "sampled")
    assert drawn(first, "sampled") != drawn(first, "greedy")


def test_greedy_rows_do_not_depend_on_the_size_of_a_chunk(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    first = _evaluate(tokenizer, model, tmp_path / "a", sampled=False)
    for size in (1, 3, 100):
        found = _evaluate(tokenizer, model, tmp_path / str(size), sampled=False, batch_rows=size)
        assert found.scores == first.scores


class KilledError(Exception):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 5])
def test_a_killed_evaluation_plays_only_what_is_missing(
    tokenizer: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    expected = _evaluate(tokenizer, model, tmp_path / "unbroken")
    whole, played = Player.play, []

    def dying(self: Player, questions: Sequence[Question], *args: Any) -> list[Trajectory]:
        if len(played) == chunks:
            raise KilledError
        played.append([q.id for q in questions])
        return whole(self, questions, *args)

    monkeypatch.setattr(Player, "play", dying)
    with pytest.raises(KilledError):
        _evaluate(tokenizer, model, tmp_path / "killed")
    first, played[:] = list(played), []
    chunks = 99
    found = _evaluate(tokenizer, model, tmp_path / "killed")
    assert found == expected
    assert Counter(i for some in [*first, *played] for i in some) == {q.id: 2 for q in QUESTIONS}


def test_what_services_did_before_a_kill_counts_once(
    tokenizer: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question asks once; the process that is killed has finished a chunk, and asked in vain for another."""
    service = SimpleNamespace(usage=Usage())
    whole, killed_at = Player.play, [2]

    def asking(self: Player, questions: Sequence[Question], *args: Any) -> list[Trajectory]:
        service.usage.add(Usage(calls=len(questions), tokens=10 * len(questions), seconds=1.0))
        killed_at[0] -= 1
        if killed_at[0] == 0:
            raise KilledError
        return whole(self, questions, *args)

    monkeypatch.setattr(Player, "play", asking)
    with pytest.raises(KilledError):
        _evaluate(tokenizer, model, tmp_path / "killed", services={"chat": service})
    found = _evaluate(tokenizer, model, tmp_path / "killed", services={"chat": service})
    used = {role: asdict(usage) for role, usage in found.usage.items()}
    count = 2 * len(QUESTIONS)
    assert used == {"chat": {"calls": count, "tokens": 10 * count, "failures": 0, "hits": 0, "seconds": 6.0}}
    assert _evaluate(tokenizer, model, tmp_path / "none", services={"rule": object()}).usage == {}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_an_outage_ends_the_evaluation_and_what_it_spoiled_is_played_again(
    tokenizer: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """11 questions twice in chunks of 4: a search fails for one question of the first chunk, two of the third."""
    expected = _evaluate(tokenizer, model, tmp_path / "unbroken")
    whole, calls, spoiled = Player.play, [], {0: 1, 2: 2}

    def failing(self: Player, *args: Any) -> list[Trajectory]:
        calls.append(len(args[0]))
        played = whole(self, *args)
        count = spoiled.get(len(calls) - 1, 0)
        gone = {"status": "failed", "answer": None, "turns": (), "error": "the server is gone."}
        return [replace(one, **gone) if i < count else one for i, one in enumerate(played)]

    monkeypatch.setattr(Player, "play", failing)
    if share == 0.2:  # 3 of 22 are fewer.
        found = _evaluate(tokenizer, model, tmp_path / "outage", max_failed_share=share)
        assert sum(row.status == "failed" for row in found.scores) == 3
        return
    told = {0.0: r"1 of 22 .*share of 0 may .*Question d/00", 0.1: r"3 of 22 .*share of 0.1 may .*Question d/08"}[share]
    with pytest.raises(RetrievalError, match=told + ": the server is gone. Mend the search"):
        _evaluate(tokenizer, model, tmp_path / "outage", max_failed_share=share)
    assert calls == {0.0: [4], 0.1: [4, 4, 3]}[share]
    calls.clear()
    spoiled.clear()
    assert _evaluate(tokenizer, model, tmp_path / "outage", max_failed_share=share) == expected
    assert calls == {0.0: [4, 4, 3, 4, 4, 3], 0.1: [4, 3, 4, 4, 3]}[share]  # The chunk without a failure was kept.


def _mixed(sizes: dict[str, int]) -> list[Question]:
    return [
        Question(f"{name}/{i:03d}", name, "train" if i % 5 == 4 else "test", "?", ("a",), 1)
        for name, size in sizes.items()
        for i in range(size)
    ]


def test_a_limit_takes_equal_parts_and_what_a_small_dataset_lacks_from_the_others() -> None:
    questions = _mixed({"large": 100, "middle": 50, "small": 5})
    found = choose(questions, ("test",), 40)
    assert Counter(q.dataset for q in found) == {"large": 18, "middle": 18, "small": 4}
    assert [q.id for q in found] == sorted(q.id for q in found)
    assert all(q.split == "test" for q in found)
    assert found == choose(questions[::-1], ("test",), 40)  # Whatever the order they come in.
    assert found != choose(questions, ("test",), 40, seed=1)
    assert not all(q.id < "large/030" for q in found if q.dataset == "large")  # A sample, not the first ones.


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1),
    st.integers(0, 60),
    st.sampled_from([("test",), ("dev", "test"), ("train", "test")]),
)
def test_a_choice_is_of_the_right_size_and_fair(sizes: dict[str, int], limit: int, splits: tuple[str, ...]) -> None:
    questions = _mixed(sizes)
    has = {(q.dataset, q.split) for q in questions}
    first = {name: next((split for split in splits if (name, split) in has), "") for name in sizes}
    eligible = Counter(q.dataset for q in questions if q.split == first[q.dataset])
    found = choose(questions, splits, limit)
    assert len(found) == len({q.id for q in found}) == min(limit or 999, eligible.total())
    taken = Counter(q.dataset for q in found)
    for name, other in ((a, b) for a in eligible for b in eligible):  # Only an exhausted dataset gives less.
        assert taken[name] + 1 >= taken[other] or taken[name] == eligible[name]


def test_no_limit_takes_all_and_a_larger_limit_keeps_what_a_smaller_took() -> None:
    questions = _mixed({"a": 20, "b": 10})
    assert len(choose(questions, ("test",), 0)) == 24
    assert {q.id for q in choose(questions, ("test",), 6)} <= {q.id for q in choose(questions, ("test",), 12)}


@dataclass
class Told:
    """Plays by changing what a right system would return; two questions at once."""

    change: Callable[[list[Episode]], list[Episode]]
    batch_questions: int = 2
    tokenizer: None = None

    def play(self, questions: Sequence[Question], mode: str, seed: int) -> list[Episode]:
        return self.change([Episode(q.id, (), "answered", q.answers[0]) for q in questions])


def _each(**changes: Any) -> Callable[[list[Episode]], list[Episode]]:
    return lambda episodes: [replace(one, **changes) for one in episodes]


ONE_EACH = r"for each question, in order\. Mend its file in tasks/systems/\.$"


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (
            Told(lambda one: one[::-1]),
            rf"episode 1 of 2: found question_id='d/01', expected 'd/00': one episode {ONE_EACH}",
        ),
        (
            Told(lambda one: one[:1] * 2),
            rf"episode 2 of 2: found question_id='d/00', expected 'd/01': one episode {ONE_EACH}",
        ),
        (
            Told(_each(question_id="x")),
            rf"episode 1 of 2: found question_id='x', expected 'd/00': one episode {ONE_EACH}",
        ),
        (Told(lambda one: one[:1]), rf"found 1 episodes for 2 questions, expected one {ONE_EACH}"),
        (Told(lambda one: one * 2), rf"found 4 episodes for 2 questions, expected one {ONE_EACH}"),
        (Told(list, batch_questions=0), r"batch_questions=0: expected 1 or more\. Mend"),
        (Told(list, batch_questions=-1), r"batch_questions=-1: expected 1 or more\. Mend"),
        (Told(_each(cost=Cost(-1, 0))), r"question 'd/00': score\.generated_tokens: found -1 \(int\), expected 0 or m"),
        (Told(_each(cost=Cost(0, 1.5))), r"question 'd/00': score\.prefill_tokens: found 1\.5 \(float\), expected a "),  # type: ignore[arg-type]
        (Told(_each(cost=Cost(math.nan, 0))), r"question 'd/00': score\.generated_tokens: found nan \(float\), expect"),  # type: ignore[arg-type]
        (
            Told(_each(answer=5)),
            r"question 'd/00': found answer 5 of type int, expected text, or None without an answer",
        ),  # type: ignore[arg-type]
        (Told(_each(answer=["a"])), r"question 'd/00': found answer \['a'\] of type list, expected text, or None"),  # type: ignore[arg-type]
        (Told(_each(status="won")), r"question 'd/00': score\.status: found 'won', expected 'answered', 'open', 'over"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_wrong_system_is_told_in_one_line_and_leaves_nothing(system: Told, message: str, tmp_path: Path) -> None:
    """Nothing may stay in the scratch folder, where the mended system would find it."""
    with pytest.raises(DataError, match=rf"^system 'mine': {message}") as caught:
        evaluate(system, QUESTIONS, True, "mine", 0, 3, tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    found = evaluate(Told(list), QUESTIONS, True, "mine", 0, 3, tmp_path)
    assert [row.em for row in found.scores] == [1.0] * (2 * len(QUESTIONS))
