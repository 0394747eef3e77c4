"""Whether a process's ports and its rounds' folder can be had, asked before anything is loaded.

A taken port, or a folder that cannot be written, so costs a line, not a start's minute. The port is taken for real only
once the node is built, some seconds later. Whoever gets in between is found then, by the errors of `Endpoint.start` and
`ApiServer.start`; so this look costs 1 ms and promises nothing.
"""

from __future__ import annotations

import errno
import socket
from tempfile import TemporaryFile
from typing import Final

from genesis.errors import GenesisError
from genesis.store.opening import folder_of, open_store
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
        require_free_port(option, host, port)


def require_free_port(option: str, host: str, port: int) -> None:
    """Checks one port that ``option`` names, 0: any free one; raises as `require_free_ports`."""
    reason = _objection(host, port) if port else ""
    if reason:
        raise TrainerUsageError(
            f"{option} {port}: expected a port to listen on at {host}, found it {reason}; "
            f"'ss -ltnp sport = :{port}' names who has it, or choose another {option}"
        )


def require_rounds_folder(config: RunConfig) -> None:
    """Makes the folder that rounds go through, where it is one, and writes to it.

    Raises:
        TrainerUsageError: it is a file, or cannot be made or written; or the address is none of a store.
    """
    if not config.bucket.url:
        return
    try:
        open_store(config.bucket.url)  # Contacts nothing.
        folder = folder_of(config.bucket.url)
    except GenesisError as error:
        raise TrainerUsageError(f"--rounds: {error}") from None
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise TrainerUsageError(f"--rounds: expected a folder or s3://bucket/prefix, found the file {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainerUsageError(
            f"--rounds {folder}: expected a folder that can be made and written, found: {error.strerror or error}; "
            "check its owner and permissions, or name another"
        ) from None


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
