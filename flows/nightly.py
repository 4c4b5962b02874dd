"""The nightly evaluation: registered policies play fixed questions, and a change that must not be is an alarm.

`python -m flows.nightly` plays a night now, `--accept REASON` takes the last one for good; `flows/serve.py` schedules
nights on Prefect's page. Settings stand in `conf/nightly/default.yaml`, the rules in `tasks/registry/nights.py`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Failed, State

from flows.child import Stopper, execute
from flows.pipeline import alone, stopped_by_signals
from flows.server import find_server, started
from tasks import params
from tasks.lifetime import end_with_parent
from tasks.registry import nights

NAME = "nightly-evaluation"
WEBHOOK = "NIGHTLY_WEBHOOK"
"""Variable with the address that is told of an alarm; it may hold a secret."""
TEXT = '{"text": {{ (flow_run.name ~ ": " ~ flow_run.state.message) | tojson }}}'


@task(name="step", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def step(name: str, words: list[str], stopper: Stopper) -> Any:
    """Run `python -m words`, with its output in the log of this task; the state names what went wrong."""
    log = get_run_logger()

    def say(line: str) -> None:
        print(f"{name} | {line}", flush=True)
        log.info(line)

    outcome = execute(name, words, Path.cwd(), say, stopper)
    if outcome.result == "stopped":
        return Cancelled(name="Stopped", message="the run was stopped")
    if outcome.result == "failed":
        return Failed(message=f"{name}: {outcome.message}")
    return Completed(message=f"executed in {outcome.seconds:.1f} s")


@flow(name="nightly", persist_result=False)
def nightly() -> State[Any]:
    """Play the champion and the newest registered policies, and compare with the last good night. Trains nothing."""
    end_with_parent()
    root, stopper = Path.cwd(), Stopper()
    try:
        with alone(root / nights.FOLDER), stopped_by_signals(stopper):
            return _night(root, stopper)
    except ValueError as error:
        return Failed(message=str(error))


def _night(root: Path, stopper: Stopper) -> State[Any]:
    """One night; the history is written only when every policy has played."""

    def run(name: str, *words: str) -> State[Any] | None:
        """Run a step; how the night ends if it did not end well."""
        state = step(name, list(words), stopper, return_state=True)
        if state.is_completed():
            return None
        return Cancelled(message="stopped") if stopper.is_stopped else Failed(message=state.message)

    if bad := run("questions and index", "tasks.registry.nightly"):
        return bad
    night = json.loads((root / nights.FOLDER / nights.NIGHT).read_text(encoding="utf-8"))
    cells = []
    for policy in night["policies"]:
        out = root / nights.FOLDER / f"played-{policy['version']}.json"
        where = ["--questions", f"{nights.SET}/questions.jsonl", "--index", f"{nights.SET}/artifacts/index"]
        if bad := run(policy["name"], "tasks.registry", "evaluate", policy["version"], *where, "--out", str(out)):
            return bad
        cells.append(nights.cell(policy, json.loads(out.read_text(encoding="utf-8"))))
        out.unlink()

    *_, found = nights.add(root, night["at"], night["commit"], cells)
    _show(root)
    if found.alarms:
        return Failed(message="\n".join(found.alarms))
    return Completed(message=nights.verdict(found))


def _show(root: Path) -> None:
    """Put the trend on the run's page in Prefect, as table and as plot."""
    folder = root / nights.FOLDER
    print((folder / nights.TREND).read_text(encoding="utf-8"), flush=True)
    with contextlib.suppress(Exception):  # The page is only a view; the trend is a file.
        create_markdown_artifact((folder / nights.TREND).read_text(encoding="utf-8"), key="nightly-trend")
        image = base64.b64encode((folder / nights.PLOT).read_bytes()).decode()
        create_image_artifact(f"data:image/svg+xml;base64,{image}", key="nightly-plot")


def deployment(root: Path = Path(".")) -> Any:
    """The nightly with its schedule.

    Raises:
        ValueError: a setting is wrong.
    """
    from prefect.schedules import Cron

    chosen = params.nightly(root)
    try:
        schedule = Cron(chosen.cron, timezone=chosen.timezone)
    except ValueError:
        raise ValueError(
            f"conf/nightly/default.yaml: cron={chosen.cron!r}: expected minute, hour, day, month and weekday, such as "
            "0 3 * * *."
        ) from None
    return nightly.to_deployment(
        NAME,
        schedule=schedule,
        description="Registered policies play fixed questions; the run fails where a result moved that must not move.",
    )


def set_alarm(number: object) -> None:
    """Make the automation that fires when a run of deployment `number` fails or crashes.

    It calls the address in NIGHTLY_WEBHOOK. Without one Prefect's page shows that it fired, and an automation that is
    there stays as its user has changed it.
    """
    from prefect.automations import Automation
    from prefect.blocks.webhook import Webhook
    from prefect.events.actions import CallWebhook, DoNothing
    from prefect.events.schemas.automations import EventTrigger

    name = "nightly alarm"
    with contextlib.suppress(ValueError):
        known = Automation.read(name=name)
        if WEBHOOK not in os.environ:
            return
        known.delete()
    action: Any = DoNothing()
    if address := os.environ.get(WEBHOOK):
        block = Webhook(url=address).save("nightly-alarm", overwrite=True)
        action = CallWebhook(block_document_id=block, payload=TEXT)
    about = {"prefect.resource.role": "deployment", "prefect.resource.id": f"prefect.deployment.{number}"}
    alarm = Automation(
        name=name,
        description="Fires when the nightly evaluation fails.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}, match_related=about, threshold=1, within=0
        ),
        actions=[action],
    )
    alarm.create()


def main(words: list[str] | None = None) -> int:
    """Play a night now, on the Prefect server of `make ui` or one of its own; or accept the last night."""
    parser = argparse.ArgumentParser(prog="python -m flows.nightly", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--accept", metavar="REASON", help="take the last night for good in spite of its alarms")
    given = parser.parse_args(words)
    root = Path.cwd()
    if given.accept:
        night = nights.accept(root, given.accept)
        print(f"The night of {night.at} is what the next one is compared with.")
        return 0
    with contextlib.ExitStack() as stack:
        server = find_server(root) or stack.enter_context(started(root))[0]
        with temporary_settings({PREFECT_API_URL: server}):
            state = nightly(return_state=True)
    if state.is_completed():
        print(state.message)
        return 0
    print(f"error: {state.message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
