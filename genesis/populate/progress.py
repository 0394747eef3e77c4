"""Progress of a populate and of learning: how much of the input was read, and how long until the first end comes.

What counts is the input as it is stored: a row group of parquet by its place in the file, compressed lines by the bytes
that were decompressed, whole files by their sizes. That is known from the plan before anything is read, so the end of
the input is as sure as a limit on shards or documents, and the time left is that of whichever comes first.

For a dry run, which reads nothing, the text is estimated: stored size times a typical expansion. FineWeb-Edu's parquet
holds 3.2 bytes of text per stored byte, gzip and zstd JSON lines 2.8 and 3.4. It is good to a factor of 1.3.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from genesis.populate.packer import Position
from genesis.progress import CountProgress, ProgressState, TimeLeft, showing_progress
from genesis.progress import counted as counted
from genesis.progress import format_duration as format_duration
from genesis.progress import format_size as format_size
from genesis.sources.base import FileFormat, InputFile, InputPlan, Task
from manifests import Cursor, InputRead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputPositions:
    """Places in the input as numbers: stored bytes of the whole plan before them."""

    first_bytes: dict[str, int]
    """For each file's name, the stored bytes of all files before it."""
    formats: dict[str, tuple[FileFormat, int]]
    total_bytes: int

    @classmethod
    def of(cls, plan: InputPlan) -> InputPositions:
        """The places of a plan."""
        formats = {file.name: (file.format, file.size_bytes) for file in plan.files}
        return cls(plan.first_bytes(), formats, plan.size_bytes)

    def before(self, task: Task, row: int) -> int:
        """Stored bytes before a row of a task; behind the task, all that was read for it."""
        file, read_bytes = task.read_before(row)
        return self.first_bytes[file.name] + min(read_bytes, file.size_bytes)

    def at_cursor(self, cursor: Cursor | None) -> int:
        """Stored bytes that certainly lie before a cursor: the files before its own, which is not opened for it."""
        if cursor is None or cursor.file not in self.first_bytes:
            return 0
        kind, size_bytes = self.formats[cursor.file]
        return self.first_bytes[cursor.file] + (size_bytes if kind is FileFormat.WHOLE_FILE and cursor.row else 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a run ends besides the end of the input, and where it stands at its start."""

    shards: int | None = None
    """Shards of the source at which it stops."""
    documents: int | None = None
    """Documents of the source, from its beginning, at which it stops."""
    shards_before: int = 0
    documents_before: int = 0
    shard_tokens: int = 0
    tokens_before: int = 0
    """Ids that already lie behind the last shard."""

    @property
    def tokens(self) -> int | None:
        """Ids after which the last shard allowed is full."""
        if self.shards is None:
            return None
        return max((self.shards - self.shards_before) * self.shard_tokens - self.tokens_before, 0)


class PopulateProgress:
    """Counts one source's run. Its methods are for one thread each; `state` may be called from any.

    Args:
        source: shown as the bar's name.
        positions: the input.
        limits: what else ends the run.
        read_bytes: stored bytes before the position the run goes on from.
        clock: seconds that do not go back.
    """

    def __init__(
        self,
        source: str,
        positions: InputPositions,
        limits: Limits,
        read_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.positions = positions
        self._source = source
        self._limits = limits
        self._clock = clock
        self._started = clock()
        self._read_bytes = min(read_bytes, positions.total_bytes)
        self._committed_bytes = self._read_bytes
        self._tokens = self._text_bytes = self._documents = 0
        self._shards = self._committed_tokens = 0
        self._filled: deque[int] = deque()
        """Stored bytes before the end of each shard that is filled and not committed."""
        limit = limits.documents
        documents = max(limit - limits.documents_before, 0) if limit is not None else None
        self._time_left = TimeLeft(positions.total_bytes, limits.tokens, documents)

    def shown(self) -> AbstractContextManager[None]:
        """Shows it until the context is left."""
        return showing_progress(self._source, self.state, logger)

    @property
    def read_bytes(self) -> int:
        """Stored bytes that have been read and encoded, from the input's beginning."""
        return self._read_bytes

    def reached(self, read_bytes: int) -> None:
        """Notes where the input is read; before the first block, where it begins in this run."""
        self._read_bytes = min(max(self._read_bytes, read_bytes), self.positions.total_bytes)
        self._observe()

    def encoded(self, num_tokens: int, text_bytes: int, num_documents: int, read_bytes: int) -> None:
        """Counts a block of documents, with the stored bytes before its end."""
        self._tokens += num_tokens
        self._text_bytes += text_bytes
        self._documents += num_documents
        self.reached(read_bytes)

    def filled(self, read_bytes: int) -> None:
        """Notes that a shard is full, with the stored bytes before its end; before it is handed on to be committed."""
        self._filled.append(min(max(self._committed_bytes, read_bytes), self.positions.total_bytes))

    def read_after(self, num_shards: int) -> InputRead:
        """How far the input is turned into shards once that many more of those filled are committed."""
        read_bytes = self._filled[num_shards - 1] if 0 < num_shards <= len(self._filled) else self._committed_bytes
        return InputRead(read_bytes=read_bytes, total_bytes=self.positions.total_bytes)

    def committed(self, num_shards: int, num_tokens: int) -> None:
        """Counts committed shards."""
        self._shards += num_shards
        self._committed_tokens += num_tokens
        for _ in range(min(num_shards, len(self._filled))):
            self._committed_bytes = self._filled.popleft()

    def ended(self) -> None:
        """Notes that the input was read to its end, whatever lay behind its last document."""
        self.reached(self.positions.total_bytes)

    def speed_with(self, num_tokens: int) -> float:
        """Committed tokens a second since the start, ``num_tokens`` that are about to be included."""
        return (self._committed_tokens + num_tokens) / max(self._clock() - self._started, 1e-9)

    def state(self) -> ProgressState:
        """Percent of the input, time left, shards, MB of text and tokens a second."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._started, 1e-9)
        end, left_s = self._time_left.nearest(now_s) or (0, None)
        facts = [f"{format_duration(left_s)} left"] if left_s else []
        shards = self._limits.shards_before + self._shards
        if end == 1:
            facts.append(f"{shards:,} of {counted(self._limits.shards or 0, 'shard')}")
        else:
            facts.append(counted(shards, "shard"))
        if end == 2:
            documents = self._limits.documents_before + self._documents
            facts.append(f"{documents:,} of {counted(self._limits.documents or 0, 'document')}")
        if self._text_bytes:
            facts.append(f"{self._text_bytes / elapsed_s / 1e6:.1f} MB/s")
            facts.append(f"{self._tokens / elapsed_s / 1e6:.2f} M tokens/s")
        total_bytes = self.positions.total_bytes
        return ProgressState(self._read_bytes / total_bytes if total_bytes else None, tuple(facts))

    def _observe(self) -> None:
        self._time_left.observe(self._clock(), self._read_bytes, self._tokens, self._documents)


class LearnProgress:
    """Counts what is learned from one source: documents read of those wanted, or of the input, then merges.

    Args:
        source: shown as the bar's name.
        positions: the input.
        num_documents: how many are learned from, at most.
        num_merges: how many are wanted.
        clock: seconds that do not go back.
    """

    def __init__(
        self,
        source: str,
        positions: InputPositions,
        num_documents: int,
        num_merges: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.positions = positions
        self._source = source
        self._wanted = num_documents
        self._clock = clock
        self._documents = self._read_bytes = 0
        self._time_left = TimeLeft(num_documents, positions.total_bytes)
        self._merges: CountProgress | None = None
        self._counting = False
        self._num_merges = num_merges

    def shown(self) -> AbstractContextManager[None]:
        """Shows it until the context is left."""
        return showing_progress(f"learning {self._source}", self.state, logger)

    def read(self, num_documents: int, read_bytes: int) -> None:
        """Counts documents, with the stored bytes before the place where the input is read."""
        self._documents += num_documents
        self._read_bytes = max(self._read_bytes, read_bytes)
        self._time_left.observe(self._clock(), self._documents, self._read_bytes)

    def all_read(self) -> None:
        """Notes that words are counted from here on, and merged after that."""
        self._counting = True

    def merged(self, num_merges: int) -> None:
        """Notes how many merges there are."""
        if self._merges is None:
            wanted = f"{self._num_merges:,} merges"
            self._merges = CountProgress(self._num_merges, lambda done: f"{done:,} of {wanted}", self._clock)
        self._merges.update(num_merges)

    def state(self) -> ProgressState:
        """Percent of documents or input, whichever ends first; then of merges."""
        if self._merges is not None:
            return self._merges.state()
        if self._counting:
            return ProgressState(None, (f"counting the words of {counted(self._documents, 'document')}",))
        total_bytes = self.positions.total_bytes
        by_input = self._read_bytes / total_bytes if total_bytes else 0.0
        left_s = self._time_left.seconds(self._clock())
        facts = [f"{format_duration(left_s)} left"] if left_s else []
        facts.append(f"{self._documents:,} of {counted(self._wanted, 'document')}")
        return ProgressState(min(max(self._documents / self._wanted, by_input), 1.0), tuple(facts))


BYTES_PER_TOKEN = 4.4
"""Typical of English under a vocabulary of 32,000 ids."""

PACKED_BYTES_PER_TOKEN = 1.25
"""Of the transfer form, for the same."""

_EXPANSION = {".parquet": 3.2, ".zst": 3.4, ".gz": 2.8, ".bz2": 3.6, ".xz": 3.7}


def text_bytes_of(file: InputFile) -> float:
    """Estimated UTF-8 bytes of a file's documents."""
    for ending, factor in _EXPANSION.items():
        if file.name.lower().endswith(ending):
            return file.size_bytes * factor
    return float(file.size_bytes)


def expected_text_bytes(plan: InputPlan, start: Position) -> float | None:
    """Estimated text behind ``start``; None for an input without files."""
    total = sum(text_bytes_of(file) for file in plan.files)
    return max(total - start.text_bytes, 1.0) if total else None
