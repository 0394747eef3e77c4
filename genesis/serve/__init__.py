"""``genesis serve``: a store's folder over HTTP, for a LAN or as the origin behind a CDN.

Guarantees: GET and HEAD of the store's public objects and of nothing else; conditional and range requests as RFC 9110
has them; an answer is all of one version of an object or visibly cut short; a bounded number of connections, each of
which must make progress. `objects` says what is public and opens it, `preconditions` has the rules of HTTP as pure
functions, `app` puts them together, `connections` and `server` bound and run it, `metrics` counts.

The trade-off: one process of Python, no TLS, no compression and no access control. On two cores with the client beside
it, it gave 20 MB objects at 0.8 to 1.2 GB/s, two to three times ``rclone serve http`` and two thirds of nginx's
sendfile; who needs TLS or more than a 10 Gbit/s card's worth puts nginx before it (docs/serve.md).
"""

from __future__ import annotations

from genesis.serve.connections import ServeLimits
from genesis.serve.metrics import ManifestReader, StoreSummary
from genesis.serve.objects import ObjectKind, PublicObject, public_object
from genesis.serve.server import StoreServer, address_of, check_folder, listen

__all__ = [
    "ManifestReader",
    "ObjectKind",
    "PublicObject",
    "ServeLimits",
    "StoreServer",
    "StoreSummary",
    "address_of",
    "check_folder",
    "listen",
    "public_object",
]
