"""`python -m tasks.registry register` registers the best policy of the report; `... evaluate champion` plays a version.

`make register` and `make evaluate CHAMPION=champion` are short. The rules are in `tasks/registry/__init__.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tasks import conf, libraries, program, store
from tasks.data.records import question_row, read_questions
from tasks.records import schema
from tasks.registry import card as cards
from tasks.registry.card import Card
from tasks.runner import record, upload
from tasks.runner.upload import Server

NAME, CHAMPION = "search-agent", "champion"
DATA, INDEX = Path("artifacts/data"), Path("artifacts/index")
SCRIPT = Path(__file__).with_name("policy.py")
MAX_INDEX_MB = 200


def register(root: Path, server: Server) -> str:
    """Register the best policy of the report, and give it the alias where it has won it; says what was done."""
    card = cards.best(root)
    for version in server.client.search_model_versions(f"name = '{NAME}'"):
        if version.tags.get("policy_sha256") == card.policy_sha256:
            return f"{card.name} is version {version.version} of {NAME} already."
    champion = _champion(server)
    number = _log(root, server, card)
    said = f"{card.name} is version {number} of {NAME}: exact match {cards.as_text(*card.results['em'])}."
    if champion is None:
        server.client.set_registered_model_alias(NAME, CHAMPION, number)
        return f"{said} It is the first one, and the {CHAMPION}."
    try:
        lead = cards.lead(card, champion)
    except ValueError as error:
        return f"{said} {champion.name} stays the {CHAMPION}: {error}. To change that by hand: docs/registry.md."
    margin = f"{lead.text()} above {champion.name}"
    if lead.ends is None or lead.low <= 0:
        return f"{said} {champion.name} stays the {CHAMPION}: {margin}."
    server.client.set_registered_model_alias(NAME, CHAMPION, number)
    return f"{said} It is the new {CHAMPION}: {margin}."


def _champion(server: Server) -> Card | None:
    """The card of the champion; None where there is none."""
    import mlflow

    if (number := _aliases(server).get(CHAMPION)) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        uri = f"models:/{NAME}/{number}"
        return cards.read(Path(mlflow.artifacts.download_artifacts(f"{uri}/artifacts/card.json", dst_path=folder)))


def _log(root: Path, server: Server, card: Card) -> str:
    """Log the policy as a model of a run of its own, with its card as metrics; returns the number of the version."""
    import mlflow
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Array

    asked = [question for question in read_questions(root / DATA / "questions.jsonl") if question.id in card.scores]
    output = Schema([ColSpec(DataType.string, "answer"), ColSpec(Array(DataType.string), "searches")])
    signature = ModelSignature(Schema([ColSpec(DataType.string, "question")]), output)
    about = {key: getattr(card, key) for key in ("data_sha256", "policy_sha256", "git_commit")}
    tags = {"system": card.system, "seed": str(card.seed), **about}
    index = root / INDEX
    size = sum(path.stat().st_size for path in index.rglob("*"))

    with (
        tempfile.TemporaryDirectory() as name,
        mlflow.start_run(experiment_id=server.experiment, run_name=f"register {card.name}", tags=tags),
    ):
        folder = Path(name)
        store.write_json(folder / "card.json", conf.plain(card))
        store.write_jsonl(folder / "questions.jsonl", map(question_row, asked))
        mlflow.log_params(record.flatten(card.settings))
        for metric, (mean, low, high) in card.results.items():
            mlflow.log_metrics({metric: mean, f"{metric}_low": low, f"{metric}_high": high})
        artifacts = {key: str(folder / file) for key, file in (("card", "card.json"), ("questions", "questions.jsonl"))}
        artifacts["policy"] = str(root / "artifacts/train" / card.name / "policy")
        model = mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(SCRIPT),
            artifacts=artifacts | ({"index": str(index)} if size <= MAX_INDEX_MB << 20 else {}),
            code_paths=[str(SCRIPT.parents[1])],
            signature=signature,
            input_example=pd.DataFrame({"question": [question.question for question in asked[:2]]}),
            pip_requirements=[f"{library}=={pin}" for library, pin in libraries.pins(root).items()],
            model_config={"index": ""},
            metadata=about,
            tags=tags,
        )
        made = mlflow.register_model(model.model_uri, NAME, tags=tags)
    return str(made.version)


def evaluate(server: Server, chosen: str, questions: Path | None, index: Path | None) -> store.Row:
    """Play a registered policy, greedily.

    Args:
        server: where it is registered.
        chosen: its version or an alias of it.
        questions: a file of questions; None takes those that it was registered with.
        index: folder of the search index; None takes its own.

    Returns:
        `policy`, `version`, `num_questions`, each metric with its 95% interval, and `scores_sha256`, which changes when
        one question is answered in another way.
    """
    import mlflow

    number = chosen if chosen in _versions(server) else _aliases(server).get(chosen)
    if number is None:
        raise ValueError(_unknown(server, chosen))
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{NAME}/{number}"))
    _require_weights(server, number, folder)
    model = mlflow.pyfunc.load_model(str(folder), model_config={"index": str(index or "")}).unwrap_python_model()
    rows = model.measure(model.questions if questions is None else list(read_questions(questions))).scores
    found = {"policy": model.card.name, "version": str(number), "num_questions": len(rows)}
    return found | cards.intervals(rows) | {"scores_sha256": store.digest([schema.plain(row) for row in rows])}


def _require_weights(server: Server, number: str, folder: Path) -> None:
    """Refuse a version whose weights are not those that were registered, before its code is run.

    Raises:
        ValueError: they are others.
    """
    from tasks.model_files import weights_sha256

    card = cards.read(folder / "artifacts/card.json").policy_sha256
    noted = server.client.get_model_version(NAME, number).tags.get("policy_sha256")
    found = weights_sha256(folder / "artifacts/policy")
    if not found == card == noted:
        raise ValueError(
            f"version {number} of {NAME}: its weights have the hash {found}, its card has {card} and the registry "
            f"{noted}, expected one hash: the files were changed after they were registered. Register the policy again."
        )


def _aliases(server: Server) -> dict[str, str]:
    """Alias -> version; empty where nothing is registered."""
    known = server.client.search_registered_models(f"name = '{NAME}'")
    return {alias: str(number) for model in known for alias, number in model.aliases.items()}


def _versions(server: Server) -> list[str]:
    """The numbers of all versions, in their order."""
    found = server.client.search_model_versions(f"name = '{NAME}'")
    return [str(number) for number in sorted(int(one.version) for one in found)]


def _unknown(server: Server, chosen: str) -> str:
    """Why no policy is called so."""
    versions = _versions(server)
    if not versions:
        return f"no policy is registered as {NAME}. Register the best one of a report: make register"
    known = [*versions, *sorted(_aliases(server))]
    return f"no version or alias {chosen!r} of {NAME}. Known: {', '.join(known)}."


def main(words: list[str] | None = None, root: Path = Path(".")) -> int:
    """Do what the command line says; returns the exit status."""
    given = _parser().parse_args(words)
    warnings.showwarning = _show
    try:
        server = upload.connect(root)
        if given.command == "register":
            print(register(root, server))
            return 0
        found = evaluate(server, given.policy, given.questions, given.index)
    except Exception as error:
        if not isinstance(error, ValueError | OSError) and type(error).__module__.partition(".")[0] != "mlflow":
            raise
        print(f"error: {record.hide('', ' '.join(str(error).split()))}", file=sys.stderr)
        return 1
    about = f"version {found['version']} of {NAME}, {found['num_questions']} questions"
    print(
        f"{found['policy']} ({about}): exact match {cards.as_text(*found['em'])}, {found['searches'][0]:.2f} searches."
    )
    if given.out is not None:
        store.write_json(given.out, found)
    return 0


def _show(message: Warning | str, *where: Any, **how: Any) -> None:
    """Print a warning, but not MLflow's wish for types that it cannot read; it overrides filters of warnings."""
    if "Add type hints" not in str(message):
        print(f"warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tasks.registry", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("register", help="register the best policy of the report")
    played = commands.add_parser("evaluate", help="play a registered policy and print its exact match")
    played.add_argument("policy", help="a version, such as 3, or an alias, such as champion")
    played.add_argument("--questions", type=Path, help="a file of questions in place of the policy's own")
    played.add_argument("--index", type=Path, help="folder of a search index in place of the policy's own")
    played.add_argument("--out", type=Path, help="also write the numbers there, as JSON")
    return parser


if __name__ == "__main__":
    program.run(main)
