"""How many files and sockets this process may hold open."""

from __future__ import annotations

import resource


def raise_open_files(needed: int) -> int:
    """Raises this process's soft limit of open files to ``needed``, or to its hard limit if that is less.

    Returns:
        How many may be open now; at least ``needed``, unless the hard limit is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return needed
    if soft >= needed:
        return soft
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return granted
