"""What a person is told about memory and disk before the first step."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import params, plan
from tasks.plan import RunSettings, disk, preflight
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import phases
from tasks.plan.model_size import ModelSize
from tasks.plan.peak import helping, worst
from tests import shipped

ROOT = Path(__file__).parents[2]
SMOL = ModelSize(576, 1536, 30, 49_152, 9, 3, 64, is_tied=True, num_weights=134_515_008, stored=538_090_408)
QWEN_3B = ModelSize(2048, 11_008, 36, 151_936, 16, 2, 128, is_tied=True, num_weights=3_085_938_688, stored=6 * 10**9)
LARGE = 10**15
HALF = "it computes in bfloat16: this processor has instructions for it (`dtype: auto`)\n"
FLOAT = "it computes in float32: this processor has no instructions for bfloat16 (`dtype: auto`)\n"


def _here(host: int, gpu: int = 0) -> Machine:
    return Machine(Memory(host, "a test"), Memory(gpu, "GPU of a test") if gpu else None, True, True)


def _run(root: Path = ROOT, **changes: Any) -> RunSettings:
    return RunSettings(root, params.with_models(replace(shipped.settings(), **changes), ROOT))


def _smol(*systems: str) -> RunSettings:
    return _run(model="smollm2-135m", scale="small", systems=("base", *systems), seeds=(0,))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the environment, and a large disk."""
    monkeypatch.delenv(preflight.VARIABLE, raising=False)
    monkeypatch.setattr(preflight, "free_disk", lambda folder: LARGE)


def _given(monkeypatch: pytest.MonkeyPatch, size: ModelSize) -> None:
    monkeypatch.setattr(preflight, "of_folder", lambda folder: size)


def test_too_little_memory_names_what_is_largest_and_settings_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, SMOL)
    with pytest.raises(ValueError, match="search_r1_grpo takes up to") as caught:
        preflight.check(_smol("search_r1_grpo"), lambda: _here(4 << 30))
    message = str(caught.value)
    assert message.startswith("conf/scale/small.yaml, conf/model/smollm2-135m.yaml: search_r1_grpo takes up to ")
    assert "GB of memory (update), and there are 4.3 GB (a test). Most of it: activations of 2048 tokens " in message
    assert "Set `train: keep_activations: false` (up to " in message
    # The stage before it does not fit either, with settings of its own.
    assert re.search(
        r" Stage `base`, which teaches the start policy, does not fit either: up to 13\.3 GB\. Most of it: activations "
        r"of 2048 tokens 9\.3 GB, .* For this stage alone: `format: null`, which teaches the model nothing \(up to",
        message,
    )
    assert message.endswith("BREADCRUMB_PREFLIGHT=warn starts in spite of it.")
    assert "\n" not in message


def test_stage_base_is_named_where_it_is_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is trained, so teaching the format is the peak; half the tokens are enough for ten gigabytes."""
    _given(monkeypatch, SMOL)
    with pytest.raises(ValueError, match=r"GB of memory \(start policy, stage `base`\)") as caught:
        preflight.check(_smol(), lambda: _here(8 << 30))
    assert "does not fit either" not in str(caught.value)
    with pytest.raises(ValueError, match="For this stage alone: ") as caught:
        preflight.check(_smol("search_r1_grpo"), lambda: _here(10 * 10**9))
    told = "For this stage alone: `format: max_batch_tokens: 1024` and `rollout: max_total_tokens: 1024` (up to "
    assert told in str(caught.value)


def test_a_pretrained_model_at_the_scale_of_a_tiny_one_is_told_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, SMOL)
    for scale, is_told in (("laptop", True), ("small", False)):
        run = _run(model="smollm2-135m", scale=scale, systems=("base", "search_r1_grpo"), seeds=(0,))
        with pytest.raises(ValueError, match="takes up to") as caught:
            preflight.check(run, lambda: _here(2 << 30))
        assert ("SCALE=small has budgets for a pretrained model." in str(caught.value)) == is_told


def test_the_smallest_run_of_a_real_model_fits_where_its_budgets_of_hours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make smoke MODEL=smollm2-135m` with the systems of `params.yaml`: at most the 17 GB that the README names."""
    run = _run(model="smollm2-135m", scale="smoke")
    assert worst(preflight.systems_of(run, SMOL, _here(LARGE))).size < 17 * 10**9


def test_the_settings_that_are_named_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lowers the peak, the last one to what there is, and one less would not do."""
    run = _smol("search_r1_grpo")
    systems = preflight.systems_of(run, SMOL, _here(4 << 30))
    peaks = [worst(systems), *(peak for _, peak in helping(systems))]
    assert [peak.share for peak in peaks] == sorted((peak.share for peak in peaks), reverse=True)
    assert peaks[-2].share > 1 >= peaks[-1].share
    assert helping(preflight.systems_of(run, SMOL, _here(64 << 30))) == []


def test_a_larger_machine_needs_fewer_settings_and_milder_ones() -> None:
    run = _smol("search_r1_grpo")
    settings = [text for text, _ in helping(preflight.systems_of(run, SMOL, _here(14 * 10**9)))]
    assert settings == ["`train: keep_activations: false`"]
    settings = [text for text, _ in helping(preflight.systems_of(run, SMOL, _here(64 * 10**8)))]
    assert settings[-1] == "`rollout: batch_rows: 32`"  # 64 are too many; 16 fit as well.


def test_where_nothing_is_enough_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, SMOL)
    with pytest.raises(ValueError, match=r"Not enough: .*; take a smaller model or .*without a critic"):
        preflight.check(_smol("search_r1_ppo"), lambda: _here(2 << 30))
    with pytest.raises(ValueError, match="a machine with more memory") as caught:
        preflight.check(_smol("search_r1_grpo"), lambda: _here(1 << 20))
    assert "critic" not in str(caught.value)


def test_models_that_are_trained_for_services_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(systems=("base", "pica", "r_search"), seeds=(0,))
    ((_, demand), *_) = preflight.systems_of(run, SMOL, _here(LARGE))
    sizes = {phase.name: phase.size("memory") for phase in phases(demand)}
    assert {"reward model pica", "reader tiny_llama"} < sizes.keys()
    assert sizes["reader tiny_llama"] < sizes["reward model pica"]  # Which is as large as the policy.


def test_a_play_longer_than_the_model_can_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, replace(SMOL, positions=1024))
    with pytest.raises(ValueError, match="search_r1_grpo plays up to 2048 tokens") as caught:
        preflight.check(_smol("search_r1_grpo"), lambda: _here(200 * 10**9))
    assert "the model was made for 1024 (max_position_embeddings). Set `rollout: {max_total" in str(caught.value)
    _given(monkeypatch, replace(SMOL, positions=2048))
    preflight.check(_smol("search_r1_grpo"), lambda: _here(200 * 10**9))


def test_it_can_be_asked_to_warn_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _given(monkeypatch, SMOL)
    monkeypatch.setenv(preflight.VARIABLE, "warn")
    preflight.check(_smol("search_r1_grpo"), lambda: _here(4 << 30))
    out, err = capsys.readouterr()
    assert out == HALF
    assert err.startswith("warning: conf/scale/small.yaml, ")
    assert len(err.splitlines()) == 1
    monkeypatch.setenv(preflight.VARIABLE, "never")
    with pytest.raises(ValueError, match="BREADCRUMB_PREFLIGHT='never': expected warn"):
        preflight.check(_smol("search_r1_grpo"), lambda: _here(4 << 30))


def test_one_line_where_it_fits_and_a_warning_where_it_is_close(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _given(monkeypatch, SMOL)
    run = _smol("search_r1_grpo")
    preflight.check(run, lambda: _here(200 * 10**9))
    out, err = capsys.readouterr()
    said = re.escape(HALF) + (
        r"this run takes memory up to [\d.]+ GB of 200 GB \(search_r1_grpo, update\), disk up to [\d.]+ GB of .* GB\n"
    )
    assert re.fullmatch(said, out), out
    preflight.check(run, lambda: replace(_here(200 * 10**9), host_has_bfloat16=False))
    out, err = capsys.readouterr()
    assert re.fullmatch(said.replace("update", "play").replace(re.escape(HALF), re.escape(FLOAT)), out), out
    assert err == ""

    peak = worst(preflight.systems_of(run, SMOL, _here(LARGE)))
    preflight.check(run, lambda: _here(int(peak.size / 0.95)))
    out, err = capsys.readouterr()
    assert out == HALF
    assert err.startswith("warning: this run nearly fills the machine: memory up to ")


@pytest.mark.parametrize("size", [SMOL, replace(SMOL, num_weights=10**6)])
def test_the_number_format_of_a_pretrained_model_is_always_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: ModelSize
) -> None:
    """Of a small one, too, and where the run does not fit."""
    _given(monkeypatch, size)
    for has_bfloat16, said in ((True, HALF), (False, FLOAT)):
        machine = replace(_here(LARGE), host_has_bfloat16=has_bfloat16)
        preflight.check(_smol("search_r1_grpo"), lambda machine=machine: machine)
        assert capsys.readouterr().out.startswith(said)
    with pytest.raises(ValueError, match="takes up to"):
        preflight.check(_smol("search_r1_grpo"), lambda: _here(1 << 20))
    assert capsys.readouterr().out == HALF

    run = _clone(tmp_path)
    file = tmp_path / "conf/scale/small.yaml"
    text = file.read_text()
    file.write_text(text.replace("dtype: auto", "dtype: float32", 1))  # That of `format`.
    preflight.check(run, lambda: _here(LARGE))
    taught = "stage base, which teaches it, computes in float32: `dtype: float32` asks for it\n"
    assert capsys.readouterr().out.startswith(HALF + taught)
    file.write_text(text.replace("dtype: auto", "dtype: float32"))
    preflight.check(_again(run), lambda: _here(LARGE))
    assert capsys.readouterr().out.startswith("it computes in float32: `dtype: float32` asks for it\n")
    gpu = Machine(Memory(LARGE, "a test"), Memory(LARGE, "GPU of a test"), True, False)
    file.write_text(text)
    preflight.check(_again(run), lambda: gpu)
    assert capsys.readouterr().out.startswith("it computes in float32: this GPU has no instructions for bfloat16 (")


def _again(run: RunSettings) -> RunSettings:
    """The same settings, read anew."""
    return RunSettings(run.root, run.params)


def test_nothing_is_said_of_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(_run(), lambda: _here(16 << 30))
    assert capsys.readouterr() == ("", "")


def test_a_gpu_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three billion weights with a critic, and vLLM with half of 85.5 GB."""
    _given(monkeypatch, QWEN_3B)
    run = _run(model="qwen2.5-3b", scale="paper", generator="vllm", systems=("base", "search_r1_ppo"))
    with pytest.raises(ValueError, match=r"search_r1_ppo takes up to 136 GB of memory \(play\)") as caught:
        preflight.check(run, lambda: _here(256 * 10**9, 85_500_000_000))
    assert "there are 85.5 GB (GPU of a test). Most of it: vLLM 42.8 GB" in str(caught.value)
    assert "`lora: {rank: 16}` in conf/model" in str(caught.value)


def test_a_fleet_of_more_generators_than_fit_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    path = tmp_path / "conf/generator/fleet.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("generators: 2", "generators: 64"), encoding="utf-8")
    run = RunSettings(tmp_path, replace(shipped.settings(), generator="fleet"))
    with pytest.raises(ValueError, match=r"of memory .* and there are 11\.0 GB"):
        preflight.check(run, lambda: _here(11 * 10**9))


def test_a_plan_that_does_not_fit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preflight,
        "worst",
        lambda systems, *phase: worst([(n, replace(d, machine=_here(1))) for n, d in systems], *phase),
    )
    with pytest.raises(ValueError, match=r"conf/scale/laptop\.yaml, conf/model/tiny\.yaml: "):
        plan.write(tmp_path / "plan", _run(), {})
    assert not (tmp_path / "plan").exists()


def _clone(root: Path, config: str = "") -> RunSettings:
    shutil.copytree(ROOT / "conf", root / "conf")
    (root / ".dvc").mkdir()
    (root / ".dvc/config").write_text(config)
    return _run(root, model="smollm2-135m", scale="small", systems=("base", "search_r1_grpo"), seeds=(0, 1))


def test_too_little_disk_names_what_is_largest_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with N weights: two seeds x (start 4N and trained 2N, both twice; two checkpoints of 12N of teaching and
    of training; best policy 2N) + 14N in writing = 2 x (12N + 48N + 2N) + 14N = 138N."""
    _given(monkeypatch, SMOL)
    monkeypatch.setattr(preflight, "free_disk", lambda folder: 10**9)
    run = _clone(tmp_path)
    with pytest.raises(
        ValueError, match=r"^params\.yaml: the run writes up to 18\.6 GB, and 1\.0 GB are free"
    ) as caught:
        preflight.check(run, lambda: _here(LARGE))
    assert round(138 * SMOL.num_weights / 1e9, 1) == 18.6
    message = str(caught.value)
    assert "Most of it: checkpoints 12.9 GB" in message
    assert "one seed in place of 2 (8.3 GB less)" in message
    assert "`dvc config --local cache.type hardlink,symlink` (1.6 GB less)" in message
    assert ".scratch/work" not in message

    old = tmp_path / ".scratch/work/train@x-0-1/checkpoints"
    old.mkdir(parents=True)
    (old / "tensors.safetensors").write_bytes(bytes(10**6))
    with pytest.raises(ValueError, match=r"delete resume folders of runs that have ended in \.scratch/work"):
        preflight.check(run, lambda: _here(LARGE))


@pytest.mark.parametrize(
    ("config", "copies"),
    [
        ("", 2),
        ("[core]\n    analytics = false\n", 2),
        ('[cache]\n    type = "hardlink,symlink"\n', 1),
        ("[cache]\n    type = copy\n", 2),
        ("[cache]\n    dir = /proc/elsewhere\n", 1),
    ],
)
def test_the_cache_of_dvc_is_a_second_copy_unless_it_links_or_is_elsewhere(
    tmp_path: Path, config: str, copies: int
) -> None:
    _clone(tmp_path, config)
    assert disk.copies_of(tmp_path) == copies


def test_data_counts_on_the_disk_as_what_it_is_unpacked(tmp_path: Path) -> None:
    run = _clone(tmp_path)
    run = RunSettings(tmp_path, replace(run.params, data="folder", data_folder="mine"))
    (tmp_path / "mine/nq").mkdir(parents=True)
    assert preflight._data(run) == 0
    (tmp_path / "mine/corpus.jsonl.gz").write_bytes(bytes(100))
    (tmp_path / "mine/nq/questions.jsonl").write_bytes(bytes(7))
    assert preflight._data(run) == 7 + 100 * preflight.UNPACKED


def test_weights_that_are_there_take_no_further_room(tmp_path: Path) -> None:
    (tmp_path / "artifacts/train/x-0/policy").mkdir(parents=True)
    (tmp_path / "artifacts/train/x-0/policy/model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "artifacts/index").mkdir()
    (tmp_path / "artifacts/index/other").write_bytes(bytes(70))
    assert disk.there(tmp_path, 2) == 2000
