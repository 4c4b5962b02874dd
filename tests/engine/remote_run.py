"""A few updates of a policy and its critic by workers of the cluster in `cluster.yaml`; prints hashes of what came out.

`python -m tests.engine.remote_run FOLDER STAGE STEPS` runs in the namespace of one host; FOLDER has the start policy.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import yaml

from tasks import cluster, conf
from tasks.crew import CrewError
from tasks.engine import Objective
from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.model import weights_sha256
from tasks.rl.losses import Normalizer
from tests.engine.test_deepspeed import EXACT, TRAINING, prepared
from tests.tiny import make_tokenizer


def main(folder: Path, stage: int, steps: int) -> None:
    """Train and export; say which step is done."""
    tree = yaml.safe_load((folder / "cluster.yaml").read_text(encoding="utf-8"))
    hosts = conf.fill(cluster.Cluster, tree, "cluster.yaml")
    cluster.load = lambda *_: hosts  # type: ignore[assignment]
    training = replace(TRAINING, keep_activations=stage != 2)
    kind = DeepSpeedEngine(workers=2, stage=stage, timeout_s=60)  # type: ignore[arg-type]
    with kind.open(folder / "start", training) as (policy, critic):
        assert critic is not None
        method, batch = prepared(policy, critic, make_tokenizer(), EXACT)
        rows = [row for micro in EXACT for row in micro]
        for number in range(steps):
            policy.update(batch, EXACT, Objective(method.loss, Normalizer.of(batch.loss_mask[rows])))
            critic.update(batch, EXACT, Objective(method.value_loss, Normalizer.of(batch.response_mask[rows])))
            print("step", number, flush=True)
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
        policy.export(folder / "out")
        critic.save(folder / "critic")
    print("weights", weights_sha256(folder / "out"), weights_sha256(folder / "critic"), flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except CrewError as error:
        print("error:", error, flush=True)
        raise SystemExit(1) from None
