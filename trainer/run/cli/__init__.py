"""The command line: `python -m trainer` trains; `seed`, `export` and `plot` are its other commands."""

from __future__ import annotations

__all__: list[str] = []
