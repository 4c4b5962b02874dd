"""How programs end whose reader goes, or that are started with closed streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIPE_CLOSED = 141


def ran(code: str, redirection: str, folder: Path = ROOT) -> tuple[int, str]:
    """Exit status of Python with this code, and what it says on the streams that are left."""
    words = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirection}', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


WAYS = ["from tasks import program; program.run(main)", "import flows; exit(flows.command(main))"]
LOUD = "\n    for _ in range(20_000): print('a line that somebody reads', flush={flush})\n    return 0\n"


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_goes_ends_a_program_quietly(way: str, flush: bool) -> None:
    code, said = ran(f"def main():{LOUD.format(flush=flush)}{way}", "| head -1")
    assert (code, said) == (PIPE_CLOSED, "a line that somebody reads\n")


def test_help_that_is_not_read_to_its_end_is_no_error() -> None:
    code, said = ran("import sys; sys.argv[0] = 'x'; from tasks.tool import ask; from tasks import program; "
                     "program.run(lambda: [print('y' * 200_000), ask.main(['--help'])])", "| head -c 3")  # fmt: skip
    assert (code, said) == (PIPE_CLOSED, "yyy")


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- 2>&-", ">&-"])
@pytest.mark.parametrize("way", WAYS)
def test_no_file_gets_the_number_of_a_closed_stream(way: str, closed: str, tmp_path: Path) -> None:
    main = (
        "import os, subprocess, sys\n"
        "def main():\n"
        "    with open('kept', 'w') as file:\n"
        "        print('to nobody', file=sys.stderr, flush=True); print('out')\n"
        "        subprocess.run(['sh', '-c', 'echo lost >&2'])\n"
        "        file.write(str(file.fileno()))\n"
        "    return 3\n"
    )
    code, said = ran(f"{main}{way}", closed, tmp_path)
    assert (code, said.replace("out\n", "").replace("to nobody\nlost\n", "")) == (3, "")
    assert int((tmp_path / "kept").read_text(encoding="utf-8")) > 2


def test_an_error_of_a_socket_is_not_taken_for_a_reader_that_went() -> None:
    code, said = ran(
        "from tasks import program\ndef main(): raise BrokenPipeError('of a socket')\nprogram.run(main)", ""
    )
    assert code == 1
    assert "of a socket" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("lines", [1, 20_000])
def test_a_full_disk_behind_the_output_is_one_line(lines: int) -> None:
    code, said = ran(
        f"from tasks import program\nprogram.run(lambda: [print('x') for _ in range({lines})] and 0)", ">/dev/full"
    )
    assert (code, said) == (1, "error: no space left where the output goes. Free some and run again.\n")


def test_a_stop_stays_a_stop(tmp_path: Path) -> None:
    code, said = ran(
        "import flows\ndef main(): raise KeyboardInterrupt(15)\nexit(flows.command(main, 'stopped.'))", "", tmp_path
    )
    assert (code, said) == (143, "stopped.\n")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", "{folder}: found no git repository, as where a ZIP file was unpacked; DVC needs"),
        (
            "from tasks import writable\ndef refuse(root): raise ValueError('.scratch: is of root')\n"
            "writable.check_clone = refuse",
            ".scratch: is of root",
        ),
    ],
)
def test_a_program_of_a_clone_checks_it_before_it_begins(fault: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / ".dvc").mkdir()
    code, said = ran(f"import flows\n{fault}\nexit(flows.command(lambda: print('begun') or 0))", "", tmp_path)
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"error: {told.format(folder=tmp_path)}")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("ENOSPC", "no space left on the disk while writing .dvc/tmp/lock. Free some and run again"),
        ("EDQUOT", "no space left on the disk while writing .dvc/tmp/lock. Free some and run again"),
        ("EACCES", ".dvc/tmp/lock: refused. {folder}/.dvc/tmp: this user cannot write there"),
    ],
)
def test_a_place_that_takes_nothing_ends_a_program_of_a_clone_with_one_line(
    fault: str, told: str, tmp_path: Path
) -> None:
    main = f"import errno\ndef main(): raise OSError(errno.{fault}, 'refused', '.dvc/tmp/lock')\n"
    code, said = ran(f"{main}import flows; exit(flows.command(main))", "", tmp_path)
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"error: {told.format(folder=tmp_path)}")
