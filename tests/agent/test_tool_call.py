"""DSPO's tool calls through the real rollout; faults, caps, frames and cuts."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.agent.grammars.tool_call import MAX_QUERIES, ToolCallGrammar, tool_frame
from tasks.agent.prompts import prompt_ids
from tasks.generate import Sampling
from tasks.rewards.answer import AnswerReward
from tasks.types import Action, Hit, Trajectory
from tests.papers import golden
from tests.tiny import PROMPT, Library, Script, Shelf, hit, make_grammar, make_player, play_script, question

GRAMMAR = ToolCallGrammar()
BAD_JSON = "Error: the call is not valid JSON."
BAD_NAME = 'Error: expected an object whose "name" is "search".'
BAD_LIST = 'Error: expected "arguments" with "query_list", a list of texts, not empty.'
ANSWER = "<think> so </think> <answer> Bristow </answer>"
many = settings(max_examples=150)


def call(value: Any) -> str:
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


def search(*queries: Any) -> str:
    return call({"name": "search", "arguments": {"query_list": list(queries)}})


def result_of(observation: str) -> str:
    """The text of a response, read as JSON; its frame must be whole."""
    found = re.fullmatch(r"\n<tool_response>\n(.*)\n</tool_response>\n", observation, re.DOTALL)
    assert found, observation
    value = json.loads(found[1])
    assert list(value) == ["result"]
    return str(value["result"])


def play(tokenizer: Any, *lines: Any, **more: Any) -> Trajectory:
    return play_script(tokenizer, lines, make_grammar("tool_call", tokenizer), **more)


# Parsing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        (search("a"), ("a",)),
        (search("a", " b \n", ""), ("a", "b", "")),
        (call({"name": "search", "arguments": {"query_list": " a "}}), ("a",)),  # a bare string is a list of one
        ('<tool_call>{"name":"search","arguments":{"query_list":["\\u00e9 \\"x\\""]}}</tool_call>', ('é "x"',)),
        ("<think> so </think> " + search("a") + search("b"), ("a",)),
        (search("</answer>"), ("</answer>",)),
        (call({"arguments": {"more": 1, "query_list": ["a"]}, "name": "search", "id": 3}), ("a",)),
    ],
)
def test_calls_that_can_be_read(text: str, queries: tuple[str, ...]) -> None:
    action = GRAMMAR.parse(text)
    assert (action.kind, action.searches, action.note) == ("search", queries, "")


@pytest.mark.parametrize(
    ("inside", "note"),
    [
        ("", BAD_JSON),
        ("who rules Avenor", BAD_JSON),
        ('{"name": "search", "arguments": {"query_list": ["a"]}', BAD_JSON),  # a brace too few
        ("{'name': 'search', 'arguments': {'query_list': ['a']}}", BAD_JSON),
        ("[" * 100_000, BAD_JSON),
        ("1" * 10_000, BAD_JSON),  # more digits than Python reads
        ('["search"]', BAD_NAME),
        ("null", BAD_NAME),
        ('"search"', BAD_NAME),
        ({"name": "open", "arguments": {"query_list": ["a"]}}, BAD_NAME),
        ({"arguments": {"query_list": ["a"]}}, BAD_NAME),
        ({"name": ["search"], "arguments": {"query_list": ["a"]}}, BAD_NAME),
        ({"name": "search"}, BAD_LIST),
        ({"name": "search", "arguments": {}}, BAD_LIST),
        ({"name": "search", "arguments": ["a"]}, BAD_LIST),
        ({"name": "search", "arguments": "a"}, BAD_LIST),
        ({"name": "search", "arguments": {"query": "a"}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": []}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": None}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": {"a": "b"}}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": 3}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": ["a", 3]}}, BAD_LIST),
        ({"name": "search", "arguments": {"query_list": [["a"]]}}, BAD_LIST),
        ({"name": "search", "query_list": ["a"]}, BAD_LIST),
    ],
)
def test_calls_that_cannot_be_read_say_what_is_wrong(inside: Any, note: str) -> None:
    action = GRAMMAR.parse(call(inside))
    assert action == Action("invalid", note=note)
    assert action.searches == ()
    assert result_of(GRAMMAR.complaint(action)) == note


@pytest.mark.parametrize("text", ["", "so", "<tool_call>", "</tool_call>", "<search> a </search>", "{}", "<answer> a"])
def test_no_call_at_all_gets_the_general_message(text: str) -> None:
    action = GRAMMAR.parse(text)
    assert action == Action("invalid")
    assert GRAMMAR.complaint(action) == GRAMMAR.invalid_message


some_queries = st.lists(st.text(max_size=12), min_size=1, max_size=MAX_QUERIES)


@many
@given(some_queries)
def test_parsing_inverts_rendering(queries: list[str]) -> None:
    asked = tuple(query.encode("utf-8", "ignore").decode().strip() for query in queries)
    text = GRAMMAR.render(Action("search", "", asked))
    if not any("</tool_call>" in query for query in asked):
        assert GRAMMAR.parse(text).searches == asked
        assert GRAMMAR.is_complete(text)


@many
@given(st.text(max_size=40), st.booleans())
def test_nothing_written_in_a_call_breaks_the_loop(inside: str, is_quoted: bool) -> None:
    """Whatever it is, it is a search of texts that can be stored, an answer or invalid."""
    action = GRAMMAR.parse(search(inside) if is_quoted else call(inside))
    assert action.kind in ("search", "invalid", "answer")
    for query in action.searches:
        query.encode()


def test_half_of_a_surrogate_pair_in_a_query_is_made_storable(tokenizer: Any) -> None:
    r"""`"\ud800"` is JSON, but no text a search engine or a file can hold."""
    action = GRAMMAR.parse(call('{"name": "search", "arguments": {"query_list": ["a \\ud800 b", "\\ud83d\\ude00"]}}'))
    assert action.searches == ("a ? b", "😀")
    assert action.content.encode().decode() == "a ? b; 😀"


# Caps and many queries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, MAX_QUERIES, MAX_QUERIES + 1, 100])
def test_queries_are_capped_and_the_policy_is_told(tokenizer: Any, count: int) -> None:
    """The response says so, cost counts what was asked."""
    shelf = Shelf()
    script = Script(tokenizer, [[search(*(f"q{i}" for i in range(count))), ANSWER]])
    player = make_player(
        script, tokenizer, shelf, make_grammar("tool_call", tokenizer), max_call_tokens=4000,
        max_observation_tokens=900, max_total_tokens=9000,
    )  # fmt: skip
    (t,) = player.play([question()], 1, Sampling(1.0, 1.0, (), 0))
    asked = min(count, MAX_QUERIES)
    assert shelf.asked == [[f"q{i}" for i in range(asked)]]
    assert player.cost.searches == asked
    assert t.num_searches == 1
    text = result_of(t.turns[0].observation)
    assert text.startswith(f"Only the first {MAX_QUERIES} queries were searched.\n---\n") is (count > MAX_QUERIES)
    assert len(text.split("\n---\n")) == asked + (count > MAX_QUERIES)
    assert len(t.turns[0].hits) == asked


def test_hits_query_by_query(tokenizer: Any) -> None:
    """Two rows ask three queries and one: one batched search, each gets its own documents in the response's format."""
    a, b, c = hit("a text .", "A", 1), hit("b text .", "B", 2), hit("c text .", "C", 3)
    shelf = Library(by_query={"a": [a, b], "none": [], "c": [c]})
    script = Script(tokenizer, [[search("a", "none", "c"), ANSWER], [search("c"), ANSWER]])
    player = make_player(
        script, tokenizer, shelf, make_grammar("tool_call", tokenizer), max_call_tokens=400,
        max_observation_tokens=400, max_total_tokens=3000,
    )  # fmt: skip
    first, second = player.play([question(0), question(1)], 1, Sampling(1.0, 1.0, (), 0))
    assert shelf.asked == [["a", "none", "c", "c"]]
    assert (first.turns[0].hits, second.turns[0].hits) == ((a, b, c), (c,))
    assert result_of(first.turns[0].observation) == (
        'Doc 1 (Title: "A")\na text .\n\nDoc 2 (Title: "B")\nb text .\n---\n\n---\nDoc 1 (Title: "C")\nc text .'
    )
    assert result_of(second.turns[0].observation) == 'Doc 1 (Title: "C")\nc text .'
    assert player.cost.searches == 4


def test_a_failed_search_fails_the_trajectory(tokenizer: Any) -> None:
    t = play(tokenizer, search("a", "b"), shelf=Shelf(failures=-1))
    assert (t.status, t.error, t.num_searches) == ("failed", "the index is away", 0)
    assert (t.turns[0].observation, t.turns[0].hits) == ("", ())


def test_a_fault_costs_a_turn_and_the_last_call_is_not_executed(tokenizer: Any) -> None:
    shelf = Shelf()
    t = play(tokenizer, call("{"), search("a"), search("b"), shelf=shelf, max_turns=2)
    assert t.status == "open"
    assert [turn.executed for turn in t.turns] == [False, True, False]
    assert result_of(t.turns[0].observation) == BAD_JSON
    assert shelf.asked == [["a"]]
    assert (t.turns[2].observation, t.answer) == ("", None)
    assert not any(any(t.loss_mask[turn.end : turn.observation_end]) for turn in t.turns)


def test_overflow(tokenizer: Any) -> None:
    """A response that does not fit is never seen: not executed, no hits, no error text."""
    lines: list[Any] = [search("a"), ANSWER]
    free = play(tokenizer, *lines)
    needed = len(free.prompt_ids) + free.turns[0].observation_end
    for first, room, status in ((lines[0], needed, "overflow"), (lines[0], needed + 1, "overflow")):
        t = play(tokenizer, first, ANSWER, max_total_tokens=room, max_prompt_tokens=20)
        assert (t.status, t.turns[0].executed) == (status, room > needed)
        assert bool(t.turns[0].observation) is (room > needed)
        assert len(t.prompt_ids) + len(t.response_ids) <= room
        assert AnswerReward("subem")([t], [question()])[0].outcome == 0.0


# Retrieved text as an adversary ---------------------------------------------------------------------------------------

HOSTILE = [
    "</tool_response>", "<tool_call>", '{"name": "search"}', "</tool_call>", "<answer> Bristow </answer>", '"}', '"',
    "\\", "\\n", "\\u00", "\n", "\t", "\x07", "é", "東", "😀", "<|endoftext|>", "< / Tool_Call >", "---", "a ",
    "\u2028",
]  # fmt: skip
hostile = st.lists(st.sampled_from(HOSTILE), max_size=12).map("".join)


@many
@given(st.lists(st.lists(st.tuples(hostile, hostile), max_size=3), min_size=1, max_size=3), st.booleans())
def test_a_response_is_json_and_holds_no_call(found: list[list[tuple[str, str]]], is_noted: bool) -> None:
    grammar = ToolCallGrammar(reserved=("<|endoftext|>",))
    hits = [[Hit(f"p{i}", 1.0, title, text) for i, (title, text) in enumerate(one)] for one in found]
    action = Action("search", "a", ("a",), "Only some." if is_noted else "")
    observation = grammar.opening + grammar.body(action, hits) + grammar.closing
    text = result_of(observation)
    shown = ["\n\n".join(grammar.document(i, h) for i, h in enumerate(one, 1)) for one in hits]
    assert text == "\n---\n".join(["Only some."] * is_noted + shown)
    assert grammar.parse(observation) == Action("invalid")
    assert not any(stop in observation for stop in grammar.stop)
    assert "<|endoftext|>" not in observation
    assert observation.count("tool_response>") == 2 + sum(
        t.count("tool_response>") for one in found for p in one for t in p
    )
    assert observation.count("</tool_response>") == observation.count("<tool_response>") == 1


@many
@given(hostile)
@example('\\"')
@example("\\u0041\x07")
def test_a_body_cut_anywhere_it_may_end_is_json(text: str) -> None:
    """Every prefix of the body, letter by letter: `may_end` tells exactly the ones that close into JSON."""
    body = GRAMMAR.body(Action("search", "a", ("a",)), [[Hit("p", 1.0, "t", text)]])
    for cut in range(min(len(body), 120) + 1):
        observation = GRAMMAR.opening + body[:cut] + GRAMMAR.closing
        try:
            result_of(observation)
            is_json = True
        except ValueError:
            is_json = False
        assert is_json == GRAMMAR.may_end(body[:cut]), body[:cut]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 14, 15, 16, 17, 18, 19, 20, 30, 45])
def test_a_truncated_response_stays_json(budget: int, tokenizer: Any, merging: Any) -> None:
    """Through the rollout, with tokens that cut characters and escapes in two."""
    evil = hit('a "quoted" \\ back\\\\slash \x07 bell \x1f é東😀 ' * 3, '"\\"')
    for one in (tokenizer, merging):
        t = play(one, search("a"), ANSWER, shelf=Shelf([evil]), max_observation_tokens=budget)
        whole = play(one, search("a"), ANSWER, shelf=Shelf([evil]))
        text, full = result_of(t.turns[0].observation), result_of(whole.turns[0].observation)
        assert full.startswith(text.rstrip("\ufffd"))  # at most a piece of the last letter
        frame = len(one.encode(make_grammar("tool_call", one).opening)) + len(one.encode('"}\n</tool_response>\n'))
        assert t.turns[0].observation_end - t.turns[0].end <= budget + frame
        assert t.turns[0].hits == (evil,)


# Chat templates -------------------------------------------------------------------------------------------------------

CHAT = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}[user]\n<tool_response>\n{{ m.content }}\n</tool_response>[end]\n"
    "{% else %}[{{ m.role }}]\n{{ m.content }}[end]\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
BEFORE, AFTER = "[end]\n[user]\n<tool_response>\n", "\n</tool_response>[end]\n[assistant]\n"


@pytest.fixture
def chatting(merging: Any) -> Any:
    """A tokenizer with a chat template that knows tools."""
    own = copy.deepcopy(merging)
    own.chat_template = CHAT
    return own


def test_the_frame_is_the_templates_own(chatting: Any, merging: Any) -> None:
    assert tool_frame(chatting) == (BEFORE, AFTER)
    plain = ("\n<tool_response>\n", "\n</tool_response>\n")
    assert tool_frame(merging) == plain
    chatting.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"  # it drops no role
    assert tool_frame(chatting) == plain
    chatting.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    assert tool_frame(chatting) == plain


def test_a_conversation_in_the_frame(chatting: Any) -> None:
    """Prompt with system message and tools; masked ids of a response decode to the frame; a fault stands in it, too."""
    grammar = make_grammar("tool_call", chatting)
    instructions = replace(PROMPT, system="You are a helpful and harmless assistant.")
    t = play_script(chatting, [search("a"), call("{"), ANSWER], grammar, Shelf(), prompt=instructions)
    prompt = chatting.decode(list(t.prompt_ids))
    schema = json.loads(prompt.split("[tools]")[1].split("\n")[0])
    assert schema == grammar.tools
    assert schema[0]["function"]["parameters"]["required"] == ["query_list"]
    asked = "[system]\nYou are a helpful and harmless assistant.[end]\n[user]\nQuestion: Who rules Avenor ?\n[end]\n"
    assert prompt.endswith(f"\n{asked}[assistant]\n")
    shown = [chatting.decode(list(t.response_ids[turn.end : turn.observation_end])) for turn in t.turns]
    for text, wanted in zip(shown, ['Doc 1 (Title: "Avenor")\nBristow rules Avenor .', BAD_JSON], strict=False):
        assert text.startswith(BEFORE)
        assert text.endswith(AFTER)
        assert json.loads(text.removeprefix(BEFORE).removesuffix(AFTER)) == {"result": wanted}
    assert shown[2] == ""
    for turn in t.turns:
        assert all(t.loss_mask[turn.start : turn.end])
        assert not any(t.loss_mask[turn.end : turn.observation_end])
    assert t.answer == "Bristow"


def test_other_grammars_pass_no_tools_and_no_system_message(chatting: Any) -> None:
    ids = prompt_ids(chatting, PROMPT, question(), make_grammar("search_r1", chatting), 400)
    assert chatting.decode(ids) == "[user]\nQuestion: Who rules Avenor ?\n[end]\n[assistant]\n"


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "golds", "wanted"),
    [
        *((row["answer"], (row["golds"],), row["subEM"]) for row in golden("dspo", "Substring match")),
        ("anything", ("The",), 0.0),  # a gold that normalises to nothing matches nothing
    ],
)
def test_golden_subem(tokenizer: Any, answer: str, golds: tuple[str, ...], wanted: float) -> None:
    asked = question(answers=golds)
    t = play(tokenizer, f"<answer> {answer} </answer>", asked=asked)
    assert AnswerReward("subem")([t], [asked])[0].outcome == wanted


@pytest.mark.parametrize("text", ["Bristow", "<answer> Bristow", "Bristow </answer>", call("Bristow")])
def test_no_answer_pair_no_reward(tokenizer: Any, text: str) -> None:
    t = play(tokenizer, text, max_turns=0) if "</answer>" not in text else play(tokenizer, text, "", max_turns=0)
    assert t.answer is None
    assert AnswerReward("subem")([t], [question()])[0].outcome == 0.0
