"""Options of a run that names an authority: whose credentials count, and how this node gets its own."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import is_peer_id
from trainer.run.config.reading import SECRET

_MAX_AUTHORITIES = 16


def _invitation() -> str:
    return os.environ.get("GENESIS_INVITATION", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Who admits to the run; without authorities and addresses of such, anybody may take part (docs/admission.md)."""

    authorities: tuple[str, ...] = ()
    """Public keys (64 hexadecimal digits) whose credentials count; one is enough to be admitted by."""
    urls: tuple[str, ...] = ()
    """Where they are asked, ``https://host:port``, in this order."""
    token: str = field(default_factory=_invitation, repr=False, metadata=SECRET)
    """The invitation by which this node joins; ``GENESIS_INVITATION`` keeps it off the command line, and no file holds
    it. Needed once: later this node is known by its key."""
    bandwidth_mbit: float = 0.0
    """What this machine can send, as its operator knows it, in Mbit/s, for the authority's list; 0: not said."""
    join_timeout_s: float = 120.0
    """Seconds for which joining is tried where no authority answers."""
    check_interval_s: float = 20.0
    """Seconds between two questions to the authority for revocations; also how it knows that this node is there."""

    def __post_init__(self) -> None:
        for key in self.authorities:
            if not is_peer_id(key):
                raise TrainerUsageError(
                    f"admission.authorities: expected 64 hexadecimal digits each, found {key[:80]!r}"
                )
        if len(self.authorities) > _MAX_AUTHORITIES:
            raise TrainerUsageError(
                f"admission.authorities: expected at most {_MAX_AUTHORITIES}, found {len(self.authorities)}"
            )
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise TrainerUsageError(
                    "--authority: expected an address such as https://authority.example.org:4500, without a user, "
                    f"found {url[:80]!r}"
                )
        for name in ("join_timeout_s", "check_interval_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"admission.{name}: expected a number of seconds above 0, found {value}")
        if not (math.isfinite(self.bandwidth_mbit) and self.bandwidth_mbit >= 0):
            raise TrainerUsageError(
                f"admission.bandwidth_mbit: expected Mbit/s, 0 or more, found {self.bandwidth_mbit}"
            )

    @property
    def is_required(self) -> bool:
        """Whether the run has an authority, as far as this node was told."""
        return bool(self.authorities or self.urls)
