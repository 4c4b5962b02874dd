"""An engine of one process and one device in plain torch, which is also the reference for faster engines.

In bfloat16 the model computes with rounded copies of float32 weights, on which
the optimizer works (`tasks/precision.py`). On a CPU everything repeats bit for bit with the same number of threads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks import limits
from tasks.engine import (
    DivergedError,
    Objective,
    OptimizerConf,
    Plan,
    PolicyLoss,
    Sharing,
    Training,
    Update,
    ValueLoss,
)
from tasks.engine.forward import by_row, policy_forward, value_forward
from tasks.engine.lora import adapted_layers, factors_of, outline_of
from tasks.generate import Adapters
from tasks.limits import Limit
from tasks.model import Dtype, LoraConf, computes_in, export_folder, load_policy, pick_device
from tasks.passes import reading, recompute_activations, recomputing
from tasks.precision import round_weights
from tasks.rl.experience import Experience
from tasks.shared_prefix import require_supported
from tasks.store import replacing_folder
from tasks.trainee import Trainee


class _Trainee(Trainee):
    """The base class of policy and critic: optimizer, warm-up, precision, state.

    `body` is the part of the module that computes in `dtype`.
    """

    def __init__(
        self, module: nn.Module, body: nn.Module, conf: OptimizerConf, dtype: Dtype, share_prefixes: Sharing
    ) -> None:
        self.share_prefixes = share_prefixes
        self.conf = conf
        device = next(module.parameters()).device
        computed = computes_in(dtype, device)
        # The fused kernel needs no second copy of the weights. In float32 a CPU keeps the default, because another
        # kernel would change the last bits of all results.
        is_fused = device.type == "cuda" or computed == torch.bfloat16
        super().__init__(module, body, computed, conf.betas, conf.weight_decay, is_fused)

    def reading(self, decoder: Any) -> AbstractContextManager[None]:
        """The block of a forward pass and its backward pass."""
        return reading(decoder, self.share_prefixes, self.dtype)

    def step(self) -> float:
        """Take one optimizer step and clear the gradients; a gradient norm that is not finite is an error."""
        norm = self.clip(self.conf.max_grad_norm)
        if norm != norm or norm == float("inf"):
            raise DivergedError(
                f"the gradient norm is {norm} after {self.num_updates} updates. Lower the learning rate."
            )
        self.take(self.conf.lr * min(1.0, (self.num_updates + 1) / max(self.conf.warmup_steps, 1)))
        return norm


class PlainPolicy(_Trainee):
    """See `Policy`.

    Args:
        model: causal LM on its device.
        tokenizer: exported with it.
        conf: optimizer.
        lora: adapters; the reference is then the model without them.
        dtype: of the forward pass.
        needs_reference: keep a frozen copy of the start weights.
        keep_activations: False recomputes layer activations in the backward pass (gradient checkpointing).
        seed: of the adapters' random start.
        share_prefixes: read a prefix once for all its samples in a micro-batch; `longest`: every common beginning.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        conf: OptimizerConf,
        lora: LoraConf,
        dtype: Dtype,
        needs_reference: bool,
        keep_activations: bool = True,
        seed: int = 0,
        share_prefixes: Sharing = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.lora = lora

        self.reference: Any = None
        if needs_reference and not lora.rank:
            self.reference = copy.deepcopy(model).requires_grad_(False).eval()
            if computes_in(dtype, model.device) == torch.bfloat16:
                round_weights(self.reference, torch.bfloat16)

        if lora.rank:
            from peft import LoraConfig, get_peft_model

            with torch.random.fork_rng():
                torch.manual_seed(seed)
                adapters = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
                model = get_peft_model(model, adapters)

        if not keep_activations:
            recompute_activations(model)
        model.eval()  # Dropout would make ratios differ from 1 where the policy has not moved.
        if share_prefixes:
            require_supported(model.get_decoder())
        super().__init__(model, model, conf, dtype, share_prefixes)

    @property
    def causal_lm(self) -> Any:
        """See `Policy.causal_lm`."""
        return self.module.get_base_model() if self.lora.rank else self.module  # type: ignore[operator]

    @torch.no_grad()
    def logprobs(self, experience: Experience, plan: Plan, reference: bool = False) -> Tensor:
        """See `Policy.logprobs`."""
        model = self.causal_lm
        without_adapters: AbstractContextManager[Any] = nullcontext()
        if reference and self.lora.rank:
            without_adapters = self.module.disable_adapter()  # type: ignore[operator]
        elif reference:
            model = self.reference
        with without_adapters, self.reading(model.get_decoder()):
            return by_row(experience, plan, lambda batch: self._forward(model, batch.to(self.device))[0])

    @torch.no_grad()
    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Policy.sequence_logprobs`."""
        result = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=self.device)  # [1, T]
            logits = self.causal_lm(ids, use_cache=False).logits  # [1, T, V]
            logprobs = logits[0, :-1].float().log_softmax(-1)
            result.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return result

    def limits(self) -> list[Limit]:
        """See `Limited`."""
        return [limits.of(self.device, self.dtype)]

    def update(self, experience: Experience, plan: Plan, objective: Objective[PolicyLoss]) -> Update:
        """See `Policy.update`."""
        old = torch.zeros_like(experience.rewards) if objective.is_first else None
        metrics = tuple(self.accumulate(experience, rows, objective, old) for rows in plan)
        return Update(metrics, self.step(), old)

    def accumulate(
        self, experience: Experience, rows: Sequence[int], objective: Objective[PolicyLoss], old: Tensor | None = None
    ) -> dict[str, float]:
        """Forward one micro-batch and add its gradient; returns its metrics.

        `old` [N, T], if given, is filled with the logprobs of this forward pass, which then are the old logprobs as
        well.
        """
        batch = experience.rows(rows)
        with self.reading(self.causal_lm.get_decoder()):
            with recomputing(self.module):
                logprobs, entropy = self._forward(self.causal_lm, batch.to(self.device), objective.entropy_gradient)

            if old is not None:
                detached = logprobs.detach().cpu()
                batch = replace(batch, old_logprobs=detached)
                old[list(rows), : detached.shape[1]] = detached

            loss, metrics = objective.loss(batch.to(self.device), logprobs, entropy, objective.normalizer)
            if loss.requires_grad:  # False where no token of the micro-batch was generated.
                loss.backward()
        return {name: float(metric) for name, metric in metrics.items()}

    def _forward(self, model: Any, batch: Experience, entropy_gradient: bool = True) -> tuple[Tensor, Tensor]:
        return policy_forward(model, batch, self.share_prefixes, entropy_gradient)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; an output head that is tied to the embedding is not given again."""
        for name, parameter in self._merged().named_parameters():
            yield name, parameter.detach()

    def adapters(self) -> Adapters | None:
        """See `Policy.adapters`."""
        if not self.lora.rank:
            return None
        layers = adapted_layers(self.module)
        return Adapters(*outline_of(layers), ((name, factor.detach()) for name, factor in factors_of(layers)))

    def export(self, folder: Path) -> None:
        """See `Policy.export`; atomic."""
        with replacing_folder(folder) as work:
            export_folder(self._merged(), self.tokenizer, work)

    def _merged(self) -> Any:
        """The causal LM; with adapters, a copy into which they are merged."""
        if not self.lora.rank:
            return self.causal_lm
        return copy.deepcopy(self.module).merge_and_unload()  # type: ignore[operator]


class PlainCritic(_Trainee):
    """See `Critic`: a copy of the start policy's decoder and a linear head that begins at 0.

    Args:
        model: causal LM on its device, without adapters: make the critic before a policy with LoRA.
        conf: optimizer.
        dtype: of the forward pass.
        keep_activations, share_prefixes: as for `PlainPolicy`.
    """

    def __init__(
        self,
        model: Any,
        conf: OptimizerConf,
        dtype: Dtype,
        keep_activations: bool = True,
        share_prefixes: Sharing = False,
    ) -> None:
        decoder = copy.deepcopy(model.get_decoder()).requires_grad_(True)
        if not keep_activations:
            recompute_activations(decoder)
        head = nn.Linear(model.config.hidden_size, 1).to(model.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        module = nn.ModuleDict({"decoder": decoder, "head": head}).eval()
        super().__init__(module, decoder, conf, dtype, share_prefixes)

    @property
    def decoder(self) -> Any:
        """The model below the head."""
        assert isinstance(self.module, nn.ModuleDict)
        return self.module["decoder"]

    @torch.no_grad()
    def values(self, experience: Experience, plan: Plan) -> Tensor:
        """See `Critic.values`."""
        with self.reading(self.decoder):
            return by_row(experience, plan, lambda batch: self._forward(batch.to(self.device)))

    def update(self, experience: Experience, plan: Plan, objective: Objective[ValueLoss]) -> Update:
        """See `Critic.update`."""
        metrics = tuple(self.accumulate(experience, rows, objective) for rows in plan)
        return Update(metrics, self.step())

    def accumulate(
        self, experience: Experience, rows: Sequence[int], objective: Objective[ValueLoss]
    ) -> dict[str, float]:
        """Forward one micro-batch and add its gradient; returns its metrics."""
        batch = experience.rows(rows)
        with self.reading(self.decoder):
            with recomputing(self.module):
                values = self._forward(batch.to(self.device))

            loss = objective.loss(batch.to(self.device), values, objective.normalizer)
            loss.backward()
        return {"value_loss": float(loss.detach())}

    def _forward(self, batch: Experience) -> Tensor:
        assert isinstance(self.module, nn.ModuleDict)
        return value_forward(self.decoder, self.module["head"], batch, self.share_prefixes)


@dataclass(frozen=True)
class PlainEngine:
    """The engine of one process and one device, which is the first GPU or else the CPU."""

    @contextmanager
    def open(self, folder: Path, training: Training) -> Iterator[tuple[PlainPolicy, PlainCritic | None]]:
        """See `Engine.open`."""
        device = pick_device()  # First: a process that waits for its GPU holds no model in memory meanwhile.
        model, tokenizer = load_policy(folder)
        model = model.to(device)
        critic = None
        # The critic comes first: later its copy of the decoder would contain the policy's adapters.
        if training.critic is not None:
            critic = PlainCritic(
                model, training.critic, training.dtype, training.keep_activations, training.share_prefixes
            )
        policy = PlainPolicy(
            model,
            tokenizer,
            training.policy,
            training.lora,
            training.dtype,
            training.needs_reference,
            training.keep_activations,
            training.seed,
            training.share_prefixes,
        )
        yield policy, critic


PART = PlainEngine
