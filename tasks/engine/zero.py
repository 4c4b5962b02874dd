"""Models whose weights, gradients and optimizer states are divided among processes by DeepSpeed's ZeRO.

This runs inside the workers of `tasks/engine/deepspeed.py`. All of them call the same methods in the same order,
because most of these exchange data with the others.

What DeepSpeed does otherwise than the plain engine, and what makes them equal:

* It averages gradients over the processes, where the plain engine adds them: losses are multiplied by their number.
* Processes that make fewer passes than others would wait for ever: all make the same number, some of them empty.
* In ZeRO-3 a parameter is there only while its module runs: one module holds the whole pass, with the output head as an
  external parameter, since slices of logits are computed as often as a batch needs.
* In bfloat16 it derives its float32 weights from rounded ones: the weights are set again after it has started.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.engine import DivergedError, Objective, OptimizerConf, Sharing
from tasks.engine.forward import policy_forward, value_forward
from tasks.passes import reading, recomputing
from tasks.precision import FullWeights
from tasks.rl.experience import Experience
from tasks.supervised import Task, numbers

Stage = Literal[0, 1, 2, 3]
"""What is divided: nothing, optimizer states, gradients as well, weights as well."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ZeroConf:
    """How a model is divided.

    Attributes:
        stage: see `Stage`.
        offload: keep optimizer states and float32 weights in the memory of the host.
        bucket: most numbers that are sent at once.
    """

    stage: Stage
    offload: bool
    bucket: int

    def settings(self, conf: OptimizerConf, is_half: bool, num_trained: int) -> dict[str, Any]:
        """DeepSpeed's configuration; with fewer numbers under training than a bucket, it would hold an idle rest."""
        bucket = min(self.bucket, num_trained + num_trained % 2)  # It takes even ones alone.
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "memory_efficient_linear": False,
        }
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return self.frozen_settings(torch.bfloat16 if is_half else torch.float32) | {
            "managed_gradient_accumulation": False,
            "gradient_clipping": conf.max_grad_norm,
            "zero_optimization": zero,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def frozen_settings(self, dtype: torch.dtype) -> dict[str, Any]:
        """The same for a model that is not trained."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.stage, "memory_efficient_linear": False},
            "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
            "steps_per_print": None,
        }


def by_layer(module: nn.Module) -> None:
    """Let ZeRO-3 fetch a layer's weights at once.

    Its hooks around smaller modules would add the gradients of a residual stream in another order than the plain
    engine, which changes the last bits.
    """
    from deepspeed.utils import set_z3_leaf_module

    from tasks.pretrained import GradientCheckpointingLayer

    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            set_z3_leaf_module(layer, True)


@contextlib.contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """The block in which DeepSpeed takes a module: it rounds buffers, which `round_weights` says why not to do."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        device = module.get_buffer(name).device
        setattr(module.get_submodule(owner), key, buffer.to(device))


def adamw(weights: Any, conf: OptimizerConf, is_fused: bool) -> torch.optim.AdamW:
    """The optimizer of the plain engine."""
    betas = (conf.betas[0], conf.betas[1])
    return torch.optim.AdamW(
        weights, lr=conf.lr, betas=betas, weight_decay=conf.weight_decay, fused=True if is_fused else None
    )


class PolicyPass(nn.Module):
    """A policy's forward pass as one module; `model` is the causal LM, with adapters where there are some."""

    def __init__(self, model: Any, share_prefixes: Sharing, is_adapted: bool) -> None:
        super().__init__()
        self.model = model
        self.share_prefixes, self.is_adapted = share_prefixes, is_adapted

    @property
    def causal_lm(self) -> Any:
        """The causal LM."""
        return self.model.get_base_model() if self.is_adapted else self.model

    @property
    def decoder(self) -> Any:
        """The model below the output head."""
        return self.causal_lm.get_decoder()

    def forward(self, batch: Experience, entropy_gradient: bool = True) -> tuple[Tensor, Tensor]:
        """See `policy_forward`."""
        return policy_forward(self.causal_lm, batch, self.share_prefixes, entropy_gradient)

    def options(self, objective: Objective[Any]) -> tuple[Any, ...]:
        """What the pass of an update gets besides its batch."""
        return (objective.entropy_gradient,)

    def loss(self, batch: Experience, output: Any, objective: Objective[Any]) -> tuple[Tensor, Any]:
        """Loss of a batch; its metrics and, where the objective asks for them, logprobs."""
        logprobs, entropy = output
        old = None
        if objective.is_first:
            old = logprobs.detach().cpu()
            batch = replace(batch, old_logprobs=old)
        loss, metrics = objective.loss(batch.to(logprobs.device), logprobs, entropy, objective.normalizer)
        return loss, (numbers(metrics), old)


class ValuePass(nn.Module):
    """A critic's forward pass as one module."""

    def __init__(self, decoder: Any, share_prefixes: Sharing) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.share_prefixes = share_prefixes

    def forward(self, batch: Experience) -> Tensor:
        """See `value_forward`."""
        return value_forward(self.decoder, self.head, batch, self.share_prefixes)

    def options(self, objective: Objective[Any]) -> tuple[Any, ...]:
        """See `PolicyPass.options`."""
        return ()

    def loss(self, batch: Experience, output: Tensor, objective: Objective[Any]) -> tuple[Tensor, Any]:
        """See `PolicyPass.loss`."""
        loss = objective.loss(batch.to(output.device), output, objective.normalizer)
        return loss, ({"value_loss": float(loss.detach())}, None)


@dataclass(frozen=True)
class Examples:
    """A micro-batch of supervised training.

    Attributes:
        examples, total: see `Task`.
        counts: False adds nothing, for a process that would else make fewer passes than others.
    """

    examples: Sequence[Any]
    total: float = 1.0
    counts: bool = True

    def to(self, device: torch.device) -> Examples:
        """Tasks themselves make tensors of examples, on the device of the model."""
        return self


class TaskPass(nn.Module):
    """Forward pass and loss of supervised training as one module."""

    is_adapted = False

    def __init__(self, model: Any, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.share_prefixes = task.share_reading

    @property
    def decoder(self) -> Any:
        """The model below its head."""
        return self.model.get_decoder()

    def forward(self, batch: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Task`."""
        loss, metrics = self.task(self.model, batch.examples, batch.total)
        return loss if batch.counts else loss * 0, metrics

    def options(self, objective: None) -> tuple[Any, ...]:
        """See `PolicyPass.options`."""
        return ()

    def loss(self, batch: Examples, output: Any, objective: None) -> tuple[Tensor, dict[str, float]]:
        """See `PolicyPass.loss`."""
        loss, metrics = output
        return loss, numbers(metrics)


class Divided:
    """A module under training by several processes; `ZeroTrainee` and `ReplicatedTrainee` differ in who holds what.

    Args:
        module: `PolicyPass`, `ValuePass` or `TaskPass`.
        inner: the part of it whose parameters are named in checkpoints.
        of_policy: its parameters by the names that they have in the start policy.
        conf: optimizer.
        dtype: of forward passes.
    """

    engine: Any
    device: torch.device

    def __init__(
        self, module: Any, inner: nn.Module, of_policy: Mapping[str, Any], conf: OptimizerConf, dtype: torch.dtype
    ) -> None:
        self.module, self.of_policy, self.conf, self.dtype = module, of_policy, conf, dtype
        self.trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self.num_updates = 0

    def reading(self) -> AbstractContextManager[None]:
        """The block of a forward pass and its backward pass."""
        return reading(self.module.decoder, self.module.share_prefixes, self.dtype)

    @torch.no_grad()
    def read(self, batches: Sequence[Any]) -> list[Any]:
        """The module's output for each batch, as many on every process."""
        with self.reading():
            return [self.engine(batch.to(self.device)) for batch in batches]

    def update(
        self, batches: Sequence[Any], objective: Objective[Any] | None, lr: float | None = None
    ) -> tuple[list[Any], float]:
        """Add up the gradients of all processes' batches and take one step.

        Args:
            batches: as many on every process; one without trained tokens adds nothing.
            objective: see `Objective`; None where the module has a task.
            lr: learning rate; None is that of the settings, after their warm-up.

        Returns:
            the report of each batch, see the `loss` of the module; and the norm of the gradient.

        Raises:
            DivergedError: the gradient is not finite; raised by all processes.
        """
        reports = []
        for batch in batches:
            with self.reading():
                with recomputing(self.module):
                    output = self.engine(batch.to(self.device), *self.module.options(objective))
                loss, report = self.module.loss(batch, output, objective)
                if not loss.requires_grad:  # No token to learn from; but the backward pass is one that all make.
                    loss = sum((piece.sum() * 0 for piece in _pieces(output)), loss)
                self.backward(loss)
            reports.append(report)

        warm = min(1.0, (self.num_updates + 1) / max(self.conf.warmup_steps, 1))
        for group in self.groups:
            group["lr"] = self.conf.lr * warm if lr is None else lr
        norm, is_taken = self.step()
        if not is_taken:
            raise DivergedError(
                f"the gradient norm is {norm} after {self.num_updates} updates. Lower the learning rate."
            )
        self.num_updates += 1
        return reports, norm

    def backward(self, loss: Tensor) -> None:
        """Add this process's gradient."""
        raise NotImplementedError

    def step(self) -> tuple[float, bool]:
        """Add the gradients of all processes and step; the norm of the gradient, and whether the step was taken."""
        raise NotImplementedError

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """What the state holds beside tensors."""
        (group,) = self.groups
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
        plain |= {"params": list(range(len(self.trained)))}
        return {"optimizer": {"groups": [plain], "scalars": {}}, "num_updates": self.num_updates}


class ZeroTrainee(Divided):
    """A module that DeepSpeed divides; see `Divided`.

    Args:
        zero: how it is divided, stage 1 to 3.
    """

    def __init__(
        self,
        module: Any,
        inner: nn.Module,
        of_policy: Mapping[str, Any],
        conf: OptimizerConf,
        dtype: torch.dtype,
        zero: ZeroConf,
    ) -> None:
        import deepspeed

        super().__init__(module, inner, of_policy, conf, dtype)
        self.zero = zero
        by_layer(module)
        # The fused kernel where the plain engine has it, so that both take the same steps.
        is_fused = (torch.cuda.is_available() or dtype == torch.bfloat16) and not zero.offload
        num_trained = sum(getattr(p, "ds_numel", p.numel()) for p in self.trained.values())
        made = self._rounded_here()
        with keeping_buffers(module):
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                model_parameters=list(self.trained.values()),
                optimizer=lambda weights: adamw(weights, conf, is_fused),
                config=zero.settings(conf, dtype == torch.bfloat16, num_trained),
            )
        self.engine.eval()
        self.device = torch.device(self.engine.device)
        for name, tensor in made.items():
            self._set(self.trained[name], tensor)

    def _rounded_here(self) -> dict[str, Tensor]:
        """Round what the start policy does not have, adapters and a critic's head; returns their whole weights."""
        known = {id(parameter) for parameter in self.of_policy.values()}
        made = {name: parameter for name, parameter in self.trained.items() if id(parameter) not in known}
        whole_weights = {name: parameter.detach().clone() for name, parameter in made.items()}
        for parameter in made.values():
            parameter.data = parameter.data.to(self.dtype)
        return whole_weights

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See `Divided.groups`."""
        groups: list[dict[str, Any]] = self.engine.basic_optimizer.param_groups
        return groups

    def backward(self, loss: Tensor) -> None:
        """See `Divided.backward`."""
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def step(self) -> tuple[float, bool]:
        """See `Divided.step`."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0), bool(self.engine.was_step_applied())

    # State. A tensor is gathered whole, one after another, so that a checkpoint does not depend on the number of
    # processes or on what is divided; the plain engine reads and writes the same files.

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state by its name in the plain engine's checkpoint; on all processes."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self.trained.items():
            yield f"weights/{name}", safe_get_full_fp32_param(parameter)
        if self.num_updates:
            for number, parameter in enumerate(self.trained.values()):
                yield f"optimizer/{number}/step", torch.tensor(float(self.num_updates))
                for moment in _MOMENTS:
                    yield f"optimizer/{number}/{moment}", safe_get_full_optimizer_state(parameter, moment)

    def begin_restore(self, values: Mapping[str, Any]) -> None:
        """Before `restore` gets every tensor of a state."""
        self.num_updates = values["num_updates"]
        self.engine.basic_optimizer.state.clear()
        self.optimizer._hp_optimizer_states_linked = False  # Else parameters stay linked with the moments cleared here.
        if not self.num_updates:
            return
        for flat in self._flat():
            moments = {moment: torch.zeros_like(flat) for moment in _MOMENTS}
            step = torch.tensor(float(self.num_updates), device=flat.device if self._is_fused else None)
            self.engine.basic_optimizer.state[flat] = {"step": step, **moments}
        if self.zero.stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def restore(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of a state, which all processes have."""
        kind, _, key = name.partition("/")
        if kind == "weights":
            self._set(self.trained[key], tensor)
            return
        number, _, moment = key.partition("/")
        if moment in _MOMENTS:
            self._set(list(self.trained.values())[int(number)], tensor, moment)

    def set_weight(self, name: str, tensor: Tensor) -> None:
        """Take one weight of the start policy, which all processes have; `settle` follows after the last one."""
        parameter = self.of_policy.get(name)
        if parameter is None:
            return
        if parameter.requires_grad:
            self._set(parameter, tensor)
        else:
            with whole([parameter], changed=True), torch.no_grad():
                parameter.copy_(tensor)

    def _set(self, parameter: Any, tensor: Tensor, moment: str | None = None) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        tensor = tensor.to(self.device, torch.float32)
        if self.zero.stage < 3:
            parameter.set_full_hp_param(tensor, moment)
            return
        size, rank = parameter.ds_tensor.numel(), dist.get_rank()
        piece = torch.zeros(size, device=tensor.device)
        own = tensor.flatten()[rank * size : (rank + 1) * size]
        piece[: len(own)] = own
        if moment is None:
            safe_set_local_fp32_param(parameter, piece)
        else:
            safe_set_local_optimizer_state(parameter, piece, moment)

    @torch.no_grad()
    def settle(self) -> None:
        """Round the weights that were set into the module that computes."""
        if self.zero.stage < 3:
            self.optimizer.update_lp_params()
            return
        for number in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        kept = self.optimizer.persistent_parameters
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def _flat(self) -> list[Any]:
        """This process's pieces of the weights, as the optimizer sees them."""
        if self.zero.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    @property
    def _is_fused(self) -> bool:
        return bool(self.engine.basic_optimizer.param_groups[0].get("fused"))


class ReplicatedTrainee(Divided):
    """A module of which every process holds all, as in the plain engine; gradients are added. See `Divided`."""

    def __init__(
        self, module: Any, inner: nn.Module, of_policy: Mapping[str, Any], conf: OptimizerConf, dtype: torch.dtype
    ) -> None:
        super().__init__(module, inner, of_policy, conf, dtype)
        self.engine = module
        self.device = next(module.parameters()).device
        body = module.decoder if isinstance(module, ValuePass) else module
        self.full = FullWeights(self.trained, body, dtype)
        is_fused = torch.cuda.is_available() or dtype == torch.bfloat16
        self.optimizer = adamw(self.full.weights.values(), conf, is_fused)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See `Divided.groups`."""
        return self.optimizer.param_groups

    def backward(self, loss: Tensor) -> None:
        """See `Divided.backward`."""
        loss.backward()

    def step(self) -> tuple[float, bool]:
        """See `Divided.step`."""
        weights = list(self.full.weights.values())
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(weights, self.conf.max_grad_norm))
        is_taken = math.isfinite(norm)
        if is_taken:
            self.optimizer.step()
            self.full.write_back()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, is_taken

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """See `ZeroTrainee.state`."""
        for name, weight in self.full.weights.items():
            yield f"weights/{name}", weight.detach()
        for number, weight in enumerate(self.full.weights.values()):
            for key, value in self.optimizer.state[weight].items():
                yield f"optimizer/{number}/{key}", value

    def begin_restore(self, values: Mapping[str, Any]) -> None:
        """See `ZeroTrainee.begin_restore`."""
        self.num_updates = values["num_updates"]
        self.optimizer.state.clear()

    @torch.no_grad()
    def restore(self, name: str, tensor: Tensor) -> None:
        """See `ZeroTrainee.restore`."""
        kind, _, key = name.partition("/")
        if kind == "weights":
            self.full.weights[key].copy_(tensor)
            return
        number, _, moment = key.partition("/")
        weight = list(self.full.weights.values())[int(number)]
        is_count = moment == "step" and not self.groups[0].get("fused")
        self.optimizer.state[weight][moment] = tensor.clone().to("cpu" if is_count else self.device)

    @torch.no_grad()
    def set_weight(self, name: str, tensor: Tensor) -> None:
        """See `ZeroTrainee.set_weight`."""
        parameter = self.of_policy.get(name)
        if parameter is None:
            return
        parameter.copy_(tensor)
        for trained, weight in self.trained.items():
            if weight is parameter:
                self.full.weights[trained].copy_(tensor)

    def settle(self) -> None:
        """See `ZeroTrainee.settle`."""
        self.full.write_back()


@contextlib.contextmanager
def whole(parameters: Sequence[Any], changed: bool = False) -> Iterator[None]:
    """The block in which these parameters are whole on every process.

    Args:
        parameters: divided ones or not.
        changed: every process changes them alike inside.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if changed else None):
        yield


def _pieces(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
