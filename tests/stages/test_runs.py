"""The report of each run is kept with its settings, once, and old ones are listed and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks import store
from tasks.runner import runs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone with a report and three kept runs, of which the second is a smoke run."""
    (tmp_path / "reports").mkdir()
    for key, scale in (("1-a", "laptop"), ("2-b", "smoke"), ("3-c", "small")):
        report(tmp_path, scale)
        assert runs.keep(tmp_path, key, f"{scale}: base; seed 0", [f"scale: laptop -> {scale}"]) == key
    return tmp_path


def report(root: Path, scale: str) -> None:
    (root / "params.yaml").write_text(f"scale: {scale}\n")
    (root / "reports/results.md").write_text(f"| {scale} |\n")
    (root / "reports/index.html").write_text(f"{scale}{os.urandom(4).hex()}" * 50_000)
    (root / "reports/.unfinished.x").touch()
    (root / "reports/metrics").mkdir(exist_ok=True)
    (root / "reports/metrics/base.json").write_text(f'{{"scale": "{scale}"}}')
    (root / "reports/of_its_user/notes").mkdir(parents=True, exist_ok=True)
    (root / "reports/of_its_user/notes/n.txt").write_text(scale)


def latest(root: Path) -> str:
    return str((root / "runs/latest").readlink())


def test_each_run_has_its_report_and_its_settings(root: Path) -> None:
    assert latest(root) == "3-c"
    for key, scale in (("1-a", "laptop"), ("2-b", "smoke"), ("3-c", "small")):
        folder = root / "runs" / key
        assert sorted(path.name for path in folder.iterdir()) == [
            "about.json", "index.html", "metrics", "of_its_user", "params.yaml", "results.md"
        ]  # fmt: skip
        assert (folder / "params.yaml").read_text() == f"scale: {scale}\n"
        assert (folder / "results.md").read_text() == f"| {scale} |\n"
        assert store.read_json(folder / "metrics/base.json") == {"scale": scale}
        assert (folder / "of_its_user/notes/n.txt").read_text() == scale
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["1-a", "2-b", "3-c", "latest"]


def test_a_run_that_changes_nothing_makes_no_copy(root: Path) -> None:
    report(root, "laptop")  # Its page alone differs.
    assert runs.keep(root, "4-d", "again", []) == "1-a"
    assert (runs.names(root), latest(root)) == (["2-b", "3-c", "1-a"], "1-a")
    (root / "params.yaml").write_text("scale: laptop\nset: {train: {num_steps: 3}}\n")
    assert runs.keep(root, "5-e", "other settings, the same table", []) == "5-e"
    assert latest(root) == "5-e"


def test_without_a_report_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("scale: smoke\n")
    assert runs.keep(tmp_path, "1-a", "x", []) == ""
    assert "No run is kept in runs/ yet." in runs.listed(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_copy_that_was_cut_short_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(root, "paper")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space"):
        runs.keep(root, "4-d", "x", [])
    monkeypatch.undo()
    assert (runs.names(root), latest(root)) == (["1-a", "2-b", "3-c"], "3-c")
    (root / "runs/.4-d.abcdefgh.partial").mkdir()  # As after SIGKILL.
    (root / "runs/.latest").symlink_to("nowhere")
    assert runs.keep(root, "5-e", "x", []) == "5-e"
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["1-a", "2-b", "3-c", "5-e", "latest"]


def test_the_last_run_stays_also_where_its_report_was_kept_before(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(root, "laptop")
    assert runs.keep(root, "9-z", "x", []) == latest(root) == "1-a"
    assert runs.names(root) == ["2-b", "3-c", "1-a"]
    assert runs.main(["--keep-last", "2", "--remove", " 2-b , 2-b"], root) == 0
    assert (runs.names(root), latest(root)) == (["3-c", "1-a"], "1-a")
    assert runs.main(["--keep-last", "1"], root) == 0
    assert (runs.names(root), latest(root)) == (["1-a"], "1-a")
    assert "error" not in capsys.readouterr().err


def test_old_ones_are_listed_and_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> list[str]:
        status = runs.main(list(words), root)
        found = capsys.readouterr()
        return [str(status), *(found.out + found.err).splitlines()]

    status, *lines, total = told()
    assert status == "0"
    assert lines[1] == "2-b   0.7 MB  smoke: base; seed 0 (scale: laptop -> smoke)"
    assert [line.endswith(" <- latest") for line in lines] == [False, False, True]
    assert total.startswith("3 runs, 2.")

    for words, error in ((["--remove", "2-b,9-z"], "REMOVE=9-z: there is no such run. Known: 1-a, 2-b, 3-c."),
                         (["--remove", "../reports"], "there is no such run"), (["--remove", "latest"], "no such run"),
                         (["--keep-last", "-1"], "KEEP_LAST='-1': expected a number")):  # fmt: skip
        status, line = told(*words)
        assert (status, error in line) == ("1", True)
        assert runs.names(root) == ["1-a", "2-b", "3-c"]

    assert told("--remove", "3-c")[0] == "0"
    assert (runs.names(root), latest(root)) == (["1-a", "2-b"], "2-b")
    assert told("--keep-last", "1")[0] == "0"
    assert (runs.names(root), latest(root)) == (["2-b"], "2-b")
    assert told("--keep-last", "0")[1].startswith("No run is kept")
    assert sorted(root.joinpath("runs").iterdir()) == []
    store.write_json(root / "runs/broken/about.json", [])
    assert "broken" in told()[1]
