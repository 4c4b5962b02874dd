"""What is evaluated: a system plays questions and returns episodes. A kind of system is a file of this folder.

A start policy, a trained policy and a prompted model are equals here: the evaluation knows these protocols alone. A
kind's `PART` is the dataclass of its settings, which opens the system that plays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tasks import conf, parts, services
from tasks.retrieval import Retriever
from tasks.services import Role, Services
from tasks.types import Episode, Mode, Question

if TYPE_CHECKING:
    from tasks.generate import Generator


class System(Protocol):
    """Plays questions.

    Attributes:
        batch_questions: how many it plays at once; so many are played again after a kill.
        tokenizer: decodes the tokens of its episodes, None where they have none.
    """

    @property
    def batch_questions(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> Iterable[Episode]:
        """One episode a question, in order; the same for the same arguments.

        Args:
            questions: at most `batch_questions`.
            mode: the most likely answer, or one drawn at temperature 1.
            seed: of the draws.
        """
        ...


@dataclass(frozen=True)
class Resources:
    """What a system may use of the run that opens it.

    Attributes:
        policy: folder of the weights, None for a kind that plays no policy.
        retriever: the search engine.
        top_k: passages per search, 0 takes what the system's own settings say.
        start_generator: starts the generator of this run with the weights in a folder.
        services: those that the kind calls, by role.
    """

    policy: Path | None
    retriever: Retriever
    top_k: int
    start_generator: Callable[[Path], Generator]
    services: Services


class Kind(Protocol):
    """Settings of a system: a file of `conf/system/`, or what a method of `conf/method/` plays with."""

    @property
    def plays_policy(self) -> bool:
        """Whether it plays a policy: the start policy, or the one that a method has trained."""
        ...

    @property
    def services(self) -> tuple[Role, ...]:
        """The services it calls; its file of `conf/system/` says which files of `conf/service/` play these roles."""
        ...

    def opened(self, resources: Resources) -> AbstractContextManager[System]:
        """Start the system when the block begins and close it when the block ends."""
        ...


@dataclass(frozen=True)
class Named:
    """What plays under a name of `systems`.

    Attributes:
        kind: its settings.
        services: what plays the roles that it calls.
    """

    kind: Kind
    services: Mapping[Role, services.Kind]

    @property
    def settings(self) -> conf.Tree:
        """Everything by value, ready for JSON; `build` inverts it."""
        called = {role: parts.plain(service) for role, service in self.services.items()}
        return {**parts.plain(self.kind), "services": called}


def build(tree: Mapping[str, Any], where: str = "the resolved system") -> Named:
    """The system whose settings are these.

    Raises:
        ValueError: an unknown kind or a wrong setting; starts with `where`.
    """
    kind = parts.make("systems", {key: value for key, value in tree.items() if key != "services"}, where)
    called = {
        role: parts.make(services.ROOM, service, f"{where}: services: {role}")
        for role, service in tree["services"].items()
    }
    return Named(kind, called)
