"""The generated world: linked entities with invented names, a passage each, and multi-hop questions.

A world is a row of regions. Facts link entities of one region only, so that the regions of the test
split hold entities no training question or answer ever names; a share of the relation compositions is
kept for the test split too. One region is in memory at a time: a million passages need no more memory
than a thousand. Everything follows from `WorldConf`; nothing is copied from the real world.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt

from tasks.conf import require
from tasks.data.records import passage_row, question_row
from tasks.store import write_jsonl
from tasks.types import Hop, Passage, Question, Split

# relation -> (kind it leads from, kind it leads to); the key is the word questions and queries use.
RELATIONS: dict[str, tuple[str, str]] = {
    "birthplace": ("person", "city"),
    "school": ("person", "university"),
    "mentor": ("person", "person"),
    "director": ("film", "person"),
    "star": ("film", "person"),
    "founder": ("company", "person"),
    "headquarters": ("company", "city"),
    "location": ("university", "city"),
    "rector": ("university", "person"),
    "country": ("city", "country"),
    "mayor": ("city", "person"),
    "capital": ("country", "city"),
    "president": ("country", "person"),
}
TEXTS: dict[str, str] = {
    "person": "{title} was born in {birthplace}, studied at {school} and was mentored by {mentor}.",
    "film": "{title} is a film directed by {director} and starring {star}.",
    "company": "{title} is a company founded by {founder} with headquarters in {headquarters}.",
    "university": "{title} is a university located in {location} led by rector {rector}.",
    "city": "{title} is a city in the country {country} whose mayor is {mayor}.",
    "country": "{title} is a country whose capital is {capital} and whose president is {president}.",
}
KINDS = tuple(TEXTS)
_ONSETS = "b br c d dr f fl g gr h j k l m n p pr qu r s sh st t th tr v w z".split()
_VOWELS = "a e i o u ae ia".split()
_CODAS = "l n r s th m nd x".split()


@dataclass(frozen=True)
class WorldConf:
    """Size and seed of a world.

    Attributes:
        seed: determines every name, fact and question.
        regions: regions per split, keys train, dev, test.
        entities: entities per region by kind.
        distractors: similarly named passages per region that no question needs.
        questions: questions per split.
        hop_shares: share of questions with 1, 2, 3 and 4 hops.
        held_out_share: share of the relation compositions of two or more hops that only the test split asks.
    """

    seed: NonNegativeInt
    regions: dict[str, int]
    entities: dict[str, int]
    distractors: int
    questions: dict[str, int]
    hop_shares: tuple[float, ...]
    held_out_share: float

    def __post_init__(self) -> None:
        for key, value in (("regions", self.regions), ("questions", self.questions)):
            require(set(value) == {"train", "dev", "test"}, key, value, "the keys train, dev and test")
            require(min(value.values()) >= 1, key, value, "at least 1 each")
        require(set(self.entities) == set(KINDS), "entities", self.entities, f"the keys {', '.join(KINDS)}")
        require(min(self.entities.values()) >= 3, "entities", self.entities, "at least 3 of each kind")
        require(self.distractors >= 0, "distractors", self.distractors, "0 or more")
        shares = self.hop_shares
        require(1 <= len(shares) <= 4 and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6,
                "hop_shares", shares, "up to four shares that sum to 1")  # fmt: skip
        require(0 <= self.held_out_share < 1, "held_out_share", self.held_out_share, "a share in [0, 1)")


@dataclass(frozen=True)
class Region:
    """One closed set of linked entities; `facts[title][relation]` is the title the relation leads to."""

    split: Split
    number: int
    kinds: dict[str, str]
    facts: dict[str, dict[str, str]]
    passages: dict[str, Passage]
    distractors: tuple[Passage, ...]


def write_world(conf: WorldConf, out: Path) -> None:
    """Write `corpus.jsonl` and `questions.jsonl` (sorted by id) into `out`, region by region."""
    write_jsonl(out / "corpus.jsonl", (passage_row(p) for p in passages(conf)))
    write_jsonl(out / "questions.jsonl", (question_row(q) for q in questions(conf)))


def passages(conf: WorldConf) -> Iterator[Passage]:
    """Every passage of the world, region by region."""
    for region in regions(conf):
        yield from region.passages.values()
        yield from region.distractors


def questions(conf: WorldConf) -> Iterator[Question]:
    """Every question, sorted by id; the questions of a split are divided evenly over its regions."""
    made: dict[str, int] = dict.fromkeys(conf.regions, 0)
    met: dict[str, int] = dict.fromkeys(conf.regions, 0)
    for region in regions(conf):
        split = region.split
        met[split] += 1
        target = conf.questions[split] * met[split] // conf.regions[split]
        for question in _region_questions(conf, region, made[split], target):
            made[split] += 1
            yield question


def regions(conf: WorldConf) -> Iterator[Region]:
    """The regions in the order of their split's name, so that question ids come out sorted."""
    names = {kind: _Names(conf, kind) for kind in KINDS}
    number = 0
    for split in ("dev", "test", "train"):
        for _ in range(conf.regions[split]):
            yield _region(conf, split, number, names)  # type: ignore[arg-type]
            number += 1


def is_held_out(conf: WorldConf, path: tuple[str, ...]) -> bool:
    """Whether only the test split may ask this composition of relations (innermost relation first)."""
    return len(path) > 1 and _fraction(conf.seed, "held out", *path) < conf.held_out_share


def ask(start: str, path: tuple[str, ...]) -> str:
    """The question's text, hops in the order of the search: `Who is X's director's mentor?`."""
    word = "Who" if RELATIONS[path[-1]][1] == "person" else "What"
    return f"{word} is {start}" + "".join(f"'s {relation}" for relation in path) + "?"


def _region(conf: WorldConf, split: Split, number: int, names: dict[str, _Names]) -> Region:
    rng = random.Random(f"{conf.seed}/region/{number}")
    titles = {kind: [names[kind].real(number * n + i) for i in range(n)] for kind, n in conf.entities.items()}
    kinds = {title: kind for kind, members in titles.items() for title in members}
    facts = {title: _facts(rng, kind, title, titles) for title, kind in kinds.items()}
    made = {title: _passage(kind, title, facts[title], split) for title, kind in kinds.items()}
    distractors = []
    for i in range(conf.distractors):
        kind = KINDS[i % len(KINDS)]
        title = names[kind].distractor(number * -(-conf.distractors // len(KINDS)) + i // len(KINDS))
        distractors.append(_passage(kind, title, _facts(rng, kind, title, titles), split))
    return Region(split, number, kinds, facts, made, tuple(distractors))


def _facts(rng: random.Random, kind: str, title: str, titles: dict[str, list[str]]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for relation, (source, target) in RELATIONS.items():
        if source == kind:
            taken = {title, *facts.values()}
            facts[relation] = rng.choice([t for t in titles[target] if t not in taken])
    return facts


def _passage(kind: str, title: str, facts: dict[str, str], split: Split) -> Passage:
    text = TEXTS[kind].format(title=title, **facts)
    digest = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()
    return Passage(id=f"p{digest[:16]}", title=title, text=text, datasets=("world",))


def _region_questions(conf: WorldConf, region: Region, first: int, stop: int) -> Iterator[Question]:
    rng = random.Random(f"{conf.seed}/questions/{region.number}")
    starts, seen = list(region.facts), set()
    for number in range(first, stop):
        hops = rng.choices(range(1, len(conf.hop_shares) + 1), conf.hop_shares)[0]
        for _ in range(5000):
            titles, path = _walk(rng, region, rng.choice(starts), hops)
            wanted = hops == 1 or is_held_out(conf, path) == (region.split == "test")
            if wanted and len(set(titles)) == len(titles) and (titles[0], path) not in seen:
                break
        else:
            raise ValueError(
                f"conf/data/world.yaml: region {region.number} ({region.split}) has no {stop - first} different "
                f"questions (found {number - first}; held_out_share={conf.held_out_share}). Ask fewer questions, "
                "or raise regions or entities, or hold out compositions for the test split."
            )
        seen.add((titles[0], path))
        yield _question(region, titles, path, number)


def _walk(rng: random.Random, region: Region, start: str, hops: int) -> tuple[list[str], tuple[str, ...]]:
    titles, path = [start], []
    for _ in range(hops):
        relation = rng.choice(list(region.facts[titles[-1]]))
        titles.append(region.facts[titles[-1]][relation])
        path.append(relation)
    return titles, tuple(path)


def _question(region: Region, titles: list[str], path: tuple[str, ...], number: int) -> Question:
    support = [region.passages[title].id for title in titles[:-1]]
    subjects = [titles[0], *(f"#{i + 1}" for i in range(len(path) - 1))]
    hops = tuple(
        Hop(ask(subject, (relation,)), answer, passage, (f"{subject} {relation}",))
        for subject, relation, answer, passage in zip(subjects, path, titles[1:], support, strict=True)
    )
    return Question(
        id=f"world/{region.split}-{number:07d}",
        dataset="world",
        split=region.split,
        question=ask(titles[0], path),
        answers=(titles[-1],),
        hops=len(path),
        type="/".join(path),
        decomposition=hops,
        gold_passage_ids=tuple(support),
        gold_method="annotated",
        gold_complete=True,
        source="generated",
    )


class _Names:
    """Unique two-word titles of one kind: an affine walk over a grid of first and second words.

    Entities and distractors share the first words and have second words of their own, so every
    distractor resembles real titles and none equals one. Memory grows with the square root of the count.
    """

    def __init__(self, conf: WorldConf, kind: str) -> None:
        regions = sum(conf.regions.values())
        real = regions * conf.entities[kind]
        false = regions * -(-conf.distractors // len(KINDS))
        self.num_first = max(4, math.isqrt(real) + 1)
        self.num_real = -(-real // self.num_first) + 1
        self.num_false = -(-false // self.num_first) + 1
        total = self.num_first + self.num_real + self.num_false
        self.words = _words(conf.seed, KINDS.index(kind), total)
        self.offset = int(_fraction(conf.seed, kind) * self.num_first * self.num_real)

    def real(self, i: int) -> str:
        return self._title(i, self.num_first, self.num_real)

    def distractor(self, i: int) -> str:
        return self._title(i, self.num_first + self.num_real, self.num_false)

    def _title(self, i: int, second_from: int, num_second: int) -> str:
        size = self.num_first * num_second
        assert i < size, (i, size)
        step = next(s for s in range(int(size * 0.618), size + 1) if math.gcd(s, size) == 1)
        first, second = divmod((i * step + self.offset) % size, num_second)
        return f"{self.words[first]} {self.words[second_from + second]}"


# Kept, because passages and questions use the same ones.
@functools.lru_cache(maxsize=16)
def _words(seed: int, kind: int, count: int) -> tuple[str, ...]:
    """`count` different invented words; kinds differ in their last syllable's vowel and coda, so no word is shared."""
    rng = random.Random(f"{seed}/words/{kind}")
    ends = [v + c for v in _VOWELS for c in _CODAS][kind :: len(KINDS)]
    heads = sorted((o + v + c).capitalize() for o in _ONSETS for v in _VOWELS for c in ("", "l", "n", "r"))
    tails = sorted(o + e for o in _ONSETS for e in ends)
    pool = [head + tail for head in heads for tail in tails]
    pool.sort()  # Nearly in order already: that takes a tenth of the time that words in any order take.
    if count > len(pool):
        raise ValueError(f"conf/data/world.yaml: {count} words needed for one kind, {len(pool)} exist. Fewer entities.")
    return tuple(rng.sample(pool, count))


def _fraction(*parts: object) -> float:
    """A fixed pseudo-random number in [0, 1) for these parts, the same on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56
