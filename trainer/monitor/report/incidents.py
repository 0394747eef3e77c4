"""What went wrong, in the order it happened, however often: alike incidents that follow each other are one.

An incident is like the one before it of the same node if kind and text are the same and no more than ten minutes lie
between. Of each kind the first 100 and the latest 200 are kept; how many are not is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainer.monitor.pages.texts import LINE, harmless
from trainer.monitor.report.event_fields import utc
from trainer.monitor.report.model import IncidentKind, ReportedIncident
from trainer.monitor.report.rounds import named

_ALIKE_WITHIN_S = 600.0
_FIRST, _LATEST = 100, 200
_GOOD: frozenset[IncidentKind] = frozenset({"restart", "note"})


@dataclass(slots=True)
class _Noted:
    kind: IncidentKind
    node: str
    began_at: float
    ended_at: float
    text: str
    count: int = 1


@dataclass(slots=True)
class _Kept:
    first: list[_Noted] = field(default_factory=list)
    latest: deque[_Noted] = field(default_factory=lambda: deque(maxlen=_LATEST))
    num_noted: int = 0


class Incidents:
    """The incidents of all logs."""

    def __init__(self) -> None:
        self._kept: dict[IncidentKind, _Kept] = {}
        self._latest: dict[tuple[IncidentKind, str], _Noted] = {}

    def note(
        self, kind: IncidentKind, node: str, at: float, text: str, *, ended_at: float | None = None, count: int = 1
    ) -> None:
        """Notes an incident; times are in seconds since 1970."""
        until = at if ended_at is None else max(at, ended_at)
        text = harmless(text, LINE)
        before = self._latest.get((kind, node))
        if before is not None and before.text == text and 0 <= at - before.ended_at <= _ALIKE_WITHIN_S:
            before.count += count
            before.ended_at = until
            return
        noted = _Noted(kind, node, at, until, text, count)
        self._latest[kind, node] = noted
        kept = self._kept.setdefault(kind, _Kept())
        kept.num_noted += 1
        if len(kept.first) < _FIRST:
            kept.first.append(noted)
        else:
            kept.latest.append(noted)

    def all(self, names: Mapping[str, str]) -> tuple[ReportedIncident, ...]:
        """Returns what is kept, in the order of time; ``names`` are those of nodes by the beginnings of their keys."""
        noted = [it for kept in self._kept.values() for it in (*kept.first, *kept.latest)]
        return tuple(
            ReportedIncident(
                kind=it.kind,
                node=it.node,
                began_at=utc(it.began_at),
                ended_at=utc(it.ended_at),
                count=it.count,
                text=named(it.text, names) if it.kind in ("left-out", "ban") else it.text,
                is_bad=it.kind not in _GOOD,
            )
            for it in sorted(noted, key=lambda it: it.began_at)
        )

    def left_out(self) -> Iterator[str]:
        """Yields which kinds have more than is kept."""
        for kind, kept in self._kept.items():
            missing = kept.num_noted - len(kept.first) - len(kept.latest)
            if missing:
                yield f"{missing:,} further incidents of the kind {kind}"
