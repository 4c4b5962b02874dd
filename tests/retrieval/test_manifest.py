"""An index answers only for its own files and its own corpus."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks import retrieval, store
from tasks.retrieval import dense
from tasks.retrieval import manifest as manifests
from tasks.retrieval.bm25 import Settings
from tasks.store import DataError


@pytest.fixture
def built(corpus, town_passages) -> tuple[Path, Path]:
    path = corpus(town_passages)
    retrieval.build(path, path.parent / "index", Settings("bm25"))
    return path, path.parent / "index"


def test_manifest_says_what_was_built(built):
    path, index = built
    manifest = manifests.read(index)
    assert manifest.corpus_sha256 == store.sha256(path)
    assert (manifest.backend, manifest.num_passages, manifest.settings["k1"]) == ("bm25", 10, 1.5)
    assert set(manifest.files) == {p.name for p in index.iterdir()} - {"manifest.json"}
    assert manifest.libraries["bm25s"]
    assert str(path.parent) not in (index / "manifest.json").read_text()


def test_another_corpus_is_refused(built):
    path, index = built
    with path.open("a") as file:
        file.write('{"id":"new","title":"","text":"one more"}\n')
    with pytest.raises(
        DataError, match=r"built from another corpus: .*corpus.jsonl has sha256 .* Build the index again"
    ):
        retrieval.open_retriever(index, path)


def test_packing_a_corpus_does_not_change_it(built):
    path, index = built
    packed = path.with_name("corpus.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert retrieval.open_retriever(index, packed).search(["Bern"], 1)[0][0].passage_id == "p1"
    whole = packed.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-20], whole[:middle] + b"\xff" * 9 + whole[middle + 9 :], b"\x1f\x8bno gzip"):
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match=r"row \d+: the gzip stream is damaged"):
            retrieval.open_retriever(index, packed)


@pytest.mark.parametrize("name", ["data.csc.index.npy", "passages.jsonl", "offsets.npy", "vocab.index.json"])
def test_a_torn_file_is_refused(built, name):
    path, index = built
    whole = (index / name).read_bytes()
    (index / name).write_bytes(whole[:-3])
    with pytest.raises(DataError, match=f"{name}: found {len(whole) - 3} bytes, the manifest says {len(whole)} bytes"):
        retrieval.open_retriever(index, path, verify=False)
    (index / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{name}: sha256 .* was damaged or changed"):
        retrieval.open_retriever(index, path)
    (index / name).unlink()
    with pytest.raises(DataError, match=f"{name}: the file is missing"):
        retrieval.open_retriever(index)


def test_no_index_and_foreign_manifests(built, tmp_path):
    _, index = built
    with pytest.raises(DataError, match=r"no search index here"):
        retrieval.open_retriever(tmp_path / "nowhere")
    tree = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps(tree | {"format": 99}))
    with pytest.raises(DataError, match=r"found format 99, expected 3"):
        retrieval.open_retriever(index)
    write_sealed(index, tree | {"surprise": 1})
    with pytest.raises(DataError, match=r"not an index manifest"):
        retrieval.open_retriever(index)
    write_sealed(index, tree | {"backend": "magic"})
    with pytest.raises(ValueError, match=r"backend='magic': expected one of bm25, dense"):
        retrieval.open_retriever(index)


def write_sealed(index: Path, tree: Any) -> None:
    """A manifest as somebody could write it who knows the seal."""
    del tree["content_digest"]
    (index / "manifest.json").write_text(json.dumps({**tree, "content_digest": store.digest(tree)}))


@pytest.mark.parametrize(
    "change", [{"files": {}}, {"num_passages": 7}, {"libraries": {}}, {"settings": {"backend": "bm25", "k1": 0.5}}]
)
def test_a_manifest_changed_by_hand_is_refused(built, change):
    _, index = built
    tree = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps(tree | change))
    with pytest.raises(DataError, match=r"manifest.json: changed after the index was built"):
        retrieval.open_retriever(index)


def test_other_versions_of_libraries_are_told(built, capsys, monkeypatch):
    _, index = built
    retrieval.open_retriever(index)
    assert capsys.readouterr().err == ""
    real = manifests.version
    monkeypatch.setattr(manifests, "version", lambda name: "9.9" if name == "bm25s" else real(name))
    retrieval.open_retriever(index)
    told = capsys.readouterr().err
    assert f"built with other libraries (bm25s {real('bm25s')} -> 9.9): hits may differ" in told


def test_an_index_can_be_moved(built, tmp_path):
    path, index = built
    moved = tmp_path / "elsewhere"
    shutil.move(index, moved)
    assert retrieval.open_retriever(moved, path).search(["Bern"], 1)[0][0].passage_id == "p1"


def test_a_failed_build_leaves_the_old_index(built):
    path, index = built
    before = (index / "manifest.json").read_bytes()
    with path.open("a") as file:
        file.write('{"id":"x","title":"t"}\n')
    with pytest.raises(DataError, match=r"row 11: field 'text' is missing"):
        retrieval.build(path, index, Settings("bm25"))
    assert (index / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in index.parent.iterdir()) == ["corpus.jsonl", "index"]


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"no passages in it"):
        retrieval.build(tmp_path / "corpus.jsonl", tmp_path / "index", Settings("bm25"))
    assert not (tmp_path / "index").exists()


def test_settings_come_from_the_named_file(tmp_path):
    folder = tmp_path / "conf" / "retriever"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("backend: bm25\nk1: 0.9\n")
    assert retrieval.load_settings("mine", tmp_path) == Settings("bm25", k1=0.9)
    (folder / "mine.yaml").write_text("backend: bm25\nk: 0.9\n")
    with pytest.raises(ValueError, match=r"mine.yaml: unknown key 'k'. Did you mean 'k1'"):
        retrieval.load_settings("mine", tmp_path)
    (folder / "mine.yaml").write_text("k1: 0.9\n")
    with pytest.raises(ValueError, match=r"mine.yaml: backend=None: expected one of bm25, dense"):
        retrieval.load_settings("mine", tmp_path)


def test_the_files_in_conf_are_valid():
    root = Path(__file__).parents[2]
    assert retrieval.load_settings("bm25", root).backend == "bm25"
    assert retrieval.load_settings("dense", root).encoder == "minilm"


@pytest.mark.parametrize("settings", [Settings("bm25"), dense.Settings("dense")])
def test_an_id_that_two_rows_have_is_refused(corpus, town_passages, settings):
    path = corpus(town_passages)
    with path.open("a") as file:
        file.write('\n{"id":"p3","title":"","text":"again"}\n')
    with pytest.raises(
        DataError, match=r"corpus.jsonl: row 12: field 'id': found 'p3' again, first in row 4; expected"
    ):
        retrieval.build(path, path.parent / "index", settings, path.parent / "scratch")
    assert not (path.parent / "index").exists()
