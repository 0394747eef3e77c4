"""Rounds as their members' logs tell them, put together by stage and index, in a bounded number of rows.

Where there are more rounds than rows, neighbours share one: twice as many in each row, whenever there are too many.
Under averaged gradients each step is a round, and a million of them are 1,000 rows of 1,024.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.monitor.event_log import Event
from trainer.monitor.pages.texts import LINE, NAME, harmless
from trainer.monitor.report.event_fields import items_of, names_of, number_of, text_of, utc, whole_of
from trainer.monitor.report.model import ReportedRound

_MAX_ROWS = 2_000
_PHASES = ("agree_s", "reduce_s", "vote_s")
_TEXTS = 8
_KEPT_MEMBERS = 64
KEY_SHOWN = 12
"""Digits of a key by which a node is named whose name no log tells."""


@dataclass(slots=True)
class _Row:
    """Sums over the reports of a round, or of some in a row."""

    began_at: float
    ended_at: float
    first: int
    last: int
    num_reports: int = 0
    num_failed: int = 0
    fewest: int | None = None
    most: int = 0
    members: list[str] = field(default_factory=list)
    completeness: list[float] = field(default_factory=lambda: [0.0, 0.0])  # Sum and count, as the next.
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    phases: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    num_phased: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    rule: str = ""
    left_out: dict[str, None] = field(default_factory=dict)
    errors: dict[str, None] = field(default_factory=dict)

    def add(self, other: _Row) -> None:
        self.began_at, self.ended_at = min(self.began_at, other.began_at), max(self.ended_at, other.ended_at)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.num_reports += other.num_reports
        self.num_failed += other.num_failed
        if other.fewest is not None:
            self.fewest = other.fewest if self.fewest is None else min(self.fewest, other.fewest)
        self.most = max(self.most, other.most)
        self.members = self.members or other.members
        for own, others in ((self.completeness, other.completeness), (self.seconds, other.seconds)):
            own[0] += others[0]
            own[1] += others[1]
        self.phases = [one + two for one, two in zip(self.phases, other.phases, strict=True)]
        self.num_phased += other.num_phased
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.rule = other.rule or self.rule
        for texts, more in ((self.left_out, other.left_out), (self.errors, other.errors)):
            for text in more:
                if len(texts) < _TEXTS:
                    texts[text] = None


class Rounds:
    """The rounds of all logs."""

    def __init__(self, max_rows: int = _MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._width = 1
        self._rows: dict[tuple[str, int], _Row] = {}

    @property
    def rounds_a_row(self) -> int:
        """How many rounds share a row; 1: each has its own."""
        return self._width

    def add(self, event: Event, stage: str) -> None:
        """Adds a ``round`` or ``round_failed`` event of a member."""
        index = whole_of(event, "round_index")
        if index is None:
            return
        at = event.time.timestamp()
        row = _failed(event, index, at) if event.kind == "round_failed" else _ended(event, index, at)
        self._put(stage, index, row)
        while len(self._rows) > self._max_rows:
            self._halve()

    def _put(self, stage: str, index: int, row: _Row) -> None:
        key = (stage, index // self._width)
        known = self._rows.get(key)
        if known is None:
            self._rows[key] = row
        else:
            known.add(row)

    def _halve(self) -> None:
        rows, self._rows = self._rows, {}
        self._width *= 2
        for (stage, _), row in rows.items():
            self._put(stage, row.first, row)

    def all(self, names: Mapping[str, str]) -> tuple[ReportedRound, ...]:
        """Returns the rows in the order of time; ``names`` are those of nodes by their keys."""
        ordered = sorted(self._rows.items(), key=lambda item: (item[1].ended_at, item[0]))
        short = {key[:KEY_SHOWN]: name for key, name in names.items() if key}
        return tuple(_reported(stage, row, names, short, is_one=self._width == 1) for (stage, _), row in ordered)


def _ended(event: Event, index: int, at: float) -> _Row:
    seconds = number_of(event, "seconds") or 0.0
    row = _Row(at - min(seconds, 86_400.0), at, index, index, num_reports=1)
    members = event.fields.get("members")
    row.most = row.fewest = len(members) if isinstance(members, list) else 0
    row.members = names_of(event, "members", _KEPT_MEMBERS)
    row.seconds = [seconds, 1.0]
    if (share := number_of(event, "completeness")) is not None:
        row.completeness = [min(1.0, share), 1.0]
    phases = [number_of(event, name) for name in _PHASES]
    if None not in phases:
        row.phases, row.num_phased = [phase or 0.0 for phase in phases], 1
    row.sent_bytes, row.received_bytes = whole_of(event, "sent_bytes") or 0, whole_of(event, "received_bytes") or 0
    row.rule = text_of(event, "rule", NAME)
    row.left_out = dict.fromkeys(dropped_texts(event))
    return row


def _failed(event: Event, index: int, at: float) -> _Row:
    reason = text_of(event, "reason") or "no result"
    return _Row(at, at, index, index, num_failed=1, errors={reason: None})


def named(text: str, names: Mapping[str, str]) -> str:
    """Returns a text that begins with the beginning of a node's key with its name instead, where that is known."""
    key, colon, rest = text.partition(":")
    return f"{names[key]}{colon}{rest}" if key in names else text


def dropped_texts(event: Event) -> Iterable[str]:
    """Returns who was left out of a round and why, some of them, as text."""
    for pair in items_of(event, "dropped", _TEXTS):
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            who, why = pair
            yield f"{harmless(who, NAME) if len(who) <= 16 else harmless(who[:KEY_SHOWN], NAME)}: {harmless(why, LINE)}"


def _mean(summed: list[float]) -> float | None:
    return round(summed[0] / summed[1], 6) if summed[1] else None


def _reported(
    stage: str, row: _Row, names: Mapping[str, str], short: Mapping[str, str], *, is_one: bool
) -> ReportedRound:
    phases = [round(phase / row.num_phased, 6) for phase in row.phases] if row.num_phased else [None, None, None]
    return ReportedRound(
        stage=stage,
        first_index=row.first,
        last_index=row.last,
        began_at=utc(row.began_at),
        ended_at=utc(row.ended_at),
        num_rounds=row.last - row.first + 1,
        num_reports=row.num_reports,
        num_failed=row.num_failed,
        fewest_members=row.fewest or 0,
        most_members=row.most,
        members=tuple(names.get(key, key[:KEY_SHOWN]) for key in row.members) if is_one else (),
        completeness=_mean(row.completeness),
        seconds=_mean(row.seconds),
        agree_s=phases[0],
        reduce_s=phases[1],
        vote_s=phases[2],
        sent_bytes=row.sent_bytes,
        received_bytes=row.received_bytes,
        rule=row.rule,
        left_out=tuple(named(text, short) for text in row.left_out),
        errors=tuple(row.errors),
    )
