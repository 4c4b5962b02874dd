"""`python -m tasks.registry.nightly` plays a night: registered policies answer its questions, and a change is an alarm.

`--accept REASON` takes the last night for good; the rules stand in `tasks/registry/nights.py`. A night trains nothing.
A folder of its own holds what it needs, with the settings of `conf/nightly/default.yaml` in the place of
`params.yaml`, so nothing that other runs of the clone do changes a night. DVC makes questions and index there with the
stages of every run, and takes them from the clone's cache where they are the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from tasks import conf, identity, own, params, planned, program, store
from tasks.data.records import question_row, read_questions
from tasks.data.sample import choose
from tasks.registry import nights
from tasks.registry.__main__ import CHAMPION, NAME
from tasks.registry.nights import Night
from tasks.runner import process, upload
from tasks.runner.git import read_commit
from tasks.runner.upload import Server

CONFIG = "[core]\n    analytics = false\n    check_update = false\n    no_scm = true\n[cache]\n    dir = {}\n"


def prepare(root: Path, server: Server) -> None:
    """Make the folder of the night and write what is to be played into `night.json`.

    Raises:
        ValueError: a setting is wrong, or no policy is registered.
        subprocess.CalledProcessError: a stage failed, and has said why.
    """
    chosen = params.nightly(root)
    policies = _policies(server, chosen.newest)
    folder = root / nights.SET
    _copy(root, folder, conf.plain(chosen.params))
    env = {**os.environ, "BREADCRUMB_TRACKING": "off"}
    subprocess.run([sys.executable, "-m", "dvc", "repro", "index"], cwd=folder, env=env, check=True)

    plan = planned.read(folder, f"evaluate@{chosen.params.systems[0]}-{chosen.params.seeds[0]}").settings
    data = folder / "artifacts/data"
    asked = choose(list(read_questions(data / "questions.jsonl")), plan["splits"], plan["max_questions"])
    if not asked:
        raise ValueError(f"conf/nightly/default.yaml: data: {chosen.params.data} has no question in {plan['splits']}")
    store.write_jsonl(folder / "questions.jsonl", map(question_row, asked))
    index = planned.read(folder, "index").settings
    passages = store.read_json(data / "manifest.json")["data_sha256"]  # Of all questions, too.
    fixed = [store.sha256(folder / "questions.jsonl"), passages, index]
    night = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": read_commit(root).sha or "none",
        "policies": [{**policy, "inputs": store.digest(*fixed, policy["version"])} for policy in policies],
    }
    store.write_json(root / nights.FOLDER / nights.NIGHT, night)


def _copy(root: Path, folder: Path, settings: dict[str, Any]) -> None:
    """What the stages read: code, settings, pinned libraries."""
    (folder / ".dvc").mkdir(parents=True, exist_ok=True)
    cache = os.path.relpath(root / ".dvc/cache", folder / ".dvc")
    (folder / ".dvc/config").write_text(CONFIG.format(cache), encoding="utf-8")
    for name in ("tasks", "conf", "requirements"):
        source = identity.ROOT / name if name == "tasks" else root / name
        shutil.rmtree(folder / name, ignore_errors=True)
        # With what Python compiled, but for what another process is writing at this moment.
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        mine = own.folder(root)
        if mine is not None and (mine / name).is_dir():  # A policy may have been trained with parts of it.
            shutil.copytree(mine / name, folder / name, dirs_exist_ok=True)
    shutil.copyfile(root / "dvc.yaml", folder / "dvc.yaml")
    (folder / conf.PARAMS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _policies(server: Server, newest: int) -> list[store.Row]:
    """The champion and the newest versions, in order of their numbers."""
    versions = {int(one.version): one for one in server.client.search_model_versions(f"name = '{NAME}'")}
    if not versions:
        raise ValueError(f"no policy is registered as {NAME}. Register the best one of a report: make register")
    numbers = set(sorted(versions)[len(versions) - min(newest, len(versions)) :])
    aliases = server.client.get_registered_model(NAME).aliases
    champions = {int(aliases[CHAMPION])} if CHAMPION in aliases else set()
    return [
        {
            "version": str(number),
            "name": f"{versions[number].tags['system']}-{versions[number].tags['seed']} v{number}",
            "is_champion": number in champions,
        }
        for number in sorted(numbers | champions)
    ]


def play(root: Path) -> Night:
    """Play a night and compare it with the last good one; the history is written only when every policy has played.

    Raises:
        ValueError: another night is at work, a setting is wrong, or no policy is registered.
        subprocess.CalledProcessError: a stage or a policy failed, and has said why.
    """
    folder = root / nights.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / "night.lock").acquire(timeout=0)
    except Timeout:
        raise ValueError("another night is at work in this clone. Wait for it to end, or stop it.") from None

    with lock:
        print("questions and index ...", flush=True)
        prepare(root, upload.connect(root))
        night = store.read_json(folder / nights.NIGHT)
        cells = []
        for policy in night["policies"]:
            out = folder / f"played-{policy['version']}.json"
            where = ["--questions", f"{nights.SET}/questions.jsonl", "--index", f"{nights.SET}/artifacts/index"]
            words = ["-m", "tasks.registry", "evaluate", policy["version"], *where, "--out", str(out)]
            print(f"{policy['name']} plays ...", flush=True)
            subprocess.run([sys.executable, *words], check=True)
            cells.append(nights.cell(policy, store.read_json(out)))
            out.unlink()
        return nights.add(root, night["at"], night["commit"], cells)[-1]


def main(words: list[str] | None = None, root: Path = Path(".")) -> int:
    """Play a night of this clone, or accept the last one; returns the exit status, 1 after an alarm."""
    parser = argparse.ArgumentParser(prog="python -m tasks.registry.nightly", description="Play a night now.")
    parser.add_argument("--accept", metavar="REASON", help="take the last night for good in spite of its alarms")
    given = parser.parse_args(words)
    try:
        if given.accept is not None:
            print(f"The night of {nights.accept(root, given.accept).at} is what the next one is compared with.")
            return 0
        night = play(root)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    print((root / nights.FOLDER / nights.TREND).read_text(encoding="utf-8"), flush=True)
    print(nights.verdict(night), file=sys.stderr if night.alarms else sys.stdout)
    return 1 if night.alarms else 0


if __name__ == "__main__":
    process.begin()
    program.run(main)
