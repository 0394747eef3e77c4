"""Reads a plan as populate does, in one process: every document with the cursor behind it."""

from __future__ import annotations

from dataclasses import dataclass

from genesis.sources import InputPlan, read_batches, tasks
from manifests import Cursor


@dataclass
class Reading:
    """What was read, and the error it ended with."""

    documents: list[bytes]
    cursors: list[Cursor]
    """Behind each document."""
    batch_ends: list[tuple[int, Cursor]]
    """After each batch: documents so far, and the cursor."""
    rows: int = 0
    error: Exception | None = None


def _read(plan: InputPlan, cursor: Cursor | None, reading: Reading) -> None:
    for task in tasks(plan, cursor):
        before = task.first_row
        for batch in read_batches(task):
            assert len(batch.texts) == len(batch.rows)
            assert all(batch.texts)
            assert batch.rows.tolist() == sorted(set(batch.rows.tolist()))
            assert all(before <= row < batch.end_row for row in batch.rows)
            reading.documents += batch.texts
            reading.cursors += [task.cursor(int(row) + 1, plan) for row in batch.rows]
            reading.batch_ends.append((len(reading.documents), task.cursor(batch.end_row, plan)))
            reading.rows += batch.end_row - before
            before = batch.end_row


def read_on(plan: InputPlan, cursor: Cursor | None = None) -> Reading:
    """Everything from the cursor to the end."""
    reading = Reading([], [], [])
    _read(plan, cursor, reading)
    return reading


def read_until_error(plan: InputPlan, expected: type[Exception]) -> Reading:
    """Everything up to the error that must come."""
    reading = Reading([], [], [])
    try:
        _read(plan, None, reading)
    except expected as error:
        reading.error = error
        return reading
    raise AssertionError(f"expected {expected.__name__}, found {len(reading.documents)} documents and no error")
