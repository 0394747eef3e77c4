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

from genesis.errors import GenesisError
from genesis.populate.ring import Assignment, EncodedDocuments, Failed, Finished, Released, RingWriter
from genesis.sources import read_batches
from genesis.sources.base import TextBatch
from genesis.tokenizer import Engine, GigatokenEngine

logger = logging.getLogger(__name__)

EOS = 2
_READ_AHEAD = 2

_Item = tuple[int, int, TextBatch] | Finished | Failed | None


def join_documents(
    ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], out: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Copies documents one after the other, each followed by EOS.

    Args:
        ids: uint32[N], all documents' ids.
        offsets: int64[D+1], where each document begins; the last is N.
        out: uint32[N+D], filled; uint16 where every id fits.

    Returns:
        int64[D], where each document ends in ``out``, its EOS included.
    """
    ends = offsets[1:] + np.arange(1, len(offsets), dtype=np.int64)
    keep = np.ones(len(out), dtype=bool)
    keep[ends - 1] = False
    out[keep] = ids
    out[ends - 1] = EOS
    return ends


def main() -> None:
    """Runs until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    logging.basicConfig(format="worker %(process)d: %(message)s", level=logging.WARNING)
    connection: Connection = Connection(int(sys.argv[1]))
    ring = RingWriter.over(int(sys.argv[2]))
    importlib.import_module("awkward")  # gigatoken imports it at its first result; importing it here delays nothing.
    try:
        engine = GigatokenEngine(connection.recv_bytes())
        engine.encode_batch([b"built before the first task comes"])
        _serve(connection, ring, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent has gone or needs us no more.


def _serve(connection: Connection, ring: RingWriter, engine: Engine) -> None:
    assignments: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
    batches: queue.Queue[_Item] = queue.Queue(_READ_AHEAD)
    threading.Thread(target=_receive, args=(connection, assignments, ring), daemon=True).start()
    threading.Thread(target=_read, args=(assignments, batches), daemon=True).start()
    while (item := batches.get()) is not None:
        if isinstance(item, Finished | Failed):
            connection.send(item)
        else:
            connection.send(_encode(*item, ring=ring, engine=engine))


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
            for batch in read_batches(assignment.task):
                batches.put((assignment.number, row, batch))
                row = batch.end_row
            batches.put(Finished(assignment.number))
        except GenesisError as error:
            batches.put(Failed(assignment.number, type(error).__name__, str(error)))
        except Exception as error:
            logger.warning("unexpected error while reading %s", assignment.task, exc_info=True)
            batches.put(Failed(assignment.number, type(error).__name__, str(error)))
    batches.put(None)


def _encode(number: int, first_row: int, batch: TextBatch, *, ring: RingWriter, engine: Engine) -> EncodedDocuments:
    ids, offsets = engine.encode_batch(batch.texts)
    num_ids = len(ids) + len(batch.texts)
    if ring.fits(num_ids):
        position, out = ring.reserve(num_ids)
        ends = join_documents(ids, offsets, out)
        carried = None
    else:
        position, carried = -1, np.empty(num_ids, dtype=np.uint32)
        ends = join_documents(ids, offsets, carried)
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


if __name__ == "__main__":
    main()
