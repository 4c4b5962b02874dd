"""Requests made up from the server's own description: no fault, no hang, and the statuses it says."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from tests.server.running import ServerProcess

PHASES = (Phase.explicit, Phase.generate)
QUICK = settings(
    max_examples=60, deadline=None, phases=PHASES, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def described(server: ServerProcess):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.generation.update(modes=list(schemathesis.GenerationMode))
    return schema


schema = schemathesis.pytest.from_fixture("described")


@pytest.mark.slow
@pytest.mark.servers
@schema.parametrize()
@QUICK
def test_made_up_requests(case):
    case.call_and_validate(timeout=10)
