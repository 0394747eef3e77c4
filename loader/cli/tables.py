"""Plain text for people: tables, counts, runs of shard ids. No colours: there is nothing for ``NO_COLOR`` to turn off.

Beside `genesis.cli.tables`, which the loader may not import.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["counted", "printable", "runs", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset({0})) -> list[str]:
    """Lines of a table.

    Args:
        header: names of the columns.
        rows: cells, as many a row as the header has.
        left: columns that are aligned to the left; the others are to the right.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def counted(number: int, noun: str) -> str:
    """``1 shard``, ``1,187 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def runs(shard_ids: Iterable[int]) -> str:
    """``12-13, 0-7``: ids in the order given, those that follow one another as one; ``-`` for none."""
    found: list[list[int]] = []
    for shard_id in shard_ids:
        if found and found[-1][1] + 1 == shard_id:
            found[-1][1] = shard_id
        else:
            found.append([shard_id, shard_id])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or "-"


def printable(text: str) -> str:
    """``text`` with what a terminal could obey spelt out: ids of nodes may come from strangers."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
