"""What the store has now, while a run reads what it had: new shards, a larger vocabulary.

Asked in the background, so that a store that does not answer never holds training up; what was found is taken up by the
training thread at an outer step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from loader import LoaderError
from loader.session import Session
from manifests import VocabularyFile
from trainer.model import rows_for
from trainer.outer.engine.daemon_call import start_daemon

__all__ = ["StoreWatch"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Seen:
    session: Session
    vocabulary: VocabularyFile

    @property
    def sequence(self) -> int:
        return self.session.catalog.manifest.sequence


class StoreWatch:
    """The newest that is known of a store. `look` is for the training thread, everything else for any.

    Args:
        seen: what is known to begin with (`open`).
        refresh_s: how often the store is asked, at most.
        clock: seconds that only rise.
    """

    def __init__(self, seen: _Seen, refresh_s: float, clock: Callable[[], float]) -> None:
        self._seen = seen
        self._refresh_s = refresh_s
        self._clock = clock
        self._next_s = clock() + refresh_s
        self._call: Future[_Seen] | None = None

    @classmethod
    def open(cls, session: Session, refresh_s: float, clock: Callable[[], float] = time.monotonic) -> StoreWatch:
        """Reads the vocabulary.

        Raises:
            LoaderError: it cannot be had.
        """
        return cls(_Seen(session, session.catalog.vocabulary()), refresh_s, clock)

    @property
    def vocabulary(self) -> VocabularyFile:
        """The newest one seen."""
        return self._seen.vocabulary

    @property
    def num_ids(self) -> int:
        """Ids of the newest vocabulary seen."""
        return self.vocabulary.next_merge_id

    def rows(self) -> int:
        """Rows a model needs for the newest vocabulary seen."""
        return rows_for(self.vocabulary.next_merge_id)

    @property
    def is_asking(self) -> bool:
        """Whether there is a question whose answer was not taken yet."""
        return self._call is not None

    def look(self) -> bool:
        """Asks the store if it is time to, and takes what an earlier question found; never waits.

        Returns:
            Whether the store was found to have changed.
        """
        if self._call is not None and self._call.done():
            return self._take(self._call)
        if self._call is None and self._clock() >= self._next_s:
            self._call = start_daemon(self._ask, "store-watch")
        return False

    def _ask(self) -> _Seen:
        catalog = self._seen.session.newest_catalog()
        return _Seen(replace(self._seen.session, catalog=catalog), catalog.vocabulary())

    def _take(self, call: Future[_Seen]) -> bool:
        self._call, self._next_s = None, self._clock() + self._refresh_s
        try:
            found = call.result(0.0)
        except LoaderError as error:
            logger.warning("the store cannot be asked for what is new: %s", error)
            return False
        before, self._seen = self._seen, found
        return found.sequence > before.sequence
