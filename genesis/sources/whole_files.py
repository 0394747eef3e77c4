"""Files that are one document each: .txt, .py. Small ones share a task of about 4 MB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from genesis.errors import SourceError
from genesis.sources.base import BATCH_BYTES, InputFile, TextBatch, WholeFilesTask
from genesis.sources.opening import read_all

__all__ = ["MAX_FILE_BYTES", "whole_file_batches", "whole_file_tasks"]

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
