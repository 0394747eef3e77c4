"""Signed announcements of made-up nodes."""

from __future__ import annotations

import time

from trainer.network.discovery.announcement import Announcement, sign_announcement
from trainer.network.rpc.identity import Identity


def announcement(identity: Identity, **fields: object) -> Announcement:
    """One of the run ``run``, with some fields changed, not stamped."""
    content = {"peer_id": identity.peer_id, "node_id": "node", "run_id": "run", "address": "127.0.0.1:4100"}
    return Announcement.model_validate(content | fields)


def announce(identity: Identity, *, lifetime_s: float = 60.0, sent_at: float | None = None, **fields: object) -> bytes:
    """Signs one, sent now."""
    stamped = announcement(identity, **fields).stamped(time.time() if sent_at is None else sent_at, lifetime_s)
    return sign_announcement(stamped, identity)
