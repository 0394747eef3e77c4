"""How the nodes of a run find each other: signed announcements that expire, by a DHT or by peer exchange.

Guarantees: each returned announcement was signed by the announced node, for this run, and has not expired; nobody can
announce for another, and what strangers can make this node remember is bounded. The trade-off: no authority decides who
belongs to a run; the collective decides who takes part in a round.

Modules are imported when one of their names is first used: the DHT's own process starts 0.3 s sooner, without gRPC.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
