"""`make bench`: CPU-seconds, generated and prefilled tokens per RL step, ours against TRL's GRPOTrainer.

    python -m tests.benchmarks.bench_trl

Each side runs in a process of its own, in both orders (ours, TRL, TRL, ours); the verdict takes the less
favourable order. Exit 1 when ours needs more than 0.43 of the CPU-seconds or more than a quarter of the
prefilled tokens, or when the two did not do the same work.

Equal: weights, tokenizer, prompt token ids (TRL's chat template with its tool schema), questions, each once,
group size, wording of tool call and observation, retriever, index and top-k, budgets, most searches
per rollout, temperature 1, one advantage per group, clipped token loss without KL term, AdamW, optimizer
steps per rollout batch, float32, threads, and a reward that differs inside every group, so that no rollout
is skipped. Generated tokens and searches per rollout come from sampling, so they are equal only on average;
the run is refused when they differ by more than a tenth.

Not equal, because it is what is compared: TRL reads the whole conversation of every rollout again at each
turn, left-padded, runs one search after another, and keeps finished rows in the batch; we read a prompt
once per group, in play and in training (`share_prefixes`), keep the KV cache, search in one batch, and drop
finished rows. So an update of ours has all rollouts of two prompts, one of TRL's has rollouts of several.
TRL 1.16.0 can also generate with vLLM; both sides generate with transformers here, which runs on any machine.

`bench_model.py` lets the same two sides play a given model by a script of calls, in bfloat16 where there is any.

An RL step is one rollout batch and all optimizer steps on it. Tokens are counted where the model reads
them, padding left out; "positions" are all places the model computed while generating, padding included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.rewards import EachReward, on_last_token
from tasks.store import digest, read_jsonl
from tasks.types import Question, Scores, Trajectory
from tests.benchmarks.machine import ROOT, aligned, run_alone
from tests.benchmarks.workload import (
    SMALLEST,
    WORLD,
    SearchTool,
    ToolCallGrammar,
    Workload,
    prepare,
    queries_of,
    reward,
    trl_chat_template,
)

if TYPE_CHECKING:
    from tasks.engine import OptimizerConf
    from tasks.rl.method import Method
    from tasks.train.settings import TrainConf
    from tests.benchmarks.scripted import Script

BOUNDS = {"cpu_s": 0.43, "prefilled": 0.25}
"""Of ours over TRL's."""
MOST_DIFFERENCE = 0.1
SEPARATE_BATCH_TOKENS = 2048
SIDES = ("ours", "trl")
ORDER = ("ours", "trl", "trl", "ours")


@dataclass
class Measured:
    """Per RL step, the warm-up left out: means over the measured steps."""

    cpu_s: float
    generated: float
    prefilled: float
    positions: float
    searches: float
    rollouts: int


@dataclass
class Meter:
    """Reads of one process at the end of each RL step; counters only grow."""

    generated: int = 0
    prefilled: int = 0
    positions: int = 0
    searches: int = 0
    marks: list[tuple[float, int, int, int, int]] = field(default_factory=list)

    def mark(self) -> None:
        """An RL step ended (or the first begins)."""
        self.marks.append((cpu_seconds(), self.generated, self.prefilled, self.positions, self.searches))

    def measured(self, workload: Workload) -> Measured:
        """Means per step after the warm-up."""
        assert len(self.marks) == workload.steps + 1, self.marks
        first, last = self.marks[workload.warm_up], self.marks[-1]
        cpu_s, generated, prefilled, positions, searches = (
            (b - a) / workload.measured for a, b in zip(first, last, strict=True)
        )
        return Measured(cpu_s, generated, prefilled, positions, searches, workload.rollouts)


def cpu_seconds() -> float:
    """User and system time of this process, all threads, and of children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def positions_counted(model: Any, meter: Meter, counts: Callable[[], bool]) -> Iterator[None]:
    """Add every position that the decoder computes inside this block while `counts()` holds, padding included."""

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if counts():
            meter.positions += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def run_ours(folder: Path, workload: Workload) -> Measured:
    """The trainer, rollout loop and plain generator of this repository, as the train stage composes them."""
    import torch

    from tasks import retrieval
    from tasks.agent.rollout import Player, RolloutConf
    from tasks.data.records import read_questions
    from tasks.device import use_threads
    from tasks.engine import OptimizerConf
    from tasks.engine.plain import PlainPolicy
    from tasks.generate.plain import PlainGenerator
    from tasks.model import LoraConf, load_policy
    from tasks.train.loop import Trainer
    from tests.benchmarks.scripted import Script, ScriptedGenerator

    use_threads(workload.threads)  # as the train stage does
    model, tokenizer = load_policy(folder / "policy")
    template = json.loads((folder / "template.json").read_text(encoding="utf-8"))
    questions = list(read_questions(folder / "questions.jsonl"))
    _require_same_prompt(tokenizer, template, questions[0].question)
    tokenizer.chat_template = None  # The template already is TRL's whole conversation.
    method = _method(template, workload)
    optimizer = OptimizerConf(
        lr=workload.learning_rate, warmup_steps=0, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0
    )
    conf = RolloutConf(
        max_turns=workload.max_searches, max_prompt_tokens=1024, max_call_tokens=workload.call_tokens,
        max_observation_tokens=500, max_total_tokens=1024 + workload.response_tokens, top_k=workload.top_k,
        batch_rows=workload.rollouts,
    )  # fmt: skip
    policy = PlainPolicy(
        model, tokenizer, optimizer, LoraConf(), workload.dtype, needs_reference=False,
        share_prefixes=workload.share_prefixes,
    )  # fmt: skip
    script = Script.read(folder)
    generator = (ScriptedGenerator if script else PlainGenerator)(model, tokenizer, shares_weights=True)
    if isinstance(generator, ScriptedGenerator) and script:
        generator.script = script
    retriever = retrieval.open_retriever(folder / "index")
    player = Player(conf, generator, tokenizer, retriever, method.grammar, method.prompt)
    meter = Meter()

    def mark(step: int = 0, metrics: dict[str, float] | None = None) -> None:
        cost = player.cost
        meter.generated, meter.prefilled, meter.searches = cost.generated, cost.prefilled, cost.searches
        meter.mark()

    trainer = Trainer(
        conf=_budget(workload, optimizer), method=method, policy=policy, critic=None, generator=generator,
        player=player, validator=player, questions=questions, validation=(), seed=workload.seed,
        scratch=folder.parent / "ours", log=mark,
    )  # fmt: skip
    shutil.rmtree(trainer.scratch, ignore_errors=True)
    mark()
    with positions_counted(model, meter, torch.is_inference_mode_enabled):
        trainer.run()
    return meter.measured(workload)


def _method(template: str, workload: Workload) -> Method:
    """GRPO without a KL term, with TRL's conversation and the reward of `SearchTool`."""
    from tasks.agent.prompts import Prompt
    from tasks.rl.advantages.group import GroupAdvantage
    from tasks.rl.filters.keep_all import KeepAll
    from tasks.rl.losses import LossSum
    from tasks.rl.losses.policy_clip import PolicyClip
    from tasks.rl.method import Method
    from tasks.rl.samplers.independent_group import IndependentGroup
    from tasks.rl.search.index import IndexSearch

    return Method(
        prompt=Prompt(None, template), grammar=ToolCallGrammar(), sampler=IndependentGroup(workload.group_size),
        rewards=(QueryReward(),), filter=KeepAll(), advantage=GroupAdvantage(),
        loss=LossSum((PolicyClip(0.2, 0.2),)), value_loss=None, temperature=1.0, top_p=1.0, search=IndexSearch(),
    )  # fmt: skip


def _budget(workload: Workload, optimizer: OptimizerConf) -> TrainConf:
    """Steps, updates and batches of our trainer, which neither validates nor saves here."""
    from tasks.train.settings import TrainConf

    return TrainConf(
        num_steps=workload.steps, prompts_per_step=workload.questions, rollouts_per_step=None,
        minibatches=workload.updates, epochs=1, max_batch_tokens=workload.batch_tokens, policy=optimizer,
        critic=optimizer, old_logprobs="sampler", dtype=workload.dtype, keep_activations=True,
        share_prefixes=workload.share_prefixes, num_threads=workload.threads, checkpoint_every=10**6,
        validate_every=10**6, validate_questions=0, record_trajectories=0,
    )  # fmt: skip


class QueryReward(EachReward):
    """The reward of `SearchTool`, for our loop."""

    components = ()

    def score(self, trajectory: Trajectory, question: Question) -> Scores:
        """See `EachReward`."""
        return on_last_token(trajectory, reward(queries_of(trajectory)))


def _require_same_prompt(tokenizer: Any, template: str, question: str) -> None:
    """Our prompt must be TRL's, id by id."""
    theirs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tools=[SearchTool().search], add_generation_prompt=True,
        tokenize=True, return_dict=False,
    )  # fmt: skip
    ours = tokenizer.encode(template.replace("{question}", question), add_special_tokens=False)
    if list(ours) != list(theirs):
        raise ValueError(
            f"the two prompts differ: ours {tokenizer.decode(ours)!r}, TRL's {tokenizer.decode(theirs)!r}."
        )


def run_trl(folder: Path, workload: Workload) -> Measured:
    """TRL's documented way: GRPOTrainer with an environment whose one method is the tool."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tasks.device import use_threads
    from tasks.model import computes_in
    from tests.benchmarks.scripted import Script

    if workload.peer_keeps_memory:
        use_threads(workload.threads)
    torch.set_num_threads(workload.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    meter = Meter()
    _count_trl(model, meter, Script.read(folder))
    rows = [{"prompt": [{"role": "user", "content": q}]} for q in _texts(folder)]

    class SearchEnvironment(SearchTool):
        """TRL makes one for each rollout and resets it for each batch."""

        retriever = _Counted(folder, meter)
        top_k = workload.top_k

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % workload.updates == 0:
                meter.mark()

    share = workload.rollouts // workload.updates
    micro = workload.micro_rollouts or share
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro,
        steps_per_generation=workload.rollouts // micro,
        gradient_accumulation_steps=share // micro,
        num_generations=workload.group_size,
        max_steps=workload.steps * workload.updates,
        max_tool_calling_iterations=workload.max_searches,
        max_completion_length=workload.response_tokens,
        generation_kwargs={"max_new_tokens": workload.call_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        bf16=computes_in(workload.dtype, torch.device("cpu")) == torch.bfloat16,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=workload.seed,
    )
    trainer = GRPOTrainer(
        model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        environment_factory=SearchEnvironment, callbacks=[Marks()],
    )  # fmt: skip
    meter.mark()
    trainer.train()
    return meter.measured(workload)


def _count_trl(model: Any, meter: Meter, script: Script | None) -> None:
    """Wrap `generate`: real tokens that enter it are prefilled, real tokens that leave it beyond them generated.

    With a script, it decides what is written.
    """
    from tests.benchmarks.scripted import Prompter

    generate, ends = model.generate, [model.config.eos_token_id]
    prompter = Prompter(script) if script else None

    def counted(*args: Any, **kwargs: Any) -> Any:
        import torch

        meter.prefilled += int(kwargs["attention_mask"].sum())
        if prompter:
            kwargs["logits_processor"] = [prompter.processor(kwargs["input_ids"], kwargs["attention_mask"])]
        with positions_counted(model, meter, lambda: True):
            output = generate(*args, **kwargs)
        written = output[:, kwargs["input_ids"].shape[1] :]  # [B, T], padded after the end-of-turn token
        is_end = torch.isin(written, torch.tensor(ends))
        meter.generated += int((is_end.cumsum(1) - is_end.long() == 0).sum())
        return output

    model.generate = counted


class _Counted:
    """The retriever, counting queries."""

    def __init__(self, folder: Path, meter: Meter) -> None:
        from tasks import retrieval

        self.inner = retrieval.open_retriever(folder / "index")
        self.meter = meter

    def search(self, queries: list[str], top_k: int) -> Any:
        """See `Retriever.search`."""
        self.meter.searches += len(queries)
        return self.inner.search(queries, top_k)


def _texts(folder: Path) -> list[str]:
    return [row["question"] for _, row in read_jsonl(folder / "questions.jsonl")]


def table(runs: list[tuple[str, Measured]], bounds: dict[str, float] = BOUNDS) -> tuple[str, bool]:
    """Both orders side by side, and whether ours met the bounds in the less favourable one."""
    found = {side: [m for name, m in runs if name == side] for side in SIDES}
    pairs = list(zip(found["ours"], found["trl"], strict=True))
    sides = ["ours, first", "TRL, second", "ours, last", "TRL, first"][: 2 * len(pairs)]
    lines, met = [["per RL step", *sides, "ratio, worse order", "bound"]], True
    rows = (
        ("CPU-seconds", "cpu_s"), ("prefilled tokens", "prefilled"), ("generated tokens", "generated"),
        ("searches", "searches"), ("positions in generation", "positions"),
    )  # fmt: skip
    for label, name in rows:
        values = [getattr(m, name) for pair in pairs for m in pair]
        ratio = max(getattr(ours, name) / max(getattr(peer, name), 1e-9) for ours, peer in pairs)
        bound, digits = bounds.get(name), 2 if name == "cpu_s" else 0
        met = met and (bound is None or ratio <= bound)
        shown = f"at most {bound:g}" if bound else "within 10%" if name in ("generated", "searches") else ""
        lines.append([label, *(f"{v:,.{digits}f}" for v in values), f"{ratio:.3f}", shown])
    return aligned(lines), met and all(same_work(ours, peer) for ours, peer in pairs)


def same_work(ours: Measured, peer: Measured) -> bool:
    """Whether generated tokens and searches per step differ by at most a tenth."""
    return all(
        abs(getattr(ours, name) - getattr(peer, name)) <= MOST_DIFFERENCE * getattr(peer, name)
        for name in ("generated", "searches")
    )


def _in_process(role: str, folder: Path, out: Path, workload: Workload) -> None:
    """This file again, in a process of its own."""
    words = ["--role", role, "--folder", str(folder), "--out", str(out)]
    words += ["--smallest"] if workload.steps == SMALLEST.steps else []
    words += [] if workload.share_prefixes else ["--separate-prefixes"]
    run_alone("tests.benchmarks.bench_trl", words, workload.threads)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Ours against TRL's GRPOTrainer, side by side.")
    parser.add_argument("--role", choices=["all", "prepare", *SIDES], default="all", help=argparse.SUPPRESS)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".scratch" / "bench", help="kept fitted policy and results"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="two questions, one step, one order: only shows that it runs"
    )
    parser.add_argument(
        "--separate-prefixes",
        action="store_true",
        help="ours trains as scale laptop does: each rollout with its own prompt, in micro-batches of 2,048 tokens",
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    workload = SMALLEST if args.smallest else Workload()
    if args.separate_prefixes:
        workload = replace(workload, share_prefixes=False, batch_tokens=SEPARATE_BATCH_TOKENS)
    if args.role == "prepare":
        prepare(args.folder, workload, trl_chat_template())
        return 0
    if args.role != "all":
        measured = {"ours": run_ours, "trl": run_trl}[args.role](args.folder, workload)
        args.out.write_text(json.dumps(asdict(measured)), encoding="utf-8")
        return 0
    folder = args.folder / f"workload-{digest(asdict(workload), asdict(WORLD))}"
    _in_process("prepare", folder, folder, workload)
    order, runs = ORDER[:2] if args.smallest else ORDER, []
    for number, side in enumerate(order, 1):
        out = args.folder / f"run-{number}-{side}.json"
        print(f"run {number} of {len(order)}: {side}, {workload.steps} RL steps", flush=True)
        _in_process(side, folder, out, workload)
        runs.append((side, Measured(**json.loads(out.read_text(encoding="utf-8")))))
    text, met = table(runs)
    print(f"\n{workload}\n\n{text}\n")
    print("met" if met else "NOT met: see the bounds above")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
