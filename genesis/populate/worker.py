"""A worker process: reads the tasks it is given, encodes them, and puts the ids where its parent reads them.

Three threads, so that the next batch is read while this one is encoded: one receives assignments, one reads text
(pyarrow, zlib and network reads release the interpreter lock), the main one encodes. It ends when its socket closes,
so no worker outlives its parent, however that died.

Started as ``python -m genesis.populate.worker SOCKET_FD RING_FD`` rather than through `multiprocessing`, whose spawn
would run the caller's script again in every worker.
"""

from __future__ import annotations

import importlib
import logging
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from genesis.errors import GenesisError, TokenizerError
from genesis.populate.ring import Assignment, EncodedDocuments, Failed, Finished, Released, RingWriter
from genesis.sources.base import TextBatch, TokenBatch
from genesis.sources.reading import read_any_batches
from genesis.tokenizer import EncoderSpec, Engine
from manifests import EOS_ID

logger = logging.getLogger(__name__)

_READ_AHEAD = 2

_Item = tuple[int, int, TextBatch | TokenBatch] | Finished | Failed | None


def join_documents(
    ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], out: npt.NDArray[np.integer], eos_id: int = EOS_ID
) -> npt.NDArray[np.int64]:
    """Copies documents one after the other, each followed by EOS.

    Args:
        ids: uint32[N], all documents' ids.
        offsets: int64[D+1], where each document begins; the last is N.
        out: uint32[N+D], filled; uint16 where every id fits.
        eos_id: the store's EOS.

    Returns:
        int64[D], where each document ends in ``out``, its EOS included.
    """
    ends = offsets[1:] + np.arange(1, len(offsets), dtype=np.int64)
    keep = np.ones(len(out), dtype=bool)
    keep[ends - 1] = False
    out[keep] = ids
    out[ends - 1] = eos_id
    return ends


def main() -> None:
    """Runs until the parent closes the socket."""
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a terminal's end reach the group; the parent decides.
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="worker %(process)d: %(message)s", level=logging.WARNING)
    connection: Connection = Connection(int(sys.argv[1]))
    ring = RingWriter.over(int(sys.argv[2]))
    importlib.import_module("awkward")  # gigatoken imports it at its first result; importing it here delays nothing.
    try:
        encoder: EncoderSpec = connection.recv()
        engine = encoder.build()
        engine.encode_batch([b"built before the first task comes"])
        _serve(connection, ring, engine, encoder)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent has gone or needs us no more.


def _serve(connection: Connection, ring: RingWriter, engine: Engine, encoder: EncoderSpec) -> None:
    assignments: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
    batches: queue.Queue[_Item] = queue.Queue(_READ_AHEAD)
    threading.Thread(target=_receive, args=(connection, assignments, ring), daemon=True).start()
    threading.Thread(target=_read, args=(assignments, batches), daemon=True).start()
    failed = -1
    while (item := batches.get()) is not None:
        number = item[0] if isinstance(item, tuple) else item.number
        if number == failed:
            continue  # The parent has been told, and expects no more of that task.
        try:
            answer = item if isinstance(item, Finished | Failed) else _encoded(*item, ring, engine, encoder)
        except TokenizerError as error:
            failed, answer = number, Failed(number, type(error).__name__, str(error))
        connection.send(answer)


def _receive(connection: Connection, assignments: queue.SimpleQueue[Assignment | None], ring: RingWriter) -> None:
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Released):
                ring.released_up_to(message.position)
            else:
                assignments.put(message)
    except (EOFError, OSError):
        ring.close()
        assignments.put(None)


def _read(assignments: queue.SimpleQueue[Assignment | None], batches: queue.Queue[_Item]) -> None:
    while (assignment := assignments.get()) is not None:
        row = assignment.task.first_row
        try:
            for batch in read_any_batches(assignment.task):
                batches.put((assignment.number, row, batch))
                row = batch.end_row
            batches.put(Finished(assignment.number))
        except GenesisError as error:
            batches.put(Failed(assignment.number, type(error).__name__, str(error)))
        except Exception as error:
            logger.warning("unexpected error while reading %s", assignment.task, exc_info=True)
            batches.put(Failed(assignment.number, type(error).__name__, str(error)))
    batches.put(None)


def _encoded(
    number: int,
    first_row: int,
    batch: TextBatch | TokenBatch,
    ring: RingWriter,
    engine: Engine,
    encoder: EncoderSpec,
) -> EncodedDocuments:
    if isinstance(batch, TokenBatch):
        return _handed_on(number, first_row, batch, ring=ring)
    return _encode(number, first_row, batch, ring, engine, encoder)


def _handed_on(number: int, first_row: int, batch: TokenBatch, *, ring: RingWriter) -> EncodedDocuments:
    """Documents that came as ids, as if they had been encoded."""
    num_ids = len(batch.ids)
    position, carried = -1, batch.ids
    if num_ids and ring.fits(num_ids):
        position, out = ring.reserve(num_ids)
        out[:] = batch.ids
    return EncodedDocuments(
        number=number,
        position=position,
        num_ids=num_ids,
        ids=carried if position < 0 else None,
        ends=batch.ends,
        rows=batch.rows,
        text_bytes=batch.stored_bytes,
        first_row=first_row,
        end_row=batch.end_row,
    )


def _encode(
    number: int, first_row: int, batch: TextBatch, ring: RingWriter, engine: Engine, encoder: EncoderSpec
) -> EncodedDocuments:
    ids, offsets = engine.encode_batch(batch.texts)
    if encoder.is_frozen:
        check_no_eos(ids, offsets, batch, encoder.eos_id)
    num_ids = len(ids) + len(batch.texts)
    if ring.fits(num_ids):
        position, out = ring.reserve(num_ids)
        ends = join_documents(ids, offsets, out, encoder.eos_id)
        carried = None
    else:
        position, carried = -1, np.empty(num_ids, dtype=np.uint32)
        ends = join_documents(ids, offsets, carried, encoder.eos_id)
    lengths = np.fromiter(map(len, batch.texts), dtype=np.int64, count=len(batch.texts))
    return EncodedDocuments(
        number=number,
        position=position,
        num_ids=num_ids,
        ids=carried,
        ends=ends,
        rows=batch.rows,
        text_bytes=np.cumsum(lengths),
        first_row=first_row,
        end_row=batch.end_row,
    )


def check_no_eos(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], batch: TextBatch, eos_id: int) -> None:
    """Refuses text that gives the EOS: 0.3 ms for a million ids, so it is asked where no rule of ours excludes it.

    Raises:
        TokenizerError: naming the row.
    """
    found = np.flatnonzero(ids == eos_id)
    if len(found):
        document = int(np.searchsorted(offsets, found[0], side="right")) - 1
        raise TokenizerError(
            f"expected an EOS that text never gives, found that row {int(batch.rows[document]) + 1} gives id {eos_id}; "
            "populate another store with another --eos"
        )


if __name__ == "__main__":
    main()
