"""The engine against naive full-softmax arithmetic; adapters, export, references, bad gradients, bfloat16."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks import model
from tasks.engine import LOGIT_CHUNK, DivergedError, Objective
from tasks.engine.plain import PlainCritic
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.model import load_policy
from tasks.rl.experience import Experience, collate, microbatches
from tasks.rl.losses import Normalizer
from tasks.rl.samples import whole_trajectories
from tasks.types import Scores, Trajectory
from tests.tiny import TEXTS, logits_of, make_method, make_model, make_policy, make_tokenizer, optimizer


def trajectory(number: int, prompt: int, mask: list[bool]) -> Trajectory:
    ids = [(37 * number + 11 * i) % 256 for i in range(prompt + len(mask))]
    return Trajectory(
        f"q{number}",
        f"g{number // 2}",
        tuple(ids[:prompt]),
        tuple(ids[prompt:]),
        tuple(mask),
        (0.0,) * len(mask),
        (),
        "open",
    )


def batch_of(count: int = 4) -> Experience:
    """Ragged rows with observations in the middle."""
    masks = [[True, True, False, False, True], [True], [True, False, False, True, True, True, True], [True, True]]
    rows = [trajectory(i, 2 + 3 * i, masks[i % 4]) for i in range(count)]
    scores = [Scores(float(i % 2), ((rows[i].last_generated, float(i % 2)),)) for i in range(count)]
    return collate(whole_trajectories(rows), scores)


def naive(model: Any, batch: Experience) -> tuple[Tensor, Tensor]:
    """Row by row, unpadded: logprob and entropy of every generated token; 0 elsewhere."""
    logprobs, entropy = torch.zeros(batch.ids.shape), torch.zeros(batch.ids.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        table = model(input_ids=batch.ids[row : row + 1, :length], use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, length):
            if batch.loss_mask[row, t]:
                logprobs[row, t] = table[t - 1, batch.ids[row, t]]
                entropy[row, t] = -(table[t - 1].exp() * table[t - 1]).sum()
    return logprobs, entropy


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def whole(batch: Experience) -> list[list[int]]:
    """The plan of one micro-batch with every row."""
    return [list(range(len(batch)))]


def accumulate(policy: Any, batch: Experience, loss: Any) -> dict[str, float]:
    """The gradient of one micro-batch with every row; returns the metrics."""
    (rows,) = whole(batch)
    found: dict[str, float] = policy.accumulate(batch, rows, Objective(loss, Normalizer.of(batch.loss_mask)))
    return found


def likelihood(batch: Experience, logprobs: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * batch.loss_mask).sum(), {}


def weighted(_batch: Any, logprobs: Tensor, entropy: Tensor, _normalizer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    weights = torch.linspace(0.5, 2, logprobs.shape[1])
    loss = (weights * logprobs).sum() - 0.3 * (entropy * weights.flip(0)).sum()
    return loss, {"loss": loss.detach()}


@pytest.mark.parametrize("chunk", [2**24, 700, 1])
@pytest.mark.parametrize("kind", [{}, {"kv_heads": 2, "tied": False}])
def test_logprobs_entropy_and_gradients_equal_a_full_softmax(
    tokenizer: Any, chunk: int, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, two tokens at a time, one at a time."""
    monkeypatch.setitem(LOGIT_CHUNK, "cpu", chunk)
    model = make_model(tokenizer, sharpness=2.0, **kind)
    slow = copy.deepcopy(model)
    policy, batch = make_policy(model, tokenizer), batch_of()
    wanted, entropy = naive(slow, batch)
    torch.testing.assert_close(policy.logprobs(batch, whole(batch)), wanted.detach(), rtol=0, atol=1e-5)
    loss, _ = weighted(None, wanted, entropy, None)
    loss.backward()
    metrics = accumulate(policy, batch, weighted)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same(gradients(policy.module), gradients(slow))


def test_recomputing_activations_changes_no_gradient_and_is_done(tokenizer: Any) -> None:
    """Layers run a second time in the backward pass, and only in updates: a generator keeps its cache."""
    kept = make_policy(make_model(tokenizer), tokenizer)
    saving = make_policy(make_model(tokenizer), tokenizer, keep_activations=False)
    batch = batch_of()
    runs = {"kept": 0, "saving": 0}
    for name, policy in (("kept", kept), ("saving", saving)):
        mlp = policy.module.get_decoder().layers[0].mlp  # type: ignore[operator]
        mlp.register_forward_pre_hook(lambda *_, name=name: runs.__setitem__(name, runs[name] + 1))
        accumulate(policy, batch, weighted)
    assert runs == {"kept": 1, "saving": 2}
    assert_same(gradients(saving.module), gradients(kept.module), 0.0)
    assert torch.equal(saving.logprobs(batch, whole(batch)), kept.logprobs(batch, whole(batch)))
    assert not any(m.training for m in saving.module.modules())
    played = [
        PlainGenerator(p.causal_lm, tokenizer, True)
        .open([[1, 2, 3]], 2, Sampling(0.0, 1.0, (), 0), 30)
        .generate([0, 1], [9, 9])
        for p in (kept, saving)
    ]
    assert played[0] == played[1]
    critic = PlainCritic(make_model(tokenizer), optimizer(), "float32", keep_activations=False)
    count: list[int] = []
    critic.module["decoder"].layers[0].mlp.register_forward_pre_hook(lambda *_: count.append(1))  # type: ignore[index, union-attr, operator]
    accumulate(critic, batch, lambda batch, values, normalizer: values.sum())
    assert len(count) == 2


def prepared(policy: Any, batch: Experience, algorithm: str = "grpo", **changes: Any) -> tuple[Any, Experience]:
    method = make_method(algorithm, policy.tokenizer, **changes)
    old = policy.logprobs(batch, whole(batch))
    batch = replace(batch, old_logprobs=old - 0.1, ref_logprobs=old + 0.2, sampler_logprobs=old * batch.loss_mask)
    return method, method.advantage(batch)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_micro_batches_add_up_to_the_mini_batch(tokenizer: Any, aggregation: str) -> None:
    """Loss, metrics and gradients do not depend on how a mini-batch is cut."""
    results = []
    for max_tokens in (10_000, 40, 1):
        policy = make_policy(make_model(tokenizer, sharpness=2.0), tokenizer)
        method, batch = prepared(policy, batch_of(7), aggregation=aggregation, entropy_coefficient=0.01)
        normalizer = Normalizer.of(batch.loss_mask)
        plan = microbatches(batch.lengths.tolist(), range(7), max_tokens)
        each = [policy.accumulate(batch, rows, Objective(method.loss, normalizer)) for rows in plan]
        sums = {name: sum(metrics[name] for metrics in each) for name in each[0]}
        results.append((len(plan), sums, gradients(policy.module)))
    assert [n for n, *_ in results] == [2, 5, 7] or results[0][0] < results[1][0] < results[2][0]
    for _, sums, found in results[1:]:
        assert sums == pytest.approx(results[0][1], abs=1e-6)
        assert_same(found, results[0][2], 1e-6)


def test_masked_tokens_get_no_gradient(tokenizer: Any) -> None:
    """Neither prompt, observation nor padding is a target; what an advantage or reference says there is ignored."""
    found = []
    for rubbish in (False, True):
        policy = make_policy(make_model(tokenizer), tokenizer)
        method, batch = prepared(policy, batch_of())
        if rubbish:
            off = ~batch.loss_mask
            batch = replace(
                batch,
                advantages=torch.where(off, torch.full_like(batch.rewards, 1e9), batch.advantages),
                ref_logprobs=torch.where(off, torch.full_like(batch.rewards, float("-inf")), batch.ref_logprobs),
                old_logprobs=torch.where(off, torch.full_like(batch.rewards, float("nan")), batch.old_logprobs),
                ids=torch.where(torch.arange(batch.ids.shape[1]) >= batch.lengths[:, None], 99, batch.ids),
            )
        accumulate(policy, batch, method.loss)
        found.append(gradients(policy.module))
    assert_same(found[1], found[0], 0.0)
    nothing = replace(batch_of(), loss_mask=torch.zeros_like(batch_of().loss_mask))
    policy = make_policy(make_model(tokenizer), tokenizer)
    before = copy.deepcopy(policy.module.state_dict())
    method, batch = prepared(policy, nothing)
    assert policy.update(batch, whole(batch), Objective(method.loss, Normalizer.of(batch.loss_mask))).grad_norm == 0.0
    assert all(torch.equal(t, before[n]) for n, t in policy.module.state_dict().items())


def test_an_update_is_one_step_on_the_gradients_of_all_its_micro_batches(tokenizer: Any) -> None:
    """Rows outside the plan take no part; the first update reports the very logprobs it took as old ones."""
    policy, slow = (make_policy(make_model(tokenizer), tokenizer) for _ in range(2))
    method, batch = prepared(policy, batch_of(7), entropy_coefficient=0.01)
    plan = [[4, 1], [6], [0, 3]]
    rows = [row for micro in plan for row in micro]
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask[rows]), is_first=True)
    old = slow.logprobs(batch, plan)
    assert not old[[2, 5]].any()

    moved = replace(batch, old_logprobs=old)
    metrics = tuple(slow.accumulate(moved, micro, replace(objective, is_first=False)) for micro in plan)
    norm = slow.step()
    done = policy.update(batch, plan, objective)

    assert done.logprobs is not None
    assert torch.equal(done.logprobs, old)
    assert (done.metrics, done.grad_norm) == (metrics, norm)
    assert policy.update(batch, plan, replace(objective, is_first=False)).logprobs is None
    assert not policy.logprobs(batch, [])[0].any()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_objective_can_be_sent_to_another_process(tokenizer: Any, algorithm: str) -> None:
    policy, twin = (make_policy(make_model(tokenizer), tokenizer) for _ in range(2))
    batch = replace(batch_of(), values=torch.zeros_like(batch_of().rewards))
    method, batch = prepared(policy, batch, algorithm)
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask), is_first=True)
    sent = pickle.loads(pickle.dumps(objective))
    assert sent == objective
    assert policy.update(batch, whole(batch), objective).metrics == twin.update(batch, whole(batch), sent).metrics
    assert all(torch.equal(p, twin.trained[n]) for n, p in policy.trained.items())
    of_values = Objective(method.value_loss, Normalizer.of(batch.loss_mask))
    assert pickle.loads(pickle.dumps(of_values)) == of_values


def test_the_last_target_of_a_row_is_the_last_position_read(tokenizer: Any) -> None:
    """The gradient on logits lands at position t - 1 of a generated token t, and nowhere else."""
    model = make_model(tokenizer, tied=False)
    policy, batch = make_policy(model, tokenizer), batch_of()
    seen: list[Tensor] = []

    def watch(_module: Any, _inputs: Any, out: Any) -> None:
        out.last_hidden_state.register_hook(seen.append)

    model.get_decoder().register_forward_hook(watch)
    accumulate(policy, batch, weighted)
    (gradient,) = seen
    touched = gradient.abs().sum(-1) > 0
    assert torch.equal(touched, batch.loss_mask[:, 1:])


def update(policy: Any, steps: int = 2) -> None:
    batch = batch_of()
    for _ in range(steps):
        policy.update(batch, whole(batch), Objective(likelihood, Normalizer.of(batch.loss_mask)))


@pytest.mark.parametrize("rank", [0, 4])
def test_reference_stays_and_policy_moves(tokenizer: Any, rank: int) -> None:
    """With adapters the reference is the base model without them."""
    start = make_model(tokenizer)
    policy, batch = make_policy(make_model(tokenizer), tokenizer, rank=rank), batch_of()
    wanted = naive(start, batch)[0].detach()
    first = policy.logprobs(batch, whole(batch))
    assert torch.equal(first, policy.logprobs(batch, whole(batch), reference=True))
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-5)
    update(policy)
    torch.testing.assert_close(policy.logprobs(batch, whole(batch), reference=True), wanted, rtol=0, atol=1e-5)
    assert float((policy.logprobs(batch, whole(batch)) - wanted).abs().max()) > 0.01


def test_adapters_only_are_trained_and_start_alike(tokenizer: Any) -> None:
    one = make_policy(make_model(tokenizer), tokenizer, rank=4)
    torch.manual_seed(99)
    torch.rand(3)
    two = make_policy(make_model(tokenizer), tokenizer, rank=4)
    other = make_policy(make_model(tokenizer), tokenizer, rank=4, seed=1)
    assert all("lora_" in name for name in one.trained)
    assert all(torch.equal(p, two.trained[n]) for n, p in one.trained.items())
    assert any(not torch.equal(p, other.trained[n]) for n, p in one.trained.items())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", [{}, {"kv_heads": 2, "tied": False}])
def test_exported_folder_is_an_ordinary_model(tmp_path: Path, rank: int, kind: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = make_tokenizer()
    policy, batch = make_policy(make_model(tokenizer, **kind), tokenizer, rank=rank), batch_of()
    update(policy)
    before = policy.logprobs(batch, whole(batch))
    policy.export(tmp_path / "policy")
    policy.export(tmp_path / "again")
    assert torch.equal(policy.logprobs(batch, whole(batch)), before)  # exporting merges a copy
    names = sorted(p.name for p in (tmp_path / "policy").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert not any("adapter" in name for name in names)
    for name in names:
        data = (tmp_path / "policy" / name).read_bytes()
        assert data == (tmp_path / "again" / name).read_bytes()
        assert str(tmp_path).encode() not in data
    stored, given = load_file(tmp_path / "policy" / "model.safetensors"), list(policy.weights())
    assert sorted(name for name, _ in given) == sorted(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in given)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    assert not any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(naive(model, batch)[0].detach(), before, rtol=0, atol=2e-5)
    probe = [5, 9, 2, 7, 7, 1]
    (told,), shown = policy.sequence_logprobs([probe]), logits_of(model, probe).log_softmax(-1)
    assert told == pytest.approx([float(shown[t, probe[t + 1]]) for t in range(len(probe) - 1)], abs=2e-5)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "policy")
    for text in [
        *TEXTS[:5],
        '<think> a </think> <search> b </search>\n\n<information>Doc 1(Title: "x") é</information>\n\n',
    ]:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    again, _ = load_policy(tmp_path / "policy")
    assert torch.equal(logits_of(again, [1, 2, 3]), logits_of(model, [1, 2, 3]))


def test_critic_values_stand_before_their_tokens(tokenizer: Any) -> None:
    """The value at t is read from the state that has seen tokens 0 ... t - 1; 0 off the response."""
    model = make_model(tokenizer)
    critic, batch = PlainCritic(model, optimizer(), "float32"), batch_of()
    assert float(critic.values(batch, whole(batch)).abs().max()) == 0.0  # the head begins at 0
    head = critic.module["head"]  # type: ignore[index]
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 32)[None])  # type: ignore[union-attr, operator]
        head.bias.fill_(0.25)  # type: ignore[union-attr, operator]
    values = critic.values(batch, whole(batch))
    for row, length in enumerate(batch.lengths.tolist()):
        for t in range(batch.ids.shape[1]):
            if t >= length or not batch.response_mask[row, t]:
                assert values[row, t] == 0
                continue
            hidden = model.get_decoder()(input_ids=batch.ids[row : row + 1, :t]).last_hidden_state[0, -1]
            wanted = float(hidden.detach() @ torch.linspace(-1, 1, 32) + 0.25)
            assert float(values[row, t]) == pytest.approx(wanted, abs=1e-4)


def test_critic_learns_its_targets_and_leaves_the_policy_alone(tokenizer: Any) -> None:
    model = make_model(tokenizer)
    before = copy.deepcopy(model.state_dict())
    critic, batch = PlainCritic(model, optimizer(), "float32"), batch_of()
    losses = []

    def far(batch: Experience, values: Tensor, _normalizer: Any) -> Tensor:
        return ((values - 0.7)[batch.loss_mask] ** 2).mean()

    for _ in range(30):
        done = critic.update(batch, whole(batch), Objective(far, Normalizer.of(batch.loss_mask)))
        losses.append(done.metrics[0]["value_loss"])
    assert losses[0] == pytest.approx(0.49)
    assert losses[-1] < 0.02
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_takes_no_step(tokenizer: Any, bad: float) -> None:
    policy, batch = make_policy(make_model(tokenizer), tokenizer), batch_of()
    before = copy.deepcopy(policy.module.state_dict())
    objective = Objective(lambda batch, lp, *_: (bad * lp.sum(), {}), Normalizer.of(batch.loss_mask))
    with pytest.raises(DivergedError, match=r"the gradient norm is (nan|inf) after 0 updates"):
        policy.update(batch, whole(batch), objective)
    assert all(torch.equal(t, before[n]) for n, t in policy.module.state_dict().items())
    assert policy.num_updates == 0


def test_warm_up_clipping_and_cleared_gradients(tokenizer: Any) -> None:
    conf = optimizer(lr=0.1, warmup_steps=4, max_grad_norm=0.5)
    policy, batch = make_policy(make_model(tokenizer), tokenizer, conf=conf), batch_of()
    rates: list[float] = []
    clipped: list[float] = []

    def measure(*_: Any) -> None:
        clipped.append(
            float(torch.stack([p.grad.norm() for p in policy.trained.values() if p.grad is not None]).norm())
        )

    policy.optimizer.register_step_pre_hook(measure)
    for _ in range(6):
        objective = Objective(lambda batch, lp, *_: (100 * lp.sum(), {}), Normalizer.of(batch.loss_mask))
        assert policy.update(batch, whole(batch), objective).grad_norm > 0.5  # reported before clipping
        rates.append(policy.optimizer.param_groups[0]["lr"])
        assert all(p.grad is None for p in policy.trained.values())
    assert clipped == pytest.approx([0.5] * 6, rel=1e-3)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("rank", [0, 4])
def test_save_and_load_continue_exactly(tokenizer: Any, tmp_path: Path, rank: int) -> None:
    unbroken = make_policy(make_model(tokenizer), tokenizer, rank=rank)
    update(unbroken, 4)
    half = make_policy(make_model(tokenizer), tokenizer, rank=rank)
    update(half, 2)
    half.save(tmp_path / "half")
    update(half, 1)  # what was saved does not follow
    rest = make_policy(make_model(tokenizer), tokenizer, rank=rank)
    rest.load(tmp_path / "half")
    update(rest, 2)
    assert all(torch.equal(p, rest.trained[n]) for n, p in unbroken.trained.items())
    assert rest.num_updates == unbroken.num_updates == 4
    batch = batch_of()
    assert torch.equal(*(p.logprobs(batch, whole(batch), reference=True) for p in (rest, unbroken)))


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in bfloat16 on every processor; one without instructions for it emulates them."""
    monkeypatch.setattr(model, "_cpu_has_bfloat16", lambda: True)


@pytest.mark.usefixtures("bfloat16")
def test_bfloat16_forward_float32_weights(tokenizer: Any) -> None:
    """Near the exact numbers, equal between forward and update; weights, sums of gradients and steps stay float32."""
    exact = make_policy(make_model(tokenizer, sharpness=2.0), tokenizer)
    half = make_policy(make_model(tokenizer, sharpness=2.0), tokenizer, dtype="bfloat16")
    critic, batch = PlainCritic(make_model(tokenizer), optimizer(), "bfloat16"), batch_of()
    assert {parameter.dtype for parameter in half.causal_lm.parameters()} == {torch.bfloat16}
    old = half.logprobs(batch, whole(batch))
    assert old.dtype == torch.float32
    gap = (old - exact.logprobs(batch, whole(batch))).abs().max()
    assert 0 < float(gap) < 0.2  # bfloat16 keeps 8 bits: relative error 0.4% per operation
    normalizer = Normalizer.of(batch.loss_mask)
    done = half.update(batch, whole(batch), Objective(likelihood, normalizer, is_first=True))
    assert done.logprobs is not None
    assert torch.equal(done.logprobs, old)
    critic.update(batch, whole(batch), Objective(lambda batch, values, n: ((values - 1) ** 2).mean(), normalizer))
    assert critic.values(batch, whole(batch)).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in [*half.trained.values(), *critic.trained.values()])
    for name, parameter in half.causal_lm.named_parameters():
        assert torch.equal(parameter, half.trained[name].bfloat16())


@pytest.mark.usefixtures("bfloat16")
def test_training_in_bfloat16_computes_what_a_model_loaded_in_it_computes(tokenizer: Any, tmp_path: Path) -> None:
    """At late positions, too, whose angles would be others if the frequencies of rotary embeddings were rounded."""
    model.export_folder(make_model(tokenizer), tokenizer, tmp_path)
    loaded, _ = load_policy(tmp_path, torch.bfloat16)
    policy = make_policy(make_model(tokenizer), tokenizer, dtype="bfloat16")
    critic = PlainCritic(make_model(tokenizer), optimizer(), "bfloat16")
    for decoder in (policy.causal_lm.get_decoder(), policy.reference.get_decoder(), critic.decoder):
        found, wanted = dict(decoder.named_buffers()), dict(loaded.get_decoder().named_buffers())
        assert found.keys() == wanted.keys()
        for name, buffer in wanted.items():
            assert found[name].dtype == buffer.dtype == torch.float32
            assert torch.equal(found[name], buffer)

    ids = [(7 * i) % 256 for i in range(400)]
    (found_logprobs,) = policy.sequence_logprobs([ids])
    table = loaded(torch.tensor([ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
    assert found_logprobs == table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.usefixtures("bfloat16")
def test_steps_too_small_for_bfloat16_add_up(tokenizer: Any) -> None:
    policy = make_policy(make_model(tokenizer), tokenizer, conf=optimizer(lr=1e-5), dtype="bfloat16")
    before = {name: weight.detach().clone() for name, weight in policy.trained.items()}
    update(policy, 3)
    moved = [float((weight - before[name]).abs().max()) for name, weight in policy.trained.items()]
    assert all(0 < step < 1e-4 for step in moved)


@pytest.mark.usefixtures("bfloat16")
def test_gradients_of_micro_batches_are_added_in_float32(tokenizer: Any) -> None:
    """Two micro-batches give the sum of what each gives alone, without another rounding."""
    policy, batch = make_policy(make_model(tokenizer), tokenizer, dtype="bfloat16"), batch_of()
    objective = Objective(likelihood, Normalizer.of(batch.loss_mask))
    found = []
    for plan in ([[0]], [[1]], [[0], [1]]):
        for rows in plan:
            policy.accumulate(batch, rows, objective)
        found.append({name: weight.grad for name, weight in policy.trained.items()})
        policy.optimizer.zero_grad(set_to_none=True)
    first, second, both = found
    assert all(torch.equal(both[name], first[name] + second[name]) for name in both)  # type: ignore[operator]


@pytest.mark.usefixtures("bfloat16")
def test_the_reference_in_bfloat16_is_the_policy_before_its_first_step(tokenizer: Any) -> None:
    policy, batch = make_policy(make_model(tokenizer, kv_heads=2), tokenizer, dtype="bfloat16"), batch_of()
    before = policy.logprobs(batch, whole(batch))
    update(policy, 1)
    assert torch.equal(policy.logprobs(batch, whole(batch), reference=True), before)


def test_generator_and_trainer_agree(tokenizer: Any) -> None:
    """Logprobs reported while sampling are the trainer's, to 1e-5, before and after an update; adapters included."""
    for rank in (0, 4):
        policy = make_policy(make_model(tokenizer, kv_heads=2), tokenizer, rank=rank)
        generator = PlainGenerator(policy.causal_lm, tokenizer, True)
        for _ in range(2):
            session = generator.open([[1, 2, 3, 4], [9]], 2, Sampling(1.0, 0.95, (), 4), 60)
            calls = session.generate([0, 1, 2, 3], [5, 9, 1, 7])
            rows = [
                Trajectory("q", "g", p, c.token_ids, (True,) * len(c.token_ids), c.logprobs, (), "open")
                for p, c in zip(((1, 2, 3, 4),) * 2 + ((9,),) * 2, calls, strict=True)
            ]
            batch = collate(whole_trajectories(rows), [Scores(0.0, ())] * 4)
            torch.testing.assert_close(policy.logprobs(batch, whole(batch)), batch.sampler_logprobs, rtol=0, atol=1e-5)
            update(policy)
