"""DiLoCo and pipeline training over nodes that come and go (not built yet: see the Trainer issue)."""

from __future__ import annotations

__all__: list[str] = []
