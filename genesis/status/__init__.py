"""What a store holds and how it is coming along, from nothing but reading it (`genesis status`).

Works on any address, also a CDN's where ``checkpoints.json`` may not be public: then it tells what the manifest alone
knows, and says so in ``notes``. The figures are those of the newest commit. Costs three small reads; the vocabulary
(0.6 MB for 32,000 ids) is read again only when it has changed. The format of the result is docs/status.md.
"""

from __future__ import annotations

from genesis.status.models import (
    STATUS_FORMAT,
    SourceStatus,
    StoreStatus,
    StoreTotals,
    VocabularyStatus,
    WriterStatus,
)
from genesis.status.reading import read_status

__all__ = [
    "STATUS_FORMAT",
    "SourceStatus",
    "StoreStatus",
    "StoreTotals",
    "VocabularyStatus",
    "WriterStatus",
    "read_status",
]
