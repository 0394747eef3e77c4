"""What a monitor has seen of a run, kept in sqlite: contributions for good, all else for a while.

Sums in reports begin anew with each process, so contributions are kept by node and incarnation and added up when asked
for: a node that restarts loses nothing of its account here, and one that lowers its figures neither. Reports, rounds
and looks at the run are kept for `retention_s`, and `max_rows` of each at most; a node and a minute take 270
bytes. One monitor writes to a file at a time; others may read it. What a look brings is written in two transactions, so
a kill leaves nothing half written.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import TrainerError, TrainerUsageError

SCHEMA_VERSION: Final = 1
_BUSY_S = 5.0
_PRUNE_EVERY_S = 600.0
_MAX_CONTRIBUTIONS = 200_000
_SCHEMA = """
CREATE TABLE run (run_id TEXT NOT NULL);
CREATE TABLE contribution (
  peer_id TEXT NOT NULL, incarnation TEXT NOT NULL, node_id TEXT NOT NULL, role TEXT NOT NULL, stage TEXT NOT NULL,
  flops REAL NOT NULL, confirmed_flops REAL, tokens INTEGER NOT NULL, micro_batches INTEGER NOT NULL,
  active_s REAL NOT NULL, rounds_shared INTEGER NOT NULL, rounds_failed INTEGER NOT NULL,
  first_at REAL NOT NULL, last_at REAL NOT NULL,
  PRIMARY KEY (peer_id, incarnation)) WITHOUT ROWID;
CREATE TABLE report (
  at REAL NOT NULL, peer_id TEXT NOT NULL, flops REAL NOT NULL, tokens INTEGER NOT NULL, active_s REAL NOT NULL,
  sent_bytes INTEGER NOT NULL, received_bytes INTEGER NOT NULL, memory_bytes INTEGER NOT NULL, loss REAL,
  tokens_per_s REAL NOT NULL,
  PRIMARY KEY (peer_id, at)) WITHOUT ROWID;
CREATE INDEX report_at ON report (at);
CREATE TABLE round (
  stage TEXT NOT NULL, round_index INTEGER NOT NULL, peer_id TEXT NOT NULL, at REAL NOT NULL, members INTEGER NOT NULL,
  completeness REAL NOT NULL, seconds REAL NOT NULL,
  agree_s REAL NOT NULL, reduce_s REAL NOT NULL, vote_s REAL NOT NULL,
  sent_bytes INTEGER NOT NULL, error TEXT NOT NULL,
  PRIMARY KEY (stage, round_index, peer_id)) WITHOUT ROWID;
CREATE INDEX round_at ON round (at);
CREATE TABLE look (
  at REAL PRIMARY KEY, step INTEGER, tokens INTEGER, loss REAL, tokens_per_s REAL NOT NULL, nodes INTEGER NOT NULL,
  alarms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE alarm (
  kind TEXT NOT NULL, subject TEXT NOT NULL, began_at REAL NOT NULL, ended_at REAL, text TEXT NOT NULL,
  PRIMARY KEY (kind, subject, began_at)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReport:
    """A node's report, as far as it is kept; times are in seconds since 1970."""

    at: float
    peer_id: str
    node_id: str
    incarnation: str
    role: str
    stage: str = ""
    flops: float = 0.0
    confirmed_flops: float | None = None
    tokens: int = 0
    micro_batches: int = 0
    active_s: float = 0.0
    rounds_shared: int = 0
    rounds_failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRound:
    """A round as one member reported it."""

    stage: str
    round_index: int
    peer_id: str
    at: float
    members: int
    completeness: float
    seconds: float
    agree_s: float
    reduce_s: float
    vote_s: float
    sent_bytes: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLook:
    """The run at a moment."""

    at: float
    step: int | None
    tokens: int | None
    loss: float | None
    tokens_per_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a node has claimed over all its lives, and what was confirmed of it; the rest is of its latest life."""

    node_id: str
    role: str
    stage: str
    last_at: float
    flops: float
    confirmed_flops: float | None
    tokens: int
    micro_batches: int
    active_s: float


class History:
    """The file of one run; a context manager. For one thread at a time.

    Raises `TrainerUsageError` where the file is of another run or release, no such file at all, or another monitor's.
    """

    def __init__(
        self,
        path: Path | None,
        run_id: str,
        *,
        retention_s: float = 30 * 86_400.0,
        max_rows: int = 2_000_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``path`` None: in memory, for one look."""
        self._path = path
        self._run_id = run_id
        self._retention_s = retention_s
        self._max_rows = max_rows
        self._clock = clock
        self._pruned_at = float("-inf")
        self._lock: FileLock | None = None
        self._file: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = FileLock(self._path.with_name(self._path.name + ".lock"))
                self._lock.acquire()
            self._file = sqlite3.connect(
                ":memory:" if self._path is None else self._path, timeout=_BUSY_S, check_same_thread=False
            )
            self._open_schema(self._file)
        except FileLockedError:
            self._lock = None
            raise TrainerUsageError(
                f"--db {self._path}: expected a file of this monitor's own, found that another one writes to it; name "
                "another file, or look at what that one serves (--port)"
            ) from None
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise TrainerUsageError(
                f"--db {self._path}: expected a file that a monitor has written, or a new one, found: {error}"
            ) from error
        except TrainerUsageError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- writing -------------------------------------------------------------------------------------------------------

    def add_reports(self, reports: Iterable[SeenReport], rounds: Iterable[SeenRound]) -> None:
        """Adds the latest reports and the rounds in them; what is known already changes nothing.

        Raises `TrainerError`: the disk is full or fails.
        """
        with self._transaction() as file:
            for report in reports:
                self._add_report(file, report)
            file.executemany(
                "INSERT OR REPLACE INTO round VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                [astuple(it) for it in rounds],  # Its fields are the columns, in their order.
            )

    def add_look(self, look: SeenLook, alarms: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], float]:
        """Adds the run as a whole and the alarms that stand now (kind, subject, text); others are over.

        Returns since when each of these alarms stands, by kind and subject. Raises as `add_reports`.
        """
        standing = {(kind, subject): text for kind, subject, text in alarms}
        values = (look.at, look.step, look.tokens, look.loss, look.tokens_per_s, look.nodes, len(standing))
        with self._transaction() as file:
            file.execute("INSERT OR REPLACE INTO look VALUES (?,?,?,?,?,?,?)", values)
            since = self._note_alarms(file, standing, look.at)
            self._prune(file)
        return since

    def _add_report(self, file: sqlite3.Connection, it: SeenReport) -> None:
        values = (it.at, it.peer_id, it.flops, it.tokens, it.active_s, it.sent_bytes, it.received_bytes)
        file.execute(
            "INSERT OR IGNORE INTO report VALUES (?,?,?,?,?,?,?,?,?,?)",
            (*values, it.memory_bytes, it.loss, it.tokens_per_s),
        )
        sums = (it.flops, it.confirmed_flops, it.tokens, it.micro_batches, it.active_s, it.rounds_shared)
        # A figure that went down within one life is of an old report, or a lie: the highest stays.
        file.execute(
            "INSERT INTO contribution VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?) "
            "ON CONFLICT (peer_id, incarnation) DO UPDATE SET node_id=excluded.node_id, role=excluded.role, "
            "stage=excluded.stage, flops=max(flops, excluded.flops), "
            "confirmed_flops=max(coalesce(confirmed_flops, excluded.confirmed_flops), "
            "coalesce(excluded.confirmed_flops, confirmed_flops)), tokens=max(tokens, excluded.tokens), "
            "micro_batches=max(micro_batches, excluded.micro_batches), active_s=max(active_s, excluded.active_s), "
            "rounds_shared=max(rounds_shared, excluded.rounds_shared), "
            "rounds_failed=max(rounds_failed, excluded.rounds_failed), last_at=max(last_at, excluded.last_at)",
            (it.peer_id, it.incarnation, it.node_id, it.role, it.stage, *sums, it.rounds_failed, it.at, it.at),
        )

    def _note_alarms(
        self, file: sqlite3.Connection, standing: dict[tuple[str, str], str], now: float
    ) -> dict[tuple[str, str], float]:
        known = {(kind, subject): at for kind, subject, at in file.execute(_OPEN_ALARMS)}
        for (kind, subject), text in standing.items():
            at = known.get((kind, subject), now)
            file.execute("INSERT OR REPLACE INTO alarm VALUES (?,?,?,NULL,?)", (kind, subject, at, text))
        for kind, subject in known.keys() - standing.keys():
            file.execute(
                "UPDATE alarm SET ended_at=? WHERE kind=? AND subject=? AND ended_at IS NULL", (now, kind, subject)
            )
        return {key: known.get(key, now) for key in standing}

    def _prune(self, file: sqlite3.Connection) -> None:
        now = self._clock()
        if now - self._pruned_at < _PRUNE_EVERY_S:
            return
        self._pruned_at = now
        limit = now - self._retention_s
        for table in ("report", "round", "look"):
            file.execute(f"DELETE FROM {table} WHERE at < ?", (limit,))
            file.execute(
                f"DELETE FROM {table} WHERE at <= (SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET ?)",
                (self._max_rows,),
            )
        file.execute("DELETE FROM alarm WHERE ended_at < ?", (limit,))
        # Identities cost nothing: of more lives than anybody runs, those that did the least and are long gone go.
        file.execute(
            "DELETE FROM contribution WHERE (peer_id, incarnation) IN (SELECT peer_id, incarnation FROM contribution "
            "ORDER BY coalesce(confirmed_flops, 0) DESC, flops DESC LIMIT -1 OFFSET ?)",
            (_MAX_CONTRIBUTIONS,),
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def contributions(self) -> dict[str, Contribution]:
        """Returns what each node has contributed, by key."""
        rows = self._read(
            # Of columns that are not summed sqlite takes those of the row with the maximum.
            # Integers that liars claim would overflow a sum of integers, which total() does not make.
            "SELECT peer_id, node_id, role, stage, max(last_at), sum(flops), sum(confirmed_flops), "
            "cast(total(tokens) AS INTEGER), cast(total(micro_batches) AS INTEGER), sum(active_s) "
            "FROM contribution GROUP BY peer_id"
        )
        return {peer_id: Contribution(*values) for peer_id, *values in rows}

    def losses(self, count: int) -> list[float]:
        """Returns the losses of the latest looks that had one, the newest last."""
        query = "SELECT loss FROM look WHERE loss IS NOT NULL ORDER BY at DESC LIMIT ?"
        rows = self._read(query, count)
        return [loss for (loss,) in rows][::-1]

    def rounds(self, count: int) -> list[SeenRound]:
        """Returns what members reported of the latest rounds, ``count`` reports at most, the newest first."""
        rows = self._read("SELECT * FROM round ORDER BY at DESC LIMIT ?", count)
        return [SeenRound(**dict(zip(_ROUND_COLUMNS, row, strict=True))) for row in rows]

    def looks(self, since: float, count: int = 2_000) -> list[SeenLook]:
        """Returns the run over time from a moment on, the newest last, ``count`` at most."""
        rows = self._read(
            "SELECT at, step, tokens, loss, tokens_per_s, nodes FROM look WHERE at >= ? ORDER BY at DESC LIMIT ?",
            since,
            count,
        )
        names = ("at", "step", "tokens", "loss", "tokens_per_s", "nodes")
        return [SeenLook(**dict(zip(names, row, strict=True))) for row in rows][::-1]

    def rows_of(self, query: str, values: Sequence[float]) -> list[tuple[float | str | None, ...]]:
        """Returns the rows of a query over these tables. Raises as `add_reports`."""
        return self._read(query, *values)

    def num_rows(self) -> dict[str, int]:
        """Returns how many rows each table has."""
        tables: Sequence[str] = ("contribution", "report", "round", "look", "alarm")
        return {name: int(self._read(f"SELECT count(*) FROM {name}")[0][0]) for name in tables}

    def _read(self, query: str, *values: float) -> list[Any]:
        try:
            return self._opened().execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise TrainerError(f"--db {self._path}: the history cannot be read: {error}; name another file") from error

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open_schema(self, file: sqlite3.Connection) -> None:
        version = int(file.execute("PRAGMA user_version").fetchone()[0])
        if version == 0 and not file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            if self._path is not None:
                file.execute("PRAGMA journal_mode=WAL")
            with file:  # Nothing is left half made by a kill.
                file.execute("BEGIN")
                for statement in _SCHEMA.split(";"):
                    file.execute(statement)
                file.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                file.execute("INSERT INTO run VALUES (?)", (self._run_id,))
        elif version != SCHEMA_VERSION:
            raise TrainerUsageError(
                f"--db {self._path}: expected a monitor's file of form {SCHEMA_VERSION}, found form {version} or "
                "something else; name another file"
            )
        [(run_id,)] = file.execute("SELECT run_id FROM run").fetchall() or [("none",)]
        if run_id != self._run_id:
            raise TrainerUsageError(
                f"--db {self._path}: expected the history of run {self._run_id}, found that of {run_id}; name a file "
                "for each run"
            )
        file.execute("PRAGMA synchronous=NORMAL")  # With WAL a kill loses nothing, a power cut a look or two.

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            raise TrainerError("expected an open history, found that it was closed")
        return self._file

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        file: Any = self._opened()
        try:
            with file:
                yield file
        except sqlite3.Error as error:
            raise TrainerError(f"--db {self._path}: the history cannot be written: {error}") from error


_ROUND_COLUMNS: Final = tuple(field.name for field in fields(SeenRound))  # In their order in the table.
_OPEN_ALARMS: Final = "SELECT kind, subject, began_at FROM alarm WHERE ended_at IS NULL"
