"""The listening socket: taken before anything is announced, so that an address in use is one clear error."""

from __future__ import annotations

import errno
import socket

from genesis.errors import UsageError

__all__ = ["address_of", "listen"]

_BACKLOG = 1_024
_REASONS = {
    errno.EADDRINUSE: "the port is in use; stop what listens there (see 'ss -ltnp') or give another --port (0: any)",
    errno.EACCES: "not permitted; ports below 1024 need root, give a higher --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host (0.0.0.0: all it has)",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the first address of ``host``; port 0 takes a free one.

    Raises:
        UsageError: it cannot.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--host {host}: expected an address of this machine, found none: {reason}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise UsageError(f"cannot listen at {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """The URL to reach it by, with the name its host was given by."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}/"
