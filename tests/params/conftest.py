"""A folder in which settings are written, for the tests of this room."""

from pathlib import Path

import pytest

from tasks.params import edit
from tests.pipeline.toy import CONF, PARAMS_YAML


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with `params.yaml` and the files it may name."""
    (tmp_path / "params.yaml").write_text(PARAMS_YAML, encoding="utf-8")
    for kind, names in CONF.items():
        (tmp_path / "conf" / kind).mkdir(parents=True)
        for name in names:
            (tmp_path / "conf" / kind / f"{name}.yaml").write_text("name: x\n", encoding="utf-8")
    (tmp_path / edit.NO_FOLDER).write_text("none\n", encoding="utf-8")
    return tmp_path
