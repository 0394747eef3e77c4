"""Options of the ledger: how data are leased to the drivers of a swarm, and how the account is kept."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trainer.errors import TrainerUsageError

MAX_LEASE_UNITS = 256
_KEY = re.compile(r"[0-9a-f]{64}")


def is_key(name: str) -> bool:
    """Whether a driver is named by its key, which no other node can claim."""
    return _KEY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Leases of data; the same at all nodes of a run. Raises TrainerUsageError if a value makes no sense."""

    keeper: str = "driver-1"
    """Key (64 hexadecimal digits) of the driver that keeps the account; its node id only where no stranger can join
    (`RunConfig.is_private`)."""
    journal: str = "local"
    """Where the account is kept. ``local``: on the keeper's disk, and with that machine it is lost. A folder that all
    drivers share, or ``s3://bucket/prefix``: any of them takes over. ``replicated``: on the disks of `keepers`."""
    keepers: tuple[str, ...] = ()
    """Drivers that may keep an account that is not ``local``: keys, or node ids where no stranger can join. Of
    ``replicated`` the three or five that have copies, in the same order everywhere; else empty: every driver may."""
    takeover_s: float = 12.0
    """Seconds without a sign of the keeper after which another driver takes over an account that is not ``local``."""
    begin_anew: bool = False
    """The keeper begins, or goes on, even if workers have trained on data that its journal does not contain."""
    unit_rows: int = 0
    """Rows of a unit, the least that is leased anew: a multiple of the micro-batch's; 0: 8 micro-batches."""
    lease_units: int = 2
    """Least units a driver asks for at once. It holds as many as it gets done in `hold_s`."""
    lease_s: float = 90.0
    """Seconds a lease lasts unless it is renewed, which drivers do six times as often."""
    lease_margin_s: float = 10.0
    """Seconds from a lease's end until it is resolved; more than two machines' clocks can drift apart in `lease_s`."""
    inquiry_s: float = 30.0
    """Seconds for which workers are asked about a lease that ran out, before what is unclear counts as lost."""
    reissue_after_s: float = 20.0
    """Seconds before what came back from a lease that ran out is given again: workers that were asked about it refuse
    the rest for so long (`WorkerConfig.refuse_s`)."""
    worker_gone_s: float = 30.0
    """Seconds without an announcement after which a worker counts as gone, and with it what only it had."""
    max_open: int = 1024
    """Micro-batches one driver may hold; near the end of the data, or of ``max_steps``, fewer."""
    epochs: int = 0
    """Passes over the data; 0: endless."""
    ahead: int = 4
    """Micro-batches a driver reads ahead."""
    call_timeout_s: float = 10.0
    """Seconds a driver waits for an answer from the keeper."""
    close_s: float = 5.0
    """Seconds for which a driver that stops tries to settle what it knows and hand back what it did not begin."""
    compact_bytes: int = 4 << 20
    """Size of the journal at which it is replaced by what it adds up to."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "takeover_s", "call_timeout_s", "close_s", "worker_gone_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"swarm.ledger.{name}: expected a positive number of seconds, found {value}")
        for name in ("lease_margin_s", "inquiry_s", "reissue_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainerUsageError(f"swarm.ledger.{name}: expected seconds, 0 or more, found {value}")
        for name, least, most in (
            ("unit_rows", 0, 1 << 20),
            ("lease_units", 1, MAX_LEASE_UNITS),
            ("max_open", 1, 1 << 20),
            ("epochs", 0, 10**9),
            ("ahead", 1, 1024),
            ("compact_bytes", 1 << 12, 1 << 40),
        ):
            count: int = getattr(self, name)
            if not least <= count <= most:
                raise TrainerUsageError(f"swarm.ledger.{name}: expected {least} to {most}, found {count}")
        if not self.keeper:
            raise TrainerUsageError("swarm.ledger.keeper: expected the node id or key of a driver, found none")
        self._check_keepers()

    @property
    def keeper_is_key(self) -> bool:
        """Whether the keeper is named by its key, which no other node can claim."""
        return is_key(self.keeper)

    @property
    def is_shared(self) -> bool:
        """Whether the account outlives its keeper's machine, and another driver can take over."""
        return self.journal != "local"

    @property
    def keeper_text(self) -> str:
        """Who keeps the account, for messages."""
        return self.keeper if not self.is_shared else f"whichever driver has the journal ({self.journal})"

    @property
    def hold_s(self) -> float:
        """Seconds of work a driver holds: less than is left of a lease that was about to be renewed."""
        return self.lease_s * 2 / 3

    def _check_keepers(self) -> None:
        text = ""
        if not self.journal:
            text = "journal: expected local, replicated, a folder or s3://bucket/prefix, found none"
        elif len(set(self.keepers)) != len(self.keepers) or not all(self.keepers):
            text = f"keepers: expected each driver once, found {', '.join(self.keepers)}"
        elif self.keepers and not self.is_shared:
            text = "keepers: expected another journal than local, which has one keeper (swarm.ledger.keeper)"
        elif self.journal == "replicated" and len(self.keepers) not in (3, 5):
            text = f"keepers: expected three or five drivers for a replicated journal, found {len(self.keepers)}"
        if text:
            raise TrainerUsageError(f"swarm.ledger.{text}")

    def rows_of_unit(self, micro_batch_rows: int) -> int:
        """Returns the rows of a unit; raises TrainerUsageError if they are no multiple of a micro-batch's rows."""
        rows = self.unit_rows or 8 * micro_batch_rows
        if rows % micro_batch_rows:
            raise TrainerUsageError(
                f"swarm.ledger.unit_rows: expected a multiple of a micro-batch's {micro_batch_rows} rows, found {rows}"
            )
        return rows
