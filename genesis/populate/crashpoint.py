"""Places where a test can have the process killed, as by a power cut.

``GENESIS_CRASH_AT=name:3`` kills this process with SIGKILL the third time it passes the point ``name``; unset, a
point costs one dictionary look-up. The commit protocol has one between every two of its writes, so that "killed at
any moment" is tested at the moments that matter and not only where chance falls.
"""

from __future__ import annotations

import os
import signal

CRASH_POINTS = (
    "lease-taken",
    "vocabulary-stored",
    "shard-sealed",
    "shard-stored",
    "packed-stored",
    "segment-stored",
    "checkpoint-stored",
    "tokenizer-published",
    "manifest-published",
    "source-finished",
)
"""Every point of a populate, in the order of a run."""

EXPORT_CRASH_POINTS = (
    "export-begun",
    "export-synced",
    "export-checkpointed",
    "export-written",
    "export-published",
    "export-completed",
)
"""Those of an export, in the order of a run."""

_passed: dict[str, int] = {}


def crash_point(name: str) -> None:
    """Dies here if the environment says so."""
    wanted = os.environ.get("GENESIS_CRASH_AT")
    if not wanted:
        return
    point, _, count = wanted.partition(":")
    if point != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
