"""Options of serving and fetching state; the defaults leave most of the uplink to the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class StateConfig:
    """How nodes serve and fetch state."""

    keep_snapshots: int = 2
    """Snapshots kept on disk; one more exists while it is written."""
    max_upload_bytes_per_s: float = 0.0
    """Most bytes a second served to all fetchers together; 0: no limit."""
    max_uploads: int = 8
    """Most transfers served at once; further requests are refused as busy."""
    parallel_per_donor: int = 2
    """Concurrent transfers from one donor."""
    chunks_per_request: int = 16
    """Most chunks (1 MiB each) per request; fewer towards the end, so that all donors finish together."""
    stall_timeout_s: float = 10.0
    """Seconds without a chunk or a heartbeat after which a donor's chunks are requested from others."""
    chunk_timeout_s: float = 60.0
    """Seconds one chunk may take, with or without heartbeats."""
    max_failures: int = 3
    """Consecutive failures (no chunk between them) after which a donor is dropped."""
    retry_pause_s: float = 1.0
    """Seconds before a donor that failed, or was busy, is retried; doubles each time."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("keep_snapshots", 1, 1000),
            ("max_uploads", 1, 1024),
            ("parallel_per_donor", 1, 64),
            ("chunks_per_request", 1, 256),
            ("stall_timeout_s", 0.1, 3600),
            ("chunk_timeout_s", 0.1, 3600),
            ("max_failures", 1, 1000),
            ("retry_pause_s", 0.01, 3600),
            ("max_upload_bytes_per_s", 0, 1e15),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise TrainerUsageError(f"{name}: expected {low:g} to {high:g}, found {value!r}")
