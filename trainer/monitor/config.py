"""Options of the HTTP interface. By default only this machine can reach it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainer.errors import TrainerUsageError

READ_TOKEN_VARIABLE = "GENESIS_READ_TOKEN"
"""Of the environment, in which commands that ask an interface find its token for reading."""
_TOKEN = re.compile(r"[!-~]{16,1024}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """The verification API and the page of metrics. Raises `TrainerUsageError` for an invalid value."""

    enabled: bool = True
    """Serve both."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines read, such as a Prometheus server."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names by which clients may ask; localhost, this machine's name and IP addresses always may."""
    read_token: str = field(default="", metadata={"secret": True})
    """What readers must send as ``Authorization: Bearer``, or type into the page's form; empty: whoever may connect."""

    def __post_init__(self) -> None:
        if not self.host:
            raise TrainerUsageError("api.host: expected an address to listen at, found none; 127.0.0.1 is the default")
        if not 0 <= self.port <= 65_535:
            raise TrainerUsageError(f"api.port: expected 0 to 65535, found {self.port}; 0 takes a free one")
        if self.read_token and not _TOKEN.fullmatch(self.read_token):
            raise TrainerUsageError(
                "api.read_token: expected 16 to 1,024 printable characters without spaces, found others (or fewer)"
            )
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise TrainerUsageError(f"api.allowed_hosts: expected host names without port, found {name!r}")
