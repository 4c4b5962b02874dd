"""The models of a worker, built from a configuration, and without weights until they are set.

Policy, critic and reference of reinforcement learning, or the one model of supervised training, which stands in the
place of the policy.

All workers call everything here together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.engine import OptimizerConf, Training
from tasks.engine.lora import ADAPTER, adapted_layers, factors_of, outline_of
from tasks.engine.zero import (
    Divided,
    PolicyPass,
    ReplicatedTrainee,
    TaskPass,
    ValuePass,
    ZeroConf,
    ZeroTrainee,
    by_layer,
    keeping_buffers,
    whole,
)
from tasks.model import computes_in, pick_device
from tasks.passes import reading, recompute_activations
from tasks.precision import round_weights
from tasks.rl.experience import Experience
from tasks.shared_prefix import require_supported
from tasks.supervised import Supervision


@dataclass(frozen=True)
class Models:
    """What a worker holds; `reference` is None where there is none, or where it is the policy without adapters."""

    policy: Divided
    critic: Divided | None
    reference: Frozen | None

    def of_start(self) -> list[Divided | Frozen]:
        """Those that begin with weights of the start policy."""
        return [model for model in (self.policy, self.critic, self.reference) if model is not None]

    @property
    def trainees(self) -> dict[str, Divided]:
        """Policy and critic by name."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    def read_reference(self, batches: Sequence[Experience]) -> list[Any]:
        """As `Divided.read`, of the start policy."""
        if self.reference is not None:
            return self.reference.read(batches)
        with self.policy.module.model.disable_adapter():
            return self.policy.read(batches)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the policy by its name in a model folder, adapters merged; valid until the next."""
        adapted = {id(layer.base_layer.weight): layer for layer in self._layers.values()}
        for name, parameter in self.policy.of_policy.items():
            layer = adapted.get(id(parameter))
            if layer is None:
                with whole([parameter]):
                    yield name, parameter.detach()
                continue
            with whole([parameter, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]):
                yield name, parameter.detach() + layer.get_delta_weight(ADAPTER)

    def adapted(self) -> tuple[tuple[str, ...], int, float]:
        """Names of adapted weights in a model folder, rank and scale of their adapters; no names without adapters."""
        return outline_of(self._layers)

    @torch.no_grad()
    def factors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters of the policy, see `Adapters`; valid until the next."""
        for name, factor in factors_of(self._layers):
            with whole([factor]):
                yield name, factor.detach()

    @property
    def _layers(self) -> dict[str, Any]:
        module = self.policy.module
        return adapted_layers(module.model) if module.is_adapted else {}


class Frozen:
    """The start policy, which is not trained.

    Args:
        module: the policy's pass.
        of_policy: its parameters by name.
        zero: divided where weights are.
        dtype: of forward passes.
    """

    def __init__(self, module: PolicyPass, of_policy: Mapping[str, Any], zero: ZeroConf, dtype: torch.dtype) -> None:
        self.module, self.of_policy, self.dtype = module.requires_grad_(False), of_policy, dtype
        round_weights(module, dtype)
        self.engine: Any = module
        if zero.stage == 3:
            import deepspeed

            by_layer(module)
            with keeping_buffers(module):
                self.engine, *_ = deepspeed.initialize(model=module, config=zero.frozen_settings(dtype))
        self.engine.eval()

    @torch.no_grad()
    def read(self, batches: Sequence[Experience]) -> list[Any]:
        """See `Divided.read`."""
        device = next(iter(self.of_policy.values())).device
        with reading(self.module.decoder, self.module.share_prefixes, self.dtype):
            return [self.engine(batch.to(device)) for batch in batches]

    def set_weight(self, name: str, tensor: Tensor) -> None:
        """See `Divided.set_weight`."""
        parameter = self.of_policy.get(name)
        if parameter is not None:
            with whole([parameter], changed=True), torch.no_grad():
                parameter.copy_(tensor)

    def settle(self) -> None:
        """Nothing was rounded."""


def build(config: Any, training: Training, zero: ZeroConf) -> Models:
    """The models of a run.

    Args:
        config: of transformers.
        training: settings.
        zero: how models are divided.

    Raises:
        ValueError: samples are to share prefixes, and the architecture cannot.
    """
    device = pick_device()
    dtype = computes_in(training.dtype, device)
    critic = None
    if training.critic is not None:
        critic = _critic(config, training, zero, dtype, device)
    policy = _policy(config, training, zero, dtype, device)

    reference = None
    if training.needs_reference and not training.lora.rank:
        model, of_policy = _causal_lm(config, zero, dtype, device)
        reference = Frozen(PolicyPass(model, training.share_prefixes, False), of_policy, zero, dtype)
    return Models(policy, critic, reference)


def build_taught(kind: str, config: Any, told: Supervision, zero: ZeroConf) -> Models:
    """The model of supervised training.

    Args:
        kind: its class in transformers.
        config: of transformers.
        told: settings.
        zero: how the model is divided.
    """
    import transformers

    device = pick_device()
    dtype = computes_in(told.dtype, device)
    model, of_start = _empty(getattr(transformers, kind)._from_config, config, zero, dtype, device)
    if not told.keep_activations:
        recompute_activations(model)
    module = TaskPass(model, told.task).eval()
    # The schedule gives each update its learning rate.
    conf = OptimizerConf(1.0, 0, told.betas, told.weight_decay, told.max_grad_norm)
    return Models(_trainee(module, model, of_start, conf, zero, dtype), None, None)


def require_sharing(models: Models) -> None:
    """Once the weights are there: whether samples can share prefixes.

    Raises:
        ValueError: the architecture cannot.
    """
    if models.policy.module.share_prefixes:
        require_supported(models.policy.module.decoder)


def _policy(config: Any, training: Training, zero: ZeroConf, dtype: torch.dtype, device: torch.device) -> Divided:
    model, of_policy = _causal_lm(config, zero, dtype, device)
    if training.lora.rank:
        from peft import LoraConfig, get_peft_model

        lora = training.lora
        with torch.random.fork_rng(), _seeming_float32(model):
            torch.manual_seed(training.seed)
            adapters = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
            model = get_peft_model(model, adapters)
        # ZeRO-3 takes a layer's gradients when that of its input is there; the first layer's input has none by itself.
        model.enable_input_require_grads()
    _choose_activations(model, training)
    module = PolicyPass(model, training.share_prefixes, bool(training.lora.rank)).eval()
    return _trainee(module, model, of_policy, training.policy, zero, dtype)


def _critic(config: Any, training: Training, zero: ZeroConf, dtype: torch.dtype, device: torch.device) -> Divided:
    assert training.critic is not None
    model, of_policy = _causal_lm(config, zero, dtype, device)
    decoder = model.get_decoder()
    _choose_activations(decoder, training)
    module = ValuePass(decoder, training.share_prefixes).eval()
    module.head.to(device)
    kept = {id(parameter) for parameter in decoder.parameters()}
    of_policy = {name: parameter for name, parameter in of_policy.items() if id(parameter) in kept}
    return _trainee(module, module, of_policy, training.critic, zero, dtype)


def _trainee(
    module: Any, inner: Any, of_policy: Mapping[str, Any], conf: OptimizerConf, zero: ZeroConf, dtype: torch.dtype
) -> Divided:
    if not zero.stage:
        return ReplicatedTrainee(module, inner, of_policy, conf, dtype)
    return ZeroTrainee(module, inner, of_policy, conf, dtype, zero)


def _choose_activations(model: Any, training: Training) -> None:
    if not training.keep_activations:
        recompute_activations(model)


def _causal_lm(config: Any, zero: ZeroConf, dtype: torch.dtype, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from tasks.pretrained import AutoModelForCausalLM

    return _empty(AutoModelForCausalLM.from_config, config, zero, dtype, device)


def _empty(
    make: Callable[..., Any], config: Any, zero: ZeroConf, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """A model without weights, made from its configuration, and its parameters by name."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), _born(zero, dtype):
        model = make(config, dtype=torch.float32, attn_implementation="sdpa")
    model.tie_weights()
    _make_buffers_again(model)
    if zero.stage < 3:
        model = model.to(device)
    return model, dict(model.named_parameters())


@contextlib.contextmanager
def _seeming_float32(model: Any) -> Iterator[None]:
    """The block in which adapters begin with float32 numbers; peft rounds them to the type of divided weights."""
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for parameter, _ in dtypes:
        parameter.data = parameter.data.float()
    yield
    for parameter, dtype in dtypes:
        parameter.data = parameter.data.to(dtype)


def _make_buffers_again(model: Any) -> None:
    """In float32, as in a model that was loaded: inside `_born` every tensor gets the type of the weights."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, buffer.float() if buffer.is_floating_point() else buffer)
        if buffers:
            model._init_weights(module)


def _born(zero: ZeroConf, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The block in which parameters are divided as soon as they are made."""
    if zero.stage < 3:
        return contextlib.nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=zero.frozen_settings(dtype))
    return context
