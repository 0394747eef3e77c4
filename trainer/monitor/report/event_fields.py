"""Fields of events as a report takes them: of the type it expects, finite, bounded, harmless; or a default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from trainer.monitor.event_log import Event
from trainer.monitor.pages.texts import LINE, NAME, harmless

MAX_WHOLE = 1 << 53  # What a page can count exactly.
_MAX_ITEMS = 64


def text_of(event: Event, name: str, limit: int = LINE) -> str:
    """Returns a field that is text, cut; else an empty one."""
    value = event.fields.get(name)
    return harmless(value, limit) if isinstance(value, str) else ""


def lines_of(event: Event, name: str, limit: int) -> str:
    """Returns a field that is text with its ends of lines, cut."""
    value = event.fields.get(name)
    if not isinstance(value, str):
        return ""
    lines = value[: limit + 1].replace("\r\n", "\n").split("\n")
    shown = "\n".join(harmless(line, limit) for line in lines)
    return shown if len(value) <= limit else f"{shown[:limit]}…"


def whole_of(event: Event, name: str) -> int | None:
    """Returns a field that is a whole number from 0 to 2^53."""
    value = event.fields.get(name)
    return value if type(value) is int and 0 <= value <= MAX_WHOLE else None


def number_of(event: Event, name: str) -> float | None:
    """Returns a field that is a finite number of 0 or more."""
    value = event.number(name)
    return value if math.isfinite(value) and value >= 0 else None


def items_of(event: Event, name: str, limit: int = _MAX_ITEMS) -> list[object]:
    """Returns a field that is a list, its first items."""
    value = event.fields.get(name)
    return value[:limit] if isinstance(value, list) else []


def names_of(event: Event, name: str, limit: int = _MAX_ITEMS) -> list[str]:
    """Returns the texts of a list, cut."""
    return [harmless(item, NAME) for item in items_of(event, name, limit) if isinstance(item, str)]


def mapping_of(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Returns a field that is an object; else an empty one."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def shown(value: object, limit: int = LINE) -> str:
    """Returns any value of JSON as text for people, cut."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return harmless(", ".join(shown(item, limit) for item in value[:_MAX_ITEMS]) or "none", limit)
    if isinstance(value, dict):
        parts = (f"{name}: {shown(item, limit)}" for name, item in list(value.items())[:_MAX_ITEMS])
        return harmless(", ".join(parts) or "none", limit)
    return harmless(str(value), limit)


def utc(at: float) -> str:
    """Returns a moment (seconds since 1970) as ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
