"""Runs and made-up GPUs: what does not fit ends before the first stage, and runs of two clones take turns."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tasks.params import edit
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tests.stages.clone import Clone
from tests.tiny import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "models/Qwen2.5-3B-Instruct"
MACHINE = """

def this_machine() -> Machine:
    return Machine(Memory(%d, "free memory of a test"), %s, True, True, 1)
"""
"""At the end of `tasks/plan/machine.py`: what a clone takes for its machine."""
CARD = 'Memory(42_900_000_000, "GPU A100 of a test")'
ONE_GPU = """

def pick_device(count: int = 1) -> torch.device:
    device.hold(["GPU-made-up"][:count])
    return torch.device("cpu")
"""
"""At the end of `tasks/model.py`: a host with one GPU, on which a processor computes."""


def put_model(folder: Path) -> None:
    """Qwen2.5-3B with weights that take no room on the disk: a file with holes."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in model.named_parameters():
        begin, end = end, end + 2 * weight.numel()
        head[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    ("host", "card", "has_model", "words", "expected"),
    [
        (
            256 * 10**9, CARD, False, ["PRESET=3b-1gpu"],
            "conf/model/qwen2.5-3b.yaml: pretrained: folder='models/Qwen2.5-3B-Instruct': there is no such folder. Put "
            "the model there; one of the Hugging Face hub by `HF_HUB_OFFLINE=0 hf download ",
        ),
        (
            256 * 10**9, CARD, True, ["PRESET=3b-1gpu"],
            "conf/scale/paper.yaml, conf/model/qwen2.5-3b.yaml: search_r1_grpo takes up to 75.4 GB of memory (update), "
            "and there are 42.9 GB (GPU A100 of a test). Most of it: ",
        ),
        (
            64 * 10**9, "None", True, ["MODEL=qwen2.5-3b", "SCALE=paper", "GENERATOR=vllm_shared"],
            "GB (free memory of a test, which has no GPU). Most of it: ",
        ),
        (256 * 10**9, CARD, True, ["MODEL=qwen2.5-3b", "SCALE=paper", "ENGINE=zero2_8"],
         "conf/engine/zero2_8.yaml: workers: 8 of them are placed on localhost, which has 1 GPU, expected one for"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_a_gpu_ends_before_its_first_stage(
    host: int, card: str, has_model: bool, words: list[str], expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`PRESET=` for more GPUs than there are is refused still earlier, see test_places."""
    clone = Clone.make(tmp_path / "clone")
    subprocess.run(["git", "init", "-q", str(clone.root)], check=True)
    with (clone.root / "tasks/plan/machine.py").open("a", encoding="utf-8") as file:
        file.write(MACHINE % (host, card))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: Made-up'\n", encoding="utf-8")
    (tools / "nvidia-smi").chmod(0o755)
    if has_model:
        (clone.root / MODEL).mkdir(parents=True)
        put_model(clone.root / MODEL)

    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    by_flow = has_model and words == ["PRESET=3b-1gpu"]  # The others by the stage that it starts first.
    words = [*words, "METHODS=search_r1_grpo"]
    if by_flow:
        done = clone.run("flows.reproduce", "--no-prefect", *(part for word in words for part in ("--set", word)))
        said = "error: plan: "
    else:
        edit.apply(edit.parse(words, clone.root), clone.root)
        done, said = clone.stage("plan"), "error: "
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(said), line
    assert expected in line, line
    assert "Traceback" not in done.stdout + done.stderr
    assert not clone.files()


TRAIN = ("--system", "search_r1_ppo", "--seed", "0")


def training(clone: Clone, temporary: Path) -> subprocess.Popen[str]:
    """The training stage of a clone, on a host with other runs."""
    command = [sys.executable, "-m", "tasks.stages.train", *TRAIN]
    env = {**clone.env(), "TMPDIR": str(temporary)}
    return subprocess.Popen(
        command, cwd=clone.root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.long
def test_training_stages_of_two_clones_take_turns_on_a_gpu(tmp_path: Path) -> None:
    first = Clone.make(tmp_path / "first")
    with (first.root / "tasks/model.py").open("a", encoding="utf-8") as file:
        file.write(ONE_GPU)
    first.must("data", "validate", "index", "base --seed 0", "augment", "inputs --system search_r1_ppo --seed 0")
    second = first.copy(tmp_path / "second")
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    one = training(first, temporary)
    until = time.monotonic() + 120
    while not list(temporary.glob("breadcrumb-*/*.holder")):
        assert one.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    one.send_signal(signal.SIGSTOP)
    other = training(second, temporary)
    assert other.stdout is not None
    said = []
    for line in other.stdout:
        said.append(line)
        if "waiting" in line:
            break
    one.send_signal(signal.SIGCONT)
    told = f"GPU GPU-made-up is in use by process {one.pid} in {first.root}: waiting until that process ends"
    assert said[-1].strip() == told, said

    for stage in (one, other):
        out, _ = stage.communicate(timeout=300)
        assert stage.returncode == 0, out
    assert first.files("artifacts/train") == second.files("artifacts/train")
