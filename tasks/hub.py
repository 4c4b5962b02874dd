"""Fetches a model of the Hugging Face hub at one commit, and says why it cannot.

`python -m tasks.hub NAME REVISION FOLDER` downloads, in a process of its own: huggingface_hub reads HF_HUB_OFFLINE when
it is imported, and a run has set it. Python files are never among what is downloaded.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.store import DataError, OutageError

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
ANSWERS = {
    "GatedRepoError": (
        "its owner gives it to people who have accepted its terms. Accept them on its page of the hub, and set "
        "HF_TOKEN to a token of yours"
    ),
    "RepositoryNotFoundError": (
        "the hub has no such model, or shows it to nobody without a token. Correct its name in conf/model, or set "
        "HF_TOKEN to a token that may read it"
    ),
    "RevisionNotFoundError": (
        "the hub has this model, but no such revision. Name a branch, tag or commit of it in conf/model, such as main"
    ),
    "RemoteEntryNotFoundError": "a file of this revision is missing on the hub. Name another revision in conf/model",
    "HFValidationError": "this can be no name of the hub. Write organisation/name in conf/model",
}
"""Errors of huggingface_hub that its user can mend -> what they mean and what to do, special ones first."""


def download(name: str, revision: str, out: Path, folder: str) -> str:
    """Download configuration, safetensors weights and tokenizer of a model; returns the commit.

    Args:
        name: organisation/name.
        revision: a commit, a tag or a branch.
        out: where the files go.
        folder: of the model, for messages.

    Raises:
        DataError: name, revision, rights or disk are wrong.
        OutageError: the hub cannot be reached or answers with another error.
    """
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tasks.hub", name, revision, str(out)],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout.split()[-1]
    said = done.stderr.strip().splitlines() or ["no reason given"]
    try:
        found = json.loads(said[-1])
    except ValueError:  # It could not even begin.
        found = {"kinds": [], "number": None, "text": said[-1]}
    raise explained(f"{name} at {revision}", name, folder, found["kinds"], found["number"], found["text"])


def explained(what: str, name: str, folder: str, kinds: Sequence[str], number: int | None, text: str) -> Exception:
    """The error of a failed download.

    Args:
        what: model and revision, for the message.
        name: of the model.
        folder: that it should have filled.
        kinds: classes of what huggingface_hub raised, the own one first.
        number: its `errno`, if it has one.
        text: its message.
    """
    reason = " ".join(text.split())[:300].rstrip(".") or "no reason given"
    if number == errno.ENOSPC or "No space left on device" in text:
        return DataError(
            f"{what}: no space left on the disk while it was downloaded to {folder}. Free some, run again."
        )
    if "PermissionError" in kinds:
        return DataError(
            f"{what}: no permission to write what was downloaded ({reason}). Give this user the permission to write "
            f"there, or name another folder than {folder} in conf/model."
        )

    for kind, answer in ANSWERS.items():
        if kind in kinds:
            return DataError(f"the hub does not give {what}: {answer} ({reason}).")
    return OutageError(
        f"the hub does not give {what}: it cannot be reached, or answers with an error ({reason}). Run again where "
        "there is a network: a run asks for the source that conf/model names even with HF_HUB_OFFLINE=1, which keeps "
        f"it from all other downloads (`make run HF_HUB_OFFLINE=0`). Or place the folder by hand: `HF_HUB_OFFLINE=0 hf "
        f"download {name} --local-dir {folder}` on another machine, and copy {folder} here."
    )


def _main(name: str, revision: str, out: str) -> int:
    import huggingface_hub as hub

    try:
        commit = hub.model_info(name, revision=revision).sha
        hub.snapshot_download(name, revision=commit, local_dir=out, allow_patterns=list(PATTERNS))
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found = {"kinds": kinds, "number": getattr(error, "errno", None), "text": str(error)}
        print(json.dumps(found), file=sys.stderr)
        return 1
    print(commit)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
