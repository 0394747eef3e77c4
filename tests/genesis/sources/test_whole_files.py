from __future__ import annotations

from pathlib import Path

import pytest

from genesis.errors import InputChangedError, SourceError
from genesis.sources import BATCH_BYTES, WholeFilesTask, read_batches, resolve, tasks
from genesis.sources import reading as module
from manifests import SourceSpec
from tests.support.source_documents import read_on

SPEC = SourceSpec(name="mine")


def test_every_file_is_one_document_and_every_cursor_resumes(tmp_path: Path):
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
    for task in found:
        for row, file in enumerate(task.files):
            rest = read_on(plan, task.cursor(row, plan)).documents
            assert rest == reading.documents[_documents_before(contents, file.name) :]


def _documents_before(contents: list[bytes], name: str) -> int:
    return sum(1 for number in range(int(name.removesuffix(".txt"))) if number not in (1, 2) and contents[number])


def test_mixed_formats_are_read_in_the_order_of_the_plan(tmp_path: Path):
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "2.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    (tmp_path / "3.txt").write_text("four")
    (tmp_path / "4.txt").write_text("five")
    plan = resolve(SPEC, [str(tmp_path)])
    reading = read_on(plan)
    assert reading.documents == [b"one", b"two", b"three", b"four", b"five"]
    for count, cursor in enumerate(reading.cursors, start=1):
        assert read_on(plan, cursor).documents == reading.documents[count:]


def test_a_file_too_large_for_one_document_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "1.txt").write_text("before")
    (tmp_path / "2.txt").write_bytes(b"x" * (3 << 20))
    given = tasks(resolve(SPEC, [str(tmp_path)]))
    assert next(batch.texts for batch in read_batches(next(given))) == [b"before"]
    with pytest.raises(SourceError, match=r"2\.txt: 3 MiB.*\.jsonl"):
        next(given)


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path):
    (tmp_path / "1.txt").write_text("before")
    (task,) = tasks(resolve(SPEC, [str(tmp_path)]))
    (tmp_path / "1.txt").write_text("after, and longer")
    assert isinstance(task, WholeFilesTask)
    with pytest.raises(InputChangedError, match=r"1\.txt: expected 6 bytes, found 17"):
        list(read_batches(task))
