"""Prompt text and prompt ids. Templates are configuration; this module only fills and tokenises them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.store import DataError
from tasks.types import Question

PLACEHOLDER = "{question}"


def render_prompt(template: str, question: str, grammar: SearchGrammar) -> str:
    """The user message: the question stripped, closed by a "?", special tokens in it made inert (search_r1 section 2).

    >>> render_prompt("Question: {question}", " Who wrote it", SearchGrammar())
    'Question: Who wrote it?'
    """
    text = question.strip()
    text = text if text.endswith("?") else text + "?"
    return template.replace(PLACEHOLDER, grammar.neutralize(text))


def check_prompts(
    tokenizer: Any, template: str, questions: Iterable[Question], grammar: SearchGrammar, limit: int
) -> None:
    """Raises DataError at the first question whose prompt is over the budget: before work begins, not amid it."""
    for question in questions:
        prompt_ids(tokenizer, template, question, grammar, limit)


def prompt_ids(tokenizer: Any, template: str, question: Question, grammar: SearchGrammar, limit: int) -> list[int]:
    """Token ids of a question's prompt, in the tokenizer's chat template where it has one.

    Raises:
        DataError: more than `limit` tokens; a prompt is never cut, because the policy would answer another question.
    """
    text = render_prompt(template, question.question, grammar)
    if getattr(tokenizer, "chat_template", None):
        system = [{"role": "system", "content": grammar.system}] if grammar.system else []
        messages = [*system, {"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tools=grammar.tools, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) > limit:
        raise DataError(
            f"questions.jsonl, question {question.id!r}: its prompt has {len(ids)} tokens, the budget "
            f"max_prompt_tokens is {limit}. Raise max_prompt_tokens in conf/scale, or remove the question."
        )
    return list(ids)
