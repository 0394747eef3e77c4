"""The two ends of reading: a plan cut into tasks (one reader), and a task read into batches (any worker).

Reading on from the cursor behind any document gives the documents that follow it, exactly. So a populate that was
killed ends as one that was not. Files that are one document each (.txt, .py, .md) share tasks of about 4 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from genesis.errors import InputChangedError, SourceError
from genesis.sources.base import (
    BATCH_BYTES,
    FileFormat,
    InputFile,
    InputPlan,
    LinesTask,
    RowGroupTask,
    RowKind,
    Task,
    TextBatch,
    TokenBatch,
    TokensTask,
    WholeFilesTask,
)
from genesis.sources.csv_records import record_batches, record_tasks
from genesis.sources.lines import line_batches, line_tasks
from genesis.sources.opening import read_all
from genesis.sources.parquet import row_group_batches, row_group_tasks
from genesis.sources.token_files import TOKEN_FORMATS, token_batches, token_tasks
from manifests import Cursor


def tasks(plan: InputPlan, cursor: Cursor | None = None) -> Iterator[Task]:
    """The plan's tasks in order, from the cursor on; lazily, so a plan of 60,000 files starts at once.

    Args:
        plan: the input.
        cursor: the next row to read; None for the beginning.

    Raises:
        InputChangedError: the cursor stands in a file or revision the plan does not have.
        CorruptInputError: a file is truncated or damaged; every task before it has been yielded.
        SourceError: a file cannot be read, or not as the source says.
    """
    start = _start(plan, cursor)
    files = plan.files[start:]
    row_group, row = (cursor.row_group, cursor.row) if cursor is not None else (0, 0)
    for whole, group in itertools.groupby(files, key=lambda file: file.format is FileFormat.WHOLE_FILE):
        if whole:
            yield from whole_file_tasks(itertools.islice(group, 1 if row else 0, None))
            row_group = row = 0
            continue
        for file in group:
            if file.format is FileFormat.PARQUET:
                yield from row_group_tasks(file, plan.text_field, row_group, row)
            elif file.format in TOKEN_FORMATS:
                yield from token_tasks(file, plan.token_rules, row)
            elif file.format is FileFormat.CSV:
                yield from record_tasks(file, plan.text_field, row)
            else:
                yield from line_tasks(file, plan.text_field, row)
            row_group = row = 0


def read_any_batches(task: Task) -> Iterator[TextBatch | TokenBatch]:
    """`read_batches`, and for a task of ids its documents as they are."""
    return token_batches(task) if isinstance(task, TokensTask) else read_batches(task)


def read_batches(task: Task) -> Iterator[TextBatch]:
    """The documents of a task of text, some 4 MB at a time, in order.

    Raises:
        CorruptInputError: the input is damaged there; the batches before it have been yielded.
        SourceError: it cannot be read, or has no text where the source says.
    """
    if isinstance(task, TokensTask):
        raise SourceError(f"{task.file.name}: expected text, found ids; give it to 'genesis import'")
    if isinstance(task, RowGroupTask):
        return row_group_batches(task)
    if isinstance(task, LinesTask):
        return record_batches(task) if task.kind is RowKind.RECORD else line_batches(task)
    return whole_file_batches(task)


def _start(plan: InputPlan, cursor: Cursor | None) -> int:
    """The number of the file the cursor stands in."""
    if cursor is None:
        return 0
    if (cursor.repo, cursor.revision) != (plan.repo, plan.revision):
        raise InputChangedError(
            f"{plan.source}: the checkpoint stands in {_place(cursor.repo, cursor.revision)}, the input is "
            f"{_place(plan.repo, plan.revision)}; give the same input as before"
        )
    return plan.number_of(cursor.file)


def _place(repo: str, revision: str) -> str:
    return f"{repo}@{revision[:12]}" if repo else "local files"


MAX_FILE_BYTES = 64 << 20


def whole_file_tasks(files: Iterable[InputFile]) -> Iterator[WholeFilesTask]:
    """The files in order, gathered until they add up to about 4 MB.

    Raises:
        SourceError: a file is over 64 MiB; those before it have been yielded.
    """
    gathered: list[InputFile] = []
    for file in files:
        if gathered and sum(each.size_bytes for each in gathered) + file.size_bytes > BATCH_BYTES:
            yield WholeFilesTask(tuple(gathered))
            gathered = []
        if file.size_bytes > MAX_FILE_BYTES:
            if gathered:
                yield WholeFilesTask(tuple(gathered))
            raise SourceError(
                f"{file.name}: {file.size_bytes >> 20} MiB in one document, expected at most {MAX_FILE_BYTES >> 20}; "
                'a file of many documents is read as .jsonl: one {"text": ...} a line'
            )
        gathered.append(file)
    if gathered:
        yield WholeFilesTask(tuple(gathered))


def whole_file_batches(task: WholeFilesTask) -> Iterator[TextBatch]:
    """The task's files as one batch; empty ones and those that are not UTF-8 are left out.

    Raises:
        InputChangedError: a file is not as long as when the plan was made.
        SourceError: a file cannot be read.
    """
    texts: list[bytes] = []
    rows: list[int] = []
    for row, file in enumerate(task.files[task.first_row :], start=task.first_row):
        data = read_all(file)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        if data:
            texts.append(data)
            rows.append(row)
    yield TextBatch(texts, np.array(rows, dtype=np.int64), len(task.files))
