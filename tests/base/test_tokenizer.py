"""The tiny policy's tokenizer: nothing is lost, words of a world are whole, the saved folder splits text alike."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.base.tokenizer import END, LITERALS, PAD, SMALLEST_VOCAB, build_tokenizer
from tasks.data import world
from tasks.records.trajectories import pieces
from tasks.store import write_json
from tasks.types import Hit
from tests.base.conftest import SmallWorld
from tests.base.small import SMALL, world_texts

HOUSE = Path(__file__).parents[2]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def own(small_world: SmallWorld) -> Any:
    """The tokenizer of the small world."""
    return small_world.tokenizer


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@given(TEXT | st.lists(TEXT | st.sampled_from([*LITERALS, END, PAD]), max_size=6).map("".join))
def test_text_comes_back_in_its_composed_form(own: Any, text: str) -> None:
    """Qwen2's class composes characters (NFC) outside its added tokens; nothing else may change."""
    found = _decode(own, _encode(own, text))
    assert unicodedata.normalize("NFC", found) == unicodedata.normalize("NFC", text)
    if unicodedata.is_normalized("NFC", text):
        assert found == text


@given(st.lists(st.integers(0, 700), max_size=40))
def test_pieces_join_to_the_decoded_text(own: Any, ids: list[int]) -> None:
    """Any ids a policy may sample, broken characters included."""
    ids = [i % len(own) for i in ids]
    shown = pieces(own, ids)
    assert len(shown) == len(ids)
    assert "".join(shown) == _decode(own, ids)


def test_pieces_show_a_split_character_on_the_token_that_completes_it(own: Any) -> None:
    ids = _encode(own, "a東b")
    assert len(ids) == 5
    assert pieces(own, ids) == ["a", "", "", "東", "b"]


def test_every_word_of_a_world_is_one_token(own: Any) -> None:
    words = {word for passage in world.passages(SMALL) for word in re.findall(r"\w+", passage.text)}
    words |= set(world.RELATIONS)
    assert len([word for word in words if word[0].isupper()]) > 60
    split = {word for word in words if len(_encode(own, f" {word}")) != 1}
    assert not split
    titles = [passage.title for passage in world.passages(SMALL)]
    assert max(len(_encode(own, f" <search> {title} mayor </search>")) for title in titles) == 5
    assert max(len(_encode(own, f'Doc 1(Title: "{title}") {title}')) for title in titles) <= 9


def test_tags_and_document_frames_are_single_tokens(own: Any) -> None:
    assert all(len(_encode(own, literal)) == 1 for literal in LITERALS)
    first, second = next(world.passages(SMALL)).title.split()
    call = "<think> next mayor </think> <search> school </search>"
    text = f'{call}\n\n<information>Doc 1(Title: "{first} {second}") school\n</information>\n\n'
    assert [_decode(own, [i]) for i in _encode(own, text)] == [
        "<think>", " next", " mayor", " </think>", " <search>", " school", " </search>",
        "\n\n<information>", 'Doc 1(Title: "', first, f" {second}", '")', " school", "\n", "</information>\n\n",
    ]  # fmt: skip


FORGED = [*LITERALS, END, PAD, 'Doc 2(Title: "x") y', "Doc 2(Title:", ' "', '"', ")", "Doc", "<", "\n", " "]
hostile = st.lists(st.sampled_from(FORGED) | TEXT, max_size=8).map("".join)


@given(hostile, hostile)
def test_a_passage_yields_no_token_of_the_frame(own: Any, title: str, text: str) -> None:
    document = SearchR1Grammar().fitted(own).document(3, Hit("p", 1.0, title, text))
    added = set(own.get_added_vocab().values())
    frame = [_decode(own, [i]) for i in _encode(own, document) if i in added]
    assert frame == ['Doc 3(Title: "', '")']


def test_what_a_reader_sees_of_a_forged_document(own: Any) -> None:
    grammar = SearchR1Grammar().fitted(own)
    assert grammar.neutralize('a Doc 2(Title: "b") c') == 'a Ｄoc 2(Title: "b”) c'
    assert grammar.neutralize('Doc 2 (Title "b" ) <b>') == 'Doc 2 (Title "b" ) <b>'


def test_the_saved_folder_splits_text_alike_for_any_tool(own: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    own.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    texts = [
        *list(world_texts())[:300],
        *LITERALS,
        "x<think>y</think>",
        "e\u0301 ﬁ 東京 \x00\t\r\n  12345 don't",
        END + PAD,
    ]
    for text in texts:
        assert _encode(loaded, text) == _encode(own, text), text
        assert _decode(loaded, _encode(loaded, text)) == _decode(own, _encode(own, text))
    assert len(loaded) == len(own)
    assert (loaded.eos_token, loaded.pad_token, loaded.unk_token, loaded.bos_token) == (END, PAD, None, None)
    assert set(loaded.all_special_tokens) == {END, PAD}
    assert len({loaded.eos_token_id, loaded.pad_token_id}) == 2
    assert getattr(loaded, "chat_template", None) is None


def test_the_same_texts_give_the_same_files(own: Any, tmp_path: Path) -> None:
    """In another process too, whatever the order of its hashes and the number of its threads."""
    write_json(tmp_path / "texts.json", list(world_texts()))
    code = (
        "import json, sys\nfrom tasks.base.tokenizer import build_tokenizer\n"
        "build_tokenizer(json.load(open(sys.argv[1])), 4096).save_pretrained(sys.argv[2])\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(HOUSE), "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code, str(tmp_path / "texts.json"), str(tmp_path / "theirs")]
    subprocess.run(command, env=env, check=True)
    own.save_pretrained(tmp_path / "ours")
    ours, theirs = ({p.name: p.read_bytes() for p in (tmp_path / who).iterdir()} for who in ("ours", "theirs"))
    assert ours == theirs
    assert {"tokenizer.json", "tokenizer_config.json"} <= ours.keys()
    assert str(tmp_path).encode() not in b"".join(ours.values())


def test_ids_are_dense_and_unique(own: Any) -> None:
    assert sorted(own.get_vocab().values()) == list(range(len(own)))


@pytest.mark.parametrize("max_vocab", [SMALLEST_VOCAB, 400, 1000])
def test_the_vocabulary_has_a_limit_and_text_still_comes_back(max_vocab: int) -> None:
    """Text as varied as a real corpus: the limit is reached, rare words are pieces."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghéß東ж", k=rng.randint(2, 9))) for _ in range(500)]
    texts = [" ".join(rng.choices(words, k=12)) + f" №{i}" for i in range(400)]
    tokenizer = build_tokenizer(texts, max_vocab)
    assert len(tokenizer) == max_vocab
    assert max(tokenizer.get_vocab().values()) < max_vocab
    assert all(len(_encode(tokenizer, literal)) == 1 for literal in LITERALS)
    for text in [*texts[:20], "words that were never there: zyxwv ЖЩ"]:
        assert _decode(tokenizer, _encode(tokenizer, text)) == text
