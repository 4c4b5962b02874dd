"""Strict settings: every mistake a person can make in YAML is named, none is repaired in silence."""

import dataclasses
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tasks import conf, params
from tasks.conf import fill, merge, plain, require
from tasks.params import Evaluate, Params
from tests import shipped


@dataclass(frozen=True)
class Inner:
    size: int = 2


@dataclass(frozen=True)
class Settings:
    learning_rate: float
    num_steps: int
    name: str
    kind: Literal["fast", "slow"]
    is_on: bool = True
    cap: float | None = None
    sizes: tuple[int, ...] = ()
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner()
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "at least 1")


ROOT = Path(__file__).parents[1]
GOOD = "learning_rate: 0.1\nnum_steps: 3\nname: x\nkind: fast\n"


def read(text, cls=Settings):
    return fill(cls, conf.parse(text, "conf/x.yaml"), "conf/x.yaml")


def test_a_good_file():
    assert read(GOOD) == Settings(0.1, 3, "x", "fast")
    more = read(GOOD + "is_on: false\ncap: 2\nsizes: [1, 2]\nshares: {a: 1, b: 0.5}\ninner: {size: 7}\n")
    assert more == Settings(0.1, 3, "x", "fast", False, 2.0, (1, 2), {"a": 1.0, "b": 0.5}, Inner(7))
    assert [type(v) for v in (more.cap, more.shares["a"])] == [float, float]
    assert read(GOOD + "cap: null").cap is None
    assert read(GOOD + "parts: {a: {b: 1}, c: [2]}").parts == {"a": {"b": 1}, "c": [2]}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("1.0e-6", 1e-6), ("-2e3", -2000.0), ("3", 3.0), ("1e+2", 100.0)],
)
def test_numbers_as_people_write_them(text, value):
    # YAML 1.1 reads 1e-6 as text.
    found = read(GOOD.replace("0.1", text)).learning_rate
    assert found == value
    assert isinstance(found, float)
    assert read(GOOD + f"cap: {text}").cap == value


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("num_steps", "num_stesp"), ["unknown key 'num_stesp'", "Did you mean 'num_steps'?", "Known: learning_rate"]),
        (("name: x", "name: x\nzzzz: 1"), ["unknown key 'zzzz'", "Known: "]),
        (("name: x", "name: x\n7: 1"), ["unknown key '7'"]),
        (("name: x\n", ""), ["key 'name' is missing", "text"]),
        (("num_steps: 3\n", ""), ["key 'num_steps' is missing", "an integer"]),
        (("fast", "fats"), ["kind", "'fats'", "'fast', 'slow'"]),
        (("3", "3.0"), ["num_steps", "3.0 (float)", "an integer"]),
        (("3", "true"), ["num_steps", "True (bool)", "an integer"]),
        (("3", "'3'"), ["num_steps", "'3' (str)", "an integer"]),
        (("3", "1e3"), ["num_steps", "1000.0 (float)", "an integer"]),
        (("3", "null"), ["num_steps", "None", "an integer"]),
        (("3", "[3]"), ["num_steps", "[3]", "an integer"]),
        (("3", "0"), ["num_steps=0", "expected at least 1"]),
        (("0.1", "true"), ["learning_rate", "True (bool)", "a number"]),
        (("0.1", "fast"), ["learning_rate", "'fast'", "a number"]),
        (("0.1", "nan"), ["learning_rate", "nan", "a number"]),
        (("0.1", "inf"), ["learning_rate", "inf", "a number"]),
        (("0.1", ".nan"), ["learning_rate=nan: expected a finite number."]),
        (("0.1", "-.inf"), ["learning_rate=-inf: expected a finite number."]),
        (("0.1", "1e400"), ["learning_rate=inf: expected a finite number."]),
        (("0.1", "1_000e1"), ["learning_rate", "'1_000e1'", "a number"]),
        (("0.1", "1_0e1"), ["learning_rate", "1_0e1", "a number"]),
        (("0.1", "null"), ["learning_rate", "None", "a number"]),
        (("name: x", "name: 5"), ["name", "5 (int)", "text"]),
        (("name: x", "name: null"), ["name", "None", "text"]),
        (("name: x", "name: no"), ["name", "False (bool)", "text"]),  # YAML's famous no
        (("name: x", "name: x\nis_on: 1"), ["is_on", "1 (int)", "true or false"]),
        (("name: x", "name: x\nis_on: 'yes'"), ["is_on", "'yes'", "true or false"]),
        (("name: x", "name: x\ncap: high"), ["cap", "'high'", "a number"]),
        (("name: x", "name: x\nsizes: 3"), ["sizes", "3", "a list of integers"]),
        (("name: x", "name: x\nsizes: 'ab'"), ["sizes", "'ab'", "a list"]),
        (("name: x", "name: x\nsizes: [1, b]"), ["sizes[1]", "'b'", "an integer"]),
        (("name: x", "name: x\nsizes: {a: 1}"), ["sizes", "a list"]),
        (("name: x", "name: x\nshares: [1]"), ["shares", "[1]", "a mapping"]),
        (("name: x", "name: x\nshares: {a: b}"), ["shares.a", "'b'", "a number"]),
        (("name: x", "name: x\ninner: {sizes: 1}"), ["inner", "unknown key 'sizes'", "Did you mean 'size'?"]),
        (("name: x", "name: x\ninner: {size: x}"), ["inner: size", "'x'", "an integer"]),
        (("name: x", "name: x\ninner: 4"), ["inner", "4", "mapping"]),
        (("name: x", "name: x\ninner: null"), ["inner", "None", "mapping"]),
    ],
)
def test_a_mistake_is_named(change, parts):
    text = GOOD.replace(*change)
    assert text != GOOD
    with pytest.raises(ValueError) as found:
        read(text)
    message = str(found.value)
    assert message.startswith("conf/x.yaml: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("tree", [None, [], "text", 3])
def test_a_section_must_be_a_mapping(tree):
    with pytest.raises(ValueError, match=r"conf/x.yaml: found .* expected a mapping with the keys of Settings"):
        fill(Settings, tree, "conf/x.yaml")


good_settings = st.builds(
    Settings,
    learning_rate=st.floats(allow_nan=False, allow_infinity=False),
    num_steps=st.integers(1, 9),
    name=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    kind=st.sampled_from(["fast", "slow"]),
    is_on=st.booleans(),
    cap=st.none() | st.floats(-1, 1),
    sizes=st.lists(st.integers(), max_size=3).map(tuple),
    shares=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 1), max_size=3),
    inner=st.builds(Inner, st.integers()),
)


@settings(max_examples=100)
@given(good_settings)
def test_settings_survive_being_written_down(made):
    assert fill(Settings, plain(made), "x") == made
    assert read(yaml.safe_dump(plain(made))) == made


keys = st.sampled_from(["a", "b", "c"])
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8)
mappings = st.dictionaries(keys, trees, max_size=3)


def at(tree, path):
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


@settings(max_examples=150)
@given(mappings, mappings, st.lists(keys, min_size=1, max_size=3))
def test_merging(base, over, path):
    before = (repr(base), repr(over))
    found, new = at(merge(base, over), path), at(over, path)
    assert (repr(base), repr(over)) == before
    if new is not None and not isinstance(new, dict):
        assert found == new
    assert merge(base, None) == merge(base, {}) == base
    assert merge({}, over) == over
    assert merge(base, base) == base


def test_merging_goes_key_by_key():
    assert merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert merge({"a": {"x": 1}}, {"a": 5}) == {"a": 5}
    assert merge({"a": 5}, {"a": {"x": 1}}) == {"a": {"x": 1}}
    assert merge({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}


def test_a_part_of_another_kind_replaces_the_one_before_whole():
    inherited = {"loss": {"kind": "clip", "low": 0.2}}
    assert merge(inherited, {"loss": {"kind": "mean"}}) == {"loss": {"kind": "mean"}}
    assert merge(inherited, {"loss": {"kind": "clip", "high": 0.3}}) == {
        "loss": {"kind": "clip", "low": 0.2, "high": 0.3}
    }
    assert merge(inherited, {"loss": {"low": 0.3}}) == {"loss": {"kind": "clip", "low": 0.3}}
    assert merge({"loss": {"low": 0.2}}, {"loss": {"kind": "clip"}}) == {"loss": {"kind": "clip"}}


# Files ------------------------------------------------------------------------------------------------------------

PARAMS = """scale: small
data: world
data_folder: conf/data
model: tiny
retriever: bm25
generator: plain
engine: plain
systems: [grpo]
seeds: [0, 1]
evaluate: {top_k: 3, max_questions: 0, num_bootstrap: 2000, sampled: true, reference: grpo}
"""


@pytest.fixture
def clone(tmp_path):
    for name in (
        "scale/small",
        "data/world",
        "model/tiny",
        "retriever/bm25",
        "generator/plain",
        "engine/plain",
        "method/grpo",
        "method/ppo",
        "method/both",
        "system/both",
        "augment/rules",
    ):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("inner: {size: 5}\nother: 1\n")
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path


def test_params(clone):
    found = params.read(clone)
    assert (found.systems, found.seeds, found.evaluate.top_k) == (("grpo",), (0, 1), 3)
    assert fill(Params, plain(found), "x") == found
    assert found.compare_retrievers == ()  # May be left out.
    assert found.augment == ""  # This, too.
    (clone / "params.yaml").write_text(PARAMS + "compare_retrievers: [bm25]\naugment: rules\n")
    assert params.read(clone).compare_retrievers == ("bm25",)
    assert params.read(clone).augment == "rules"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("[grpo]", "[grop]"), ["evaluate.reference='grpo'", "expected one of systems=['grop']"]),
        (("[grpo]", "[grpo, pop]"), ["unknown system 'pop'", "Did you mean 'ppo'?", "Known: both, grpo, ppo"]),
        (("[grpo]", "[grpo, both]"), ["'both' names conf/system/both.yaml and conf/method/both.yaml. Rename one"]),
        (("[grpo]", "[]"), ["systems=[]", "expected at least 1 in it (what is evaluated"]),
        (("[grpo]", "grpo"), ["systems", "'grpo'", "a list of texts"]),
        (("[grpo]", "[grpo, grpo]"), ["systems", "different names"]),
        (("[0, 1]", "[]"), ["seeds=[]", "expected at least 1 in it"]),
        (("[0, 1]", "[1, 1]"), ["seeds", "different integers"]),
        (("[0, 1]", "[0, x]"), ["seeds[1]", "'x'"]),
        (("model: tiny", "model: tyni"), ["unknown model 'tyni'", "Known: tiny"]),
        (("scale: small", "scale: big"), ["unknown scale 'big'", "Known: small"]),
        (("generator: plain", "generator: vlm"), ["unknown generator 'vlm'", "Known: plain"]),
        (("engine: plain", "engine: deep"), ["unknown engine 'deep'", "Known: plain"]),
        (("top_k: 3", "topk: 3"), ["evaluate", "unknown key 'topk'", "Did you mean 'top_k'?"]),
        (
            ("top_k: 3", "top_k: -1"),
            [
                "evaluate: top_k=-1",
                "expected 0 or more and 1000 or less (passages per search; 0 takes the scale's, as in training)",
            ],
        ),
        (("max_questions: 0", "max_questions: -1"), ["max_questions=-1", "expected 0 or more", "0 takes the scale's"]),
        (("top_k: 3", "top_k: 1000000000"), ["evaluate: top_k=1000000000", "expected 0 or more and 1000 or less"]),
        (("num_bootstrap: 2000", "num_bootstrap: 99"), ["num_bootstrap=99", "100 or more"]),
        (("num_bootstrap: 2000", "num_bootstrap: 1000000000000"), ["num_bootstrap=1000000000000", "1000000 or less"]),
        (("[0, 1]", f"[0, {10**23}]"), [f"seeds[1]={10**23}", "expected 0 or more and 999999 or less"]),
        (("scale: small", "scale: " + "1" * 5000), ["4300 digits", "line 1, column 8", "scale: 1111"]),
        (("scale: small", "scale: 2020-13-41"), ["month must be in 1..12", "line 1, column 8", "scale: 2020-13-41"]),
        (("scale: small", "scale: " + "[" * 5000 + "]" * 5000), ["too deep"]),
        (("scale: small", "scale: 0x" + "f" * 5000), ["found what JSON cannot hold"]),
        (("seeds: [0, 1]\n", ""), ["'seeds' is missing"]),
        (("seeds:", "compare_retrievers: [bm25, bm52]\nseeds:"), ["unknown retriever 'bm52'", "Did you mean 'bm25'?"]),
        (("seeds:", "augment: rule\nseeds:"), ["unknown augment 'rule'", "Did you mean 'rules'?"]),
        (("seeds:", "compare_retrievers: [bm25, bm25]\nseeds:"), ["compare_retrievers", "different names"]),
        (("seeds: [0, 1]\n", "seeds: [0, 1]\nseeds: [2]\n"), ["seeds", "twice"]),
    ],
)
def test_a_mistake_in_params_is_named(clone, change, parts):
    (clone / "params.yaml").write_text(PARAMS.replace(*change))
    with pytest.raises(ValueError) as found:
        params.read(clone)
    for part in ["params.yaml", *parts]:
        assert part in str(found.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"a: b: c", "not valid YAML"),
        (b"", "found NoneType, expected a mapping"),
        (b"- a\n- b\n", "found list, expected a mapping"),
        (b"a: \xff\xfe", "not valid YAML|UTF-8"),
        (b"!!python/object/apply:os.getcwd []", "not valid YAML"),
        (
            b"a: {x: 1, x: 2}",
            r"key 'x' stands twice, expected each key once \(line 1, column 11\): a: {x: 1, x: 2}\. Mend",
        ),
        (b"a: 1\nb: \x00", "not valid YAML: unacceptable character"),
        (b"a: &a [*a]", "an alias stands inside what it names"),
        (b"a: &a {<<: *a}", "an alias stands inside what it names"),
        (b"a: *b", "undefined alias"),
        (b"a: " + b"[" * 5000, "not valid YAML"),
        (b"a: 2024-13-01", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_named(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as found:
        conf.read_yaml(path)
    assert str(path) in str(found.value)


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    for name in ("folder", "circle"):
        with pytest.raises(
            ValueError, match=rf"{name}\.yaml: found what cannot be read \(.*\), expected a file of sett"
        ):
            conf.read_yaml(tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("value", ["[" * 250 + "]" * 250, '"\\ud800"'])
def test_what_json_cannot_hold_is_no_matter_of_utf_8(value):
    with pytest.raises(ValueError, match=r"^conf/x\.yaml: found settings that JSON cannot hold \(") as found:
        read(GOOD + f"parts: {{a: {value}}}")
    assert "UTF-8" not in str(found.value)


@pytest.mark.parametrize("text", ["5e-7 GRPO", "12e4ab", "1e3x"])
def test_a_text_that_begins_like_a_number_is_text(text):
    assert read(GOOD.replace("name: x", f"name: {text}")).name == text


def test_a_name_that_commands_cannot_hold_is_refused(clone):
    for name in ("a-b", "a b", "--seed", "${x}", "2x", "méthode"):
        (clone / f"conf/method/{name}.yaml").write_text("title: x\n")
        with pytest.raises(
            ValueError, match=r"found a name that commands cannot hold, expected ASCII letters"
        ) as found:
            conf.kind_of(("system", "method"), name, clone)
        assert str(found.value).endswith(f"Rename conf/method/{name}.yaml.")


def test_a_folder_without_files_has_no_known_names(tmp_path):
    with pytest.raises(ValueError, match=r"unknown method 'mine'\. There is none yet\. One of your own lies in"):
        conf.path_of("method", "mine", tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"params\.yaml: the file is missing\. Run from the root"):
        params.read(tmp_path)


def test_loading_a_section(clone):
    assert conf.load(Inner, "method", "grpo", "inner", clone) == Inner(5)
    assert conf.section("method", "grpo", clone) == {"inner": {"size": 5}, "other": 1}
    with pytest.raises(ValueError, match=r"conf/method/grpo\.yaml: section 'innner' is missing"):
        conf.load(Inner, "method", "grpo", "innner", clone)
    with pytest.raises(ValueError, match=r"conf/method/grpo\.yaml: unknown key 'inner'"):
        conf.load(Inner, "method", "grpo", root=clone)
    with pytest.raises(ValueError, match=r"conf/method/grpo\.yaml: other: found 1, expected a mapping"):
        conf.load(Inner, "method", "grpo", "other", clone)
    with pytest.raises(ValueError, match="unknown method 'dspo'"):
        conf.load(Inner, "method", "dspo", root=clone)


def test_yaml_merge_keys_still_work(tmp_path):
    (tmp_path / "x.yaml").write_text("base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n")
    assert conf.read_yaml(tmp_path / "x.yaml")["more"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("line", ["{key}: &{key} [{alias}]", "{key}: &{key} {{<<: [{alias}]}}"])
def test_a_few_lines_that_stand_for_a_billion_values_are_refused(tmp_path, line):
    names = "abcdefghij"
    rows = [line.format(key=new, alias=", ".join([f"*{old}"] * 9)) for old, new in itertools.pairwise(names)]
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\n" + "\n".join(rows))
    with pytest.raises(ValueError, match=r"x\.yaml: not valid YAML: aliases stand for more than 20,000 values"):
        conf.read_yaml(tmp_path / "x.yaml")


LARGE = {
    "a list": "[" + "x, " * 9_000 + "x]",
    "a text": "x" * 100_000,
    "a mapping": "{" + "".join(f"k{i}: 1, " for i in range(9_000)) + "}",
    "deep lists": "[" * 60 + "]" * 60,
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_message_is_short_whatever_was_found(kind):
    for key in ("num_steps", "sizes", "inner", "kind"):
        with pytest.raises(ValueError, match=rf"^conf/x\.yaml: {key}") as found:
            read("\n".join([*(line for line in GOOD.split("\n") if key not in line), f"{key}: {LARGE[kind]}"]))
        assert len(str(found.value)) < 600
    with pytest.raises(ValueError) as found:
        require(False, "key", conf.parse(LARGE[kind], ""), "something else")
    assert len(str(found.value)) < 600


def test_a_message_does_not_spell_out_what_it_cuts():
    """A few aliases can stand for a list whose whole text is larger than memory."""
    spelt = []

    class Found:
        def __repr__(self) -> str:
            spelt.append(self)
            return "x"

    assert "..." in conf.shown([[Found()] * 100] * 100)
    assert len(spelt) < 200


def test_a_date_is_text_and_what_json_cannot_hold_is_named():
    assert read(GOOD.replace("name: x", "name: 2024-01-01")).name == "2024-01-01"
    with pytest.raises(ValueError, match=r"conf/x\.yaml: num_steps: found '2024-01-01' \(str\), expected an integer"):
        read(GOOD.replace("3", "2024-01-01"))
    with pytest.raises(ValueError, match=r"conf/x\.yaml: found what JSON cannot hold \(keys must be str"):
        fill(Settings, {"parts": {(1, 2): 3}}, "conf/x.yaml")
    with pytest.raises(ValueError, match=r"conf/x\.yaml: found settings that JSON cannot hold \("):
        fill(Settings, {"name": "\ud800"}, "conf/x.yaml")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_every_bit(number):
    assert fill(Settings, {**conf.parse(GOOD, ""), "learning_rate": number}, "x").learning_rate.hex() == number.hex()


@dataclass(frozen=True)
class Bounded:
    share: Annotated[float, Field(ge=0, lt=1, description="of all rows")] = 0.5
    size: Annotated[int, Field(gt=0, le=9)] = 1
    name: Annotated[str, Field(min_length=1)] = "x"
    names: Annotated[tuple[str, ...], Field(min_length=2)] = ("a", "b")
    inner: Annotated[Inner | None, Field(description="further")] = None
    inners: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("share: -0.1", "conf/x.yaml: share=-0.1: expected 0 or more and a number below 1 (of all rows)."),
        ("share: 1", "conf/x.yaml: share=1: expected 0 or more and a number below 1 (of all rows)."),
        ("size: 0", "conf/x.yaml: size=0: expected a number above 0 and 9 or less."),
        ("size: 10", "conf/x.yaml: size=10: expected a number above 0 and 9 or less."),
        ("name: ''", "conf/x.yaml: name='': expected at least 1 in it."),
        ("names: [a]", "conf/x.yaml: names=['a']: expected at least 2 in it."),
        ("inner: {sise: 2}", "conf/x.yaml: inner: unknown key 'sise'. Did you mean 'size'? Known: size."),
        ("inners: [{}, {size: x}]", "conf/x.yaml: inners[1]: size: found 'x' (str), expected an integer."),
        ("inners: [1]", "conf/x.yaml: inners[0]: found 1, expected a mapping with the keys of Inner (size)."),
    ],
)
def test_bounds_stand_in_the_type(text, message):
    with pytest.raises(ValueError) as found:
        read(text, Bounded)
    assert str(found.value) == message


def test_the_shipped_params_are_well_formed():
    made = conf.fill(Params, conf.read_yaml(shipped.root() / conf.PARAMS), "params.yaml")
    assert isinstance(made.evaluate, Evaluate)


@pytest.mark.parametrize("text", ["- 1\n" * 1_000_000, "a: " + "[1," * 30_000, "{" + "a: {b: 1}, " * 300_000 + "}"])
def test_a_file_of_too_many_values_is_refused_before_it_is_read(tmp_path, text, monkeypatch):
    monkeypatch.setattr(conf, "MAX_NODES", 400)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"x\.yaml: not valid YAML: .*(more than 400 values|stands twice| too deep)"):
        conf.parse(text, "x.yaml")
    assert time.process_time() - began < 5
    (tmp_path / "x.yaml").write_text(text * 50)
    with pytest.raises(
        ValueError, match=r"x\.yaml: found [\d,]+ bytes, expected a file of settings, of at most 4,194,304"
    ):
        conf.read_yaml(tmp_path / "x.yaml")
