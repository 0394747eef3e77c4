"""A training node's verified, resumable stream of batches (not built yet: see the Loader issue)."""

from __future__ import annotations

__all__: list[str] = []
