from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, SourceError
from genesis.sources import LinesTask, resolve, tasks
from genesis.sources import lines as lines_module
from manifests import SourceSpec
from tests.support.source_documents import read_on, read_until_error

SPEC = SourceSpec(name="mine")


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "json": bytes,
    "jsonl.zst": zstd,
    "jsonl.gz": gzip.compress,
    "json.gz": gzip.compress,
}
every_format = pytest.mark.parametrize("suffix", COMPRESS)
compressed = pytest.mark.parametrize("suffix", ["jsonl.zst", "json.gz"])


def noise(count: int, seed: int) -> list[str]:
    """Texts that do not compress to nothing."""
    source = random.Random(seed)
    return [f"{number}: {source.randbytes(300).hex()}" for number in range(count)]


def as_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {"n": 1}}).encode() + b"\n" for text in texts)


def plan_of(path: Path, **spec: str):
    return resolve(SourceSpec(name="mine", **spec), [str(path)])


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@every_format
def test_documents_are_those_of_a_plain_reading(tmp_path: Path, suffix: str):
    texts = ["plain", "äöü 三 \U0001f600", 'quo"te\\ \n newline', "\0", " "]
    lines = [
        *(json.dumps({"text": text, "n": 1}) for text in texts),
        json.dumps({"n": [1, {"text": "inner"}], "text": "raw ünïcode"}, ensure_ascii=False),
        "",
        "   ",
        '{"text": ""}',
        '{"text": null}',
        '{"text": 5}',
        '{"text": ["a"]}',
        '{"other": "x"}',
        "{}",
        r'{"text": "lone \ud800 surrogate"}',
        r'{"text": "pair \ud83d\ude00"}',
        r'{"text": "kept", "meta": "\udfff"}',
        '{"text": "nan", "x": NaN, "y": 123456789012345678901234567890}',
        '{"text": "crlf"}\r',
        '{"text": "last line without newline"}',
    ]
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix]("\n".join(lines).encode()))
    reading = read_on(plan_of(path))
    expected = [*texts, "raw ünïcode", "pair \U0001f600", "kept", "nan", "crlf", "last line without newline"]
    assert [text.decode() for text in reading.documents] == expected
    assert reading.rows == len(lines)
    assert [cursor.row for cursor in reading.cursors] == [1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20]


def test_bytes_that_are_not_utf8_skip_their_row_only(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b", "url": "\xff"}\n')
    assert read_on(plan_of(path)).documents == [b"a", b"b"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_on(plan_of(path)).documents == [b"a"]


@compressed
def test_all_frames_and_members_of_a_file_are_read(tmp_path: Path, suffix: str):
    texts = noise(200, seed=1)
    data = as_lines(texts)
    cuts = [0, 10, 5000, 5001, 70_000, len(data)]
    parts = [COMPRESS[suffix](data[start:end]) for start, end in itertools.pairwise(cuts)]
    path = write(tmp_path / f"a.{suffix}", b"".join(parts))
    assert read_on(plan_of(path)).documents == [text.encode() for text in texts]


def test_zeros_behind_the_last_gzip_member_are_padding_and_other_bytes_damage(tmp_path: Path):
    data = gzip.compress(as_lines(["a", "b"]))
    path = write(tmp_path / "a.json.gz", data + bytes(1024))
    assert read_on(plan_of(path)).documents == [b"a", b"b"]
    write(path, data + b"garbage")
    assert read_until_error(plan_of(path), CorruptInputError).documents == [b"a", b"b"]


@compressed
@pytest.mark.parametrize("kept", [0.999, 0.7, 0.05])
def test_a_truncated_file_gives_every_whole_line_before_the_cut(tmp_path: Path, suffix: str, kept: float):
    texts = noise(2000, seed=2)
    whole = COMPRESS[suffix](as_lines(texts))
    path = write(tmp_path / f"a.{suffix}", whole[: int(len(whole) * kept)])
    reading = read_until_error(plan_of(path), CorruptInputError)
    count = len(reading.documents)
    assert reading.documents == [text.encode() for text in texts[:count]]
    assert count >= (kept - 0.3) * len(texts)
    assert f"a.{suffix}" in str(reading.error)
    assert f"line {count + 1}," in str(reading.error)


@compressed
def test_a_flipped_bit_is_an_error_and_what_is_before_it_is_kept(tmp_path: Path, suffix: str):
    texts = noise(2000, seed=3)
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(as_lines(texts)))
    if suffix.endswith("gz"):
        data = bytearray(gzip.compress(as_lines(texts)))
    data[len(data) // 2] ^= 0x10
    reading = read_until_error(plan_of(write(tmp_path / f"a.{suffix}", data)), CorruptInputError)
    good = 0
    while good < len(reading.documents) and reading.documents[good] == texts[good].encode():
        good += 1
    assert good > len(texts) // 4


@every_format
def test_a_line_that_is_not_an_object_stops_with_its_number(tmp_path: Path, suffix: str):
    for bad in (b'{"text": "cut', b"[1, 2]", b'"text"', b"not json", b'{"text": "a"} {"text": "b"}', b"[" * 5000):
        data = as_lines(["one", "two"]) + b"\n" + bad + b"\n" + as_lines(["after"])
        reading = read_until_error(plan_of(write(tmp_path / f"a.{suffix}", COMPRESS[suffix](data))), CorruptInputError)
        assert reading.documents == [b"one", b"two"]
        assert f"a.{suffix}: line 4 is not a JSON object" in str(reading.error)
        assert reading.batch_ends[-1][1].row == 3


def test_a_field_no_row_has_is_an_error_not_an_empty_store(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", as_lines(noise(20, seed=4)))
    with pytest.raises(SourceError, match=r"a\.jsonl: none of the first 20 lines has the field 'content'.*meta, text"):
        read_on(plan_of(path, text_field="content"))
    late = b'{"other": 1}\n' * 999 + b'{"content": "here"}\n'
    assert read_on(plan_of(write(path, late), text_field="content")).documents == [b"here"]


def test_an_empty_file_and_one_of_blank_lines_have_no_documents(tmp_path: Path):
    write(tmp_path / "a.jsonl", b"")
    write(tmp_path / "b.jsonl", b"\n\n  \n")
    write(tmp_path / "c.jsonl.gz", gzip.compress(b""))
    write(tmp_path / "d.jsonl.zst", zstd(b""))
    reading = read_on(plan_of(tmp_path))
    assert (reading.documents, reading.rows) == ([], 3)


@every_format
def test_a_line_too_long_to_hold_stops_with_its_number(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 2 << 20)
    data = as_lines(["one", "x" * (1 << 20), "y" * (5 << 20), "after"])
    path = write(tmp_path / f"a.{suffix}", COMPRESS[suffix](data))
    reading = read_until_error(plan_of(path), CorruptInputError)
    assert [len(text) for text in reading.documents] == [3, 1 << 20]
    assert "line 3 is over 2 MiB" in str(reading.error)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=60),
    suffix=st.sampled_from(sorted(COMPRESS)),
    block_bytes=st.integers(1, 2000),
    terminated=st.booleans(),
    data=st.data(),
)
def test_reading_on_from_any_cursor_is_skipping(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    suffix: str,
    block_bytes: int,
    terminated: bool,
    data: st.DataObject,
):
    folder = tmp_path_factory.mktemp("lines")
    half = len(texts) // 2
    for name, part in (("1", texts[:half]), ("2", texts[half:])):
        content = as_lines(part) if terminated else as_lines(part).removesuffix(b"\n")
        write(folder / f"{name}.{suffix}", COMPRESS[suffix](content))
    plan = plan_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BATCH_BYTES", block_bytes)
        whole = read_on(plan)
        assert whole.documents == [text.encode() for text in texts if text]
        assert whole.rows == len(texts)
        places = [*enumerate(whole.cursors, start=1), *whole.batch_ends]
        if places:
            count, cursor = data.draw(st.sampled_from(places))
            rest = read_on(plan, cursor)
            assert rest.documents == whole.documents[count:]
            assert rest.cursors == whole.cursors[count:]


@pytest.mark.slow
@every_format
def test_blocks_are_whole_lines_of_some_four_megabytes(tmp_path: Path, suffix: str):
    data = as_lines(noise(20_000, seed=6))
    found = list(tasks(plan_of(write(tmp_path / f"a.{suffix}", COMPRESS[suffix](data)))))
    blocks = [task for task in found if isinstance(task, LinesTask)]
    assert b"".join(task.data for task in blocks) == data
    assert all(task.data.endswith(b"\n") for task in blocks)
    assert [task.first_row for task in blocks[1:]] == [
        sum(block.data.count(b"\n") for block in blocks[: number + 1]) for number in range(len(blocks) - 1)
    ]
    assert 3 <= len(blocks) <= 4
