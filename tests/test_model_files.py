"""What is read of a model folder, what its hashes cover, and folders for which the two would differ."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks import model_files
from tasks.model import export_folder, load_policy, load_tokenizer, outline, read_weights, stored_weights
from tasks.retrieval.encoders import folder_sha256
from tasks.store import DataError
from tests.tiny import make_model, make_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def write(path: Path, tree: object) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")


def index(folder: Path, name: str) -> None:
    """Let the index name this file for every weight, and move the weights there."""
    file = folder / name
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file.parent.mkdir(exist_ok=True)
    save_file(weights, file, {"format": "pt"})
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": dict.fromkeys(weights, name)})


def change(path: Path, **keys: object) -> None:
    write(path, json.loads(path.read_text(encoding="utf-8")) | keys)


def decoy(folder: Path, name: str = "decoy.safetensors") -> None:
    save_file({"other": torch.ones(1)}, folder / name)


def below(folder: Path) -> None:
    index(folder, "sub/w.safetensors")
    decoy(folder)


def outside(folder: Path) -> None:
    index(folder, "../outside/model.safetensors")
    decoy(folder)


def absolute(folder: Path) -> None:
    index(folder, str(folder.parent / "outside.safetensors"))


def two_truths(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    decoy(folder, "other.safetensors")
    write(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(weights, "other.safetensors")})


def missing_shard(folder: Path) -> None:
    index(folder, "one.safetensors")
    (folder / "one.safetensors").unlink()


def no_map(folder: Path) -> None:
    index(folder, "one.safetensors")
    write(folder / "model.safetensors.index.json", {"weight_map": {"a": ["one.safetensors"]}})


def named_in_configuration(folder: Path) -> None:
    decoy(folder, "w.safetensors")
    index(folder, "model-1.safetensors")
    change(folder / "config.json", transformers_weights="w.safetensors")


def adapter(folder: Path) -> None:
    write(folder / "adapter_config.json", {"base_model_name_or_path": "../base", "peft_type": "LORA"})


def tokenizer_elsewhere(folder: Path) -> None:
    change(folder / "tokenizer_config.json", fast_tokenizer_files=["../other/tokenizer.4.0.json"])


def escape(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})


OF_WEIGHTS = (below, outside, absolute, decoy, two_truths, missing_shard, no_map)
"""What those refuse, too, who read weights alone."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (below, "'sub/w.safetensors', expected a plain name"),
        (outside, "'../outside/model.safetensors', expected a plain name"),
        (absolute, "expected a plain name"),
        (decoy, "found decoy.safetensors beside model.safetensors"),
        (two_truths, "which names other.safetensors: some loaders read the one"),
        (missing_shard, "names one.safetensors, which is missing"),
        (no_map, "expected a plain name"),
        (named_in_configuration, "transformers_weights='w.safetensors' names another file"),
        (adapter, "found adapter_config.json, expected a model without adapters"),
        (tokenizer_elsewhere, "one of fast_tokenizer_files is '../other/tokenizer.4.0.json'"),
        *[
            (functools.partial(escape, name=name), re.escape(f"a weight is called {name!r}, expected a name of print"))
            for name in ("\x1b[2Jx", "\x9b31m", "\x1b]0;x\x07", "a\nb")
        ],
    ],
)
def test_what_no_hash_would_cover_is_refused_by_every_reader(
    folder: Path, spoil: Callable[[Path], None], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    of_weights = (stored_weights, lambda folder: list(read_weights(folder))) if spoil in OF_WEIGHTS else ()
    for read in (load_policy, load_tokenizer, outline, folder_sha256, *of_weights):
        with pytest.raises(DataError, match=message) as refused:
            read(folder)
        assert str(refused.value).isprintable()
    assert not {"\x1b", "\x9b", "\x07"} & {*"".join(capfd.readouterr())}


def test_an_index_decides_what_all_read_and_what_the_hash_covers(folder: Path) -> None:
    before, names = model_files.weights_sha256(folder), set(stored_weights(folder))
    index(folder, "model-1.safetensors")
    decoy(folder, "consolidated.safetensors")  # As in published folders: the index says that it is not read.
    assert [file.name for file in model_files.weight_files(folder)] == ["model-1.safetensors"]
    assert model_files.weights_sha256(folder) == before
    assert set(stored_weights(folder)) == {name for name, _ in read_weights(folder)} == names
    assert names >= {name for name, _ in load_policy(folder)[0].named_parameters()}

    weights = load_file(folder / "model-1.safetensors")
    weights[min(weights)] += 1
    save_file(weights, folder / "model-1.safetensors", {"format": "pt"})
    assert model_files.weights_sha256(folder) != before


@pytest.mark.parametrize(
    "name", ["generation_config.json", "chat_template.jinja", "tokenizer.json", "additional_chat_templates/tool.jinja"]
)
def test_every_file_that_a_loader_reads_is_in_the_hash_of_the_content(folder: Path, name: str) -> None:
    before = model_files.content_sha256(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(" ")
    assert model_files.content_sha256(folder) != before


def test_a_link_counts_by_what_is_read_through_it(folder: Path) -> None:
    before = model_files.content_sha256(folder), model_files.weights_sha256(folder)
    blob = folder.parent / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert (model_files.content_sha256(folder), model_files.weights_sha256(folder)) == before
    with blob.open("ab") as file:
        file.write(b" ")
    assert model_files.content_sha256(folder) != before[0]
    assert model_files.weights_sha256(folder) != before[1]


def test_an_encoder_of_parts_elsewhere_is_refused(folder: Path) -> None:
    write(folder / "modules.json", [{"path": "../outside", "type": "x"}])
    with pytest.raises(DataError, match=r"modules.json: found path '../outside', expected a folder within"):
        folder_sha256(folder)


def test_weights_that_a_disk_has_changed_are_not_loaded(folder: Path) -> None:
    file, known = folder / "model.safetensors", model_files.weights_sha256(folder)
    model_files.require_weights(folder, known)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DataError, match=rf"found weights with sha256 [0-9a-f]{{64}}, expected {known}, those that were"
    ):
        model_files.require_weights(folder, known)
    model_files.require_weights(folder, None)
