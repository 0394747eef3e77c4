"""The populate pipeline and its commit protocol.

`pipeline` runs it, `commit_log` commits, `pool` and `worker` encode on every core, `packer` cuts shards. Nothing is
imported here, since every worker process imports this package at its start and needs only `worker`.
"""

from __future__ import annotations

__all__: list[str] = []
