"""What is told of a play while it is played: the play stays what it is, and every piece is told once."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.tool.live import (
    Audience,
    CallText,
    Complained,
    Event,
    Found,
    LiveGenerator,
    LiveRetriever,
    StoppedError,
    Wrote,
)
from tasks.tool.script import Script, harmless, shortened
from tests.tiny import Script as Writer
from tests.tiny import Shelf, hit, make_grammar, make_merging_tokenizer, make_model, make_player, make_tokenizer
from tests.tiny import question as asked

GRAMMARS = ("search_r1", "r_search", "stepsearch", "research", "tool_call", "answer_only")


def watched(tokenizer: Any, kind: str, audience: Audience) -> tuple[Any, Any]:
    """A player of a random policy as it is, and one that tells."""
    generator, shelf = PlainGenerator(make_model(tokenizer), tokenizer), Shelf()
    grammar, budgets = make_grammar(kind, tokenizer), {"max_turns": 3, "max_call_tokens": 60}
    live: Any = LiveGenerator(generator, tokenizer, audience)
    return (
        make_player(generator, tokenizer, shelf, grammar, **budgets),
        make_player(live, tokenizer, LiveRetriever(shelf, audience), grammar, **budgets),
    )


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), make_merging_tokenizer()], ids=["tags", "merged"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_no_draw_changes_and_all_text_is_told(kind: str, tokenizer: Any) -> None:
    events: list[Event] = []
    plain, live = watched(tokenizer, kind, Audience(events.append))
    for seed in range(6):
        events.clear()
        sampling = Sampling(0.9, 1.0, (), seed)
        (expected,), (played,) = plain.play([asked(seed)], 1, sampling), live.play([asked(seed)], 1, sampling)
        assert played == expected
        assert live.cost == plain.cost

        told = "".join(event.text for event in events if isinstance(event, Wrote))
        written = "".join(turn.text for turn in played.turns)
        for tag in ("think", "search", "tool_call", "original_evidence", "answer"):
            written = written.replace(f"<{tag}>", "").replace(f"</{tag}>", "")
        assert told == written
        searched = [turn for turn in played.turns if turn.executed]
        assert [event.hits for event in events if isinstance(event, Found)] == [(turn.hits,) for turn in searched]


def test_a_play_is_told_in_its_order() -> None:
    tokenizer, events = make_tokenizer(), list[Event]()
    calls = ["<think> so </think>\n<search> Avenor </search>", " Hask", "<answer> Bristow </answer>"]
    pieces = [[[token] for token in tokenizer.encode(call)] for call in calls]
    nothing: list[int] = []  # The end of text, where the second call is neither a search nor an answer.
    audience = Audience(events.append)
    live: Any = LiveGenerator(Writer(tokenizer, [[*pieces[0], *pieces[1], nothing, *pieces[2]]]), tokenizer, audience)
    player = make_player(live, tokenizer, LiveRetriever(Shelf(), audience), max_call_tokens=30)
    (played,) = player.play([asked()], 1, Sampling(0.0, 1.0, (), 0))
    assert played.answer == "Bristow"
    kinds = [event.part if isinstance(event, Wrote) else type(event).__name__ for event in events]
    order = [kind for number, kind in enumerate(kinds) if kinds[number - 1] != kind or not number]
    assert order == ["thought", "search", "Found", "thought", "Complained", "answer"]


def test_a_play_that_nobody_wants_ends_with_the_next_token() -> None:
    tokenizer, events = make_tokenizer(), list[Event]()
    audience = Audience(events.append, lambda: len(events) < 3)
    _, live = watched(tokenizer, "search_r1", audience)
    with pytest.raises(StoppedError):
        live.play([asked()], 1, Sampling(1.0, 1.0, (), 1))
    assert sum(isinstance(event, Wrote) for event in events) == 3
    with pytest.raises(StoppedError):
        live.retriever.search(["x"], 1)


def test_tags_and_characters_that_come_in_pieces() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    text = "zé < b <think>é 中</think><b> <search>x<y</search> 𝄞 <answer> a</answer> end <ans"
    call, pieces = CallText(Bytes()), list[Wrote]()
    for byte in text.encode():
        for piece in call.add([byte]):
            assert "\ufffd" not in piece.text
            pieces.append(piece)
    pieces += call.add([], is_over=True)
    joined: dict[str, str] = {}
    for piece in pieces:
        joined[piece.part] = joined.get(piece.part, "") + piece.text
    assert joined == {"thought": "zé < b é 中<b>  𝄞  end <ans", "search": "x<y", "answer": " a"}
    assert len(pieces) > 20


# As text --------------------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\u2066\x9b31m\r\nnext\u2028x\ud800"


def test_nothing_that_a_terminal_obeys_is_shown() -> None:
    for has_colours in (False, True):
        script = Script(has_colours)
        found = Found((EVIL, "b"), ((hit(EVIL, EVIL),), ()))
        text = "".join(script.text(event) for event in (Wrote("thought", EVIL), found, Wrote("answer", EVIL)))
        for code in ("\x1b[2;36m", "\x1b[2m", "\x1b[1;32m", "\x1b[0m"):
            text = text.replace(code, "") if has_colours else text
        assert all(character.isprintable() or character == "\n" for character in text)
        assert r"\x1b[2J\u202e\u2066\x9b31m" in text
        text.encode()


def test_a_play_as_lines() -> None:
    script = Script()
    events = [
        Wrote("thought", " next"), Wrote("thought", " mayor"), Wrote("thought", " "), Wrote("search", " Avenor"),
        Wrote("search", " "), Found(("Avenor",), ((hit("a  b\nc", "T"), hit("x" * 500, "U")),)), Wrote("thought", "\n"),
        Complained(), Found(("a", "b"), ((hit("y", "V"),), ())), Wrote("answer", " Hask "),
    ]  # fmt: skip
    assert "".join(map(script.text, events)) + script.end() == (
        "thought: next mayor\nsearch: Avenor\n  [1] T: a b c\n  [2] U: " + "x" * 160 + "...\n"
        "(neither a search nor an answer)\n  a\n  [1] V: y\n  b\n  nothing\nanswer: Hask\n"
    )
    assert script.answer == " Hask "
    assert script.end() == ""


def test_short_texts_are_not_cut() -> None:
    assert shortened("a" * 160) == "a" * 160
    assert shortened("a" * 161) == "a" * 160 + "..."
    assert shortened(" " * 10_000 + "a") == "..."
    assert harmless("a\u200db\tc") == "a\u200db c"
