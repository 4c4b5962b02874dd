"""The additions that CONTRIBUTING describes, each as the files that one adds and the lines that one changes.

Their parts are the examples of the tests, put where CONTRIBUTING says. Each method extends that of the addition before
it, so the last one is made of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.stages.clone import HOUSE, PATIENCE, Clone

ENDPOINT = (
    """kind: endpoint
base_url: URL
model: %s
key_variable: ""
max_in_flight: 4
"""
    + PATIENCE
    + """max_requests: 1000
max_total_tokens: 100000
request: {temperature: 0}
"""
)
SCORED = """extends: search_r1_grpo
title: Scored
rewards:
  turn_scores: {scale: 0.5, is_potential: false}
services: {turn_scores: parity}
"""
JUDGED = """extends: scored
title: Judged
rewards:
  judge:
    scale: 0.1
    prompt: |
      Question: {question}
      {text}
services: {chat: judge}
"""
BEST_OF_THREE = """extends: judged
title: Best of three
sampler: {kind: candidates, size: 3, weight: 0.0009765625}
"""
ASKED = """kind: asked_model
title: Asked model
services: {chat: reader}
prompt: |
  {passages}
  Question: {question}
"""

LAST_SYSTEM = '    "rejection_sampling": of('
SYSTEM = '    "%s": of(GRPO, EM, %s),\n' + LAST_SYSTEM
BEHIND_STAND_INS = "\n\ndef services_of("
SCORER = """

class Scorer:
    def score(self, trajectories: Sequence[Trajectory], questions: Any) -> list[list[float]]:
        return [[0.0] * len(t.turns) for t in trajectories]


SERVICES["turn_scores"] = Scorer()
"""
CHAT = """

class Chat:
    model = "silent"

    def replies(self, conversations: Any, request: Any = None) -> Any:
        yield from (Refusal("says nothing") for _ in conversations)


SERVICES["chat"] = Chat()
"""
LAST_BUDGET = "| `search_r1_grpo` | 1005 | 512 | 5 | 10 | 1e-6 | 2864 (0.285) | | | 0.001 | 0.2 | 4 |\n"


@dataclass(frozen=True)
class Addition:
    """One addition.

    Attributes:
        section: of CONTRIBUTING, without "Adding ".
        copied: file of this repository -> its place in the clone.
        written: new file -> its text; URL stands for the address of the server.
        changed: (file, text that it has, text in its place).
    """

    section: str
    copied: dict[str, str]
    written: dict[str, str]
    changed: tuple[tuple[str, str, str], ...] = field(default=())

    def put_into(self, clone: Clone, url: str) -> None:
        """Add and change the files."""
        for source, place in self.copied.items():
            (clone.root / place).write_bytes((HOUSE / source).read_bytes())
        for place, text in self.written.items():
            (clone.root / place).write_text(text.replace("URL", url), encoding="utf-8")
        for path, old, new in self.changed:
            clone.change(path, old, new)


RED_TEAM, SYSTEMS = "tests/rewards/test_red_team.py", "tests/methods/test_systems.py"
ADDITIONS = {
    "scored": Addition(
        "a process reward model",
        {
            "tests/services/parity.py": "tasks/services/parity.py",
            "tests/services/test_parity.py": "tests/services/test_parity.py",
        },
        {"conf/service/parity.yaml": "kind: parity\neven: 0.75\nodd: 0.25\n", "conf/method/scored.yaml": SCORED},
        (
            (SYSTEMS, LAST_SYSTEM, SYSTEM % ("scored", '"TurnScoresReward", services=["parity"]')),
            (RED_TEAM, BEHIND_STAND_INS, SCORER + BEHIND_STAND_INS),
        ),
    ),
    "judged": Addition(
        "a reward that asks a chat model",
        {
            "tests/rewards/judge.py": "tasks/rewards/judge.py",
            "tests/rewards/test_judge.py": "tests/rewards/test_judge.py",
        },
        {"conf/service/judge.yaml": ENDPOINT % "judge", "conf/method/judged.yaml": JUDGED},
        (
            (
                SYSTEMS,
                LAST_SYSTEM,
                SYSTEM % ("judged", '"TurnScoresReward", "Judge", services=["parity", "endpoint"]'),
            ),
            (RED_TEAM, BEHIND_STAND_INS, CHAT + BEHIND_STAND_INS),
            (
                RED_TEAM,
                "import Judged, Pair, Probabilities, Services",
                "import Judged, Pair, Probabilities, Refusal, Services",
            ),
        ),
    ),
    "best_of_three": Addition(
        "another way to draw samples",
        {
            "tests/rl/candidates.py": "tasks/rl/samplers/candidates.py",
            "tests/rl/test_candidates.py": "tests/rl/test_candidates.py",
        },
        {"conf/method/best_of_three.yaml": BEST_OF_THREE},
        (
            (
                SYSTEMS,
                LAST_SYSTEM,
                SYSTEM
                % (
                    "best_of_three",
                    '"TurnScoresReward", "Judge", services=["parity", "endpoint"], group=3, sampler="Candidates"',
                ),
            ),
            (
                "docs/methods/search_r1.md",
                LAST_BUDGET,
                LAST_BUDGET + LAST_BUDGET.replace("search_r1_grpo", "best_of_three").replace("| 5 |", "| 3 |"),
            ),
        ),
    ),
    "sharded": Addition(
        "an engine",
        {
            "tests/engine/sharded.py": "tasks/engine/sharded.py",
            "tests/engine/test_sharded.py": "tests/engine/test_sharded.py",
        },
        {"conf/engine/two_workers.yaml": "kind: sharded\nnum_workers: 2\n"},
        (("params.yaml", "engine: plain", "engine: two_workers"),),
    ),
    "asked": Addition(
        "a prompted system",
        {
            "tests/systems/asked_model.py": "tasks/systems/asked_model.py",
            "tests/systems/test_asked_model.py": "tests/systems/test_asked_model.py",
        },
        {"conf/system/asked.yaml": ASKED, "conf/service/reader.yaml": ENDPOINT % "reader"},
        (("params.yaml", "systems: [base", "systems: [base, asked, title, best_of_three"),),
    ),
}
"""By the name of its method, engine or system."""
