"""Tokens a second that our engine trains, beside what the machine can multiply.

The limit is the time of the matrix products that no trainer can leave out: each weight matrix of the model once
forward and twice backward (for its input and for itself), for as many positions as the engine reads, and the output
head for the tokens that are trained. They are timed alone, in the dtype of training, with the model's own shapes, on
micro-batches of the same size; the best of several. Attention, norms, the loss and the optimizer are no part of the
limit, so its share says what they and everything else cost together.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.decoding import Shape, random_texts

if TYPE_CHECKING:
    import torch

    from tasks.rl.experience import Experience

REPEATS = 5


def measured(folder: Path, dtype: str, shape: Shape, batch_tokens: int, threads: int) -> dict[str, Any]:
    """One update on rollouts of this shape: each with its own prompt (`separate`), and with a shared one (`shared`).

    Returns:
        `separate` and `shared`: the update's seconds in two orders, the positions that the model read and the
        seconds of the limit for them; `tokens` of all rollouts, `trained` of them.
    """
    from tasks.device import use_threads
    from tasks.model import computes_in, load_policy, pick_device

    use_threads(threads)
    model, _ = load_policy(folder)
    precision = computes_in(dtype, pick_device())  # type: ignore[arg-type]
    batch = experience(shape, model.config.vocab_size)
    before = limits(model, batch_tokens, precision)
    del model

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for share in (False, True, True, False):
        seconds[share].append(_update(folder, dtype, batch, batch_tokens, share))
        print(f"  update, {'shared prompts' if share else 'separate prompts'}: {seconds[share][-1]:.2f} s", flush=True)
    model, _ = load_policy(folder)
    after = limits(model, batch_tokens, precision)
    body, head = (min(pair) for pair in zip(before, after, strict=True))

    trained = int(batch.loss_mask.sum())
    found: dict[str, Any] = {"dtype": str(precision), "tokens": int(batch.lengths.sum()), "trained": trained}
    for name, share in (("separate", False), ("shared", True)):
        positions = _positions(batch, batch_tokens, share)
        limit = positions * body + trained * head
        found[name] = {"seconds": seconds[share], "positions": positions, "limit": limit}
    return found


def experience(shape: Shape, vocab_size: int) -> Experience:
    """Rollouts of a shape, with random advantages."""
    import torch

    from tasks.rl.experience import Experience

    texts, draw = random_texts(shape, vocab_size, 1), torch.Generator().manual_seed(1)
    written = torch.randint(0, vocab_size, (shape.rows, shape.turns, shape.written), generator=draw)
    rows, mask = [], [False] * shape.prompt
    for row in range(shape.rows):
        ids = list(texts.prompts[row // shape.copies])
        for turn in range(shape.turns):
            ids += written[row, turn].tolist()
            ids += texts.observations[turn][row] if turn + 1 < shape.turns else []
        rows.append(ids)
    for turn in range(shape.turns):
        mask += [True] * shape.written + [False] * (shape.observed if turn + 1 < shape.turns else 0)

    ids = torch.tensor(rows)  # [N, T]
    trained = torch.tensor(mask).expand(ids.shape).clone()
    response = (torch.arange(shape.total) >= shape.prompt).expand(ids.shape).clone()
    names = tuple(str(row // shape.copies) for row in range(shape.rows))
    nothing = torch.zeros(ids.shape)
    lengths = torch.full((shape.rows,), shape.total)
    advantages = torch.randn(shape.rows, 1, generator=draw).expand(ids.shape) * trained
    return Experience(
        ids, lengths, response, trained, nothing, names, nothing, old_logprobs=nothing.clone(), advantages=advantages,
        question_ids=names,
    )  # fmt: skip


def _update(folder: Path, dtype: str, batch: Experience, batch_tokens: int, share: bool) -> float:
    """Seconds of one update of a fresh policy, after one on a single micro-batch."""
    from tasks.engine import Objective, OptimizerConf
    from tasks.engine.plain import PlainPolicy
    from tasks.model import LoraConf, load_policy
    from tasks.rl.losses import LossSum, Normalizer
    from tasks.rl.losses.policy_clip import PolicyClip

    model, tokenizer = load_policy(folder)
    conf = OptimizerConf(lr=1e-6, warmup_steps=0, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    policy = PlainPolicy(
        model, tokenizer, conf, LoraConf(), dtype, needs_reference=False, share_prefixes=share  # type: ignore[arg-type]
    )  # fmt: skip
    loss = LossSum((PolicyClip(0.2, 0.2, importance_cap=None),))
    plan = _plan(batch, batch_tokens, share)
    for rows in (plan[:1], plan):
        every = [row for micro in rows for row in micro]
        normalizer = Normalizer.of(batch.loss_mask[every], [batch.question_ids[row] for row in every])
        start = time.perf_counter()
        policy.update(batch, rows, Objective(loss, normalizer, loss.needs_entropy_gradient, is_first=True))
    return time.perf_counter() - start


def _plan(batch: Experience, batch_tokens: int, share: bool) -> list[list[int]]:
    from tasks.rl.experience import microbatches, shared_microbatches

    rows = range(len(batch))
    if share:
        return shared_microbatches(batch, rows, batch_tokens)
    return microbatches(batch.lengths.tolist(), rows, batch_tokens)


def _positions(batch: Experience, batch_tokens: int, share: bool) -> int:
    """What the model reads in all micro-batches; the last token of a row is only predicted."""
    from tasks.rl.experience import prefix_groups

    lengths, prefixes = batch.lengths.tolist(), batch.prefix_lengths.tolist()
    read = 0
    for rows in _plan(batch, batch_tokens, share):
        read += sum(lengths[row] - 1 for row in rows)
        if share:
            read -= sum(prefixes[group[0]] * (len(group) - 1) for group in prefix_groups(batch, rows))
    return read


def limits(model: Any, positions: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds for a position in the decoder's matrices, and for a predicted token in the output head."""
    head = model.get_output_embeddings()
    shapes = matrices(model.get_decoder())
    seconds = sum(count * _products(*shape, positions, dtype) for shape, count in shapes.items())
    return seconds / positions, _products(*head.weight.shape, min(positions, 512), dtype) / min(positions, 512)


def matrices(decoder: Any) -> Counter[tuple[int, int]]:
    """How many weight matrices of each shape (outputs, inputs) a decoder multiplies with."""
    from torch import nn

    return Counter(tuple(m.weight.shape) for m in decoder.modules() if isinstance(m, nn.Linear))


def _products(outputs: int, inputs: int, positions: int, dtype: torch.dtype) -> float:
    """Seconds of one matrix: forward, and backward for its input and for itself; the best of several for each."""
    import torch

    weight = torch.randn(outputs, inputs).to(dtype)
    states = torch.randn(positions, inputs).to(dtype)
    gradients = torch.randn(positions, outputs).to(dtype)
    products = (lambda: states @ weight.T, lambda: gradients @ weight, lambda: gradients.T @ states)
    total = 0.0
    for product in products:
        taken = []
        for _ in range(REPEATS + 1):  # The first one prepares.
            start = time.perf_counter()
            product()
            taken.append(time.perf_counter() - start)
        total += min(taken[1:])
    return total
