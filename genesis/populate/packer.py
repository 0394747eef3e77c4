"""Cuts the stream of encoded documents into shards, and knows the position at every cut.

Pure bookkeeping: no I/O, no clock. The shards are a function of the ids that are fed, not of how they come in blocks.
Where the ids are is not known here: in this process's memory each is copied once, widened on the way, from the
worker's ring into the shard file's image; on a cluster a piece of a block is noted and copied by the machine that has
it (`remote_ids.py`). So one code decides the cuts for both, by counts alone.

A cut falls where it falls, usually inside a document. The position after a shard is then the end of that document, and
its remaining ids are the checkpoint's ``leftover_tokens``; reading resumes with the document after it. A document may
span many shards. While more than `MAX_LEFTOVER_TOKENS` of it remain, the position is that document itself and how many
of its ids shards hold, so that a checkpoint stays small: a start reads and encodes that one document again, some 1 s
for 200 MB, where each commit would otherwise write what remains of it, 290 MB of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from genesis.errors import InputChangedError
from genesis.populate.pool import EncodedBlock
from genesis.populate.remote_ids import TokenIds
from genesis.sources.base import InputPlan, Task, WholeFilesTask
from manifests import MAX_LEFTOVER_TOKENS, Cursor, PartialDocument, SourceCheckpoint


@dataclass(frozen=True, slots=True)
class Position:
    """Where the source stands at the end of a shard, or at the start."""

    documents: int = 0
    """Documents processed: all of their ids are in shards, in ``leftover``, or in the rest of ``partial``."""
    text_bytes: int = 0
    rows_skipped: int = 0
    cursor: Cursor | None = None
    """Behind the last of them; at it if that is ``partial``."""
    leftover: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    partial: PartialDocument | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: SourceCheckpoint) -> Position:
        """The position a checkpoint stands for."""
        return cls(
            documents=checkpoint.documents_processed,
            text_bytes=checkpoint.text_bytes,
            rows_skipped=checkpoint.rows_skipped,
            cursor=checkpoint.cursor,
            leftover=np.asarray(checkpoint.leftover_tokens, dtype=np.uint32),
            partial=checkpoint.partial_document,
        )

    @property
    def tokens_left(self) -> int:
        """Ids of the last document that are in no shard."""
        return len(self.leftover) + (self.partial.tokens_left if self.partial else 0)


class Image(Protocol):
    """A shard being filled: a `ShardImage`, or the pieces it will be made of."""

    @property
    def ids(self) -> Any:
        """As long as the shard; takes `TokenIds` by assignment to a slice."""


ImageT = TypeVar("ImageT", bound=Image)


@dataclass(frozen=True, slots=True)
class FilledShard(Generic[ImageT]):
    """A shard whose ids are complete, and the position to commit with it."""

    image: ImageT
    first_document: int
    last_document: int
    position: Position


class Packer(Generic[ImageT]):
    """Fills shard images from blocks.

    Args:
        plan: the input, for cursors.
        start: the position to go on from. If it is inside a document, the first block begins with that document.
        new_image: gives an image to fill; may wait until one is free.
        max_leftover: the longest tail that a position holds itself.
    """

    def __init__(
        self,
        plan: InputPlan,
        start: Position,
        new_image: Callable[[], ImageT],
        max_leftover: int = MAX_LEFTOVER_TOKENS,
    ) -> None:
        self._plan = plan
        self._new_image = new_image
        self._max_leftover = max_leftover
        self._position = start
        self._image: ImageT | None = None
        self._filled = 0
        self._first_document = start.documents - (1 if start.tokens_left else 0)

    @property
    def documents(self) -> int:
        """Documents seen so far, those before the start included."""
        return self._position.documents

    @property
    def inside_document(self) -> bool:
        """Whether the block fed next must begin with the document in which the start stands."""
        return self._position.partial is not None

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of those documents."""
        return self._position.text_bytes

    @property
    def unsharded_tokens(self) -> int:
        """Ids, fed or left over at the start, that fill no shard yet."""
        return self._filled + self._position.tokens_left

    @property
    def unsharded_documents(self) -> int:
        """Documents that have some of those ids."""
        return self.documents - self._first_document if self.unsharded_tokens else 0

    def start(self) -> Iterator[FilledShard[ImageT]]:
        """Begins with the tail left over from before; a tail longer than a shard fills some at once."""
        tail, position = self._position.leftover, self._position
        self._position = replace(position, leftover=_nothing())
        yield from self._fill(tail, lambda consumed: _with_leftover(position, tail[consumed:]))

    def feed(self, block: EncodedBlock, max_documents: int | None = None) -> Iterator[FilledShard[ImageT]]:
        """Takes in a block and yields the shards it completes.

        Args:
            block: the next documents.
            max_documents: take no more documents than this many in all.

        Raises:
            InputChangedError: the start is inside a document, and the block begins with another.
        """
        begun = 1 if self.inside_document else 0  # That one is brought to its end, whatever the limit.
        before, skipped = self._before(block)
        count = len(block.ends)
        if max_documents is not None:
            count = min(count, max(max_documents - before.documents, begun))
        if count:
            ids = block.ids[skipped : block.ends[count - 1]]
            yield from self._fill(ids, lambda consumed: self._position_at(before, block, skipped + consumed))
        if count == len(block.ends):
            row = block.end_row
        else:
            row = int(block.rows[count - 1]) + 1 if count else block.first_row
        self._position = self._after(before, block, count, row)

    def _before(self, block: EncodedBlock) -> tuple[Position, int]:
        """The position before the block's first document, and how many of that document's ids shards hold already."""
        before, partial = self._position, self._position.partial
        if partial is None:
            return before, 0
        if not len(block.ends) or block.rows[0] != block.first_row or block.ends[0] != partial.tokens:
            found = f"one of {block.ends[0]} tokens" if len(block.ends) else "none"
            raise InputChangedError(
                f"{self._plan.source}: the last shard ends inside a document of {partial.tokens} tokens at "
                f"{_place(before.cursor)}, found {found} there; restore the input as it was"
            )
        before = replace(
            before,
            documents=before.documents - 1,
            text_bytes=before.text_bytes - int(block.text_bytes[0]),
            partial=None,
        )
        return before, partial.tokens_in_shards

    def _fill(self, ids: TokenIds, position_at: Callable[[int], Position]) -> Iterator[FilledShard[ImageT]]:
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

    def _complete(self, position: Position) -> FilledShard[ImageT]:
        image = self._image
        if image is None:
            raise RuntimeError("a shard was completed that was never begun")
        shard = FilledShard(image, self._first_document, position.documents - 1, position)
        self._image, self._filled = None, 0
        self._first_document = position.documents - (1 if position.tokens_left else 0)
        return shard

    def _position_at(self, before: Position, block: EncodedBlock, consumed: int) -> Position:
        """The position if the shard ends after ``consumed`` of the block's ids: behind the document of the last one.

        At that document, if too much of it remains to be kept.
        """
        document = int(np.searchsorted(block.ends, consumed, side="left"))
        row, end = int(block.rows[document]), int(block.ends[document])
        position = self._after(before, block, document + 1, row + 1)
        if end - consumed <= self._max_leftover:
            return _with_leftover(position, block.ids[consumed:end])
        begin = int(block.ends[document - 1]) if document else 0
        return replace(
            position,
            cursor=_cursor_at(block.task, row, self._plan),
            partial=PartialDocument(
                tokens_in_shards=consumed - begin, tokens=end - begin, tokenizer_sha256=block.tokenizer_sha256
            ),
        )

    def _after(self, before: Position, block: EncodedBlock, count: int, row: int) -> Position:
        """The position behind ``count`` of the block's documents, with rows up to ``row`` looked at."""
        return Position(
            documents=before.documents + count,
            text_bytes=before.text_bytes + (int(block.text_bytes[count - 1]) if count else 0),
            rows_skipped=before.rows_skipped + (row - block.first_row) - count,
            cursor=block.task.cursor(row, self._plan),
        )


def _nothing() -> npt.NDArray[np.uint32]:
    return np.empty(0, dtype=np.uint32)


def _with_leftover(position: Position, leftover: TokenIds) -> Position:
    return replace(position, leftover=leftover.copy(), partial=None)


def _cursor_at(task: Task, row: int, plan: InputPlan) -> Cursor:
    """The position before ``row``, in the file that has it, so that its fingerprint covers that file."""
    if isinstance(task, WholeFilesTask):
        return Cursor(repo=plan.repo, revision=plan.revision, file=task.files[row].name, row=0)
    return task.cursor(row, plan)


def _place(cursor: Cursor | None) -> str:
    if cursor is None:
        return "the input's beginning"
    return f"row {cursor.row} of {cursor.file}"
