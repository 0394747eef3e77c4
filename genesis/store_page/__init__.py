"""The page of a store in a browser: sources, shards, documents, vocabulary; served, or as one file.

    StoreView (service)  ── overview ── status of the newest commit, read at most once a second
      │                  ── ShardTable ── the index in arrays, 33 bytes a shard, read in the background
      │                  ── ShardReader ── a shard held against the index once, then read by ranges
      │                  ── TokenTable ── the vocabulary: what ids spell, which ids hold a text
      ├─ routes, handling: JSON inside ``genesis serve``, in two threads, with bounds by address
      └─ report: the same as one HTML file with its data inside

Guarantees: it only reads; nothing is shown of a shard before the shard was held against the index; "verified" means
that this process, or the ``genesis verify`` whose report it was given, read every byte of it. A request costs at most
one pass over one shard (40 ms for 20 MB) or two index segments, and holds 1 MiB of it. The trade-off: with an index of
600,000 shards the page is there at once, and its grid fills while the index is read (some 10 s, in the background).
"""

from __future__ import annotations

from genesis.store_page.handling import StorePageHandler, store_page
from genesis.store_page.report import ReportOptions, read_verify_report, store_report

__all__ = ["ReportOptions", "StorePageHandler", "read_verify_report", "store_page", "store_report"]
