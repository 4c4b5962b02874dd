"""The pipeline as a Prefect flow. Prefect knows when, DVC knows what depends on what, the core knows neither.

Prefect reads some settings at import, so they are set here: its files stay in the clone and nothing is sent anywhere.
"""

import os
from pathlib import Path

STOPPED = "stopped. Run again to go on where it stopped."

for _name, _value in {
    "PREFECT_HOME": str(Path(".scratch/prefect").resolve()),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_CLIENT_MAX_RETRIES": "2",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # A stage that was stopped would be an ERROR.
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "true",
}.items():
    os.environ.setdefault(_name, _value)

if Path("dvc.yaml").exists():  # Prefect makes its home, but not what lies above it.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
