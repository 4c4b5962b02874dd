"""The scale of a run: the sections of `conf/scale/<scale>.yaml`, as the file of the data changes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks import conf, extends
from tasks.conf import Tree

T = TypeVar("T")
SECTIONS = ("base", "format", "rollout", "train", "evaluate")
"""What a scale sets. A file of `conf/data/` may have the same sections beside its own keys; they change the scale's."""


@dataclass(frozen=True)
class Scale:
    """One scale with one kind of data. Files are read once.

    Attributes:
        root: root of the clone.
        name: of the file of `conf/scale/`.
        data: of the file of `conf/data/`.
    """

    root: Path
    name: str
    data: str

    def section(self, cls: type[T], name: str, changes: Mapping[str, Any] | None = None, where: str = "") -> T:
        """A section, with the changes that a third file makes.

        Args:
            cls: dataclass of the section.
            name: its name.
            changes: settings that replace those of the section.
            where: the file with the changes, for messages.

        Raises:
            ValueError: the section is missing or wrong, or the file of the scale has an unknown section.
        """
        tree, place = self.tree.get(name), self.files(name)
        if not isinstance(tree, dict):
            helps = "See conf/scale/laptop.yaml"
            if name == "base" and tree is None:  # What teaches a policy of random weights.
                helps = "This scale is for a pretrained model: name one, such as MODEL=smollm2-135m"
            raise ValueError(f"{place}: {name}={conf.shown(tree)}: expected a section of settings. {helps}.")
        plain = conf.fill(cls, conf.laid_over(name, "", tree), f"{place}: {name}")
        if not changes:
            return plain
        changed = conf.laid_over(name, "", conf.merge(tree, changes))
        return conf.fill(cls, changed, f"{where}: {name} over {place}: {name}")

    @functools.cached_property
    def tree(self) -> Tree:
        """All sections."""
        tree = conf.section("scale", self.name, self.root)
        for key in tree:
            if key not in SECTIONS:
                place = f"{conf.CONF}/scale/{self.name}.yaml"
                raise ValueError(f"{place}: unknown key {key!r}. Known: {', '.join(SECTIONS)}.")
        return conf.merge(tree, _of_what_is_on(tree, self._changes))

    def files(self, section: str) -> str:
        """Where a section is read from, for messages."""
        over = f"{conf.CONF}/data/{self.data}.yaml over " if section in self._changes else ""
        return f"{over}{conf.CONF}/scale/{self.name}.yaml"

    @functools.cached_property
    def _changes(self) -> Tree:
        """The sections that the file of the data has."""
        tree = extends.read("data", self.data, self.name, self.root)
        return {key: value for key, value in tree.items() if key in SECTIONS}


def _of_what_is_on(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """The changes without those of a section that is null in the tree: what is switched off stays off."""
    return {
        key: _of_what_is_on(tree.get(key, {}), value) if isinstance(value, Mapping) else value
        for key, value in changes.items()
        if not (isinstance(value, Mapping) and tree.get(key, {}) is None)
    }
