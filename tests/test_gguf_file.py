"""GGUF files that claim what they do not hold: each is read or refused in words, with little memory and time."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import gguf_file
from tasks.store import DataError

Q8_0, F32 = 8, 0


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def string(text: bytes) -> bytes:
    return number(len(text)) + text


def written(values: bytes = b"", tensors: bytes = b"", num_values: int = 1, num_tensors: int = 0) -> bytes:
    return b"GGUF" + number(3, 4) + number(num_tensors) + number(num_values) + values + tensors


def tensor(name: bytes, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return string(name) + number(len(shape), 4) + b"".join(map(number, shape)) + number(kind, 4) + number(offset)


def with_tensor(name: bytes, shape: tuple[int, ...], kind: int = F32) -> bytes:
    return written(tensors=tensor(name, shape, kind), num_values=0, num_tensors=1) + bytes(99)


def array(kind: int, count: int) -> bytes:
    return string(b"k") + number(9, 4) + number(kind, 4) + number(count)


NESTED = string(b"k") + number(9, 4) + (number(9, 4) + number(1)) * 20_000 + number(0, 4) + number(1) + b"\0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (written(array(0, 1 << 60)) + bytes(1000), r"a count of 1,152,921,504,606,846,976, and 1,000 bytes are left"),
        (written(array(8, 1 << 61)) + bytes(1000), r"found a count of 2,305,843,009,213,693,952"),
        (written(NESTED), r"found arrays within arrays, more than 4 deep"),
        (written(array(0, 9_000_000)) + bytes(9_000_000), r"arrays of 9,000,000 values, expected at most 8,000,000"),
        (written(string(b"k") + number(99, 4) + bytes(50)), r"found a value of type 99"),
        (written(number(1 << 63)), r"found a count of"),
        (written(num_values=1 << 62) + bytes(99), r"found a count of 4,611,686,018,427,387,904"),
        (written(num_values=0, num_tensors=1 << 62) + bytes(99), r"found a count of 4,611,686,018,427,387,904"),
        (with_tensor(b"a", (0, 0)), r"found a tensor of shape 0 x 0"),
        (with_tensor(b"a", (1 << 40, 1 << 40)), r"found a tensor of shape \d+ x"),
        (with_tensor(b"a", (8,) * 9), r"found a tensor of 9 dimensions"),
        (with_tensor(b"a", (33,), Q8_0), r"cannot be read to the last"),
        (with_tensor(b"a\x1b[2J", (1,)), r"called 'a\\x1b\[2J'"),
        (b"GGUF" + number(1, 4) + bytes(99), r"found version 1 of the format"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_a_file_claims_and_does_not_hold_is_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(content)
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"odd\.gguf: .*{message}"):
            gguf_file.check(file)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b", "c"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    writer.add_tensor("q", gguf.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return file.read_bytes()


@settings(max_examples=150, deadline=2000)
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1, 4, 8]), st.integers(0, 2**64 - 1)), max_size=3),
    end=st.one_of(st.none(), st.integers(0, 700)),
)
def test_a_damaged_file_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, edits: list[tuple[int, int, int]], end: int | None
) -> None:
    content = bytearray(whole)
    for at, size, value in edits:
        content[at : at + size] = struct.pack("<Q", value)[:size]
    file = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    file.write_bytes(content[:end])
    said = ""
    try:
        gguf_file.check(file)
    except DataError as error:
        said = str(error)
    assert said.startswith(f"{file}: ") if said else gguf_file.num_weights(file) >= 0
