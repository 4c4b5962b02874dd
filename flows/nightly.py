"""The nightly evaluation on Prefect's page: its schedule, its trend, and the automation that tells of an alarm.

A night itself is `python -m tasks.registry.nightly`; settings stand in `conf/nightly/default.yaml`.
"""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.events.actions import CallWebhook, DoNothing
from prefect.events.schemas.automations import EventTrigger
from prefect.logging import get_run_logger
from prefect.schedules import Cron
from prefect.states import Cancelled, Completed, Failed, State

from flows.child import Stopper, execute, stopped_by_signals
from tasks import params
from tasks.lifetime import end_with_parent
from tasks.registry import nights

WEBHOOK = "NIGHTLY_WEBHOOK"
"""Variable with the address that is told of an alarm; it may hold a secret."""
TEXT = '{"text": {{ (flow_run.name ~ ": " ~ flow_run.state.message) | tojson }}}'
ENDS = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}


@flow(name="nightly", persist_result=False)
def nightly() -> State[Any]:
    """Play the champion and the newest registered policies, and compare with the last good night. Trains nothing."""
    end_with_parent()
    root, stopper, log = Path.cwd(), Stopper(), get_run_logger()
    num_before = len(nights.read(root))
    with stopped_by_signals(stopper):
        outcome = execute("night", ["tasks.registry.nightly"], root, log.info, stopper)
    if stopper.is_stopped:
        return Cancelled(message="stopped")
    if len(played := nights.read(root)) == num_before:
        return Failed(message=outcome.message)

    with contextlib.suppress(Exception):  # The page is only a view; the trend is a file.
        folder = root / nights.FOLDER
        create_markdown_artifact((folder / nights.TREND).read_text(encoding="utf-8"), key="nightly-trend")
        image = base64.b64encode((folder / nights.PLOT).read_bytes()).decode()
        create_image_artifact(f"data:image/svg+xml;base64,{image}", key="nightly-plot")
    state = Failed if played[-1].alarms else Completed
    return state(message=nights.verdict(played[-1]))


def deployment(root: Path = Path(".")) -> Any:
    """The nightly with its schedule.

    Raises:
        ValueError: a setting is wrong.
    """
    chosen = params.nightly(root)
    try:
        schedule = Cron(chosen.cron, timezone=chosen.timezone)
    except ValueError:
        raise ValueError(
            f"conf/nightly/default.yaml: cron={chosen.cron!r}: expected minute, hour, day, month and weekday, such as "
            "0 3 * * *."
        ) from None
    about = "Registered policies play fixed questions; the run fails where a result moved that must not move."
    return nightly.to_deployment("nightly-evaluation", schedule=schedule, description=about)


def set_alarm(number: object) -> None:
    """Make the automation that fires when a run of deployment `number` fails or crashes.

    It calls the address in NIGHTLY_WEBHOOK. Without one Prefect's page shows that it fired, and an automation that is
    there stays as its user has changed it.
    """
    name, address = "nightly alarm", os.environ.get(WEBHOOK)
    with contextlib.suppress(ValueError):
        known = Automation.read(name=name)
        if WEBHOOK not in os.environ:
            return
        known.delete()
    action: Any = DoNothing()
    if address:
        block = Webhook(url=address).save("nightly-alarm", overwrite=True)
        action = CallWebhook(block_document_id=block, payload=TEXT)
    about = {"prefect.resource.role": "deployment", "prefect.resource.id": f"prefect.deployment.{number}"}
    trigger = EventTrigger(expect=ENDS, match_related=about, threshold=1, within=0)
    text = "Fires when the nightly evaluation fails."
    Automation(name=name, description=text, trigger=trigger, actions=[action]).create()
