"""Prompt texts and prompt ids. The texts are files of `conf/prompt/`; this module only fills and tokenises them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.agent.grammar import SearchGrammar
from tasks.conf import require
from tasks.store import DataError
from tasks.types import Question

PLACEHOLDER = "{question}"
MAX_ADDED = 1 << 20
"""Characters that a chat template may add to its messages; those of tools are some thousands."""


@dataclass(frozen=True)
class Prompt:
    """One file of `conf/prompt/`.

    Attributes:
        system: the system message, if the tokenizer has a chat template; null keeps the template's own.
        user: the instructions, with `{question}` in place of the question.
    """

    system: str | None
    user: str

    def __post_init__(self) -> None:
        expected = f"text with {PLACEHOLDER}, which the question replaces"
        require(PLACEHOLDER in self.user, "user", self.user, expected)


def load(name: object, where: str, root: Path = conf.ROOT) -> Prompt:
    """The prompt `conf/prompt/<name>.yaml`.

    Raises:
        ValueError: no such file, or settings that break a rule; the message names the file `where` the name was given.
    """
    if not isinstance(name, str):
        raise ValueError(f"{where}: prompt={name!r}: expected the name of a file of conf/prompt/.")
    conf.path_of("prompt", name, root, where)
    return conf.load(Prompt, "prompt", name, root=root)


def render_prompt(user: str, question: str, grammar: SearchGrammar) -> str:
    """The user message, with the question stripped, ended by a "?" and without special tokens that could act.

    >>> from tasks.agent.grammars.search_r1 import SearchR1Grammar
    >>> render_prompt("Question: {question}", " Who wrote it", SearchR1Grammar())
    'Question: Who wrote it?'
    """
    text = question.strip()
    text = text if text.endswith("?") else text + "?"
    return user.replace(PLACEHOLDER, grammar.neutralize(text))


def check_prompts(
    tokenizer: Any, prompt: Prompt, questions: Iterable[Question], grammar: SearchGrammar, limit: int
) -> None:
    """Raises DataError at the first question whose prompt is over the budget, so that no work is lost later."""
    for question in questions:
        prompt_ids(tokenizer, prompt, question, grammar, limit)


def prompt_ids(tokenizer: Any, prompt: Prompt, question: Question, grammar: SearchGrammar, limit: int) -> list[int]:
    """Token ids of a question's prompt, in the tokenizer's chat template where it has one.

    Without a template the system message stands before the prompt, and a blank line between them.

    Raises:
        DataError: more than `limit` tokens; a prompt is never cut, because the policy would answer another question.
            Or the chat template does not take the messages, or leaves the question out.
    """
    text = render_prompt(prompt.user, question.question, grammar)
    if not getattr(tokenizer, "chat_template", None):
        text = f"{prompt.system}\n\n{text}" if prompt.system else text
    else:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = [*system, {"role": "user", "content": text}]
        text = _in_template(tokenizer, messages, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) > limit:
        what = f"questions.jsonl, question {question.id!r}" if question.id else "a question of one word"
        remove = ", or remove the question" if question.id else ", or name another one (`prompt:`)"
        raise DataError(
            f"{what}: its prompt has {len(ids)} tokens, the budget max_prompt_tokens is {limit}. Raise it for this "
            f"model alone (in its file of conf/model: `rollout: {{max_prompt_tokens: {max(2 * limit, len(ids))}}}`), "
            f"shorten the prompt{remove}."
        )
    return list(ids)


def _in_template(tokenizer: Any, messages: Sequence[Mapping[str, str]], grammar: SearchGrammar) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tools=grammar.tools, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Templates raise what they like, beside the errors of their language.
        roles = " and ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise DataError(
            f"{tokenizer.name_or_path}: its chat template does not take messages of {roles}: {reason}. Mend "
            "chat_template.jinja in the model's folder, or name a prompt without `system` in its file of conf/model "
            "(`prompt:`)."
        ) from None
    if len(text) > sum(len(message["content"]) for message in messages) + MAX_ADDED:
        raise DataError(
            f"{tokenizer.name_or_path}: its chat template makes {len(text):,} characters of a prompt, expected at most "
            f"{MAX_ADDED:,} more than the messages have. Mend chat_template.jinja in the model's folder."
        )
    if messages[-1]["content"].strip() not in text:
        raise DataError(
            f"{tokenizer.name_or_path}: its chat template leaves out the user's message, so the model would not see "
            f"the question. Found {str(text)[:60]!r}. Mend chat_template.jinja in the model's folder."
        )
    return str(text)
