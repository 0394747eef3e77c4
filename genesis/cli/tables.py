"""Aligned plain text for people: tables and counts. No colours, so there is nothing for ``NO_COLOR`` to turn off."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset({0})) -> list[str]:
    """Lines of a table.

    Args:
        header: names of the columns.
        rows: cells, as many a row as the header has.
        left: columns that are aligned to the left; the others are to the right.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [_line(row, widths, left) for row in (header, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], left: frozenset[int]) -> str:
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(padded).rstrip()


def count(number: float | None) -> str:
    """``85,000``; a dash for None."""
    return "-" if number is None else f"{number:,.0f}"


def compact(number: float | None) -> str:
    """At most eight characters: ``85,000``, ``320.00 M``, ``150.0 G``; a dash for None."""
    if number is None or abs(number) < 1e6:
        return count(number)
    for unit, size in (("M", 1e6), ("G", 1e9)):
        if abs(number) < 1000 * size:
            return f"{number / size:.2f} {unit}"
    return f"{number / 1e12:.2f} T"


def shorten(text: str, width: int) -> str:
    """``text``, cut to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def printable(text: str) -> str:
    """``text`` with its control characters spelt out, except newline and tab.

    Web text may hold terminal escape sequences; printed as they are, they would be obeyed.
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else _spelt(character) for character in text
    )


def _spelt(character: str) -> str:
    return character if character.isspace() and ord(character) >= 0xA0 else repr(character)[1:-1]
