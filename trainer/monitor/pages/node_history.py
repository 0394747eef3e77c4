"""What a node keeps for its own page: its steps, its rounds, the run as it has seen it, what happened; in sqlite.

A thread takes what the training thread queued (1.2 µs a step), looks at the tracker's status every 10 s, and writes
both every 5 s: so much a kill -9 loses. It keeps 14 days, 100,000 rows of each kind and the steps of the node's life
(`StepCourse`), some 20 MB at most. A file that cannot be opened or written costs the curve of the time before, with one
warning, and never the run. Answers are made from a second connection, or in memory where there is no file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pydantic import TypeAdapter

from trainer.errors import TrainerError
from trainer.monitor.event_log import active_path
from trainer.monitor.facts import RoundFacts, StepFacts
from trainer.monitor.history import History, SeenLook, SeenReport
from trainer.monitor.pages.step_course import Bucket, StepCourse, bucket_of
from trainer.monitor.pages.texts import harmless
from trainer.monitor.status import TrainingStatus

logger = logging.getLogger(__name__)

_RETENTION_S: Final = 14 * 86_400.0
_MAX_ROWS: Final = 100_000
_LOOK_S: Final = 10.0
_WRITE_S: Final = 5.0
_PEERS_S: Final = 60.0
_MAX_PEERS: Final = 64
_MAX_QUEUED: Final = 100_000
_MAX_ROUNDS: Final = 2_000
_MAX_INCIDENTS: Final = 1_000
_NAMES_A_ROUND: Final = 32
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS own_round (
  at REAL PRIMARY KEY, round_index INTEGER NOT NULL, step INTEGER NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incident (
  at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, is_bad INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS incident_at ON incident (at);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRound:
    """A round as this node was in it; ``step`` is the node's own at its end."""

    at: float
    round_index: int
    step: int
    stage: str = ""  # Whose round it was, at a node that has several.
    members: tuple[str, ...] = ()  # Keys.
    left_out: tuple[tuple[str, str], ...] = ()  # Keys, and why.
    completeness: float = 0.0
    seconds: float = 0.0
    phases: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sent_bytes: int = 0
    received_bytes: int = 0
    rule: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Happened:
    """Something that is worth a line on the page."""

    at: float
    kind: str
    text: str
    is_bad: bool = False


class NodeHistory:
    """A node's history; it implements what `Observer` reports to. `start` before and `close` after, or a ``with``.

    ``status`` returns the node's status; ``path`` None keeps all in memory.
    """

    def __init__(
        self,
        status: Callable[[], TrainingStatus],
        path: Path | None,
        run_id: str,
        *,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._path = path
        self._run_id = run_id
        self._look_s = look_s
        self._clock = clock
        self._queue: queue.SimpleQueue[Bucket | OwnRound | Happened] = queue.SimpleQueue()
        self._lock = threading.RLock()  # Of all below.
        self._steps = StepCourse()
        self._rounds: deque[OwnRound] = deque(maxlen=_MAX_ROUNDS)
        self._incidents: deque[Happened] = deque(maxlen=_MAX_INCIDENTS)
        self._unsaved_rounds: list[OwnRound] = []
        self._unsaved_incidents: list[Happened] = []
        self._history: History | None = None
        self._file: sqlite3.Connection | None = None
        self._is_failing = False
        self._peers_at = float("-inf")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what happens; any thread --------------------------------------------------------------------------------------

    def step(self, step: StepFacts, num_tokens: int) -> None:
        """Notes a step; ``num_tokens`` are those of the run so far, 0: they are counted here."""
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(bucket_of(step.step, self._clock(), step.loss, num_tokens, step.num_tokens, step.seconds))

    def round(self, report: RoundFacts, *, step: int, stage: str = "") -> None:
        """Notes a round with a result, of a stage at a node that has several."""
        self._queue.put(
            OwnRound(
                at=self._clock(),
                round_index=report.round_index,
                step=step,
                stage=stage,
                members=tuple(report.members[:_NAMES_A_ROUND]),
                left_out=tuple((who, harmless(why)) for who, why in report.dropped[:_NAMES_A_ROUND]),
                completeness=report.completeness,
                seconds=report.seconds,
                phases=report.phases,
                sent_bytes=report.sent_bytes,
                received_bytes=report.received_bytes,
                rule=report.rule,
            )
        )

    def round_failed(self, round_index: int, reason: str, *, step: int, stage: str = "") -> None:
        """Notes a round without one; ``stage`` as for `round`."""
        error = harmless(reason) or "no result"
        self._queue.put(OwnRound(at=self._clock(), round_index=round_index, step=step, stage=stage, error=error))
        of_stage = f" of {stage}" if stage else ""
        self._queue.put(Happened(self._clock(), "round failed", f"round {round_index}{of_stage}: {error}", True))

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Notes any other event, if it is one for people."""
        found = _told(kind, fields)
        if found is not None:
            text, is_bad = found
            self._queue.put(Happened(self._clock(), kind.replace("_", " "), harmless(text), is_bad))

    # -- what is known; any thread -------------------------------------------------------------------------------------

    def steps(self, begin: float, end: float, limit: int) -> list[Bucket]:
        """Returns the node's steps in a range, as `StepCourse.between`."""
        with self._lock:
            self._drain()
            return self._steps.between(begin, end, limit)

    def latest_steps(self, count: int) -> list[Bucket]:
        """Returns the latest steps, the newest last."""
        with self._lock:
            self._drain()
            return self._steps.latest(count)

    def rounds(self) -> list[OwnRound]:
        """Returns the latest 2,000 rounds, the oldest first."""
        with self._lock:
            self._drain()
            return list(self._rounds)

    def incidents(self, count: int) -> list[Happened]:
        """Returns the latest incidents, the newest first."""
        with self._lock:
            self._drain()
            return list(self._incidents)[::-1][:count]

    def read(self, query: str, values: Sequence[float]) -> list[tuple[float | str | None, ...]]:
        """Runs a query over the tables of `History`; nothing where it cannot be read."""
        with self._lock:
            if self._history is None:
                return []
            try:
                return self._history.rows_of(query, values)
            except TrainerError as error:
                logger.debug("the page's history: %s", error)
                return []

    # -- the thread ----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Opens the file, reads what is in it, and begins to write."""
        with self._lock:
            try:
                self._open(self._path)
            except (TrainerError, sqlite3.Error, OSError) as error:
                logger.warning("the page has no curve of the time before this start, and keeps none: %s", error)
                self._close_files()
                self._open(None)
        self._thread = threading.Thread(target=self._keep, name="page-history", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Writes what is left and closes the file."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(_WRITE_S)
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self) -> None:
        looked_s = written_s = time.monotonic()
        is_stopping = False
        while not is_stopping:
            is_stopping = self._stopping.wait(min(1.0, self._look_s))
            with self._lock:
                self._drain()
            now_s = time.monotonic()
            if is_stopping or now_s - looked_s >= self._look_s:
                looked_s = now_s
                self._look()
            if is_stopping or now_s - written_s >= min(_WRITE_S, self._look_s):
                written_s = now_s
                self._write()
        with self._lock:
            self._close_files()

    def _look(self) -> None:
        """Notes how the run stands, by what others announce too."""
        status, now = self._status(), self._clock()
        with self._lock:
            tokens, step = self._steps.last_tokens, self._steps.last_step
            # No speed is known before this life's second step; a zero would be drawn as a stand-still.
            if self._history is None or step is None or not status.tokens_per_s:
                return
            look = SeenLook(
                at=now,
                step=step + 1,
                tokens=tokens,
                loss=status.global_loss,
                tokens_per_s=status.tokens_per_s,
                nodes=status.training_nodes,
            )
            try:
                self._history.add_look(look, ())
                if now - self._peers_at >= min(_PEERS_S, self._look_s * 6):
                    self._peers_at = now
                    self._history.add_reports(_reports(status, now), ())
            except TrainerError as error:
                self._fail(error)

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._queue.get_nowait())

    def _take(self, item: Bucket | OwnRound | Happened) -> None:
        if isinstance(item, Bucket):
            if not item.tokens:
                before = 0 if self._steps.last_step is None else self._steps.last_tokens
                item = item._replace(tokens=before + item.num_tokens)
            self._steps.add(item)
        elif isinstance(item, OwnRound):
            self._rounds.append(item)
            self._unsaved_rounds.append(item)
        else:
            self._incidents.append(item)
            self._unsaved_incidents.append(item)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open(self, path: Path | None) -> None:
        self._history = History(path, self._run_id, retention_s=_RETENTION_S, max_rows=_MAX_ROWS).__enter__()
        if path is None:
            return
        self._file = file = sqlite3.connect(path, timeout=_WRITE_S, check_same_thread=False)
        file.execute("PRAGMA synchronous=NORMAL")
        file.executescript(_SCHEMA)
        self._steps.load(file)
        rows = file.execute("SELECT detail FROM own_round ORDER BY at DESC LIMIT ?", (_MAX_ROUNDS,))
        for (detail,) in list(rows)[::-1]:
            with contextlib.suppress(ValueError):
                self._rounds.append(_ROUND.validate_json(detail))
        rows = file.execute("SELECT * FROM incident ORDER BY at DESC LIMIT ?", (_MAX_INCIDENTS,))
        for at, kind, text, is_bad in list(rows)[::-1]:
            self._incidents.append(Happened(float(at), str(kind), str(text), bool(is_bad)))

    def _write(self) -> None:
        with self._lock:
            file = self._file
            if file is None:
                return
            try:
                with file:
                    self._steps.save(file)
                    file.executemany(
                        "INSERT OR REPLACE INTO own_round VALUES (?,?,?,?)",
                        [
                            (it.at, it.round_index, it.step, _ROUND.dump_json(it).decode())
                            for it in self._unsaved_rounds
                        ],
                    )
                    file.executemany(
                        "INSERT INTO incident VALUES (?,?,?,?)",
                        [(it.at, it.kind, it.text, it.is_bad) for it in self._unsaved_incidents],
                    )
                    for table, limit in (("own_round", _MAX_ROUNDS), ("incident", _MAX_INCIDENTS)):
                        beyond = f"SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET ?"
                        file.execute(f"DELETE FROM {table} WHERE at <= ({beyond})", (limit,))
            except sqlite3.Error as error:
                self._fail(error)
                return
            self._unsaved_rounds.clear()
            self._unsaved_incidents.clear()
            self._is_failing = False

    def _fail(self, error: Exception) -> None:
        if not self._is_failing:
            logger.warning("the history of the page cannot be written: %s; training goes on", error)
        self._is_failing = True
        del self._unsaved_rounds[:-_MAX_ROUNDS], self._unsaved_incidents[:-_MAX_INCIDENTS]

    def _close_files(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._history is not None:
            self._history.close()
            self._history = None


def history_path(directory: Path, node_id: str) -> Path:
    """Returns the file of a node's history, beside its log."""
    log = active_path(directory, node_id)
    return log.with_name(f"page-{log.stem.removeprefix('events-')}.sqlite")


def _reports(status: TrainingStatus, now: float) -> list[SeenReport]:
    return [
        SeenReport(
            at=now,
            peer_id=node.peer_id,
            node_id=harmless(node.node_id),
            incarnation="",
            role=node.role,
            stage=node.stage,
            tokens_per_s=node.tokens_per_s,
            loss=node.loss,
        )
        for node in status.nodes[:_MAX_PEERS]
        if not node.is_self and node.loss is not None and math.isfinite(node.loss)
    ]


def _told(kind: str, fields: Mapping[str, object]) -> tuple[str, bool] | None:
    """An event in words, and whether it is bad; None: it is no news for people, or told elsewhere."""
    if kind == "checkpoint":
        outcome = fields.get("outcome")
        return None if outcome == "saved" else (f"step {fields.get('step')}: {outcome}", outcome == "failed")
    if kind == "withdrew":
        return f"took itself out: {fields.get('reason')}", True
    if kind == "adopted":
        return f"took up the others' state of outer step {fields.get('outer_step')}", False
    if kind == "run_change":
        return f"change {fields.get('number')} of the run is in force: {fields.get('settings')}", False
    if kind in ("vocabulary", "store"):
        return ", ".join(f"{name} {value}" for name, value in fields.items()), False
    if kind == "held_out":
        return f"step {fields.get('step')}: {fields.get('loss')} nats a token", False
    return None


_ROUND: Final = TypeAdapter(OwnRound)
