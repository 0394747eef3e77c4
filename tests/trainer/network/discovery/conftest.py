"""Identities and announcements."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from trainer.network.discovery.announcement import Announcement, sign_announcement
from trainer.network.rpc.identity import Identity


@pytest.fixture
def identity() -> Identity:
    return Identity.create()


@pytest.fixture
def announce() -> Callable[..., bytes]:
    """Signs an announcement of the identity given, sent now, with some fields changed."""

    def make(identity: Identity, *, lifetime_s: float = 60.0, sent_at: float | None = None, **fields: object) -> bytes:
        content: dict[str, object] = {
            "peer_id": identity.peer_id,
            "node_id": "node",
            "run_id": "run",
            "address": "127.0.0.1:4100",
        }
        announcement = Announcement.model_validate(content | fields)
        stamped = announcement.stamped(time.time() if sent_at is None else sent_at, lifetime_s)
        return sign_announcement(stamped, identity)

    return make
