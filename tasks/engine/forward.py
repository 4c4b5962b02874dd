"""The forward pass of a policy or a critic over one micro-batch, which all engines make alike.

Logits are computed only for generated tokens, one slice of them at a time, so memory grows with the token budget and
not with vocabulary times sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tasks.engine import LOGIT_CHUNK, Plan, Sharing
from tasks.rl.experience import Experience, shared_prefixes
from tasks.shared_prefix import hidden_states


def policy_forward(
    model: Any, batch: Experience, share_prefixes: Sharing, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [B, T] of the tokens that the policy wrote, 0 elsewhere.

    Args:
        model: causal LM.
        batch: on the model's device.
        share_prefixes: see `Training`.
        entropy_gradient: whether entropies carry gradient.
    """
    states = _hidden(model.get_decoder(), batch, share_prefixes)
    chosen = batch.loss_mask[:, 1:]  # position t of the model predicts token t + 1
    logprobs, entropy = token_logprobs(
        model.get_output_embeddings(), states[chosen], batch.ids[:, 1:][chosen], entropy_gradient
    )
    return _scatter(logprobs, chosen), _scatter(entropy, chosen)


def value_forward(decoder: Any, head: Any, batch: Experience, share_prefixes: Sharing) -> Tensor:
    """Values [B, T] before each response token, 0 elsewhere; the head, a linear layer, computes in float32."""
    states = _hidden(decoder, batch, share_prefixes).float()
    values = nn.functional.linear(states, head.weight.float(), head.bias.float())[..., 0]
    return nn.functional.pad(values, (1, 0)) * batch.response_mask


def by_row(experience: Experience, plan: Plan, forward: Callable[[Experience], Tensor]) -> Tensor:
    """[N, T] on the CPU, the result of `forward` for each micro-batch in its rows; 0 in rows outside the plan."""
    table = torch.zeros_like(experience.rewards)
    for rows in plan:
        batch = experience.rows(rows)
        table[list(rows), : batch.ids.shape[1]] = forward(batch).cpu()
    return table


def token_logprobs(head: Any, hidden: Tensor, targets: Tensor, entropy_gradient: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, natural log.

    Args:
        head: maps [n, d] to logits [n, V].
        hidden: [N, d].
        targets: [N] token ids.
        entropy_gradient: whether entropies carry gradient; False saves a pass.

    Returns:
        [N] log-probabilities, with gradient, and [N] entropies.
    """

    def of_chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = head(states).float().log_softmax(-1)
        for_entropy = logprobs if entropy_gradient else logprobs.detach()
        return logprobs.gather(-1, ids[:, None])[:, 0], -(for_entropy.exp() * for_entropy).sum(-1)

    chunk = max(1, LOGIT_CHUNK[hidden.device.type] // head.weight.shape[0])
    if len(targets) <= chunk:
        return of_chunk(hidden, targets)

    # With gradients, each chunk's logits are computed again in the backward pass instead of being kept.
    pieces = [
        recompute(of_chunk, hidden[i : i + chunk], targets[i : i + chunk], use_reentrant=False)
        if torch.is_grad_enabled()
        else of_chunk(hidden[i : i + chunk], targets[i : i + chunk])
        for i in range(0, len(targets), chunk)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropies for _, entropies in pieces])


def _scatter(values: Tensor, chosen: Tensor) -> Tensor:
    """[N] values at the True positions of `chosen` [B, T-1], shifted to token positions [B, T]; 0 elsewhere."""
    full = torch.zeros(chosen.shape, dtype=values.dtype, device=values.device)
    return nn.functional.pad(full.masked_scatter(chosen, values), (1, 0))


def _hidden(decoder: Any, batch: Experience, share_prefixes: Sharing) -> Tensor:
    """[B, T - 1, d] last hidden states; position t predicts token t + 1."""
    if share_prefixes:
        groups = None if share_prefixes == "longest" else shared_prefixes(batch)
        return hidden_states(decoder, batch.ids, batch.lengths, groups)
    states: Tensor = decoder(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return states
