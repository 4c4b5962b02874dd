"""Hybrid search: against a slow fusion, whole and torn indexes, and a reranker whose order is worked by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import conf, retrieval
from tasks.retrieval import RetrievalError
from tasks.retrieval.bm25 import Settings as Bm25
from tasks.retrieval.fusion import fuse
from tasks.retrieval.hybrid import GROWTH, HybridRetriever, Settings, _Rows
from tasks.retrieval.rerank import CrossEncoder, RerankConf
from tasks.store import DataError
from tasks.types import Hit
from tests.papers import golden
from tests.retrieval.conftest import Corpus

ROOT = Path(__file__).parents[2]
TITLES = {"backend": "bm25", "title_weight": 3}
TEXTS = {"backend": "bm25", "stemmer": "snowball", "title_weight": 0}
SMALL = Settings("hybrid", {"titles": TITLES, "texts": TEXTS}, depth=3)


class Ranked:
    """Answers every query with the same ranking of the passages 0, 1, 2, ..., of which the first `matched` match."""

    def __init__(self, order: list[int], matched: int = 99) -> None:
        self.order, self.matched = order, matched

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        scores = [1.0 / (n + 1) if n < self.matched else 0.0 for n in range(len(self.order))]
        return [
            [Hit(f"p{i}", score, "", "") for i, score in zip(self.order[:top_k], scores, strict=False)] for _ in queries
        ]


class Rows(list):
    """The rows of passages whose ids are `p<row>`."""

    def of(self, passage_ids: list[str]) -> list[int]:
        return [int(name[1:]) for name in passage_ids]


def _hybrid(orders: list[list[int]], depth: int, k: float = 60.0, weights: tuple[float, ...] = (), **more: object):
    names = [f"part{i}" for i in range(len(orders))]
    settings = Settings(
        "hybrid", dict.fromkeys(names, Bm25("bm25")), depth, k, dict(zip(names, weights, strict=False)),
        more.pop("reranker", RerankConf()),
    )  # fmt: skip
    matched = more.pop("matched", [99] * len(orders))
    parts = {name: Ranked(*pair) for name, *pair in zip(names, orders, matched, strict=True)}
    return HybridRetriever(settings, parts, Rows(orders[0]), **more)


def _slow(orders: list[list[int]], depth: int, k: float, weights: tuple[float, ...], matched: list[int]) -> list[int]:
    """Depth by depth: every passage not placed yet that some part has so early, by what its matching ranks give."""
    placed: list[int] = []
    while len(placed) < len(orders[0]):
        scores: dict[int, float] = {}
        for row in range(len(orders[0])):
            ranks = [order.index(row) + 1 for order in orders]
            cases = zip(weights, ranks, matched, strict=True)
            terms = [weight / (k + rank) * (rank <= most) for weight, rank, most in cases if rank <= depth]
            if terms and row not in placed:
                scores[row] = sum(terms)
        placed += sorted(scores, key=lambda row: (-scores[row], row))
        depth *= GROWTH
    return placed


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[list[int]], int, float, tuple[float, ...], list[int]]:
    count, parts = draw(st.integers(1, 30)), draw(st.integers(2, 3))
    orders = [draw(st.permutations(range(count))) for _ in range(parts)]
    weights = tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 3.0, 200.0]), min_size=parts, max_size=parts)))
    matched = draw(st.lists(st.sampled_from([0, 2, 5, 99]), min_size=parts, max_size=parts))
    return orders, draw(st.integers(1, 12)), draw(st.sampled_from([0.0, 1.0, 60.0])), weights, matched


@given(_cases())
def test_fusion_against_a_slow_one_and_every_result_begins_the_longer_ones(case):
    orders, depth, k, weights, matched = case
    retriever = _hybrid(orders, depth, k, weights, matched=matched)
    count = len(orders[0])
    [whole] = retriever.search(["q"], count)
    assert [int(hit.passage_id[1:]) for hit in whole] == _slow(orders, depth, k, weights, matched)
    for top_k in range(1, count + 3):
        assert retriever.search(["q", "r"], top_k) == [whole[:top_k]] * 2
    scores = [hit.score for hit in whole]
    assert scores == sorted(scores, reverse=True)
    for one, other in itertools.pairwise(whole):
        assert one.score > other.score or int(one.passage_id[1:]) < int(other.passage_id[1:])


@pytest.mark.parametrize("row", golden("search", "Fused ranks"))
def test_golden_fusion(row):
    rankings = [[Hit(letter, 1.0, "", "") for letter in word] for word in row["rankings"]]
    found = fuse(rankings, 9, row["k"], row["weights"])
    assert [hit.passage_id for hit in found] == row["order"]
    assert [hit.score for hit in found] == pytest.approx(row["scores"], abs=1e-6)


def test_by_hand():
    """k = 1, depth 2, weights 1 and 2: part 0 ranks 3 1 2 0, part 1 ranks 1 0 2 3.

    p1: 1/3 + 2/2 = 4/3; p0: 2/3; p3: 1/2; S = 3/2. Then all at depth 4: p2: 1/4 + 2/4 - 3/2 = -3/4.
    """
    [hits] = _hybrid([[3, 1, 2, 0], [1, 0, 2, 3]], 2, 1.0, (1.0, 2.0)).search(["q"], 9)
    assert [hit.passage_id for hit in hits] == ["p1", "p0", "p3", "p2"]
    assert [hit.score for hit in hits] == pytest.approx([4 / 3, 2 / 3, 1 / 2, -3 / 4])


def test_passages_that_match_nothing_do_not_push_aside_those_of_the_other_part():
    """Part 0 found p5 and filled up with p0, p1, ...; part 1 knows the order of all."""
    orders, matched = [[5, 0, 1, 2, 3, 4], [4, 5, 3, 2, 1, 0]], [1, 99]
    [hits] = _hybrid(orders, 4, matched=matched).search(["q"], 6)
    assert [hit.passage_id for hit in hits] == ["p5", "p4", "p3", "p2", "p0", "p1"]
    assert [hit.score for hit in hits[4:]] == [0.0, 0.0]


def test_the_reranker_sees_the_first_hits_whatever_is_asked_for():
    asked: list[list[str]] = []

    def scores(query: str, hits: list[Hit]) -> list[float]:
        asked.append([hit.passage_id for hit in hits])
        return [{"p4": 0.9, "p2": 0.9}.get(hit.passage_id, 0.1) for hit in hits]

    orders = [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0]]
    retriever = _hybrid(orders, 4, reranker=RerankConf("some", depth=3), rerank=scores)
    [hits] = retriever.search(["q"], 5)
    assert [hit.passage_id for hit in hits] == ["p2", "p4", "p3", "p1", "p0"]  # p2 and p4 tie: corpus order.
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert retriever.search(["q"], 1) == [hits[:1]]
    assert asked == [["p4", "p3", "p2"]] * 2


def test_index_on_disk(corpus: Corpus, town_passages: list[tuple[str, str]], tmp_path: Path):
    path = corpus(town_passages)
    manifest = retrieval.build(path, tmp_path / "index", SMALL, tmp_path / "scratch")
    assert manifest["num_passages"] == 10
    retriever = retrieval.open_retriever(tmp_path / "index", path)
    parts = {}
    for name, settings in SMALL.parts.items():
        retrieval.build(path, tmp_path / name, settings)
        parts[name] = retrieval.open_retriever(tmp_path / name, path)
        for file in (tmp_path / name).iterdir():  # A part is what it would be alone.
            assert (tmp_path / "index" / name / file.name).read_bytes() == file.read_bytes(), file.name
    queries = ["Bern city", "", "river run", "no such word", "Zürich " * 1500]
    results = retriever.search(queries, 50)
    for query, hits in zip(queries, results, strict=True):
        alone = [part.search([query], 10)[0] for part in parts.values()]
        orders = [[int(hit.passage_id[1:]) for hit in found] for found in alone]
        matched = [sum(hit.score > 0 for hit in found) for found in alone]
        assert [int(hit.passage_id[1:]) for hit in hits] == _slow(orders, 3, 60.0, (1.0, 1.0), matched)
        assert [(hit.title, hit.text) for hit in hits] == [town_passages[int(h.passage_id[1:])] for h in hits]
        assert retriever.search([query], 4) == [hits[:4]]
    assert retriever.search([], 3) == []
    assert retrieval.open_retriever(tmp_path / "index", path, num_threads=2).search(queries, 50) == results
    again = retrieval.build(path, tmp_path / "again", conf.fill(Settings, manifest["settings"], "manifest"))
    assert again == manifest
    with pytest.raises(ValueError, match="top_k=0"):
        retriever.search(["x"], 0)


def test_a_torn_part_is_found(corpus: Corpus, town_passages: list[tuple[str, str]], tmp_path: Path):
    path = corpus(town_passages)
    retrieval.build(path, tmp_path / "index", SMALL)
    file = tmp_path / "index" / "texts" / "passages.jsonl"
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    with pytest.raises(DataError, match=r"texts/passages\.jsonl: sha256 .* is not"):
        retrieval.open_retriever(tmp_path / "index", path)


def test_a_part_that_fails_fails_the_search():
    class Down(Ranked):
        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            raise RetrievalError("server: no answer")

    class Short(Ranked):
        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            return super().search(queries, top_k - 1)

    for kind, at_once, message in (
        (Down, False, "hybrid: part 'b': server: no answer"),
        (Down, True, "hybrid: part 'b': server: no answer"),
        (Short, False, r"hybrid: part 'b': found \[1\] hits, expected 2 for each query"),
    ):
        settings = Settings("hybrid", {"a": Bm25("bm25"), "b": Bm25("bm25")}, depth=2)
        parts = {"a": Ranked([0, 1, 2]), "b": kind([0, 1, 2])}
        with pytest.raises(RetrievalError, match=message):
            HybridRetriever(settings, parts, Rows([0, 1, 2]), at_once=at_once).search(["q"], 1)


def test_a_part_with_a_passage_of_another_corpus_fails_the_search(corpus: Corpus, town_passages, tmp_path: Path):
    path = corpus(town_passages)
    retrieval.build(path, tmp_path / "index", SMALL)
    parts = {"titles": Ranked([0, 10, 1]), "texts": Ranked([0, 1, 2])}
    with pytest.raises(RetrievalError, match="a part found passage 'p10', which is not in the corpus"):
        HybridRetriever(SMALL, parts, _Rows(tmp_path / "index")).search(["q"], 1)


def test_a_part_that_repeats_a_passage_cannot_keep_the_search_going():
    with pytest.raises(RetrievalError, match="the parts found 2 passages in all, expected 3"):
        _hybrid([[0, 0, 1], [1, 0, 0]], 1).search(["q"], 3)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"parts": {"a": TITLES}}, r"mine: parts=\['a'\]: expected at least two"),
        ({"parts": {"a": TITLES, "b": {"backend": "bm52"}}}, r"mine: parts\.b: backend='bm52': expected one of bm25"),
        ({"parts": {"a": TITLES, "b": {**TEXTS, "stemmr": 1}}}, r"mine: parts\.b: unknown key 'stemmr'\. Did you"),
        ({"parts": {"a": TITLES, "b": 3}}, r"mine: parts\.b=3: expected a mapping"),
        ({"parts": {"a": TITLES, "../b": TEXTS}}, r"mine: parts='\.\./b': expected names of a-z"),
        ({"weights": {"c": 1.0}}, r"mine: weights='c': expected names of parts: a, b"),
        ({"weights": {"a": 0}}, r"mine: weights\.a=0\.0: expected more than 0"),
        ({"depth": 0}, "mine: depth=0: expected a number above 0"),
        ({"reranker": {"model": "x", "depth": 101}}, r"mine: reranker\.depth=101: expected at most depth=100"),
        ({"reranker": {"models": "x"}}, "mine: reranker: unknown key 'models'"),
    ],
)
def test_wrong_settings_are_named(tree: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        conf.fill(Settings, {"backend": "hybrid", "parts": {"a": TITLES, "b": TEXTS}, **tree}, "mine")


def test_the_settings_of_the_house_are_those_of_its_parts_files():
    settings = retrieval.load_settings("hybrid", ROOT)
    assert settings.parts == {name: retrieval.load_settings(name, ROOT) for name in ("bm25", "dense")}
    assert settings.reranker.model == ""


# The reranker

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "city", "river", "bern", "cold"]


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a BERT of one layer with random weights, 9 words and 40 positions."""

    def write(labels: int = 1, name: str = "cross") -> Path:
        import torch
        from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, num_labels=labels, **sizes)
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
        BertTokenizerFast(vocab={w: n for n, w in enumerate(WORDS)}).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


HITS = [Hit(f"p{i}", 1.0, title, text) for i, (title, text) in enumerate(
    [("Bern", "city city"), ("River", "cold river bern"), ("", "cold"), ("City", "river " * 60), ("Bern", "city city")]
)]  # fmt: skip


@pytest.mark.slow
def test_a_random_cross_encoder_against_its_layers_written_out(cross_encoder):
    """Embeddings, one attention layer, pooler and classifier with plain matrices, and the order that follows."""
    import torch
    from safetensors.torch import load_file

    folder = cross_encoder()
    conf = RerankConf(str(folder), batch_size=2, max_tokens=16)
    weights = {name.removeprefix("bert."): w.double() for name, w in load_file(folder / "model.safetensors").items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def by_hand(query: str, hit: Hit) -> float:
        first, second = (text.lower().split() for text in (query, f"{hit.title} {hit.text}"))
        second = second[: 16 - 3 - len(first)]  # [CLS] query [SEP] passage [SEP]
        words = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
        kinds = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        part = "embeddings"
        x = weights[f"{part}.word_embeddings.weight"][[WORDS.index(w) for w in words]]
        x = x + weights[f"{part}.position_embeddings.weight"][: len(words)]
        x = norm(f"{part}.LayerNorm", x + weights[f"{part}.token_type_embeddings.weight"][kinds])
        layer = "encoder.layer.0"
        q, k, v = (
            linear(f"{layer}.attention.self.{n}", x).view(-1, 2, 8).transpose(0, 1) for n in ("query", "key", "value")
        )
        mixed = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v  # [heads, T, 8]
        mixed = linear(f"{layer}.attention.output.dense", mixed.transpose(0, 1).reshape(-1, 16))
        x = norm(f"{layer}.attention.output.LayerNorm", x + mixed)
        wide = torch.nn.functional.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", wide))
        return float(torch.sigmoid(linear("classifier", torch.tanh(linear("pooler.dense", x[0])))))

    model = CrossEncoder(conf)
    found = model.scores("cold city", HITS)
    assert found == pytest.approx([by_hand("cold city", hit) for hit in HITS], abs=1e-6)
    assert found[0] == pytest.approx(found[4], abs=1e-6)
    assert len({round(score, 6) for score in found}) == 4
    assert model.scores("cold city", HITS[:2]) == found[:2]
    assert model.scores("", []) == []


@pytest.mark.slow
def test_an_index_with_a_reranker(corpus: Corpus, town_passages, cross_encoder, tmp_path: Path):
    path, folder = corpus(town_passages), cross_encoder()
    reranker = RerankConf(str(folder), depth=3, max_tokens=32)
    settings = Settings("hybrid", {"titles": TITLES, "texts": TEXTS}, depth=3, reranker=reranker)
    manifest = retrieval.build(path, tmp_path / "index", settings)
    assert manifest["details"]["reranker_sha256"] == CrossEncoder(reranker).sha256
    retriever = retrieval.open_retriever(tmp_path / "index", path)
    retrieval.build(path, tmp_path / "plain", SMALL)
    queries = ["Bern city", "", "city " * 2000]
    results = retriever.search(queries, 10)
    for query, hits, plain in zip(
        queries, results, retrieval.open_retriever(tmp_path / "plain", path).search(queries, 10), strict=True
    ):
        scores = dict(
            zip((h.passage_id for h in plain[:3]), CrossEncoder(reranker).scores(query, plain[:3]), strict=True)
        )
        assert [hit.passage_id for hit in hits[:3]] == sorted(scores, key=lambda name: (-scores[name], name))
        assert hits[3:] == plain[3:]
        assert all(one.score >= other.score for one, other in itertools.pairwise(hits))
        assert retriever.search([query], 2) == [hits[:2]]
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    with pytest.raises(DataError, match=r"built with another reranker: .* has hash .*, the index was built with"):
        retrieval.open_retriever(tmp_path / "index", path)


@pytest.mark.slow
def test_a_model_that_is_no_cross_encoder_is_refused(cross_encoder, tmp_path: Path):
    with pytest.raises(DataError, match="no such folder"):
        CrossEncoder(RerankConf(str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="found 2 labels, expected a cross-encoder with one"):
        CrossEncoder(RerankConf(str(cross_encoder(labels=2, name="two"))))
    folder = cross_encoder()
    with pytest.raises(DataError, match="the model reads 40 tokens, but max_tokens=256"):
        CrossEncoder(RerankConf(str(folder)))
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w for n, w in weights.items() if "classifier" not in n}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(DataError, match=r"the weights lack classifier\.bias, classifier\.weight"):
        CrossEncoder(RerankConf(str(folder), max_tokens=32))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="no safetensors weights here"):
        CrossEncoder(RerankConf(str(folder), max_tokens=32))
