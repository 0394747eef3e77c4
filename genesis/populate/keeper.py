"""Holds a store's lease for as long as something is done under it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from genesis.errors import GenesisError, LeaseError, LeaseLostError, StoreError
from genesis.populate.commit_log import CommitLog
from manifests import ContractError

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
        on_lost: called, once, when another populator has taken over.
    """

    def __init__(self, commit_log: CommitLog, on_lost: Callable[[], None]) -> None:
        self._commit_log = commit_log
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.failure: LeaseLostError | None = None

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
        """Raises LeaseLostError if the lease was lost."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while not self._ended.wait(self._commit_log.lease_s / 3):
            try:
                self._commit_log.renew()
            except LeaseLostError as error:
                self.failure = error
                self._on_lost()
                return
            except (GenesisError, ContractError) as error:
                logger.warning("the lease could not be renewed: %s", error)
