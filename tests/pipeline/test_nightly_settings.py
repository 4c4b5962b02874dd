"""Settings of the nightly evaluation that cannot be."""

import shutil
from pathlib import Path

import pytest

from flows import nightly
from tests.pipeline.toy import HOUSE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cron: 0 3 * * *", "cron: at three", r"default.yaml: cron='at three': expected minute, hour"),
        ("timezone: UTC", "timezone: Mars", r"default.yaml: timezone.*'Mars'.*expected a time zone"),
        ("newest: 2", "newest: -1", r"default.yaml: newest=-1: expected"),
        ("newest: 2", "latest: 2", r"default.yaml: unknown key 'latest'"),
        ("retriever: bm25", "retriever: bm26", r"default.yaml: params: unknown retriever 'bm26'. Did you mean 'bm25'"),
    ],
)
def test_wrong_settings_of_the_nightly_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    shutil.copytree(HOUSE / "conf", tmp_path / "conf")
    path = tmp_path / "conf/nightly/default.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        nightly.deployment(tmp_path)
