"""The form of a run on Prefect's page, made from `tasks.params.Params`: every field shows the present setting."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from tasks import params
from tasks.params import chosen
from tasks.params.edit import names_of, set_answers

FIRST = ("scale", "data", "data_folder", "model", "retriever", "systems", "seeds")
"""Settings that stand first; all others are rarely changed and stand apart."""
SET = "set"
"""Is one line of text, as after `SET=`."""
FOLLOWS = (*params.TRAINED.values(), params.TOOLS)
"""Settings that follow from the systems, so no one fills them in."""


class Form(BaseModel):
    """The settings of one run. `params.yaml` stays as it is, unless `keep` is set."""

    model_config = ConfigDict(extra="forbid")

    def answers(self) -> dict[str, Any]:
        """Settings by dotted key, as `tasks.params.edit` takes them."""
        given = self.model_dump(mode="json")
        first = {key: given[key] for key in FIRST}
        evaluate = {f"evaluate.{key}": value for key, value in given["evaluate"].items()}
        return {**first, **given["rare"], **evaluate, **set_answers(given["rare"][SET], {SET: {}}, Path("."))}


def form_of(root: Path = Path(".")) -> type[Form]:
    """The form with the choices of `conf/` and the settings of `params.yaml` as they are now.

    Raises:
        ValueError: `params.yaml` cannot be read.
    """
    now = params.read(root)
    settings = {setting.key: setting for setting in params.settings_of()}
    rare = [one for key, one in settings.items() if key not in (*FIRST, *FOLLOWS) and one.section is None]
    evaluate = _section("Evaluate", params.settings_of(params.Evaluate), now.evaluate, root)
    fields: dict[str, Any] = {
        **dict(_fields((settings[key] for key in FIRST), now, root)),
        "evaluate": (evaluate, Field(evaluate(), description="How results are measured.")),
        "rare": ((section := _section("Rare", rare, now, root)), Field(section(), description="Rarely changed.")),
        "force": (list[str], Field([], description="Stages to run even if nothing changed, such as evaluate.")),
        "max_parallel": (int, Field(2, ge=1, le=64, description="Independent stages at once.")),
        "keep": (bool, Field(False, description="Write these settings into params.yaml for good.")),
    }
    return create_model("Form", __base__=Form, **fields)


def _section(name: str, settings: Iterable[params.Setting], now: Any, root: Path) -> type[BaseModel]:
    return create_model(name, __config__=ConfigDict(extra="forbid"), **dict(_fields(settings, now, root)))


def _fields(settings: Iterable[params.Setting], now: Any, root: Path) -> Iterator[tuple[str, Any]]:
    for setting in settings:
        text = setting.info.description or ""
        answer: Any = Annotated[(_choice(setting, root), Field(), *setting.info.metadata)]  # type: ignore[misc]
        value = getattr(now, setting.key)
        value = list(value) if setting.is_list else value
        if setting.key == SET:
            answer, value, text = str, chosen.shown(now.set), f"{text}, written as train.policy.lr=1e-4 rollout.top_k=5"
        yield setting.key, (answer, Field(value, description=f"{text[:1].upper()}{text[1:]}."))


def _choice(setting: params.Setting, root: Path) -> Any:
    """The type of a setting; if it names files, a choice of their names."""
    names = tuple(names_of(setting.kinds, root))
    if len(names) < 2:  # Prefect says of a single choice that it cannot be changed.
        kind = setting.info.annotation
        return list[typing.get_args(kind)[0]] if setting.is_list else kind  # type: ignore[misc]
    return list[Literal[names]] if setting.is_list else Literal[names]  # type: ignore[valid-type]
