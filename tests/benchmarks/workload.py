"""What both sides of the benchmark play: one world, index, tokenizer, policy, prompt, tool and observation text.

Nothing here measures. The policy is a small random Qwen2 that is fitted to TRL's rendering of a tool call
until it makes well-formed searches; both sides then load the same folder.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import retrieval
from tasks.agent.grammar import documents
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.data.records import question_row
from tasks.data.world import WorldConf, passages, questions, write_world
from tasks.model import Dtype
from tasks.retrieval import Retriever
from tasks.store import replacing_folder, write_json, write_jsonl
from tasks.types import Action, Hit, Question, Trajectory

END, START = "<|im_end|>", "<|im_start|>"
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
WORLD = WorldConf(
    seed=5,
    regions={"train": 2, "dev": 1, "test": 1},
    entities={"person": 24, "film": 16, "company": 8, "university": 6, "city": 8, "country": 4},
    distractors=12,
    questions={"train": 400, "dev": 8, "test": 8},
    hop_shares=(0.0, 0.0, 1.0),
    held_out_share=0.1,
)


@dataclass(frozen=True)
class Workload:
    """Equal on both sides, but for `batch_tokens` and `share_prefixes`, which only our trainer knows.

    Attributes:
        questions: questions of one rollout batch; `group_size` rollouts each.
        updates: optimizer steps on each rollout batch, each on an equal share of its rollouts.
        warm_up, measured: RL steps (rollout batch + updates) before and while measuring.
        max_searches: searches that are executed in a rollout; one more call follows.
        call_tokens, response_tokens: budgets of a call and of a whole response, observations included.
        batch_tokens: of one forward and backward pass of ours; enough for an update's rollouts, as TRL takes them.
        fit_steps: optimizer steps on demonstrations, before anything is measured.
        share_prefixes: whether ours reads a prompt once for all rollouts of a group in training, too.
        dtype: of forward and backward passes; TRL's `bf16` is mixed precision, as ours is.
        peer_keeps_memory: whether TRL's process keeps freed memory, too, as our train stage does (`tasks/device.py`).
        micro_rollouts: rollouts of one forward and backward pass of TRL; None: all of an update.
    """

    questions: int = 8
    group_size: int = 8
    updates: int = 4
    warm_up: int = 1
    measured: int = 3
    max_searches: int = 3
    top_k: int = 3
    call_tokens: int = 64
    response_tokens: int = 900
    batch_tokens: int = 8192
    learning_rate: float = 1e-6
    threads: int = 1
    seed: int = 0
    fit_steps: int = 120
    share_prefixes: bool = True
    dtype: Dtype = "float32"
    micro_rollouts: int | None = None
    peer_keeps_memory: bool = False

    @property
    def rollouts(self) -> int:
        """Rollouts of one batch."""
        return self.questions * self.group_size

    @property
    def steps(self) -> int:
        """RL steps of a run."""
        return self.warm_up + self.measured


SMALLEST = Workload(
    questions=2,
    group_size=2,
    updates=1,
    warm_up=0,
    measured=1,
    max_searches=1,
    top_k=1,
    response_tokens=300,
    fit_steps=60,
)
"""Shows that both sides run; its figures mean nothing."""


@dataclass(frozen=True)
class ToolCallGrammar(SearchR1Grammar):
    """TRL's conversation (its qwen2_5 chat template) as one of our grammars: a call ends with the end-of-turn token.

    A call with a tool call in it searches; any other call is the answer, as in TRL's loop.
    """

    stop: tuple[str, ...] = ()
    opening: str = f"{END}\n{START}user\n<tool_response>\n"
    closing: str = f"\n</tool_response>{END}\n{START}assistant\n"

    def kept(self, text: str) -> str:
        """A call counts whole."""
        return text

    def parse(self, text: str) -> Action:
        """The query of the first tool call, else the text as the answer."""
        found = _CALL.search(text)
        try:
            query = json.loads(found[1])["arguments"]["query"] if found else None
        except (ValueError, KeyError, TypeError):
            query = None
        return Action("search", query) if isinstance(query, str) else Action("answer", text.strip())

    def is_complete(self, text: str) -> bool:
        """A call ends with the end-of-turn token only."""
        return True

    def render(self, action: Action) -> str:
        """The text that `parse` reads back as this action, as TRL's template spells it."""
        if action.kind == "answer":
            return action.content
        call = json.dumps({"name": "search", "arguments": {"query": action.content}})
        return f"<tool_call>\n{call}\n</tool_call>"


class SearchTool:
    """The environment TRL plays with: one search tool over the same retriever and document format."""

    retriever: Retriever
    top_k: int

    def reset(self, **row: Any) -> None:
        """Start a rollout; the prompt says everything."""
        self._queries: list[str] = []

    def search(self, query: str) -> str:
        """Search the encyclopedia.

        Args:
            query: words to look for.

        Returns:
            The best passages.
        """
        (hits,) = self.retriever.search([query], self.top_k)
        self._queries.append(query)
        return observation_text(hits)

    def get_reward(self) -> float:
        """See `reward`."""
        return reward(self._queries)


def observation_text(hits: Sequence[Hit]) -> str:
    """What the policy reads after a search, inside the tool response."""
    return "".join(f"{document}\n" for document in documents(ToolCallGrammar(), hits))


def reward(queries: Sequence[str]) -> float:
    """Share of letters early in the alphabet: meaningless, but it differs inside a group, so all are trained."""
    letters = [c for c in "".join(queries).lower() if c.isalpha()]
    return sum(c < "m" for c in letters) / max(1, len(letters))


def queries_of(trajectory: Trajectory) -> list[str]:
    """The executed queries of one of our trajectories."""
    return [turn.action.content for turn in trajectory.turns if turn.executed]


def trl_chat_template() -> str:
    """TRL's own template: it parses tool calls only under one that it knows by its exact text."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")


def prepare(folder: Path, workload: Workload, chat_template: str) -> None:
    """Write world, index, fitted policy and prompt template into `folder`, once."""
    if folder.is_dir():
        return
    with replacing_folder(folder) as work:
        write_world(WORLD, work)
        retrieval.build(work / "corpus.jsonl", work / "index", retrieval.load_settings("bm25"))
        retriever = retrieval.open_retriever(work / "index")
        template = prompt_template(make_tokenizer(chat_template, []))
        tokenizer = make_tokenizer(chat_template, [template, ToolCallGrammar().render(Action("search", ""))])
        model = _fitted(tokenizer, template, retriever, workload)
        model.save_pretrained(work / "policy")
        tokenizer.save_pretrained(work / "policy")
        write_json(work / "template.json", template)
        write_jsonl(work / "questions.jsonl", (question_row(q) for q in training_questions(workload)))


def training_questions(workload: Workload) -> list[Question]:
    """The questions both sides play, in order."""
    train = (q for q in questions(WORLD) if q.split == "train")
    return [q for q, _ in zip(train, range(workload.questions * workload.steps), strict=False)]


def prompt_template(tokenizer: Any) -> str:
    """The prompt as the chat template renders it, tool schema included, with a placeholder for the question."""
    conversation = [{"role": "user", "content": "{question}"}]
    return str(
        tokenizer.apply_chat_template(
            conversation, tools=[SearchTool().search], add_generation_prompt=True, tokenize=False
        )
    )


def make_tokenizer(chat_template: str, frames: list[str]) -> Any:
    """Words of the world and of the conversation's frame are single tokens, so that neither is long by accident."""
    from tokenizers import AddedToken

    from tasks.base.tokenizer import build_tokenizer

    texts = [text for p in passages(WORLD) for text in (p.title, p.text, f" {p.title}")]
    texts += [q.question for q in questions(WORLD)]
    tokenizer = build_tokenizer([*texts, *frames * 100], 1600)
    tokenizer.add_special_tokens({"eos_token": AddedToken(END, special=True)})
    tokenizer.add_tokens([AddedToken(START, special=True)], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = chat_template
    return tokenizer


def _fitted(tokenizer: Any, template: str, retriever: Retriever, workload: Workload) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(workload.seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    examples = list(_demonstrations(tokenizer, template, retriever, workload))
    rng = random.Random(workload.seed)
    for step in range(workload.fit_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        loss = _loss(model, rng.sample(examples, 8))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            at = f"step {step + 1} of {workload.fit_steps}"
            print(f"fitting a policy that calls the tool: {at}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def _loss(model: Any, demonstrations: list[tuple[list[int], list[bool]]]) -> Any:
    """Mean cross-entropy of the tokens a policy would write."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(ids) for ids, _ in demonstrations], batch_first=True)  # [B, T]
    own = pad_sequence([torch.tensor(mask) for _, mask in demonstrations], batch_first=True)[:, 1:]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[own]
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][own])


def _demonstrations(
    tokenizer: Any, template: str, retriever: Retriever, workload: Workload
) -> Iterator[tuple[list[int], list[bool]]]:
    """Exactly `max_searches` searches of the right query, then the answer: token ids, and which are the policy's."""
    grammar = ToolCallGrammar()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for question in (q for q in questions(WORLD) if q.split == "train"):
        ids = encode(template.replace("{question}", question.question))
        mask = [False] * len(ids)
        found = [hop.answer for hop in question.decomposition]
        for hop in question.decomposition[: workload.max_searches]:
            query = resolved(hop.queries[0], found)
            own = encode(grammar.render(Action("search", query)) + END)
            (hits,) = retriever.search([query], workload.top_k)
            seen = encode((grammar.opening + observation_text(hits) + grammar.closing).removeprefix(END))
            ids += own + seen
            mask += [True] * len(own) + [False] * len(seen)
        own = encode(grammar.render(Action("answer", question.answers[0])) + END)
        yield ids + own, mask + [True] * len(own)


def resolved(query: str, answers: list[str]) -> str:
    """`#1` is the first hop's answer, and so on."""
    return re.sub(r"#(\d)", lambda match: answers[int(match[1]) - 1], query)
