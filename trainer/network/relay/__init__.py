"""Nodes behind routers: a relay lends them a port, and carries the bytes of whoever connects there.

    node ──register──▶ relay: port 40123 is yours        node announces relay:40123
    caller ──TCP──▶ relay:40123 ──"incoming"──▶ node ──TCP──▶ relay, which joins the two connections

Everybody else calls a relayed node as any other: what crosses the relay is the TLS connection between caller and node,
pinned to the node's certificate, so a relay can neither read nor change it, only delay it or cut it off. Both ends
connect outwards, so no router has to let anything in. The trade-off is a detour, and the relay's bandwidth, which its
nodes share evenly. A relay also tells a node whether it could be reached without one; the node then announces its own
address, and asks again every ten minutes.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
