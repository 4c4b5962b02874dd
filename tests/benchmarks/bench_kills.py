"""Kills a run at random moments, lets the next one end it, and compares every byte with an undisturbed run.

    python -m tests.benchmarks.bench_kills [--kills 10] [--seed 0] [--folder FOLDER] [--cut] NAME=value ...

The variables are those of `make run`, such as MODEL=smollm2-135m SCALE=small METHODS=search_r1_grpo SEEDS=0. A clone
is run once undisturbed. Then all results, caches and resume folders are taken away and the run begins anew. At a random
moment every process that works in the clone gets signal 9, and the next run goes on from what is left, until stages at
work were killed that many times; a run that ends before begins anew. `--cut` makes the steps of `conf/scale/small.yaml`
few, so that a run takes minutes.

Exit 1 unless the last run ends well and gives the bytes of the undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.bench_stops import differing, hashes_of, processes_in
from tests.stages.clone import Clone

PATIENCE_S = 3 * 3600.0
CUT = {
    "max_questions": "60",
    "max_steps": "10",
    "num_steps": "6",
    "rollouts_per_step": "20",
    "checkpoint_every": "2",
    "validate_every": "3",
    "validate_questions": "8",
}
STAGE = re.compile(r"tasks\.stages\.(\w+)")


@dataclass(frozen=True)
class Runs:
    """Runs of one clone with the same variables."""

    clone: Clone
    words: list[str]

    def start(self) -> subprocess.Popen[bytes]:
        """`make run`, without servers; what it prints goes to `said.txt` beside the clone."""
        command, env = self.clone.make_words("run", *self.words)
        with (self.clone.root.parent / "said.txt").open("ab") as said:
            return subprocess.Popen(
                command, cwd=self.clone.root, env={**env, "BREADCRUMB_TRACKING": "off"}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def finish(self) -> float:
        """Run to the end; seconds that it took.

        Raises:
            RuntimeError: it did not end well.
        """
        began = time.monotonic()
        if code := self.start().wait(PATIENCE_S):
            raise RuntimeError(f"the run ended with {code}; see {self.clone.root.parent / 'said.txt'}")
        return time.monotonic() - began

    def forget(self) -> None:
        """Take away all that runs have left."""
        for name in ("artifacts", "reports", ".dvc/cache", ".dvc/tmp", ".scratch"):
            shutil.rmtree(self.clone.root / name, ignore_errors=True)
        (self.clone.root / "dvc.lock").unlink(missing_ok=True)

    def kill_after(self, seconds: float) -> str:
        """Start a run and kill all of it after so long; the stages that were at work.

        Empty if there was none: the run had ended before, or was between stages.

        Raises:
            RuntimeError: it had ended with an error.
        """
        made = self.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := made.wait(seconds):
                raise RuntimeError(f"the run ended with {code}; see {self.clone.root.parent / 'said.txt'}")
            return ""
        stages = set()
        while found := processes_in(self.clone.root):
            stages |= {match[1] for words in found.values() if (match := STAGE.search(words))}
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        made.wait()
        return ", ".join(sorted(stages))


def _cut(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for key, value in CUT.items():
        text, count = re.subn(rf"\b{key}: [^,}}\n]+", f"{key}: {value}", text)
        if not count:
            raise ValueError(f"{path}: found no {key} to cut")
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the clone here")
    parser.add_argument("--cut", action="store_true", help="few steps, at SCALE=small")
    parser.add_argument("words", nargs="*", metavar="NAME=value")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as made:
        folder = (given.folder or Path(made)).resolve()
        runs = Runs(Clone.make(folder / "clone", smoke=False), given.words)
        subprocess.run(["git", "init", "-q", str(runs.clone.root)], check=True)
        if given.cut:
            _cut(runs.clone.root / "conf/scale/small.yaml")
        runs.forget()
        seconds = runs.finish()
        wanted = hashes_of(runs.clone)
        print(f"undisturbed: {seconds:.0f} s, {len(wanted)} files", flush=True)

        runs.forget()
        killed = 0
        while killed < given.kills:
            moment = rng.uniform(5, 5 + 2 * seconds / given.kills)
            if stages := runs.kill_after(moment):
                killed += 1
                print(f"kill {killed:2} after {moment:5.1f} s: {stages}", flush=True)
            elif (runs.clone.root / "reports/results.csv").is_file():
                print("all is made, so the run begins anew", flush=True)
                runs.forget()
        print(f"the last run: {runs.finish():.0f} s", flush=True)
        other = differing(hashes_of(runs.clone), wanted)
    print(f"other bytes: {', '.join(other) or 'none'}")
    return 1 if other else 0


if __name__ == "__main__":
    raise SystemExit(main())
