"""A small reader: settings, questions and passages of the small world, and a folder with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks import conf, extends
from tasks.base.tokenizer import build_tokenizer
from tasks.data import world
from tasks.model import export_folder
from tasks.reader.card import write_card
from tasks.reader.make import new_model
from tasks.reader.reading import Habits
from tasks.reader.settings import ReaderConf
from tests.base.small import SMALL, world_texts

ROOT = Path(__file__).parents[2]
QUESTIONS = list(world.questions(SMALL))
PASSAGES = {passage.id: passage for passage in world.passages(SMALL)}
HABITS = Habits("{evidence} Question: {question} Answer:", 6)


def settings(**changes: Any) -> ReaderConf:
    """The shipped reader at its smallest size."""
    tree = extends.read("reader", "tiny_llama", "smoke", ROOT)
    small = {"architecture": {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_vocab": 700}}
    return conf.fill(ReaderConf, conf.merge(conf.merge(tree, small), changes), "a test")


def write_reader(folder: Path, seed: int = 0) -> Path:
    """A model folder with random weights that knows its prompt."""
    tokenizer = build_tokenizer([*world_texts(), " Question: Answer:"], 700, ())
    folder.mkdir(parents=True)
    export_folder(new_model(settings().architecture, tokenizer, seed), tokenizer, folder)
    quality = {"held_out_accuracy": {"all": 0.0}, "num_held_out": 1, "steps": 0, "num_training_questions": 1}
    write_card(folder, "small", seed, HABITS, quality)
    return folder
