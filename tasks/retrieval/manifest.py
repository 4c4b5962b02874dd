"""The manifest of an index: its corpus, its settings, library versions, and the checksum of every file.

Its bytes depend on corpus, settings and library versions alone, not on time, host or path. It contains a hash of its
own content, so that a setting that was edited by hand is noticed.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import conf, store
from tasks.store import DataError

NAME = "manifest.json"
FORMAT = 3
_SEAL = "content_digest"


@dataclass(frozen=True)
class Built:
    """A backend's report about the folder that it has filled.

    Attributes:
        num_passages: passages indexed.
        details: JSON-ready facts of this backend (vocabulary size, dimensions, hash of the encoder).
        libraries: installed packages whose version matters to the files.
    """

    num_passages: int
    details: dict[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    """Size and sha256 of one file of an index."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`; `files` maps names in the folder to their records."""

    format: int
    backend: str
    settings: dict[str, Any]
    corpus_sha256: str
    num_passages: int
    details: dict[str, Any]
    libraries: dict[str, str]
    files: dict[str, FileRecord]


def write(folder: Path, backend: str, settings: dict[str, Any], corpus_hash: str, built: Built) -> Manifest:
    """Record every file in `folder`. The manifest is written last, so that an index without one is incomplete."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(
        format=FORMAT,
        backend=backend,
        settings=settings,
        corpus_sha256=corpus_hash,
        num_passages=built.num_passages,
        details=built.details,
        libraries={name: version(name) for name in built.libraries},
        files={name: FileRecord((folder / name).stat().st_size, store.sha256(folder / name)) for name in names},
    )
    content = conf.plain(manifest)
    store.write_json(folder / NAME, {**content, _SEAL: store.digest(content)})
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of an index folder.

    Raises:
        DataError: there is no manifest, or it has another format.
    """
    path = folder / NAME
    if not path.is_file():
        raise DataError(f"{folder}: no search index here ({NAME} is missing). Run the index stage.")
    tree = store.read_json(path)
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise DataError(f"{path}: found format {found!r}, expected {FORMAT}. Build the index again.")
    if tree.pop(_SEAL, None) != store.digest(tree):
        raise DataError(f"{path}: changed after the index was built. Build the index again.")
    try:
        files = {str(name): FileRecord(**record) for name, record in tree.pop("files").items()}
        return Manifest(files=files, **tree)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not an index manifest ({error}). Build the index again.") from None


def other_versions(manifest: Manifest) -> list[str]:
    """`name old -> installed` for each library whose version has changed since the index was built."""
    found = {name: version(name) for name in manifest.libraries}
    return [f"{name} {built} -> {found[name]}" for name, built in manifest.libraries.items() if found[name] != built]


def version(name: str) -> str:
    """Version of an installed package, `none` if there is no such package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check(folder: Path, manifest: Manifest, corpus: Path | None, checksums: bool = True) -> None:
    """Compare a folder with its manifest, and with the corpus it is meant to serve.

    Raises:
        DataError: a file is missing, has another size or checksum, or the corpus is another one.
    """
    for name, record in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            found = "the file is missing" if size is None else f"found {size} bytes"
            raise DataError(f"{path}: {found}, the manifest says {record.bytes} bytes. Build the index again.")
        if checksums and (found_sha256 := store.sha256(path)) != record.sha256:
            raise DataError(
                f"{path}: sha256 {found_sha256[:12]} is not the {record.sha256[:12]} of the manifest: "
                "the file was damaged or changed. Build the index again."
            )
    if corpus is not None and (found_sha256 := corpus_sha256(corpus)) != manifest.corpus_sha256:
        raise DataError(
            f"{folder}: built from another corpus: {corpus} has sha256 {found_sha256[:12]}, "
            f"the index was built from {manifest.corpus_sha256[:12]}. Build the index again."
        )


def corpus_sha256(path: Path) -> str:
    """Hex digest of the uncompressed bytes of a JSONL file, so that compressing does not change a corpus.

    Raises:
        DataError: the file is missing or its gzip stream is broken (the row is named).
    """
    if not path.is_file():
        raise DataError(f"{path}: the file is missing.")
    if path.suffix != ".gz":
        return store.sha256(path)
    digest = hashlib.sha256()
    try:
        with gzip.open(path, "rb") as file:
            for block in _blocks(file):
                digest.update(block)
    except store.GZIP_DAMAGE:
        for _ in store.read_jsonl(path):  # Names the row.
            pass
        raise
    return digest.hexdigest()


def _blocks(file: gzip.GzipFile) -> Iterable[bytes]:
    while block := file.read(1 << 20):
        yield block
