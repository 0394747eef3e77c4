"""Who may write to a store: one process at a time, named, with a fencing token.

The lease lives inside checkpoints.json, the very object whose compare-and-swap is the commit. So it need not be
believed: a writer that slept through its lease fails its next commit because the object changed, whatever its clock
says. Time only decides when a newcomer may take over: after `LEASE_S` without a renewal, or at once if the holder ran
on this machine and its process is gone. `held` and `LeaseKeeper` hold the lease for as long as something is done under
it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from genesis.errors import (
    GenesisError,
    LeaseError,
    LeaseHeldError,
    LeaseLostError,
    StoreError,
    StoreRemovedError,
)
from manifests import ContractError, Writer, format_time, parse_time

if TYPE_CHECKING:
    from genesis.populate.commit_log import CommitLog

LEASE_S = 60.0
"""How long a lease lasts unless renewed; it is renewed every third of that."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from every other on any machine at any time."""

    host: str
    pid: int
    started: str
    """Start time in kernel ticks since boot."""
    boot: str
    """Digits of the boot id and the process-id namespace; empty where the system has none."""

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}:{self.boot}"

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """The inverse of ``str``; None for an id of another form."""
        parts = text.rsplit(":", 3)
        if len(parts) != 4 or not parts[1].isdigit():
            return None
        return cls(parts[0], int(parts[1]), parts[2], parts[3])

    def is_gone(self) -> bool:
        """Whether it certainly no longer runs; False when that cannot be known from here."""
        here = this_process()
        if not self.boot or (self.host, self.boot) != (here.host, here.boot):
            return False
        return _start_ticks(self.pid) != self.started


@lru_cache(maxsize=1)
def _this_process(pid: int) -> ProcessId:
    return ProcessId(socket.gethostname(), pid, _start_ticks(pid), _boot())


def this_process() -> ProcessId:
    """The calling process."""
    return _this_process(os.getpid())


def _start_ticks(pid: int) -> str:
    """Field 22 of /proc/PID/stat; empty if there is no such process or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat[stat.rindex(")") + 2 :].split()
    return "" if fields[0] == "Z" else fields[19]


def _boot() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return f"{boot_id[:8]}-{namespace}"


def check_free(writer: Writer | None, url: str, now: datetime) -> None:
    """Returns if the store's lease may be taken.

    Raises:
        LeaseHeldError: its holder is alive, as far as can be known; the message names it.
    """
    if writer is None or writer.expires_at is None:
        return
    expires = parse_time(writer.expires_at)
    holder = ProcessId.parse(writer.id)
    if now >= expires or (holder is not None and holder.is_gone()):
        return
    raise LeaseHeldError(
        f"{url} is being written by {describe_writer(writer)}; wait until it ends or stop it "
        f"(its lease goes stale in {(expires - now).total_seconds():.0f} s if it has died)"
    )


def describe_writer(writer: Writer) -> str:
    """``process 1234 on gpu-7 (populating fineweb-edu)``."""
    holder = ProcessId.parse(writer.id)
    who = f"process {holder.pid} on {holder.host}" if holder else writer.id
    return f"{who} (populating {writer.source})" if writer.source else who


def lease_end(now: datetime, lease_s: float = LEASE_S) -> str:
    """When a lease taken or renewed now goes stale."""
    return format_time((now + timedelta(seconds=lease_s)).astimezone(UTC))


logger = logging.getLogger(__name__)


@contextmanager
def held(commit_log: CommitLog) -> Iterator[CommitLog]:
    """Opens the commit log, and gives its lease back at the end.

    If the body fails, that error is the one reported, though the lease may then have to go stale by itself.
    """
    commit_log.open()
    try:
        yield commit_log
    except BaseException:
        with suppress(StoreError, LeaseError):
            commit_log.close()
        raise
    commit_log.close()


class LeaseKeeper:
    """Renews the lease every third of its length, in a thread; a context manager.

    A store that does not answer is a warning: the next commit finds out whether the lease still holds.

    Args:
        commit_log: whose lease.
        on_lost: called, once, when another populator has taken over or the store was removed.
    """

    def __init__(self, commit_log: CommitLog, on_lost: Callable[[], None]) -> None:
        self._commit_log = commit_log
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.failure: LeaseLostError | StoreRemovedError | None = None

    def __enter__(self) -> LeaseKeeper:
        """Starts renewing."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops renewing; the lease itself is kept."""
        self._ended.set()
        self._thread.join(timeout=self._commit_log.lease_s)

    def raise_failure(self) -> None:
        """Raises LeaseLostError if the lease was lost, StoreRemovedError if it went with the whole store."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while not self._ended.wait(self._commit_log.lease_s / 3):
            try:
                self._commit_log.renew()
            except (LeaseLostError, StoreRemovedError) as error:
                self.failure = error
                self._on_lost()
                return
            except (GenesisError, ContractError) as error:
                logger.warning("the lease could not be renewed: %s", error)
