"""What a host of a cluster file says of itself before a run; `tasks.plan.hosts` starts it there as a worker."""

from __future__ import annotations

from tasks import crew
from tasks.plan.machine import this_machine

if __name__ == "__main__":
    crew.work(lambda stage: {"machine": this_machine})
