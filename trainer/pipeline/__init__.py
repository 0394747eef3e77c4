"""A model cut into stages that are held by workers which come, go, lag and lie.

`protocol` is what all sides say to each other; `stage` the arithmetic of one stage; `worker` serves it; `driver` sends
micro-batches through all of them and audits the answers; `ledger` accounts for every micro-batch. Between machines of
one data centre `torch.distributed.pipelining` is faster: activations go through the host's memory and Python here.
"""

from __future__ import annotations

__all__: list[str] = []
