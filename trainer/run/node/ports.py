"""Whether a node's ports are free, asked before anything is loaded: a taken one costs a line, not a start's minute.

The port is taken for real only once the node is built, some seconds later. Whoever gets in between is found then, by
the errors of `Endpoint.start` and `ApiServer.start`; so this look costs 1 ms and promises nothing.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from trainer.errors import TrainerUsageError
from trainer.run.config import RunConfig

_TAKEN: Final = {errno.EADDRINUSE: "taken", errno.EADDRNOTAVAIL: "not of this machine", errno.EACCES: "not allowed"}


def require_free_ports(config: RunConfig) -> None:
    """Checks the ports that a node would listen on, where they are named; 0 is any free one.

    Raises:
        TrainerUsageError: one is taken, not allowed, or at an address that is not of this machine.
    """
    wanted = [("--port", config.rpc.host, config.rpc.port)]
    if config.api.enabled:
        wanted.append(("--api-port", config.api.host, config.api.port))
    for option, host, port in wanted:
        reason = _objection(host, port) if port else ""
        if reason:
            raise TrainerUsageError(
                f"{option} {port}: expected a port to listen on at {host}, found it {reason}; "
                f"'ss -ltnp sport = :{port}' names who has it, or choose another {option}"
            )


def _objection(host: str, port: int) -> str:
    """Why one cannot listen there; empty: one can, or it will be told otherwise when it is tried for real."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError:
        return ""
    except OSError as error:
        return _TAKEN.get(error.errno or 0, "")
    return ""
