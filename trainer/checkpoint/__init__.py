"""Checkpoints of nodes, and of the stages of a swarm.

`node` writes and finds one file a node, from which training resumes bit for bit; `stages` writes one file a worker, by
the time of day, finds the newest moment that all stages have, and exports the model. Both write and verify files by
`files`, and save in the background by `saver`.

Guarantees: a file is replaced whole or not at all, is checked against its digest before it is used, and is read without
unpickling. The trade-off: a checkpoint is written in the background from a copy, which costs its size in memory.
"""

from __future__ import annotations

__all__: list[str] = []
