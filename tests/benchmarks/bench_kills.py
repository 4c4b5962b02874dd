"""Kills a run at random moments, lets the next one end it, and compares every byte with an undisturbed run.

    python -m tests.benchmarks.bench_kills [--kills 10] [--seed 0] [--folder F] [--cut] [--one base,train] [NAME=value]

The variables are those of `make run`, such as MODEL=smollm2-135m SCALE=small METHODS=search_r1_grpo SEEDS=0. A clone
is run once undisturbed. Then all results, caches and resume folders are taken away and the run begins anew. At a random
moment every process that works in the clone gets signal 9, and the next run goes on from what is left, until stages at
work were killed that many times; a run that ends before begins anew. `--cut` makes the steps of `conf/scale/small.yaml`
few, so that a run takes minutes.

With `--one base,train` a single process is killed at each moment: the process of one of these stages, one of its
workers or one of its generators, drawn at random. All of that stage must then be gone within 15 seconds, unless it was
a generator, which others may replace.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.bench_stops import differing, hashes_of, processes_in
from tests.stages.clone import Clone, cut

PATIENCE_S, LIMIT_S = 3 * 3600.0, 15.0
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
GENERATOR = "tasks.generate.fleet_worker"
LEARNS = re.compile(rf"^\S*python\S* -m (tasks\.stages\.(?:base|train)|tasks\.engine\.deepspeed_worker|{GENERATOR})\b")
"""The words of a process that takes part in learning."""


@dataclass(frozen=True)
class Runs:
    """Runs of one clone with the same variables."""

    clone: Clone
    words: list[str]

    @property
    def said(self) -> Path:
        """The file with what all runs printed."""
        return self.clone.root.parent / "said.txt"

    def start(self) -> subprocess.Popen[bytes]:
        """`make run`, without servers."""
        command, env = self.clone.make_words("run", *self.words)
        with self.said.open("ab") as said:
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
            raise RuntimeError(f"the run ended with {code}; see {self.said}")
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
                raise RuntimeError(f"the run ended with {code}; see {self.said}")
            return ""
        stages = self._kill_all()
        made.wait()
        return ", ".join(sorted(stages))

    def all_killed(self, rng: random.Random, longest: float) -> Iterator[str]:
        """Kill all of a run at random moments, again and again; after each kill, what was killed."""
        while True:
            moment = rng.uniform(5, 5 + longest)
            if stages := self.kill_after(moment):
                yield f"{stages} after {moment:.1f} s"
            elif (self.clone.root / "reports/results.csv").is_file():
                print("all is made, so the run begins anew", flush=True)
                self.forget()

    def one_killed(self, rng: random.Random, longest: float, stages: list[str]) -> Iterator[str]:
        """Kill one process of those that learn in these stages at random moments, again and again, likewise."""
        made = self.start()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if code := made.wait(rng.uniform(1, 1 + longest)):
                        raise RuntimeError(f"the run ended with {code}; see {self.said}")
                    print("all is made, so the run begins anew", flush=True)
                    self.forget()
                    made = self.start()
                    continue
                family = self._learning(rng, stages)
                if not family:
                    continue
                victim = rng.choice(sorted(family))
                told = len(self._phases())
                with contextlib.suppress(ProcessLookupError):  # It has ended since.
                    os.kill(victim, signal.SIGKILL)
                gone = self._gone_after(victim, family)
                if gone is None:
                    yield f"{family[victim]}, the others go on"
                    continue
                made.wait()
                where = "".join(f" in {phase}" for phase in self._phases()[told : told + 1])
                yield f"{family[victim]}{where}, all gone after {gone:.1f} s"
                made = self.start()
        finally:
            self._kill_all()
            made.wait()

    def _phases(self) -> list[str]:
        """What workers did when they were lost, as the runs have told it."""
        return re.findall(r"] \S+ +\| error: worker \d+ on \S+, in ([^:]+):", self.said.read_text(encoding="utf-8"))

    def _learning(self, rng: random.Random, stages: list[str]) -> dict[int, str]:
        """The process of one of these stages, its workers and its generators, by module; empty if none is at work."""
        found = self._by_module()
        working = sorted(pid for pid, module in found.items() if module in [f"tasks.stages.{name}" for name in stages])
        if not working:
            return {}
        stage = rng.choice(working)
        with contextlib.suppress(psutil.NoSuchProcess):
            below = {process.pid for process in psutil.Process(stage).children()}
            return {pid: module for pid, module in found.items() if pid in below | {stage}}
        return {}

    def _by_module(self) -> dict[int, str]:
        found = {pid: LEARNS.match(words) for pid, words in processes_in(self.clone.root).items()}
        return {pid: match[1] for pid, match in found.items() if match}

    def _gone_after(self, victim: int, family: dict[int, str]) -> float | None:
        """Seconds until all others of a family are gone; None if they go on without a generator.

        Raises:
            RuntimeError: after `LIMIT_S` some are gone, or all are there without one that they need.
        """
        began, others = time.monotonic(), family.keys() - {victim}
        while (passed := time.monotonic() - began) < LIMIT_S:
            if not (left := others & self._by_module().keys()):
                return passed
            time.sleep(0.05)
        if family[victim] == GENERATOR and left == others:
            return None
        raise RuntimeError(f"{family[victim]} was killed {passed:.0f} s ago, and {len(left)} of {len(others)} are left")

    def _kill_all(self) -> set[str]:
        """Kill every process that works in the clone; the stages among them."""
        stages = set()
        while found := processes_in(self.clone.root):
            stages |= {match[1] for words in found.values() if (match := STAGE.search(words))}
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the clone here")
    parser.add_argument("--cut", action="store_true", help="few steps, at SCALE=small")
    parser.add_argument("--one", choices=("base", "train", "base,train"), help="kill single processes")
    parser.add_argument("words", nargs="*", metavar="NAME=value")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as made:
        folder = (given.folder or Path(made)).resolve()
        runs = Runs(Clone.make(folder / "clone", smoke=False), given.words)
        subprocess.run(["git", "init", "-q", str(runs.clone.root)], check=True)
        if given.cut:
            cut(runs.clone.root / "conf/scale/small.yaml", CUT)
        runs.forget()
        seconds = runs.finish()
        wanted = hashes_of(runs.clone)
        print(f"undisturbed: {seconds:.0f} s, {len(wanted)} files", flush=True)

        runs.forget()
        longest = 2 * seconds / given.kills
        # A run needs half a minute until a stage learns, and is to come further than its first one.
        single = (given.one or "").split(",")
        kills = runs.one_killed(rng, max(60.0, longest), single) if given.one else runs.all_killed(rng, longest)
        for number, said in zip(range(1, given.kills + 1), kills, strict=False):
            print(f"kill {number:2}: {said}", flush=True)
        kills.close()
        print(f"the last run: {runs.finish():.0f} s", flush=True)
        other = differing(hashes_of(runs.clone), wanted)
    print(f"other bytes: {', '.join(other) or 'none'}")
    return 1 if other else 0


if __name__ == "__main__":
    raise SystemExit(main())
