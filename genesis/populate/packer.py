"""Cuts the stream of encoded documents into shards, and knows the position at every cut.

Pure bookkeeping over arrays: no I/O, no clock. The shards are a function of the ids that are fed, not of how they
come in blocks. Each id is copied once, widened on the way, from the worker's memory into the shard file's image.

A cut falls where it falls, usually inside a document. The position after a shard is then the end of that document:
its remaining ids are the checkpoint's ``leftover_tokens``, and reading resumes with the document after it. A document
may span many shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from genesis.populate.pool import EncodedBlock
from genesis.sources.base import InputPlan
from manifests import Cursor, ShardImage, SourceCheckpoint


@dataclass(frozen=True, slots=True)
class Position:
    """Where the source stands at the end of a shard, or at the start."""

    documents: int = 0
    """Documents processed: all of their ids are in shards or in ``leftover``."""
    text_bytes: int = 0
    rows_skipped: int = 0
    cursor: Cursor | None = None
    leftover: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))

    @classmethod
    def from_checkpoint(cls, checkpoint: SourceCheckpoint) -> Position:
        """The position a checkpoint stands for."""
        return cls(
            documents=checkpoint.documents_processed,
            text_bytes=checkpoint.text_bytes,
            rows_skipped=checkpoint.rows_skipped,
            cursor=checkpoint.cursor,
            leftover=np.asarray(checkpoint.leftover_tokens, dtype=np.uint32),
        )


@dataclass(frozen=True, slots=True)
class FilledShard:
    """A shard whose ids are complete, and the position to commit with it."""

    image: ShardImage
    first_document: int
    last_document: int
    position: Position


class Packer:
    """Fills shard images from blocks.

    Args:
        plan: the input, for cursors.
        start: the position to go on from.
        new_image: gives an image to fill; may wait until one is free.
    """

    def __init__(self, plan: InputPlan, start: Position, new_image: Callable[[], ShardImage]) -> None:
        self._plan = plan
        self._new_image = new_image
        self._position = start
        self._image: ShardImage | None = None
        self._filled = 0
        self._first_document = start.documents - (1 if len(start.leftover) else 0)

    @property
    def documents(self) -> int:
        """Documents seen so far, those before the start included."""
        return self._position.documents

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of those documents."""
        return self._position.text_bytes

    @property
    def unsharded_tokens(self) -> int:
        """Ids, fed or left over at the start, that fill no shard yet."""
        return self._filled + len(self._position.leftover)

    @property
    def unsharded_documents(self) -> int:
        """Documents that have some of those ids."""
        return self.documents - self._first_document if self.unsharded_tokens else 0

    def start(self) -> Iterator[FilledShard]:
        """Begins with the tail left over from before; a tail longer than a shard fills some at once."""
        tail, position = self._position.leftover, self._position
        self._position = Position(position.documents, position.text_bytes, position.rows_skipped, position.cursor)
        yield from self._fill(tail, lambda consumed: _with_leftover(position, tail[consumed:]))

    def feed(self, block: EncodedBlock, max_documents: int | None = None) -> Iterator[FilledShard]:
        """Takes in a block and yields the shards it completes.

        Args:
            block: the next documents.
            max_documents: take no more documents than this many in all.
        """
        before = self._position
        count = len(block.ends)
        if max_documents is not None:
            count = min(count, max_documents - before.documents)
        if count:
            ids = block.ids[: block.ends[count - 1]]
            yield from self._fill(ids, lambda consumed: self._position_at(before, block, consumed))
        if count == len(block.ends):
            row = block.end_row
        else:
            row = int(block.rows[count - 1]) + 1 if count else block.first_row
        self._position = self._after(before, block, count, row)

    def _fill(self, ids: npt.NDArray[np.uint32], position_at: Callable[[int], Position]) -> Iterator[FilledShard]:
        consumed = 0
        while consumed < len(ids):
            if self._image is None:
                self._image = self._new_image()
            room = len(self._image.ids) - self._filled
            take = min(room, len(ids) - consumed)
            self._image.ids[self._filled : self._filled + take] = ids[consumed : consumed + take]
            self._filled += take
            consumed += take
            if take == room:
                yield self._complete(position_at(consumed))

    def _complete(self, position: Position) -> FilledShard:
        image = self._image
        if image is None:
            raise RuntimeError("a shard was completed that was never begun")
        shard = FilledShard(image, self._first_document, position.documents - 1, position)
        self._image, self._filled = None, 0
        self._first_document = position.documents - (1 if len(position.leftover) else 0)
        return shard

    def _position_at(self, before: Position, block: EncodedBlock, consumed: int) -> Position:
        """The position if the shard ends after ``consumed`` of the block's ids: behind the document of the last one."""
        document = int(np.searchsorted(block.ends, consumed, side="left"))
        position = self._after(before, block, document + 1, int(block.rows[document]) + 1)
        return _with_leftover(position, block.ids[consumed : block.ends[document]])

    def _after(self, before: Position, block: EncodedBlock, count: int, row: int) -> Position:
        """The position behind ``count`` of the block's documents, with rows up to ``row`` looked at."""
        return Position(
            documents=before.documents + count,
            text_bytes=before.text_bytes + (int(block.text_bytes[count - 1]) if count else 0),
            rows_skipped=before.rows_skipped + (row - block.first_row) - count,
            cursor=block.task.cursor(row, self._plan),
        )


def _with_leftover(position: Position, leftover: npt.NDArray[np.uint32]) -> Position:
    return Position(
        documents=position.documents,
        text_bytes=position.text_bytes,
        rows_skipped=position.rows_skipped,
        cursor=position.cursor,
        leftover=leftover.copy(),
    )
