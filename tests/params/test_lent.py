"""`params.yaml` is never lost: not by a kill at any point, a full disk, an edit, a damaged copy, or a link."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import store
from tasks.params import edit, lent
from tasks.runner import record, runs
from tests import shipped
from tests.pipeline.toy import HOUSE, PARAMS_YAML

ANSWERS = {"evaluate.top_k": 9}
WRITTEN = PARAMS_YAML.replace("top_k: 3", "top_k: 9")
MINE = PARAMS_YAML.replace("seeds: [0]", "seeds: [7, 8, 9]")


def settings(root: Path) -> str:
    return (root / "params.yaml").read_text(encoding="utf-8")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_file())


def killed(work: Callable[[], object]) -> None:
    """Do this in a process that ends as after SIGKILL: nothing is cleaned up."""
    if (pid := os.fork()) == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def kill_in(function: str, call: int) -> Callable[[], None]:
    """Lends in a process that is killed in this call of a function of `os`, before it does anything."""

    def work() -> None:
        real, count = getattr(os, function), [0]

        def counted(*args: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os._exit(9)
            return real(*args, **named)

        setattr(os, function, counted)
        with edit.applied(ANSWERS, root_of[0]):
            os._exit(9)

    return work


root_of: list[Path] = []


def test_settings_of_one_run_are_put_back_and_kept_ones_stay(root: Path) -> None:
    with edit.applied(ANSWERS, root) as changes:
        assert (changes, settings(root)) == (["evaluate.top_k: 3 -> 9"], WRITTEN)
    assert (settings(root), names(root)) == (PARAMS_YAML, ["params.yaml"])
    with pytest.raises(KeyError), edit.applied(ANSWERS, root):  # A run that fails.
        raise KeyError
    assert (settings(root), names(root)) == (PARAMS_YAML, ["params.yaml"])
    with edit.applied(ANSWERS, root):
        lent.keep(root)
    assert (settings(root), names(root)) == (WRITTEN, ["params.yaml"])


@pytest.mark.parametrize(("function", "call"), [(name, n) for name in ("fsync", "replace") for n in (1, 2, 3, 4)])
def test_a_kill_at_any_point_loses_nothing(root: Path, function: str, call: int) -> None:
    """The copy, the hashes and `params.yaml` are each filled, flushed and renamed; the fourth kill is in the run."""
    root_of[:] = [root]
    killed(kill_in(function, call))
    assert settings(root) == (WRITTEN if call == 4 else PARAMS_YAML)
    assert lent.restore(root) == ([lent.PUT_BACK] if call == 4 else [])
    assert (settings(root), names(root)) == (PARAMS_YAML, ["params.yaml"])


def test_settings_that_are_kept_outlive_a_kill_and_others_do_not(root: Path) -> None:
    def work() -> None:
        with edit.applied(ANSWERS, root):
            lent.keep(root)
            os._exit(9)

    killed(work)
    assert (lent.restore(root), settings(root), names(root)) == ([], WRITTEN, ["params.yaml"])


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_full_disk_changes_nothing_and_is_named(root: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]

    def full(_: int) -> None:
        count[0] += 1
        if count[0] == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    told = r"params\.yaml: the settings .* \(No space left on device\); it is as it was"
    with pytest.raises(ValueError, match=told), edit.applied(ANSWERS, root):
        pytest.fail("the run must not start")
    assert (settings(root), names(root)) == (PARAMS_YAML, ["params.yaml"])


@pytest.mark.parametrize("edited", [MINE, "mine", ""])
def test_an_edit_made_after_a_kill_or_during_a_run_stays(
    root: Path, edited: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root_of[:] = [root]
    killed(kill_in("fsync", 4))
    (root / "params.yaml").write_text(edited)
    (line,) = lent.restore(root)
    found = re.fullmatch(r"params\.yaml was edited since and stays so; (\S+) is what it was before that run", line)
    assert found is not None
    assert (settings(root), (root / found[1]).read_text()) == (edited, PARAMS_YAML)
    assert lent.restore(root) == []

    (root / "params.yaml").write_text(PARAMS_YAML)
    with edit.applied(ANSWERS, root):
        (root / "params.yaml").write_text(edited)
    assert (settings(root), (root / found[1]).read_text()) == (edited, PARAMS_YAML)
    assert f"warning: {line}" in capsys.readouterr().out


def test_settings_put_back_by_hand_or_removed_are_those_of_before(root: Path) -> None:
    root_of[:] = [root]
    killed(kill_in("fsync", 4))
    (root / "params.yaml").write_text(PARAMS_YAML)  # git checkout params.yaml
    assert lent.restore(root) == []
    assert names(root) == ["params.yaml"]
    killed(kill_in("fsync", 4))
    (root / "params.yaml").unlink()
    assert lent.restore(root) == [lent.PUT_BACK]
    assert (settings(root), names(root)) == (PARAMS_YAML, ["params.yaml"])


@pytest.mark.parametrize(("file", "content"), [
    (lent.KEPT, b""), (lent.KEPT, PARAMS_YAML.encode()[:40]), (lent.KEPT, b"\0" * 300),
    (lent.HASHES, b""), (lent.HASHES, b"[]"), (lent.HASHES, b'{"before": 7}'), (lent.HASHES, None),
])  # fmt: skip
def test_a_damaged_copy_is_never_put_back(root: Path, file: Path, content: bytes | None) -> None:
    root_of[:] = [root]
    killed(kill_in("fsync", 4))
    (root / file).unlink()
    if content is not None:
        (root / file).write_bytes(content)
    (line,) = lent.restore(root)
    assert line.startswith("params.yaml stays as it is: params.old-")
    assert "is not whole" in line
    assert settings(root) == WRITTEN
    assert (root / line.split()[5].rstrip(",")).exists(), "whatever is left of the copy stays"
    assert lent.restore(root) == []


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system, where this machine has one."""
    other = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    with tempfile.TemporaryDirectory(prefix="elsewhere-", dir=other) as folder:
        yield Path(folder)


def test_scratch_on_another_file_system_is_as_good(root: Path, elsewhere: Path) -> None:
    (root / ".scratch").symlink_to(elsewhere)
    with edit.applied(ANSWERS, root):
        assert settings(root) == WRITTEN
    assert (settings(root), list(elsewhere.iterdir())) == (PARAMS_YAML, [])


def test_kept_runs_on_another_file_system_are_as_good(root: Path, elsewhere: Path) -> None:
    (root / runs.FOLDER).symlink_to(elsewhere)
    store.write_json(root / runs.REPORTS / "a.json", 1)
    for key in ("1", "2"):
        assert runs.keep(root, key, "title", []) == key
        assert (elsewhere / runs.LATEST).readlink() == Path(key)
        store.write_json(root / runs.REPORTS / "a.json", 2)
    assert (runs.names(root), store.read_json(elsewhere / "1/a.json")) == (["1", "2"], 1)


@pytest.mark.parametrize("linked", ["artifacts", "artifacts/out"])
def test_outputs_on_another_file_system_are_as_good(root: Path, elsewhere: Path, linked: str) -> None:
    """A folder of outputs, or one output, which is replaced where it is named."""
    (root / linked).parent.mkdir(exist_ok=True)
    (root / linked).symlink_to(elsewhere)
    for number in (1, 2):
        with store.replacing_folder(root / "artifacts/out") as folder:
            store.write_json(folder / "a.json", number)
        assert store.read_json(root / "artifacts/out/a.json") == number
        assert store.write_jsonl(root / "artifacts/rows.jsonl", [{"a": number}]) == 1
        assert [row for _, row in store.read_jsonl(root / "artifacts/rows.jsonl")] == [{"a": number}]
    assert sorted(path.name for path in (root / "artifacts").iterdir()) == ["out", "rows.jsonl"]


def test_records_on_another_file_system_are_as_good(
    root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / record.FOLDER).parent.mkdir()
    (root / record.FOLDER).symlink_to(elsewhere)
    track = record.Track("plan", root)
    track.log_artifact(Path("params.yaml"))
    track.end("FINISHED", 1.0)
    assert [path.read_text() for path in elsewhere.rglob("params.yaml")] == [PARAMS_YAML]
    assert [row["kind"] for _, row in store.read_jsonl(elsewhere / f"{track.record}.jsonl")] == ["artifact", "end"]
    assert capsys.readouterr().err == ""


def test_files_are_renamed_within_one_folder_by_the_store_alone() -> None:
    """A rename between folders fails where one of them is a link or a mount, and one without a flush can be torn."""
    may = {
        "tasks/store.py",
        "tasks/params/lent.py",
        "tasks/runner/runs.py",  # A link, which has no content.
        "tasks/services/endpoint.py",  # What was spent, which is counted anew where it cannot be read.
    }
    moves = re.compile(r"os\.(replace|rename|renames)\(|\.rename\(|\.replace\([^,()=]*\)|shutil\.move\(")
    files = [*shipped.files("tasks", "*.py"), *shipped.files("flows", "*.py")]
    moving = {str(path.relative_to(HOUSE)) for path in files if moves.search(path.read_text(encoding="utf-8"))}
    assert moving == may


def test_a_file_of_the_store_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for function in ("fsync", "replace"):
        store.write_json(path, 1)

        def work(function: str = function) -> None:
            setattr(os, function, lambda *_: os._exit(9))
            store.write_json(path, 2)

        killed(work)
        assert store.read_json(path) == 1
