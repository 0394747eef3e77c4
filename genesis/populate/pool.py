"""Worker processes, and their results put back in order.

`WorkerPool.blocks` gives the encoded documents of a stream of tasks exactly in the tasks' order, whatever the number
of workers and whichever is fastest or dies:

- Each worker holds at most two tasks and one ring of results; a worker whose results have not been read yet waits, so
  memory is bounded by workers × (ring + two tasks), whatever the corpus. The worker holding the task in turn is always
  read, so nothing can wait in a circle.
- A worker that dies (the kernel's out-of-memory killer, say) is replaced and its unfinished tasks are done again; what
  was already received of them is skipped the second time, batches being the same each time. A task that kills three
  workers stops the run with an error that names it.
- A task's failure is raised in its turn, after everything before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

import genesis.errors
from genesis.errors import GenesisError, TokenizerError, WorkerError
from genesis.populate.remote_ids import TokenIds
from genesis.populate.ring import (
    RING_IDS,
    Assignment,
    EncodedDocuments,
    Failed,
    Finished,
    Released,
    RingReader,
    anonymous_file,
)
from genesis.sources.base import LinesTask, RowGroupTask, Task, TokensTask
from genesis.tokenizer import EncoderSpec

logger = logging.getLogger(__name__)

_TASKS_PER_WORKER = 2
_TASKS_AHEAD = 4
_DEATHS_PER_TASK = 3
_SILENCE_S = 3600.0
"""A worker that owes the task in turn and says nothing for this long is killed. Reading one batch from the Hub may
honestly take several requests of up to 900 s each."""
_WAKE_S = 1.0


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Encoded documents of one task, in order. ``ids`` is only valid until the next block is asked for."""

    task: Task
    ids: TokenIds
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]
    first_row: int
    end_row: int
    tokenizer_sha256: str | None = None
    """Vocabulary they are encoded with, where that is an earlier one than the run's."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ring: RingReader
    assigned: list[int] = field(default_factory=list)
    """Numbers of its tasks, ascending: it does them in this order, and so its ring holds their results."""
    heard_at: float = field(default_factory=time.monotonic)
    fell_silent: bool = False


@dataclass(slots=True)
class _Pending:
    """A task under way: its results not yet handed on, and how many were received and must not come twice."""

    task: Task
    worker: _Worker | None = None
    results: deque[tuple[_Worker, EncodedDocuments]] = field(default_factory=deque)
    received: int = 0
    to_skip: int = 0
    finished: bool = False
    failure: GenesisError | None = None
    deaths: int = 0

    @property
    def ready(self) -> bool:
        """Whether there is something to do for it without waiting."""
        return bool(self.results) or self.finished or self.failure is not None


class WorkerPool:
    """Runs ``num_workers`` processes that encode with one vocabulary; a context manager.

    Entering it starts the processes, which then import what they need (0.6 s) while the caller opens its store and
    learns or reads the vocabulary; `load` gives them that.

    Args:
        num_workers: processes to run.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._encoder: EncoderSpec | None = None
        self._workers: list[_Worker] = []
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._reader: _TaskReader | None = None

    def __enter__(self) -> WorkerPool:
        """Starts the processes.

        Raises:
            WorkerError: the system does not allow that many.
        """
        try:
            for _ in range(self._num_workers):
                self._workers.append(self._start_worker())
        except WorkerError:
            self._end_workers()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the processes, at once: what they still hold is not wanted."""
        if self._reader is not None:
            self._reader.stop()
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=10)

    @property
    def process_ids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers]

    @property
    def assignments(self) -> list[list[int]]:
        """For each worker, the numbers of the tasks it holds, in the order in which it does them."""
        return [list(worker.assigned) for worker in self._workers]

    def load(self, encoder: EncoderSpec) -> None:
        """Gives the workers their vocabulary and what encodes with it (`genesis.tokenizer.choose_encoder`)."""
        self._encoder = encoder
        for worker in self._workers:
            self._send_encoder(worker, encoder)

    def blocks(self, tasks: Iterable[Task], stop: threading.Event | None = None) -> Iterator[EncodedBlock]:
        """Encodes ``tasks``; may be called once in the life of a pool, after `load`.

        Args:
            tasks: what to encode, in order.
            stop: once set, the iterator ends early, within a second or so.

        Raises:
            GenesisError: reading or encoding a task failed, or its worker died again and again.
        """
        self._reader = reader = _TaskReader(tasks)
        reader.start()
        turn = 0
        while stop is None or not stop.is_set():
            self._assign(reader)
            pending = self._pending.get(turn)
            # Even with results at hand the others are heard, or they would wait for work.
            self._listen(reader, timeout_s=0.0 if (pending.ready if pending else reader.exhausted) else _WAKE_S)
            if pending is None:
                if reader.failure is not None and reader.exhausted:
                    raise reader.failure
                if reader.exhausted:
                    return
            elif pending.results:
                worker, encoded = pending.results.popleft()
                yield _block(pending.task, worker, encoded)
                self._release(worker, encoded)
            elif pending.failure is not None:
                raise pending.failure
            elif pending.finished:
                del self._pending[turn]
                turn += 1
            else:
                self._check_alive(pending)

    def _assign(self, reader: _TaskReader) -> None:
        """Hands out new tasks, always to the worker with the fewest."""
        while True:
            worker = min(self._workers, key=lambda each: len(each.assigned))
            if len(worker.assigned) >= _TASKS_PER_WORKER:
                return
            task = reader.take()
            if task is None:
                return
            number, self._next_number = self._next_number, self._next_number + 1
            self._pending[number] = _Pending(task)
            self._give(worker, number)

    def _give(self, worker: _Worker, number: int) -> None:
        pending = self._pending[number]
        pending.worker, pending.to_skip = worker, pending.received
        worker.assigned.append(number)
        worker.heard_at = time.monotonic()
        self._send(worker, Assignment(number, pending.task))

    def _listen(self, reader: _TaskReader, timeout_s: float) -> None:
        """Takes in what the workers or the task reader have to say, waiting for the first of it."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for ready in wait([*by_connection, reader.news], timeout=timeout_s):
            if ready is reader.news:
                reader.clear_news()
                continue
            worker = by_connection[ready]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            worker.heard_at = time.monotonic()
            if isinstance(message, EncodedDocuments):
                self._take_in(worker, message)
            elif isinstance(message, Finished | Failed):
                worker.assigned.remove(message.number)
                pending = self._pending[message.number]
                pending.finished = True
                if isinstance(message, Failed):
                    pending.failure = as_error(message, pending.task)
                pending.task = without_text(pending.task)

    def _take_in(self, worker: _Worker, encoded: EncodedDocuments) -> None:
        pending = self._pending[encoded.number]
        if encoded.position >= 0:
            worker.ring.receive(encoded.position, encoded.num_ids)
        if pending.to_skip:
            pending.to_skip -= 1
            self._release(worker, encoded)
        else:
            pending.received += 1
            pending.results.append((worker, encoded))

    def _release(self, worker: _Worker, encoded: EncodedDocuments) -> None:
        if encoded.position >= 0:
            self._send(worker, Released(worker.ring.release(encoded.position)))

    def _send(self, worker: _Worker, message: Assignment | Released) -> None:
        # A dead worker's socket fails here; `_listen` reads its end and replaces the worker.
        with contextlib.suppress(OSError):
            worker.connection.send(message)

    def _check_alive(self, pending: _Pending) -> None:
        worker = pending.worker
        if worker is not None and time.monotonic() - worker.heard_at > _SILENCE_S:
            worker.fell_silent = True
            worker.process.kill()
            worker.heard_at = time.monotonic()

    def _replace(self, worker: _Worker) -> None:
        """Starts another process, which does all of the dead one's tasks again, in their order.

        They may not go to a worker that has later tasks already: its ring would hold results in another order than
        they are wanted, and fill up with those that must wait.
        """
        worker.connection.close()
        worker.process.kill()
        status = worker.process.wait(timeout=10)
        reason = f"silent for {_SILENCE_S:.0f} s" if worker.fell_silent else _died_of(status)
        self._workers.remove(worker)
        for number in worker.assigned:
            pending = self._pending[number]
            pending.deaths += 1
            if pending.deaths >= _DEATHS_PER_TASK:
                pending.failure = WorkerError(
                    f"{pending.deaths} workers in a row died ({reason}) while encoding "
                    f"{describe_task(pending.task)}; free memory or use fewer --workers, then run the same command "
                    "again"
                )
        again = [number for number in worker.assigned if self._pending[number].failure is None]
        logger.warning(
            "worker %d died (%s); replaced, %d of its tasks are done again", worker.process.pid, reason, len(again)
        )
        replacement = self._start_worker()
        self._workers.append(replacement)
        for number in again:
            self._give(replacement, number)

    def _start_worker(self) -> _Worker:
        try:
            worker = _spawn()
        except OSError as error:
            raise WorkerError(
                f"cannot start another worker beside {len(self._workers)} ({error.strerror}); use fewer --workers, "
                "or raise the limits on processes and open files"
            ) from None
        if self._encoder is not None:
            self._send_encoder(worker, self._encoder)
        return worker

    def _send_encoder(self, worker: _Worker, encoder: EncoderSpec) -> None:
        # As in `_send`: one that died already is replaced when its end is read.
        with contextlib.suppress(OSError):
            worker.connection.send(encoder)


class _TaskReader:
    """Runs the task iterator in a thread, a few tasks ahead, and says through a socket when there is one."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tasks
        self._queue: queue.Queue[Task | None] = queue.Queue(_TASKS_AHEAD)
        self._stopped = threading.Event()
        self.news, self._notify = socket.socketpair()
        self.news.setblocking(False)
        self._notify.setblocking(False)
        self.exhausted = False
        self.failure: GenesisError | None = None
        """Why the iterator ended early, if it did; to be raised once all before it is done."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="task-reader", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self.news.close()
        self._notify.close()

    def take(self) -> Task | None:
        """The next task; None if there is none yet, or (``exhausted``) ever."""
        if self.exhausted:
            return None
        try:
            task = self._queue.get_nowait()
        except queue.Empty:
            return None
        self.exhausted = task is None
        return task

    def clear_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.news.recv(4096)

    def _run(self) -> None:
        try:
            for task in self._tasks:
                self._put(task)
                if self._stopped.is_set():
                    return
        except GenesisError as error:
            self.failure = error
        except Exception as error:
            logger.debug("task reader", exc_info=True)
            self.failure = WorkerError(f"reading the input failed: {type(error).__name__}: {error}")
        self._put(None)

    def _put(self, item: Task | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=1.0)
                break
            except queue.Full:
                continue
        # A full socket means that a notification is pending already; a closed one, that there is no reader any more.
        with contextlib.suppress(OSError):
            self._notify.send(b"!")


def _spawn() -> _Worker:
    """Starts a process and the socket and ring it shares with this one."""
    # -P: the search path is this process's, without whatever the working folder holds.
    command = [sys.executable, "-P", "-m", "genesis.populate.worker"]
    search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with contextlib.ExitStack() as only_theirs, contextlib.ExitStack() as on_failure:
        ours, theirs = socket.socketpair()
        on_failure.callback(ours.close)
        only_theirs.callback(theirs.close)
        ring_descriptor = anonymous_file(RING_IDS * 4)
        only_theirs.callback(os.close, ring_descriptor)
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(ring_descriptor)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), ring_descriptor),
            env={**os.environ, "PYTHONPATH": search_path},
        )
        ring = RingReader.over(ring_descriptor)
        on_failure.pop_all()
        return _Worker(process, Connection(ours.detach()), ring)


def _block(task: Task, worker: _Worker, encoded: EncodedDocuments) -> EncodedBlock:
    ids = encoded.ids if encoded.ids is not None else worker.ring.view(encoded.position, encoded.num_ids)
    return EncodedBlock(
        task=task,
        ids=ids,
        ends=encoded.ends,
        rows=encoded.rows,
        text_bytes=encoded.text_bytes,
        first_row=encoded.first_row,
        end_row=encoded.end_row,
    )


def as_error(failed: Failed, task: Task) -> GenesisError:
    """What a worker reported, as the error it was there."""
    kind = getattr(genesis.errors, failed.error, None)
    if kind is TokenizerError:  # Which only knows the text.
        return TokenizerError(f"{describe_task(task)}: {failed.message}")
    if isinstance(kind, type) and issubclass(kind, GenesisError):
        return kind(failed.message)
    return WorkerError(f"encoding {describe_task(task)} failed: {failed.error}: {failed.message}")


def without_text(task: Task) -> Task:
    """The task, for naming positions only: lines would otherwise stay in memory until their turn."""
    return replace(task, data=b"") if isinstance(task, LinesTask) else task


def describe_task(task: Task) -> str:
    """``row group 3 of a.parquet``."""
    if isinstance(task, RowGroupTask):
        return f"row group {task.row_group} of {task.file.name}"
    if isinstance(task, LinesTask):
        return f"the lines of {task.file.name} from line {task.first_row + 1}"
    if isinstance(task, TokensTask):
        return f"documents {task.first_row} to {task.first_row + len(task.ends) - 1} of {task.file.name}"
    return f"{task.files[0].name} and {len(task.files) - 1} more files"


def _died_of(status: int) -> str:
    if status == -9:
        return "signal 9, as the out-of-memory killer sends"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
