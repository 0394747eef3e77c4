"""Training over nodes that come, go, lag and lie: one node or many, by DiLoCo, alone or inside a cluster.

`python -m trainer --node-id ID --store URL` is one node; docs/training.md says what it does, ARCHITECTURE.md where.
From the inside out: `model` and `inner` are one node alone; `aggregation` and `compression` the arithmetic of a round;
`network` calls, discovery and transfer among strangers; `outer` the strategies between replicas, `collective` the
rounds they are made of; `checkpoint` what survives a process; `monitor` what a node shows; `pipeline` a model cut into
stages; `run` the processes put together.

Guarantees: members of a round end bit for bit alike; a node that is killed goes on exactly where it was (on a CPU, with
fixed threads); nothing another node sends is unpickled, or ends this one. The trade-off: everything between nodes is
signed Python over gRPC, 1.2 to 1.5 times hivemind's speed and a fifth of gloo's, in exchange for rounds that survive
their members (docs/performance.md).
"""

from __future__ import annotations

__all__: list[str] = []
