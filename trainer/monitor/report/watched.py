"""A monitor's history as a part of a report: the run at its looks, contributions, alarms. It is only read.

A monitor may write to the file meanwhile. Looks are brought down by sqlite, so that a year of them costs no memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainer.errors import TrainerUsageError
from trainer.monitor.pages.texts import NAME, harmless
from trainer.monitor.report.event_fields import MAX_WHOLE, utc
from trainer.monitor.report.incidents import Incidents
from trainer.monitor.report.model import Contribution, Watched, WatchedPoint

_MAX_POINTS: Final = 600
_MAX_CONTRIBUTIONS: Final = 300
_MAX_ALARMS: Final = 2_000
_LATEST_AT: Final = 4e9  # A year 2096 is a broken clock.


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    name = quote(str(path.absolute()))
    try:
        with closing(sqlite3.connect(f"file:{name}?mode=ro", uri=True, timeout=5.0)) as file:
            try:
                file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            except sqlite3.OperationalError:  # On a disk that cannot be written to, a log beside it cannot be made.
                with closing(sqlite3.connect(f"file:{name}?immutable=1", uri=True)) as unchanging:
                    yield unchanging
                    return
            yield file
    except sqlite3.Error as error:
        raise TrainerUsageError(f"{path}: expected a monitor's history, found: {error}; leave it out") from None


def read_watched(path: Path, incidents: Incidents) -> Watched:
    """Returns what a history has, and notes its alarms; raises `TrainerUsageError`: it is none."""
    with _opened(path) as file:
        for kind, subject, began_at, ended_at, text in file.execute(
            "SELECT kind, subject, began_at, ended_at, text FROM alarm ORDER BY began_at DESC LIMIT ?", (_MAX_ALARMS,)
        ).fetchall()[::-1]:
            began, ended = _moment(began_at), _moment(began_at if ended_at is None else ended_at)
            state = " (stands)" if ended_at is None else ""
            incidents.note("alarm", harmless(str(subject), NAME), began, f"{kind}: {text}{state}", ended_at=ended)
        return Watched(
            points=_points(file),
            contributions=_contributions(file),
            num_contributions=int(file.execute("SELECT count(DISTINCT peer_id) FROM contribution").fetchone()[0]),
        )


def _points(file: sqlite3.Connection) -> tuple[WatchedPoint, ...]:
    first, last = file.execute("SELECT min(at), max(at) FROM look").fetchone()
    if first is None:
        return ()
    width = max(1.0, (last - first) / _MAX_POINTS)
    rows = file.execute(
        "SELECT max(at), max(step), max(tokens), avg(loss), avg(tokens_per_s), max(nodes), max(alarms) FROM look "
        "GROUP BY cast((at - ?) / ? AS INTEGER) ORDER BY 1",
        (first, width),
    )
    return tuple(
        WatchedPoint(
            at=utc(_moment(at)),
            step=step,
            tokens=tokens,
            loss=loss,
            tokens_per_s=speed,
            nodes=nodes,
            alarms=alarms,
        )
        for at, step, tokens, loss, speed, nodes, alarms in rows.fetchmany(2 * _MAX_POINTS)
    )


def _contributions(file: sqlite3.Connection) -> tuple[Contribution, ...]:
    rows = file.execute(
        "SELECT node_id, peer_id, role, stage, max(last_at), sum(flops), sum(confirmed_flops), total(tokens), "
        "sum(active_s) FROM contribution GROUP BY peer_id ORDER BY 7 DESC, 6 DESC LIMIT ?",
        (_MAX_CONTRIBUTIONS,),
    )
    return tuple(_contribution(row) for row in rows)


def _contribution(row: tuple[Any, ...]) -> Contribution:
    node_id, peer_id, role, stage, last_at, flops, confirmed, tokens, active_s = row
    return Contribution(
        node_id=harmless(str(node_id), NAME),
        peer_id=harmless(str(peer_id), 64),
        role=harmless(str(role), NAME),
        stage=harmless(str(stage), NAME),
        pflops=flops / 1e15,
        confirmed_pflops=None if confirmed is None else confirmed / 1e15,
        hours=active_s / 3_600,
        tokens=int(min(tokens, MAX_WHOLE)),
        last_at=utc(_moment(last_at)),
    )


def _moment(at: float) -> float:
    return min(max(0.0, float(at)), _LATEST_AT)
