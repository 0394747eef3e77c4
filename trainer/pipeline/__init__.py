"""A model cut into stages that are held by workers which come, go, lag and lie.

`protocol` is what all sides say to each other; `stage` the arithmetic of one stage; `worker` serves it; `driver` sends
micro-batches through all of them and audits the answers; `ledger` accounts for every micro-batch, so that none is lost
or counted twice.

Guarantees: a micro-batch that was counted is counted once, in every stage (ledger); an answer that lies within what an
audit can tell costs its worker all further work (driver). The trade-off: activations go through the host's memory and
Python, some 500 MB/s a process; between machines of one data centre `torch.distributed.pipelining` is faster.
"""

from __future__ import annotations

__all__: list[str] = []
