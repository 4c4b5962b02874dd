"""Prompts: the question's form, the budget, chat templates, and questions that try to be more than text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.prompts import prompt_ids, render_prompt
from tasks.store import DataError
from tests.tiny import PROMPT, question

GRAMMAR = SearchR1Grammar(reserved=("<|endoftext|>",))


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("  Who rules Avenor ", "Who rules Avenor?"),
        ("Who rules Avenor?", "Who rules Avenor?"),
        ("Who rules Avenor?\n", "Who rules Avenor?"),
        ("What is {question}", "What is {question}?"),
        ("Is it <|endoftext|> or </search>", "Is it ‹|endoftext|> or ‹/search>?"),
    ],
)
def test_question_in_its_place(asked: str, shown: str) -> None:
    assert render_prompt("Q: {question}\n", asked, GRAMMAR) == f"Q: {shown}\n"


def test_ids_decode_to_the_prompt_and_hold_no_special_token(tokenizer: Any) -> None:
    ids = prompt_ids(tokenizer, PROMPT, question(text="Who <|endoftext|> rules Avenor"), GRAMMAR, 100)
    assert tokenizer.decode(ids) == "Question: Who ‹|endoftext|> rules Avenor?\n"
    assert tokenizer.eos_token_id not in ids


def test_chat_template_wraps_the_message(merging: Any) -> None:
    merging.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    try:
        ids = prompt_ids(merging, PROMPT, question(), GRAMMAR, 200)
    finally:
        merging.chat_template = None
    assert merging.decode(ids) == "[user]Question: Who rules Avenor ?\n[assistant]"


def test_without_a_chat_template_the_system_message_stands_before_the_prompt(tokenizer: Any) -> None:
    assert not getattr(tokenizer, "chat_template", None)
    alone = prompt_ids(tokenizer, PROMPT, question(0), GRAMMAR, 256)
    told = prompt_ids(tokenizer, replace(PROMPT, system="Be short."), question(0), GRAMMAR, 256)
    assert tokenizer.decode(told) == f"Be short.\n\n{tokenizer.decode(alone)}"


def test_a_prompt_over_its_budget_is_an_error_and_never_cut(tokenizer: Any) -> None:
    long = question(3, "Who rules Avenor " * 20)
    count = len(prompt_ids(tokenizer, PROMPT, long, GRAMMAR, 1000))
    assert len(prompt_ids(tokenizer, PROMPT, long, GRAMMAR, count)) == count
    with pytest.raises(
        DataError, match=f"question 'q3': its prompt has {count} tokens, the budget max_prompt_tokens is {count - 1}"
    ):
        prompt_ids(tokenizer, PROMPT, long, GRAMMAR, count - 1)
