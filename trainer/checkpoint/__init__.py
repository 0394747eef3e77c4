"""Checkpoints: of nodes (`node`), one file each, and of a swarm's stages (`stages`), by the time of day.

Both write and verify files by `files`, and save in the background by `saver`, from a copy in host memory.
"""

from __future__ import annotations

__all__: list[str] = []
