"""Switches telemetry and network look-ups of libraries off before a stage imports any of them.

Most libraries read these variables only once, at import. A variable that the user has set is not changed.
"""

import os

QUIET = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "true",
    "TOKENIZERS_PARALLELISM": "false",
}

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
