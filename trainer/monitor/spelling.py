"""Events as JSON: one line each, canonical, whatever the fields hold.

JSON has no NaN, and a diverging run has many: numbers that are not finite are spelt as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, as in protobuf's JSON form; Python's ``float`` reads all three. Text is cut at 4,096
characters, so that one field cannot make a line of megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from numbers import Integral, Real

from manifests import canonical_json
from trainer.monitor.facts import RoundFacts, StepFacts

__all__ = ["RESERVED_FIELDS", "event_line", "round_fields", "step_fields"]

RESERVED_FIELDS = frozenset({"time", "node", "kind"})
"""What every line has of itself."""
_MAX_TEXT = 4_096
_MAX_DEPTH = 8


def event_line(time_s: float, node_id: str, kind: str, fields_: Mapping[str, object]) -> bytes:
    """One event as a line of canonical JSON, its newline included.

    Args:
        time_s: when, seconds since the epoch.
        node_id: whose event.
        kind: ``step``, ``round``, or any other word.
        fields_: what there is to say; none of `RESERVED_FIELDS`.
    """
    event = {name: _plain(value, _MAX_DEPTH) for name, value in fields_.items()}
    moment = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    event |= {"time": f"{moment}Z", "node": node_id, "kind": kind}
    return canonical_json(event) + b"\n"


def step_fields(step: StepFacts, loader_wait_s: float) -> dict[str, object]:
    """A step as the fields of its event."""
    return {
        "step": step.step,
        "loss": _rounded(step.loss),
        "grad_norm": _rounded(step.grad_norm),
        "lr": _rounded(step.lr),
        "num_tokens": step.num_tokens,
        "skipped": step.skipped,
        "seconds": round(step.seconds, 6),
        "loader_wait_s": round(loader_wait_s, 6),
    }


def round_fields(report: RoundFacts, outer_step: int, state_digest: str) -> dict[str, object]:
    """A round as the fields of its event."""
    return {
        "round_index": report.round_index,
        "outer_step": outer_step,
        "state_digest": state_digest,
        "members": report.members,
        "dropped": report.dropped,
        "completeness": report.completeness,
        "sent_bytes": report.sent_bytes,
        "received_bytes": report.received_bytes,
        "seconds": round(report.seconds, 6),
        "rule": report.rule,
        "num_passes": report.num_passes,
        "weights": report.weights,
        "validation": report.validation,
        "note": report.note,
    }


def _rounded(value: float) -> float:
    """7 significant digits: what there is in a float32."""
    return float(f"{value:.7g}")


def _plain(value: object, depth: int) -> object:
    """``value`` as JSON can have it; what has no such form, as its text."""
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:  # Asked first, since the abstract classes below take 1 µs each.
        return _number(value)
    if isinstance(value, Integral):  # NumPy's too, as the next.
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if isinstance(value, str):
        return _text(value)
    if depth == 0:
        return _text(repr(value))
    if isinstance(value, Mapping):
        return {_text(str(name)): _plain(item, depth - 1) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), depth - 1) for field in fields(value)}
    if isinstance(value, Collection) and not isinstance(value, bytes | bytearray | memoryview):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item, depth - 1) for item in items]
    return _text(str(value))


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(value: str) -> str:
    shown = value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…"
    return shown.encode("utf-8", "backslashreplace").decode()  # Half a surrogate pair cannot be written.
