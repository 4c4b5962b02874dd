"""Systems are what is evaluated: a system plays questions and returns episodes. A kind of system is a file here.

The evaluation treats a start policy, a trained policy and a prompted model alike, because it knows only these
protocols. A kind's `PART` is the dataclass of its settings, which opens the system that plays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tasks import conf, parts, services
from tasks.retrieval import Retriever
from tasks.services import Role, Services
from tasks.types import Episode, Mode, Question

if TYPE_CHECKING:
    from tasks.generate import Generator


class System(Protocol):
    """Plays questions.

    Attributes:
        batch_questions: number of questions that it plays at once; after a kill at most so many are played again.
        tokenizer: decodes the tokens of its episodes, None if they have no tokens.
    """

    @property
    def batch_questions(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> Iterable[Episode]:
        """One episode per question, in order; the same arguments give the same episodes.

        Args:
            questions: at most `batch_questions`.
            mode: `greedy`, or `sampled` at temperature 1.
            seed: of the draws.
        """
        ...


@dataclass(frozen=True)
class Resources:
    """The things of a run that a system may use.

    Attributes:
        policy: folder of the weights, None if the kind plays no policy.
        retriever: the search engine.
        top_k: passages per search; 0 takes the number in the system's own settings.
        start_generator: starts the generator of this run with the weights in a folder.
        services: the services that the kind calls, by role.
    """

    policy: Path | None
    retriever: Retriever
    top_k: int
    start_generator: Callable[[Path], Generator]
    services: Services


class Kind(Protocol):
    """Settings of a system, from a file of `conf/system/`, or those with which a method's policy plays."""

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


@runtime_checkable
class Prompted(Protocol):
    """A `Kind` that can say, before anything is played, whether the policy's tokenizer fits every prompt."""

    def check_prompts(self, policy: Path, questions: Iterable[Question], where: str) -> None:
        """Raise the DataError, which begins with `where`, for a prompt over its budget; `policy` is a folder."""
        ...


@dataclass(frozen=True)
class Named:
    """A system with the services that it calls.

    Attributes:
        kind: its settings.
        services: the service that plays each role it calls.
    """

    kind: Kind
    services: Mapping[Role, services.Kind]

    @property
    def settings(self) -> conf.Tree:
        """All settings, ready for JSON; `build` inverts it."""
        called = {role: parts.plain(service) for role, service in self.services.items()}
        return {**parts.plain(self.kind), "services": called}


def build(tree: Mapping[str, Any], where: str) -> Named:
    """The system that these settings describe.

    Raises:
        ValueError: an unknown kind, a wrong setting or no services; starts with `where`.
    """
    kind = parts.make("systems", {key: value for key, value in tree.items() if key != "services"}, where)
    named = tree.get("services")
    if not isinstance(named, Mapping):
        raise ValueError(f"{where}: services={conf.shown(named)}: expected a mapping of role to service.")
    called = {role: parts.make(services.ROOM, one, f"{where}: services: {role}") for role, one in named.items()}
    return Named(kind, called)
