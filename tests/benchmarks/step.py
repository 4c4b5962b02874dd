"""The folder that both sides of an RL step of a given model play from: world, index, policy, prompts, script.

The policy's weights are the model's own. Its tokenizer gets a chat template that TRL knows, because TRL parses tool
calls under no other. What is written is scripted (`scripted.py`): every rollout searches with queries of its question,
the odd ones once less, and then answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import retrieval
from tasks.data.records import question_row
from tasks.data.world import write_world
from tasks.store import DataError, replacing_folder, write_json, write_jsonl
from tasks.types import Action, Question
from tests.benchmarks.scripted import Ids, Script
from tests.benchmarks.workload import (
    END,
    START,
    WORLD,
    ToolCallGrammar,
    Workload,
    prompt_template,
    resolved,
    training_questions,
)


def prepare(folder: Path, workload: Workload, chat_template: str, model: Path) -> None:
    """Write all that a step of this model needs into `folder`; the weights are a link.

    Raises:
        DataError: the model is none of ChatML, or a call of the script is over its budget.
    """
    from tasks.model import load_tokenizer

    tokenizer = load_tokenizer(model)
    end = tokenizer.convert_tokens_to_ids([START, END])
    if tokenizer.eos_token != END or None in end:
        raise DataError(
            f"{model}: found end-of-text {tokenizer.eos_token!r}, expected {END!r} and {START!r} (ChatML), which the "
            "chat template of the peer uses. Measure this model without the step: ARGS='--parts decode,training'."
        )
    tokenizer.chat_template = chat_template
    template = prompt_template(tokenizer)
    questions = training_questions(workload)
    script = Script(dict(_scripted(tokenizer, template, question, workload) for question in questions))
    with replacing_folder(folder) as work:
        write_world(WORLD, work)
        retrieval.build(work / "corpus.jsonl", work / "index", retrieval.load_settings("bm25"))
        policy = work / "policy"
        policy.mkdir()
        for file in model.iterdir():
            if file.suffix == ".safetensors" or file.name.endswith("config.json") or "index" in file.name:
                (policy / file.name).symlink_to(file.resolve())
        (policy / "tokenizer_config.json").unlink(missing_ok=True)  # The link; the tokenizer writes its own.
        tokenizer.save_pretrained(policy)
        write_json(work / "template.json", template)
        write_jsonl(work / "questions.jsonl", map(question_row, questions))
        script.write(work)


def _scripted(
    tokenizer: Any, template: str, question: Question, workload: Workload
) -> tuple[Ids, tuple[tuple[Ids, ...], ...]]:
    """The prompt of a question and what each of its rollouts writes."""
    prompt = tuple(tokenizer.encode(template.replace("{question}", question.question), add_special_tokens=False))
    rollouts = []
    for copy in range(workload.group_size):
        calls = []
        for text in _texts(question, copy, workload):
            ids = tuple(tokenizer.encode(text + END, add_special_tokens=False))
            if len(ids) > workload.call_tokens:
                raise DataError(
                    f"question {question.id!r}: a call of the script has {len(ids)} tokens, expected at most "
                    f"{workload.call_tokens}. Raise call_tokens in tests/benchmarks/bench_model.py."
                )
            calls.append(ids)
        rollouts.append(tuple(calls))
    return prompt, tuple(rollouts)


def _texts(question: Question, copy: int, workload: Workload) -> Iterator[str]:
    """The calls of one rollout: hops with a word more of the question for each rollout before it, then the answer."""
    answers = [hop.answer for hop in question.decomposition]
    words = " ".join(question.question.split()[:copy])
    searches = max(1, workload.max_searches - copy % 2)
    for hop in question.decomposition[:searches]:
        yield ToolCallGrammar().render(Action("search", f"{resolved(hop.queries[0], answers)} {words}".strip()))
    yield ToolCallGrammar().render(Action("answer", question.answers[0]))
