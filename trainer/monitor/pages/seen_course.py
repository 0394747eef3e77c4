"""Curves of a whole run from the tables of `History`: looks, reports of nodes, rounds.

The file groups rows by time before they come to Python (2,400 groups at most), so a month of looks is as quick as an
hour (0.3 s for 260,000 looks). Nodes report by time; where x is steps or tokens, the looks tell how far the run was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer.monitor.pages.course import (
    MAX_NODES,
    Axis,
    CourseRange,
    CourseView,
    Curve,
    Numbers,
    RoundMark,
    curve,
    evenly,
)
from trainer.monitor.pages.texts import NAME, harmless

Rows = list[tuple[float | str | None, ...]]
Read = Callable[[str, Sequence[float]], Rows]
"""Runs a query over the tables; the empty list where there is nothing to read from."""

_COLUMN: Final[dict[Axis, str]] = {"step": "step", "tokens": "tokens", "time": "at"}
_PARTS: Final = 4
"""Groups to a point: two by two they become a point's mean, lowest and highest."""
_MAX_ROUNDS: Final = 2_000
_LOOKS: Final = (
    "SELECT avg(at), max({x}), avg(loss), min(loss), max(loss), avg(tokens_per_s), avg(nodes), count(loss) FROM look "
    "WHERE {x} IS NOT NULL AND {x} >= ? AND {x} <= ? GROUP BY cast((at - ?) / ? AS INTEGER) ORDER BY 1"
)
_EXTENT: Final = "SELECT min(at), max(at), min({x}), max({x}) FROM look WHERE {x} IS NOT NULL"
_REPORTS: Final = (
    "SELECT avg(at), avg(loss), min(loss), max(loss), count(*), peer_id FROM report WHERE loss IS NOT NULL AND "
    "at >= ? AND at <= ? GROUP BY peer_id, cast((at - ?) / ? AS INTEGER)"
)
_NAMES: Final = "SELECT peer_id, node_id, max(last_at) FROM contribution GROUP BY peer_id"
_ROUNDS: Final = (
    "SELECT max(at), round_index, max(error = ''), stage FROM round WHERE at >= ? AND at <= ? "
    f"GROUP BY stage, round_index ORDER BY 1 DESC LIMIT {_MAX_ROUNDS}"
)


@dataclass(frozen=True, slots=True)
class Looks:
    """The run over time, in the order of time."""

    at: Numbers
    x: Numbers
    loss: Numbers
    low: Numbers
    high: Numbers
    tokens_per_s: Numbers
    nodes: Numbers
    num_losses: Numbers

    def place(self, at: Numbers) -> Numbers:
        """Returns x at moments."""
        return np.interp(at, self.at, self.x) if len(self.at) else np.full_like(at, np.nan)


def looks_in(read: Read, wanted: CourseRange) -> tuple[Looks, float | None, float | None]:
    """Returns the looks in a range, and from where to where x goes in all of them."""
    column = _COLUMN[wanted.by]
    [(first_at, last_at, first, last)] = read(_EXTENT.format(x=column), ()) or [(None, None, None, None)]
    if first_at is None or last_at is None or first is None or last is None:
        return Looks(*(np.empty(0) for _ in range(8))), None, None
    begin = float(first) if wanted.begin is None else wanted.begin
    end = float(last) if wanted.end is None else wanted.end
    # Zoomed in, the range in time is not known before it is read: by its share of all of x.
    share = min(1.0, max(1e-6, (end - begin) / max(1e-9, float(last) - float(first))))
    width_s = max(1e-3, share * (float(last_at) - float(first_at)) / (_PARTS * wanted.points))
    rows = read(_LOOKS.format(x=column), (begin, end, float(first_at), width_s))
    columns = _columns(rows, 8)
    return Looks(*columns), float(first), float(last)


def curves_of_run(looks: Looks, wanted: CourseRange) -> list[Curve]:
    """Loss, speed and number of nodes of the run."""
    weights = np.maximum(looks.num_losses, 1.0)
    speed = looks.tokens_per_s if wanted.begin is not None else from_first(looks.tokens_per_s)
    found = [
        curve("all nodes", "loss", "run", looks.x, looks.loss, wanted, low=looks.low, high=looks.high, weights=weights),
        curve("all nodes", "speed", "run", looks.x, speed, wanted),
        curve("nodes", "nodes", "run", looks.x, looks.nodes, wanted),
    ]
    return [it for it in found if it is not None]


def from_first(speed: Numbers) -> Numbers:
    """Returns speeds over time without the zeros at the beginning, when no node had told its own yet."""
    return np.where(np.cumsum(speed > 0) > 0, speed, np.nan)


def curves_of_nodes(read: Read, looks: Looks, wanted: CourseRange) -> list[Curve]:
    """The loss of each node, as it reported it; of more than 12 the band in which they lie."""
    if not len(looks.at):
        return []
    begin_at, end_at = float(looks.at[0]) - 120.0, float(looks.at[-1]) + 120.0
    width_s = max(1e-3, (end_at - begin_at) / wanted.points)
    rows = read(_REPORTS, (begin_at, end_at, begin_at, width_s))
    if not rows:
        return []
    peers = [str(row[5]) for row in rows]
    at, loss, low, high, counts = _columns([row[:5] for row in rows], 5)
    x = at if wanted.by == "time" else looks.place(at)
    each = sorted(set(peers))
    if len(each) > MAX_NODES:
        found = curve(
            f"single nodes ({len(each)})", "loss", "node", x, loss, wanted, low=low, high=high, weights=counts
        )
        return [] if found is None else [found]
    names = {str(row[0]): harmless(str(row[1]), NAME) for row in read(_NAMES, ())}
    of = np.array(peers)
    curves = []
    for peer in each:
        own = of == peer
        name = names.get(peer, peer[:12])
        curves.append(curve(name, "loss", "node", x[own], loss[own], wanted, low=low[own], high=high[own]))
    return [it for it in curves if it is not None]


def round_marks(read: Read, looks: Looks, wanted: CourseRange) -> tuple[RoundMark, ...]:
    """The rounds that members reported, on the course."""
    if not len(looks.at):
        return ()
    rows = read(_ROUNDS, (float(looks.at[0]) - 60.0, float(looks.at[-1]) + 60.0))[::-1]
    at = _columns([row[:1] for row in rows], 1)[0]
    x = at if wanted.by == "time" else looks.place(at)
    marks = [
        RoundMark(x=float(place), round_index=int(row[1] or 0), stage=str(row[3]), is_failed=not row[2])
        for place, row in zip(x.tolist(), rows, strict=True)
    ]
    return evenly(marks)


def run_course(read: Read, wanted: CourseRange) -> CourseView:
    """The course of a run by what a monitor has kept of it."""
    looks, begin, end = looks_in(read, wanted)
    curves = [*curves_of_run(looks, wanted), *curves_of_nodes(read, looks, wanted)]
    return CourseView(by=wanted.by, begin=begin, end=end, curves=tuple(curves), rounds=round_marks(read, looks, wanted))


def _columns(rows: Rows, count: int) -> list[Numbers]:
    if not rows:
        return [np.empty(0) for _ in range(count)]
    return list(np.array([[np.nan if it is None else float(it) for it in row] for row in rows], dtype=np.float64).T)
