from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from genesis.errors import CorruptInputError, InputChangedError, SourceError
from genesis.sources import BATCH_BYTES, WholeFilesTask, read_batches, resolve, tasks
from genesis.sources import lines as lines_module
from genesis.sources import reading as module
from genesis.sources.opening import read_ahead
from manifests import SourceSpec
from tests.support.documents import read_on, read_until_error

SPEC = SourceSpec(name="mine")


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "json": bytes,
    "jsonl.zst": zstd,
    "jsonl.gz": gzip.compress,
    "json.gz": gzip.compress,
    "jsonl.bz2": lambda data: bz2.compress(data, 1),
    "json.xz": lambda data: lzma.compress(data, preset=0),
}
every_format = pytest.mark.parametrize("suffix", COMPRESS)
compressed = pytest.mark.parametrize("suffix", ["jsonl.zst", "json.gz", "jsonl.bz2", "json.xz"])


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
def test_documents_are_those_of_a_plain_reading(tmp_path, suffix):
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


@compressed
def test_all_frames_and_members_of_a_file_are_read(tmp_path, suffix):
    texts = noise(200, seed=1)
    data = as_lines(texts)
    cuts = [0, 10, 5000, 5001, 70_000, len(data)]
    parts = [COMPRESS[suffix](data[start:end]) for start, end in itertools.pairwise(cuts)]
    path = write(tmp_path / f"a.{suffix}", b"".join(parts))
    assert read_on(plan_of(path)).documents == [text.encode() for text in texts]


@pytest.mark.parametrize("suffix", ["json.gz", "jsonl.bz2", "json.xz"])
def test_padding_behind_a_compressed_stream_is_none_of_it_and_garbage_is_an_error(tmp_path, suffix):
    data = COMPRESS[suffix](as_lines(["a", "b"]))
    path = write(tmp_path / f"a.{suffix}", data + bytes(1024))
    assert read_on(plan_of(path)).documents == [b"a", b"b"]
    write(path, data + b"garbage")
    assert read_until_error(plan_of(path), CorruptInputError).documents == [b"a", b"b"]
    write(path, bytes(12))
    assert f"a.{suffix}" in str(read_until_error(plan_of(path), CorruptInputError).error)


def test_a_field_that_no_row_has(tmp_path):
    path = write(tmp_path / "a.jsonl", as_lines(noise(20, seed=4)))
    with pytest.raises(SourceError, match=r"a\.jsonl: none of the first 20 lines has the field 'content'.*meta, text"):
        read_on(plan_of(path, text_field="content"))
    late = b'{"other": 1}\n' * 999 + b'{"content": "here"}\n'
    assert read_on(plan_of(write(path, late), text_field="content")).documents == [b"here"]


@compressed
@pytest.mark.parametrize("kept", [0.999, 0.7, 0.05])
def test_a_truncated_file_gives_every_whole_line_before_the_cut(tmp_path, suffix, kept):
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
def test_a_flipped_bit_is_an_error_and_what_is_before_it_is_kept(tmp_path, suffix):
    texts = noise(2000, seed=3)
    data = bytearray(COMPRESS[suffix](as_lines(texts)))
    if suffix.endswith("zst"):
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(as_lines(texts)))
    data[len(data) // 2] ^= 0x10
    reading = read_until_error(plan_of(write(tmp_path / f"a.{suffix}", data)), CorruptInputError)
    same = (found == text.encode() for found, text in zip(reading.documents, texts, strict=False))
    assert len(list(itertools.takewhile(bool, same))) > len(texts) // 4


@every_format
def test_a_line_that_is_not_an_object_stops_with_its_number(tmp_path, suffix):
    for bad in (b'{"text": "cut', b"[1, 2]", b'"text"', b"not json", b'{"text": "a"} {"text": "b"}', b"[" * 5000):
        data = as_lines(["one", "two"]) + b"\n" + bad + b"\n" + as_lines(["after"])
        reading = read_until_error(plan_of(write(tmp_path / f"a.{suffix}", COMPRESS[suffix](data))), CorruptInputError)
        assert reading.documents == [b"one", b"two"]
        assert f"a.{suffix}: line 4 is not a JSON object" in str(reading.error)
        assert reading.batch_ends[-1][1].row == 3


def test_bytes_that_are_not_utf8_byte_order_marks_and_files_without_text(tmp_path):
    write(tmp_path / "a.jsonl", b"")
    write(tmp_path / "b.jsonl", b"\n\n  \n")
    write(tmp_path / "c.jsonl.gz", gzip.compress(b""))
    write(tmp_path / "d.jsonl.zst", zstd(b""))
    reading = read_on(plan_of(tmp_path))
    assert (reading.documents, reading.rows) == ([], 3)
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b", "url": "\xff"}\n')
    assert read_on(plan_of(path)).documents == [b"a", b"b"]
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_on(plan_of(path)).documents == [b"a"]


@every_format
def test_a_line_too_long_to_hold_stops_with_its_number(tmp_path, suffix, monkeypatch):
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
def test_reading_on_from_any_cursor_is_skipping(tmp_path_factory, texts, suffix, block_bytes, terminated, data):
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


def test_pieces_come_in_order_with_one_fetched_ahead_and_the_error_last():
    second = threading.Event()

    def pieces() -> Iterator[int]:
        yield 0
        second.set()
        yield from range(1, 100)
        raise OSError("gone")

    given, found = read_ahead(pieces()), []
    assert next(given) == 0
    assert second.wait(timeout=30)
    with pytest.raises(OSError, match="gone"):
        found.extend(given)
    assert found == list(range(1, 100))


def test_every_file_is_one_document_and_every_cursor_resumes(tmp_path):
    contents = [b"one\r\ntwo", b"", b"\xff\xfe not utf-8", "ünï".encode(), b"x" * 3_000_000, b"y" * 3_000_000, b"end"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    plan = resolve(SPEC, [str(tmp_path)])
    reading = read_on(plan)
    assert reading.documents == [contents[0], *contents[3:]]
    assert reading.rows == len(contents)
    found = list(tasks(plan))
    assert len(found) == 2
    assert all(sum(file.size_bytes for file in task.files) <= BATCH_BYTES for task in found)
    for count, cursor in [*enumerate(reading.cursors, start=1), *reading.batch_ends]:
        assert read_on(plan, cursor).documents == reading.documents[count:]


def test_files_that_change_or_are_too_large_for_one_document(tmp_path, monkeypatch):
    (tmp_path / "1.txt").write_text("before")
    (task,) = tasks(resolve(SPEC, [str(tmp_path)]))
    (tmp_path / "1.txt").write_text("after, and longer")
    assert isinstance(task, WholeFilesTask)
    with pytest.raises(InputChangedError, match=r"1\.txt: expected 6 bytes, found 17"):
        list(read_batches(task))
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "1.txt").write_text("before")
    (tmp_path / "2.txt").write_bytes(b"x" * (3 << 20))
    given = tasks(resolve(SPEC, [str(tmp_path)]))
    assert next(batch.texts for batch in read_batches(next(given))) == [b"before"]
    with pytest.raises(SourceError, match=r"2\.txt: 3 MiB.*\.jsonl"):
        next(given)
