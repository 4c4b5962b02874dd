"""The generated world: reproducible, answerable from its passages, and a test split that training never showed."""

import dataclasses
import hashlib
import itertools
import tracemalloc
from collections import Counter

import pytest

from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.data.records import passage_row, question_row, to_passage, to_question
from tasks.data.world import KINDS, RELATIONS, WorldConf, _words, is_held_out, passages, questions, regions, write_world
from tasks.rewards.answer import AnswerReward
from tasks.rewards.format_answer import FormatAnswerReward
from tasks.store import read_jsonl
from tasks.text import exact_match, normalize
from tasks.types import Trajectory, Turn

SMALL = WorldConf(
    seed=3,
    regions={"train": 4, "dev": 1, "test": 2},
    entities={"person": 12, "film": 6, "company": 4, "university": 4, "city": 6, "country": 4},
    distractors=9,
    questions={"train": 161, "dev": 20, "test": 61},
    hop_shares=(0.25, 0.25, 0.25, 0.25),
    held_out_share=0.3,
)


@pytest.fixture(scope="module")
def asked():
    return list(questions(SMALL))


@pytest.fixture(scope="module")
def told():
    return list(passages(SMALL))


@pytest.fixture(scope="module")
def places():
    return list(regions(SMALL))


def of(asked, split):
    return [question for question in asked if question.split == split]


def contents(folder, conf):
    write_world(conf, folder)
    return [(folder / name).read_bytes() for name in ("corpus.jsonl", "questions.jsonl")]


# Reproducible -----------------------------------------------------------------------------------------------------


def test_a_seed_determines_every_byte(tmp_path):
    assert contents(tmp_path / "a", SMALL) == contents(tmp_path / "b", SMALL)


def test_the_bytes_of_one_world_are_recorded(tmp_path):
    # Guards against a generator that depends on the machine or the hash seed. A change here changes every
    # result: give a reason in the commit.
    digest = hashlib.sha256(b"".join(contents(tmp_path, SMALL))).hexdigest()
    assert digest == "feb031d80eae62d712ca64aad5aa2d3d536842e17f6381ff550bb2ad2bd2b737"


def test_another_seed_is_another_world(asked, told):
    other = dataclasses.replace(SMALL, seed=4)
    assert not {p.title for p in told} & {p.title for p in passages(other)}
    assert not {q.question for q in asked} & {q.question for q in questions(other)}


def test_iterating_twice_and_in_parts_gives_the_same(asked, told):
    assert list(itertools.islice(questions(SMALL), 50)) == asked[:50]
    assert list(itertools.islice(passages(SMALL), 50)) == told[:50]


# Ids and counts ---------------------------------------------------------------------------------------------------


def test_question_ids_are_unique_and_sorted(asked):
    ids = [question.id for question in asked]
    assert ids == sorted(set(ids))
    assert Counter(q.split for q in asked) == SMALL.questions
    assert all(q.id.startswith(f"world/{q.split}-") for q in asked)


def test_no_question_is_asked_twice(asked):
    assert len({q.question for q in asked}) == len(asked)


def test_passages_are_unique(told):
    assert len({p.id for p in told}) == len(told)
    assert len({p.title for p in told}) == len(told)
    assert len({normalize(p.title) for p in told}) == len(told)
    per_region = sum(SMALL.entities.values()) + SMALL.distractors
    assert len(told) == per_region * sum(SMALL.regions.values())


def test_a_passage_id_is_the_published_hash(told):
    for p in told:
        assert p.id == "p" + hashlib.sha256(f"{p.title}\n{p.text}".encode()).hexdigest()[:16]


def test_files_hold_what_the_iterators_give(tmp_path, asked, told):
    write_world(SMALL, tmp_path)
    assert [to_question(row, "x") for _, row in read_jsonl(tmp_path / "questions.jsonl")] == asked
    assert [to_passage(row, "x") for _, row in read_jsonl(tmp_path / "corpus.jsonl")] == told


def test_rows_pass_the_schema(asked, told):
    assert all(to_question(question_row(q), "x") == q for q in asked)
    assert all(to_passage(passage_row(p), "x") == p for p in told)


@pytest.mark.parametrize("shares", [(1.0,), (0.0, 1.0), (0.0, 0.0, 0.0, 1.0)])
def test_hop_shares_are_kept(shares):
    conf = dataclasses.replace(SMALL, hop_shares=shares, questions={"train": 20, "dev": 5, "test": 10})
    assert {q.hops for q in questions(conf)} == {i + 1 for i, share in enumerate(shares) if share}


def test_hops_are_mixed_as_asked(asked):
    counts = Counter(q.hops for q in asked)
    assert set(counts) == {1, 2, 3, 4}
    assert all(abs(count / len(asked) - 0.25) < 0.1 for count in counts.values())


# Answerable -------------------------------------------------------------------------------------------------------


def test_every_gold_passage_exists_and_holds_its_sub_answer(asked, told):
    corpus = {p.id: p for p in told}
    for q in asked:
        assert (q.gold_complete, q.gold_method) == (True, "annotated")
        assert len(q.gold_passage_ids) == len(set(q.gold_passage_ids)) == len(q.decomposition) == q.hops
        assert q.answers == (q.decomposition[-1].answer,)
        for hop, gold in zip(q.decomposition, q.gold_passage_ids, strict=True):
            assert hop.support_passage_id == gold
            assert hop.answer in corpus[gold].text
            assert hop.answer != corpus[gold].title


def test_the_decomposition_leads_from_the_question_to_the_answer(asked, told):
    corpus = {p.id: p for p in told}
    for q in asked:
        subject = corpus[q.gold_passage_ids[0]].title
        assert subject in q.question
        for number, (hop, relation) in enumerate(zip(q.decomposition, (q.type or "").split("/"), strict=True)):
            written = subject if number == 0 else f"#{number}"
            word = "Who" if RELATIONS[relation][1] == "person" else "What"
            assert hop.question == f"{word} is {written}'s {relation}?"
            assert hop.queries == (f"{written} {relation}",)
            assert corpus[hop.support_passage_id].title == subject
            subject = hop.answer
        assert subject == q.answers[0]


def test_a_question_names_its_start_and_its_relations_only(asked, told):
    titles = {p.title for p in told}
    for q in asked:
        path = (q.type or "").split("/")
        start = q.question.split(" is ")[1].split("'s ")[0]
        assert start in titles
        relations = "".join(f"'s {relation}" for relation in path)
        assert q.question == f"{q.question.split()[0]} is {start}{relations}?"
        assert q.question.startswith("Who" if RELATIONS[path[-1]][1] == "person" else "What")
        assert not any(hop.answer in q.question for hop in q.decomposition)


def test_each_step_has_one_right_answer(places):
    # A relation of an entity leads to exactly one other entity, and its passage names nobody twice.
    for region in places:
        for title, facts in region.facts.items():
            kind = region.kinds[title]
            assert set(facts) == {r for r, (source, _) in RELATIONS.items() if source == kind}
            assert len({title, *facts.values()}) == 1 + len(facts)
            for relation, other in facts.items():
                assert region.kinds[other] == RELATIONS[relation][1]
                assert region.passages[title].text.count(other) == 1


def test_no_two_titles_score_as_one_answer(told):
    for a, b in itertools.pairwise(sorted(p.title for p in told)):
        assert exact_match(a, [b]) == 0.0


def test_every_scorer_gives_the_worlds_own_answers_full_marks(asked):
    texts, parse = [f"<think> so </think> <answer> {q.answers[0]} </answer>" for q in asked], SearchR1Grammar().parse
    played = [
        Trajectory(q.id, q.id, (1,), tuple(range(len(t))), (True,) * len(t), (0.0,) * len(t),
                   (Turn(parse(t), 0, len(t), len(t), t),), "answered", parse(t).content)
        for q, t in zip(asked, texts, strict=True)
    ]  # fmt: skip
    for reward in (AnswerReward("em"), AnswerReward("f1"), AnswerReward("subem"), FormatAnswerReward(retrieval=0.1)):
        assert {s.outcome for s in reward(played, asked)} == {1.0}


# Held out ---------------------------------------------------------------------------------------------------------


def test_compositions_of_the_test_split_are_never_trained(asked):
    seen = {q.type for q in asked if q.split != "test" and q.hops > 1}
    new = {q.type for q in of(asked, "test") if q.hops > 1}
    assert seen
    assert new
    assert not seen & new
    for q in asked:
        if q.hops > 1:
            assert is_held_out(SMALL, tuple((q.type or "").split("/"))) == (q.split == "test")
    assert {q.type for q in of(asked, "test") if q.hops == 1} <= set(RELATIONS)


def test_the_held_out_share_is_about_as_asked():
    paths = [path for n in (2, 3, 4) for path in itertools.product(RELATIONS, repeat=n)
             if all(RELATIONS[a][1] == RELATIONS[b][0] for a, b in itertools.pairwise(path))]  # fmt: skip
    for share in (0.1, 0.3, 0.7):
        conf = dataclasses.replace(SMALL, held_out_share=share)
        assert abs(sum(is_held_out(conf, p) for p in paths) / len(paths) - share) < 0.05
    assert not any(is_held_out(SMALL, (relation,)) for relation in RELATIONS)
    assert len({tuple(is_held_out(dataclasses.replace(SMALL, seed=s), p) for p in paths) for s in range(3)}) == 3


def test_every_relation_of_the_test_split_is_trained_alone_or_inside_a_path(asked):
    trained = {relation for q in of(asked, "train") for relation in (q.type or "").split("/")}
    assert trained == set(RELATIONS)


def test_test_entities_occur_nowhere_in_the_other_splits(places, asked):
    hidden = {title for region in places if region.split == "test" for title in region.kinds}
    assert len(hidden) == 2 * sum(SMALL.entities.values())
    texts = [
        p.title + " | " + p.text
        for region in places if region.split != "test"
        for p in (*region.passages.values(), *region.distractors)
    ]  # fmt: skip
    for q in asked:
        if q.split != "test":
            texts += [q.question, *q.answers]
            texts += [part for hop in q.decomposition for part in (hop.question, hop.answer, *hop.queries)]
    everything = "\n".join(texts)
    assert not [title for title in hidden if title in everything]


def test_regions_share_no_entity_and_facts_stay_inside(places):
    titles = [title for region in places for title in region.kinds]
    assert len(set(titles)) == len(titles)
    for region in places:
        assert all(other in region.kinds for facts in region.facts.values() for other in facts.values())


def test_words_belong_to_one_kind(places):
    words: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for region in places:
        for title, kind in region.kinds.items():
            words[kind] |= set(title.split())
    for a, b in itertools.combinations(KINDS, 2):
        assert not words[a] & words[b]


def test_no_word_can_be_made_in_two_ways():
    """The list that words are drawn from has each once."""
    words = _words.__wrapped__(3, 0, 219_520)
    assert len(words) == len(set(words))
    with pytest.raises(ValueError, match="219521 words needed for one kind, 219520 exist"):
        _words.__wrapped__(3, 0, len(words) + 1)


# Distractors ------------------------------------------------------------------------------------------------------


def test_distractors_resemble_real_titles_and_never_equal_one(places, asked):
    real = {title for region in places for title in region.kinds}
    first_words = {title.split()[0] for title in real}
    false = {p.title for region in places for p in region.distractors}
    assert len(false) == SMALL.distractors * len(places)
    assert not {normalize(title) for title in false} & {normalize(title) for title in real}
    assert all(title.split()[0] in first_words for title in false)
    needed = {gold for q in asked for gold in q.gold_passage_ids}
    assert not needed & {p.id for region in places for p in region.distractors}


@pytest.mark.parametrize("num", [1, 5, 6, 7, 11, 12, 13])
def test_any_number_of_distractors_gives_different_titles(num):
    titles = [p.title for p in passages(dataclasses.replace(SMALL, distractors=num))]
    assert len(set(titles)) == len(titles) == 7 * (sum(SMALL.entities.values()) + num)


def test_a_world_without_distractors():
    conf = dataclasses.replace(SMALL, distractors=0)
    assert sum(1 for _ in passages(conf)) == sum(SMALL.entities.values()) * 7
    assert sum(1 for _ in questions(conf)) == sum(SMALL.questions.values())


# Size -------------------------------------------------------------------------------------------------------------


def peak_of_streaming(make, num_regions):
    """Bytes allocated at most while streaming, beyond what is held once the first item is out."""
    conf = dataclasses.replace(
        SMALL,
        regions={"train": num_regions, "dev": 1, "test": 1},
        questions={"train": 4 * num_regions, "dev": 4, "test": 4},
    )
    stream = iter(make(conf))
    next(stream)  # The word lists are made; they grow with the square root of the size.
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream)
        return tracemalloc.get_traced_memory()[1], count
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [passages, questions])
def test_ten_times_the_regions_need_no_more_memory(make):
    small, few = peak_of_streaming(make, 10)
    large, many = peak_of_streaming(make, 100)
    assert many > 7 * few
    assert large < 1.3 * small + 20_000


def test_word_lists_grow_slower_than_the_world():
    from tasks.data.world import _Names

    def words(factor):
        conf = dataclasses.replace(SMALL, regions={k: v * factor for k, v in SMALL.regions.items()})
        return sum(len(_Names(conf, kind).words) for kind in ("person", "city"))

    assert words(100) < 15 * words(1)


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_too_many_questions_are_an_error_that_says_what_to_do(split):
    conf = dataclasses.replace(SMALL, hop_shares=(1.0,), questions={**{"train": 4, "dev": 4, "test": 4}, split: 2000})
    with pytest.raises(ValueError, match=rf"region \d \({split}\) .*Ask fewer questions, or raise regions or entities"):
        list(questions(conf))


def test_too_many_questions_leave_no_half_written_file(tmp_path):
    conf = dataclasses.replace(SMALL, hop_shares=(1.0,), questions={"train": 9000, "dev": 1, "test": 1})
    with pytest.raises(ValueError, match="Ask fewer"):
        write_world(conf, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_nothing_held_out_but_asked_for_is_an_error():
    with pytest.raises(ValueError, match=r"held_out_share=0\.0"):
        list(questions(dataclasses.replace(SMALL, held_out_share=0.0)))
    list(questions(dataclasses.replace(SMALL, held_out_share=0.0, hop_shares=(1.0,))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regions": {"train": 1, "dev": 1}}, "regions=.*train, dev and test"),
        ({"regions": {"train": 0, "dev": 1, "test": 1}}, "regions=.*at least 1"),
        ({"questions": {"train": 1, "dev": 1, "tset": 1}}, "questions=.*train, dev and test"),
        ({"entities": {"person": 3}}, "entities=.*university"),
        ({"entities": {**SMALL.entities, "city": 2}}, "entities=.*at least 3"),
        ({"distractors": -1}, "distractors=-1"),
        ({"hop_shares": ()}, "hop_shares"),
        ({"hop_shares": (0.5, 0.4)}, "hop_shares=.*sum to 1"),
        ({"hop_shares": (1.5, -0.5)}, "hop_shares"),
        ({"hop_shares": (0.2,) * 5}, "hop_shares=.*up to four"),
        ({"held_out_share": 1.0}, "held_out_share=1.0"),
        ({"held_out_share": -0.1}, "held_out_share"),
    ],
)
def test_bounds(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_the_smallest_world_is_possible():
    conf = dataclasses.replace(
        SMALL, regions={"train": 1, "dev": 1, "test": 1}, entities=dict.fromkeys(KINDS, 3), distractors=1,
        questions={"train": 3, "dev": 3, "test": 3}, hop_shares=(0.5, 0.5),
    )  # fmt: skip
    assert sum(1 for _ in questions(conf)) == 9
    assert sum(1 for _ in passages(conf)) == 3 * 19
