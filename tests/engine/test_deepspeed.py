"""Workers of DeepSpeed and the plain engine: the same logprobs, gradients, updates, weights and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks import cluster, conf, crew, identity, parts
from tasks.engine import Critic, DivergedError, Limited, Objective, Policy, Training, deepspeed
from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.engine.plain import PlainEngine
from tasks.generate.plain import PlainConf
from tasks.model import LoraConf, computes_in, export_folder
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import Division, Learner, phases
from tasks.plan.model_size import of_folder
from tasks.plan.scaling import Speeds, Work, step_seconds
from tasks.rl.losses import Normalizer
from tests.engine.test_plain import batch_of
from tests.plan.test_memory import GRPO
from tests.tiny import make_method, make_model, optimizer

UNCLIPPED = replace(optimizer(), max_grad_norm=1e9)
TRAINING = Training(
    policy=UNCLIPPED, critic=UNCLIPPED, lora=LoraConf(), dtype="float32", keep_activations=True,
    needs_reference=True, seed=0,
)  # fmt: skip
EXACT = [[0, 3, 5], [1, 2, 4, 6]]
"""One micro-batch a worker: both engines add the same two gradients, and a + b = b + a."""
UNEVEN = [[0], [3, 5], [1], [2, 4], [6]]
"""Three for one worker and two for the other, whose third is empty; float32 rounds each sum."""


NO_BFLOAT16 = "no bfloat16: this processor has no instructions for it"
pytestmark = pytest.mark.usefixtures("forked_workers")


def needs(dtype: str) -> None:
    """Skip a test where this processor does not compute in this type."""
    if dtype == "bfloat16" and computes_in("bfloat16", torch.device("cpu")) != torch.bfloat16:
        pytest.skip(NO_BFLOAT16)


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Path:
    export_folder(make_model(tokenizer, kv_heads=2), tokenizer, tmp_path / "start")
    return tmp_path / "start"


def prepared(policy: Policy, critic: Critic, tokenizer: Any, plan: Any) -> tuple[Any, Any]:
    """PPO with a reference and values, and seven scored samples."""
    method, batch = make_method("ppo", tokenizer, entropy_coefficient=0.01), batch_of(7)
    old, reference = (policy.logprobs(batch, plan, reference=which) for which in (False, True))
    values = critic.values(batch, plan)
    return method, method.advantage(replace(batch, old_logprobs=old - 0.1, ref_logprobs=reference, values=values))


def update(policy: Policy, critic: Critic, method: Any, batch: Any, plan: Any, is_first: bool = False) -> Any:
    """One update of both."""
    rows = [row for micro in plan for row in micro]
    of_policy = Objective(method.loss, Normalizer.of(batch.loss_mask[rows]), True, is_first)
    of_critic = Objective(method.value_loss, Normalizer.of(batch.response_mask[rows]))
    return policy.update(batch, plan, of_policy), critic.update(batch, plan, of_critic)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def assert_equal_adapters(policy: Policy, other: Policy, lora: LoraConf) -> None:
    mine, theirs = policy.adapters(), other.adapters()
    if not lora.rank:
        assert mine is theirs is None
        return
    assert mine is not None
    assert theirs is not None
    assert replace(mine, factors=()) == replace(theirs, factors=())
    assert (mine.rank, mine.scale, len(mine.names)) == (lora.rank, lora.alpha / lora.rank, 2 * len(lora.targets))
    factors = {name: factor.clone() for name, factor in mine.factors}
    assert len(factors) == 2 * len(mine.names)
    assert all(torch.equal(factors[name], factor) for name, factor in theirs.factors)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("lora", "tied"), [(LoraConf(), True), (LoraConf(rank=4), True), (LoraConf(), False)])
def test_updates_are_those_of_the_plain_engine(
    stage: Any, lora: LoraConf, tied: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """Of grouped queries, with a tied and an untied head."""
    start, training = tmp_path / "start", replace(TRAINING, lora=lora)
    export_folder(make_model(tokenizer, kv_heads=2, tied=tied), tokenizer, start)
    kind = DeepSpeedEngine(workers=2, stage=stage)
    torch.set_num_threads(1)
    with PlainEngine().open(start, training) as plain, kind.open(start, training) as divided:
        method, batch = prepared(*plain, tokenizer, EXACT)  # type: ignore[arg-type]
        sequences = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
        for found, wanted in zip(*(e[0].sequence_logprobs(sequences) for e in (divided, plain)), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)

        for number in range(5):
            for reference in (True, False):
                assert torch.equal(*(e[0].logprobs(batch, EXACT, reference) for e in (divided, plain)))
            assert torch.equal(*(e[1].values(batch, EXACT) for e in (divided, plain)))  # type: ignore[union-attr]
            ours, theirs = (update(*e, method, batch, EXACT, number == 0) for e in (divided, plain))
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.metrics == other.metrics
                assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
                assert (mine.logprobs is None) == (other.logprobs is None)
            if number == 0:
                assert torch.equal(ours[0].logprobs, theirs[0].logprobs)

        ours, theirs = weights_of(divided[0]), weights_of(plain[0])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        assert_equal_adapters(divided[0], plain[0], lora)
        for engine, folder in ((divided, "ours"), (plain, "theirs")):
            engine[0].save(tmp_path / folder)
            engine[1].save(tmp_path / folder / "critic")  # type: ignore[union-attr]
            engine[0].export(tmp_path / f"{folder}-policy")
    for part in ("", "critic"):
        ours, theirs = (load_file(tmp_path / f / part / "tensors.safetensors") for f in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "ours-policy" / name).read_bytes() == (tmp_path / "theirs-policy" / name).read_bytes()


@pytest.mark.parametrize(
    ("stage", "workers", "options"),
    [
        (2, 2, {"share_prefixes": "longest"}),
        (3, 3, {"keep_activations": False, "lora": LoraConf(rank=4)}),
        (3, 2, {"keep_activations": False, "policy": optimizer()}),
        (1, 3, {}),
        (3, 1, {"lora": LoraConf(rank=4)}),
    ],
)
def test_where_a_plan_does_not_come_out_even_only_sums_are_rounded(
    stage: Any, workers: int, options: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    """Also with an untied head, clipping, recomputed activations, shared prefixes."""
    export_folder(make_model(tokenizer, tied=False), tokenizer, tmp_path / "start")
    training = replace(TRAINING, **options)
    torch.set_num_threads(1)
    kind = DeepSpeedEngine(workers=workers, stage=stage)
    with PlainEngine().open(tmp_path / "start", training) as plain, kind.open(tmp_path / "start", training) as divided:
        method, batch = prepared(*plain, tokenizer, UNEVEN)  # type: ignore[arg-type]
        for number in range(3):
            ours, theirs = (update(*e, method, batch, UNEVEN, number == 0) for e in (divided, plain))
            for mine, other in zip(ours, theirs, strict=True):
                assert len(mine.metrics) == len(UNEVEN)
                for found, wanted in zip(mine.metrics, other.metrics, strict=True):
                    assert found == pytest.approx(wanted, abs=1e-5)
        found, wanted = (e[0].logprobs(batch, UNEVEN) for e in (divided, plain))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
        ours, theirs = weights_of(divided[0]), weights_of(plain[0])
        moved = torch.cat([(tensor - theirs[name]).abs().flatten() for name, tensor in ours.items()])
        assert float(moved.mean()) < 1e-6


def test_any_number_of_workers_goes_on_from_a_checkpoint_and_so_does_the_plain_engine(
    start: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """One, two and four workers take the same bits: they multiply and divide by powers of two, and add empty batches.
    Three round a gradient when they divide by three, so that AdamW may move a weight by a step of its own."""
    torch.set_num_threads(1)
    with DeepSpeedEngine(workers=2, stage=2).open(start, TRAINING) as first:
        method, batch = prepared(*first, tokenizer, EXACT)  # type: ignore[arg-type]
        first[0].save(tmp_path / "none")  # Nothing has moved yet.
        for _ in range(2):
            update(*first, method, batch, EXACT)  # type: ignore[arg-type]
        first[0].save(tmp_path / "policy")
        first[1].save(tmp_path / "critic")  # type: ignore[union-attr]
        for _ in range(2):
            update(*first, method, batch, EXACT)  # type: ignore[arg-type]
        wanted = weights_of(first[0])

    others: list[tuple[int, Any]] = [(2, 0), (2, 1), (2, 3), (1, 2), (4, 2), (4, 3), (3, 2)]
    for kind in (PlainEngine(), *(DeepSpeedEngine(workers=workers, stage=stage) for workers, stage in others)):
        with kind.open(start, TRAINING) as second:
            update(*second, method, batch, UNEVEN)  # type: ignore[arg-type]
            second[0].load(tmp_path / "policy")
            second[1].load(tmp_path / "critic")  # type: ignore[union-attr]
            for _ in range(2):
                update(*second, method, batch, EXACT)  # type: ignore[arg-type]
            found = weights_of(second[0])
        atol = UNCLIPPED.lr / 10 if kind == DeepSpeedEngine(workers=3, stage=2) else 0.0
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=f"{kind}: {name}")


@pytest.mark.parametrize(("key", "value", "least"), [("timeout_s", 0.001, 1), ("bucket", 1, 1000)])
def test_numbers_with_which_no_workers_could_exchange_are_refused(key: str, value: float, least: int) -> None:
    tree = conf.section("engine", "deepspeed") | {key: value}
    with pytest.raises(ValueError, match=rf"conf/x\.yaml: .*{key}={value}: expected {least} or more"):
        parts.make("engine", tree, "conf/x.yaml")


def not_finite(batch: Any, logprobs: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum() * float("nan"), {}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_moves_nothing(stage: Any, start: Path, tokenizer: Any) -> None:
    with DeepSpeedEngine(workers=2, stage=stage).open(start, TRAINING) as (policy, critic):
        assert critic is not None
        method, batch = prepared(policy, critic, tokenizer, EXACT)
        before = weights_of(policy)
        bad = Objective(not_finite, Normalizer.of(batch.loss_mask))
        with pytest.raises(DivergedError, match=r"the gradient norm is \w+ after 0 updates\. Lower the learning rate"):
            policy.update(batch, EXACT, bad)  # type: ignore[arg-type]
        after = weights_of(policy)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        update(policy, critic, method, batch, EXACT)
        after = weights_of(policy)
        assert not all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(("stage", "lora"), [(0, 0), (1, 4), (2, 0), (3, 0), (3, 4)])
def test_bfloat16_computes_with_rounded_weights_and_adds_up_whole_ones(
    stage: Any, lora: int, start: Path, tokenizer: Any, tmp_path: Path
) -> None:
    needs("bfloat16")
    training = replace(TRAINING, dtype="bfloat16", lora=LoraConf(rank=lora))
    torch.set_num_threads(1)
    kind = DeepSpeedEngine(workers=2, stage=stage)
    with PlainEngine().open(start, training) as plain, kind.open(start, training) as divided:
        method, batch = prepared(*plain, tokenizer, EXACT)  # type: ignore[arg-type]
        for reference in (True, False):
            assert torch.equal(*(e[0].logprobs(batch, EXACT, reference) for e in (divided, plain)))
        for engine, folder in ((divided, "ours"), (plain, "theirs")):
            engine[0].save(tmp_path / folder)
            update(*engine, method, batch, EXACT)  # type: ignore[arg-type]
            engine[0].save(tmp_path / f"{folder}-later")
    ours, theirs = (load_file(tmp_path / f / "tensors.safetensors") for f in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    ours, theirs = (load_file(tmp_path / f"{f}-later/tensors.safetensors") for f in ("ours", "theirs"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2.1 * UNCLIPPED.lr, msg=name)


CAPABILITY = "import torch\ntorch.cpu.get_capabilities = lambda: {'avx512_bf16': %s}\n"
"""A `sitecustomize.py`: what the processor of a host is said to be able to do."""


def hosts_with(tmp_path: Path, forking: Path, *have_bfloat16: bool) -> cluster.Cluster:
    """A host for each, with one worker, whose processor has instructions for bfloat16 or not."""
    python = f"{forking}/python"
    hosts = []
    for name, has_it in zip("abcd", have_bfloat16, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(CAPABILITY % has_it, encoding="utf-8")
        hosts.append(cluster.HostConf(name=name, start=("env", f"PYTHONPATH={tmp_path / name}"), python=python))
    return cluster.Cluster(hosts=tuple(hosts))


def test_hosts_that_do_not_all_have_bfloat16_are_refused(
    start: Path, tmp_path: Path, forking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes on two made-up hosts; nothing is built, and in float32 all are alike."""
    described = hosts_with(tmp_path, forking, True, False)
    monkeypatch.setattr(cluster, "load", lambda: described)
    engine = DeepSpeedEngine(workers=2, stage=2)
    for dtype in ("auto", "bfloat16"):
        with (
            pytest.raises(ValueError, match=r"^worker 1 on b computes in float32, and worker 0 on a in bfloat16, bec"),
            engine.open(start, replace(TRAINING, dtype=dtype)),  # type: ignore[arg-type]
        ):
            raise AssertionError
    with engine.open(start, TRAINING) as (policy, _):
        assert len(policy.sequence_logprobs([[1, 2, 3]])[0]) == 2


def test_where_no_host_has_bfloat16_all_compute_in_float32(
    start: Path, tokenizer: Any, tmp_path: Path, forking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = hosts_with(tmp_path, forking, False, False)
    monkeypatch.setattr(cluster, "load", lambda: described)
    torch.set_num_threads(1)
    training = replace(TRAINING, dtype="auto")
    with (
        PlainEngine().open(start, TRAINING) as plain,
        DeepSpeedEngine(workers=2, stage=3).open(start, training) as ours,
    ):
        method, batch = prepared(*plain, tokenizer, EXACT)  # type: ignore[arg-type]
        for engine in (plain, ours):
            update(*engine, method, batch, EXACT)  # type: ignore[arg-type]
        assert torch.equal(*(engine[0].logprobs(batch, EXACT) for engine in (plain, ours)))


def test_a_generator_gets_a_copy_that_it_can_prove(start: Path, tokenizer: Any) -> None:
    torch.set_num_threads(1)
    with DeepSpeedEngine(workers=2, stage=3).open(start, TRAINING) as (policy, critic):
        assert critic is not None
        generator = PlainConf().start(start, "float32", policy)
        assert not generator.shares_weights
        method, batch = prepared(policy, critic, tokenizer, EXACT)
        update(policy, critic, method, batch, EXACT)
        generator.update_weights(policy.weights())
        (wanted,) = policy.sequence_logprobs([[1, 2, 3, 4, 5]])
        logits = generator.model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, :-1].log_softmax(-1)
        found = logits.gather(-1, torch.tensor([2, 3, 4, 5])[:, None])[:, 0].tolist()
        assert found == pytest.approx(wanted, abs=1e-5)


def test_memory_and_limit_are_those_of_all_workers(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "_MODULE", "tests.engine.tensors_worker")
    torch.set_num_threads(2)
    with DeepSpeedEngine(workers=2, stage=2).open(start, TRAINING) as (policy, _):
        assert isinstance(policy, deepspeed.DeepSpeedPolicy)
        assert isinstance(policy, Limited)
        pids = policy.crew.call("pid", [()] * 2)
        peaks = [_peak_mb(pid) for pid in pids]
        held = [one.rss_mb for one in crew.footprints([policy])]
        found = policy.limits()
    torch.set_num_threads(1)
    assert [one.device for one in found] == ["processor, 1 thread, float32"] * 2
    assert all(one.flop_per_s is not None and one.flop_per_s > 1e9 for one in found)
    assert held[:2] == pytest.approx(peaks, rel=0.05)
    assert min(peaks) > 100


def _peak_mb(pid: int) -> float:
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("stage", [1, 2])
def test_workers_send_what_the_sums_of_scaling_say(
    stage: Any, start: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a link of one byte a second, the seconds of the exchange are bytes: those of real tables, counted."""
    monkeypatch.setattr(deepspeed, "_MODULE", "tests.engine.exchange_worker")
    torch.set_num_threads(1)
    alone = replace(TRAINING, critic=None, needs_reference=False)
    method, batch = make_method("grpo", tokenizer, kl_coefficient=0.0), batch_of(7)
    batch = replace(batch, old_logprobs=torch.zeros_like(batch.rewards), advantages=batch.rewards + 1.0)
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask))
    with DeepSpeedEngine(workers=2, stage=stage).open(start, alone) as (policy, _):
        assert isinstance(policy, deepspeed.DeepSpeedPolicy)
        policy.crew.call("sent", [()] * 2)
        policy.update(batch, UNEVEN, objective)
        found = policy.crew.call("sent", [()] * 2)
        weights = sum(weight.numel() for weight in weights_of(policy).values())

    speeds = Speeds(1, 1, 1, 1, exchanged=1, exchanged_between=1, handed=1, search_s=0)
    work = Work(0, 0, 0, 0, 0, updates=1, batches=len(UNEVEN) if stage == 2 else 0, weights=weights, handed=0)
    predicted = step_seconds(speeds, work, 2)["exchange"]
    for numbers in found:  # Half of a table leaves a worker, twice where tables are added up. Norms are a few numbers.
        assert 4 * (numbers["all_reduce"] + numbers["all_gather"] / 2) == pytest.approx(predicted, rel=0.02)


def test_adapters_that_are_divided_learn_from_several_micro_batches(start: Path, tokenizer: Any) -> None:
    torch.set_num_threads(1)
    method, batch = make_method("grpo", tokenizer, kl_coefficient=0.0), batch_of(7)
    batch = replace(batch, old_logprobs=torch.zeros_like(batch.rewards), advantages=batch.rewards + 1.0)
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask))
    adapted = replace(TRAINING, critic=None, needs_reference=False, lora=LoraConf(rank=2))
    with PlainEngine().open(start, adapted) as (plain, _):
        wanted = plain.update(batch, UNEVEN, objective).grad_norm
    with DeepSpeedEngine(workers=2, stage=3).open(start, adapted) as (policy, _):
        assert policy.update(batch, UNEVEN, objective).grad_norm == pytest.approx(wanted, rel=1e-5)


def test_a_reader_of_weights_that_stops_early_leaves_the_workers_ready(start: Path, tokenizer: Any) -> None:
    torch.set_num_threads(1)
    with DeepSpeedEngine(workers=2, stage=3).open(start, replace(TRAINING, critic=None)) as (policy, _):
        expected = policy.sequence_logprobs([[1, 2, 3, 4, 5]])
        weights = policy.weights()
        next(weights)
        weights.close()  # type: ignore[attr-defined]
        assert policy.sequence_logprobs([[1, 2, 3, 4, 5]]) == expected
        assert weights_of(policy).keys() == dict(make_model(tokenizer, kv_heads=2).named_parameters()).keys()


def test_more_workers_than_places_start_nothing(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_start", None)
    with (
        pytest.raises(ValueError, match=r"workers=65: expected at most 64, all .* conf/cluster/local\.yaml take"),
        DeepSpeedEngine(workers=65).open(start, TRAINING),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")]
)
def test_a_worker_holds_the_tensors_that_the_preflight_counts(
    stage: Any, dtype: Any, start: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(dtype)
    monkeypatch.setattr(deepspeed, "_MODULE", "tests.engine.tensors_worker")
    torch.set_num_threads(1)
    kind = DeepSpeedEngine(workers=2, stage=stage)
    with kind.open(start, replace(TRAINING, dtype=dtype)) as (policy, critic):
        assert isinstance(policy, deepspeed.DeepSpeedPolicy)
        assert critic is not None
        method, batch = prepared(policy, critic, tokenizer, EXACT)
        update(policy, critic, method, batch, EXACT)
        held = policy.crew.call("tensors", [()] * 2)
        loaded = policy.crew.call("loaded", [()] * 2)
    # A change of any of them makes those stages run again whose plan names this engine.
    files = identity.Sources(identity.ROOT).closure(identity.modules_of([kind, method]))
    assert [path for path in loaded[0] if path not in files] == []
    assert "tasks/engine/zero_models.py" in loaded[0]

    division = Division(2, 1, stage, kind.offload, kind.bucket)
    machine = Machine(Memory(1, "memory"), None, True, True)
    demand = replace(GRPO, model=of_folder(start), machine=machine, vllm=None, division=division)
    demand = replace(demand, train=replace(demand.train, dtype=dtype), learner=Learner(True, True, False, 1))
    (play,) = (phase for phase in phases(demand) if phase.name == "play")
    counted = sum(item.size for item in play.items if item.name.split(":")[0] in ("policy", "critic", "reference"))
    for found in held:
        # Buffers, the value head, the count of steps, and what makes lengths even.
        assert 0 <= found - counted <= 4000
