"""Communication between nodes that need not trust each other: calls, discovery, and the transfer of whole states.

`rpc` signs, bounds and times every call over gRPC. `discovery` finds the run's other nodes, by a list of addresses or a
DHT. `transfer` fetches a state from several nodes at once, by its digest.

Guarantees: the receiver bounds sizes, rates and lifetimes before they cost anything, by address as well as by identity.
Nothing is unpickled, and no message ends a process. The trade-off: signed Python over gRPC has a fifth of gloo's
throughput (docs/performance.md).
"""

from __future__ import annotations

__all__: list[str] = []
