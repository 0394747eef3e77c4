"""Options of a driver, with their units; the defaults fit stages of seconds over links of tens of Mbit/s."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from trainer.errors import TrainerUsageError

Routing = Literal["hub", "chain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverConfig:
    """How a driver takes micro-batches through the stages."""

    max_in_flight: int = 8
    """Micro-batches in flight; twice as many more may wait for workers that may have counted them and are silent."""
    max_in_flight_per_worker: int = 4
    """Micro-batches at one worker at once: enough to hide the latency of its link, few enough to lose with it."""
    routing: Routing = "hub"
    """``hub``: every activation returns to the driver; ``chain``: each worker sends on to the next."""
    synchronous: bool = False
    """Send nothing of the next optimizer step before all of this one is counted: the same steps as in one process."""
    request_timeout_s: float = 60.0
    """Seconds one request to one stage may take; a chain may take as long for each of its stages."""
    unclear_s: float = 120.0
    """Seconds for which a worker that may have counted a micro-batch is asked again before it is given up as lost."""
    ban_s: float = 30.0
    """Seconds without work for a worker that could not be reached; doubled with each failure in a row."""
    max_ban_s: float = 3600.0
    """The longest of these bans."""
    malformed_ban_s: float = 3600.0
    """Seconds without work for a worker that answered what no honest worker answers."""
    max_attempts: int = 6
    """Failures of a micro-batch in one stage after which it is given up; a worker that is busy does not count."""
    audit_every: int = 64
    """One forward pass in so many is compared with another worker's of the stage; 0: none."""
    drain_s: float = 20.0
    """Seconds for which micro-batches in flight may go on after `stop`."""
    refresh_s: float = 0.5
    """Seconds between two reads of the directory of workers."""

    def __post_init__(self) -> None:
        """Raises TrainerUsageError, with the field and its value, if a value makes no sense."""
        for name in ("max_in_flight", "max_in_flight_per_worker", "max_attempts", "audit_every"):
            least, count = 0 if name == "audit_every" else 1, getattr(self, name)
            if count < least:
                raise TrainerUsageError(f"driver.{name}: expected {least} or more, found {count}")
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= 86_400):
                raise TrainerUsageError(f"driver.{name}: expected more than 0 and at most 86400 s, found {value}")
        if self.routing not in ("hub", "chain"):
            raise TrainerUsageError(f"driver.routing: expected hub or chain, found {self.routing!r}")
        if self.max_ban_s < self.ban_s:
            raise TrainerUsageError(
                f"driver.max_ban_s: expected at least ban_s ({self.ban_s:g} s), found {self.max_ban_s:g}"
            )
