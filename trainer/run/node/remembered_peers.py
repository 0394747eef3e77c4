"""The addresses of nodes that this one was last among, kept on the disk for its next start.

The first node of a run is started without addresses, for there is nobody yet. If it restarts the others know it, and it
does not know them: until they call, it would train and commit rounds alone, from a state that nobody else has. So it
begins to look where they were. Addresses that are given win; these are for a node that is given none.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from trainer.errors import TrainerUsageError
from trainer.network.discovery import Announcement, DiscoveryConfig
from trainer.run.config import RunConfig

logger = logging.getLogger(__name__)

_MOST: Final = 16
_MAX_BYTES: Final = 16 << 10
_EVERY_S: Final = 60.0


class RememberedPeers:
    """The file of one node of one run; a file that cannot be read or written is as none."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._kept: tuple[str, ...] = ()
        self._kept_s = float("-inf")

    @classmethod
    def of(cls, config: RunConfig) -> RememberedPeers:
        """Returns those of a node with this configuration."""
        return cls(Path(config.state_dir).expanduser() / "peers" / config.run_id / f"{config.node_id}.json")

    def completed(self, config: RunConfig) -> RunConfig:
        """Returns a configuration that looks where nodes were last, where it names no address itself."""
        if config.discovery.initial_peers:
            return config
        return replace(config, discovery=replace(config.discovery, initial_peers=self.addresses()))

    def addresses(self) -> tuple[str, ...]:
        """Returns where nodes were when some were there last; none where there is no file or another's."""
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return ()
        addresses = [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
        with suppress(TrainerUsageError):
            config = DiscoveryConfig(initial_peers=tuple(addresses[:_MOST]))
            return () if config.uses_dht else config.initial_peers
        return ()

    def note(self, peers: Iterable[Announcement]) -> None:
        """Keeps the addresses of nodes that are there, once a minute at most, if there are any."""
        addresses = tuple(sorted(said.address for said in peers)[:_MOST])
        now_s = self._clock()
        if not addresses or addresses == self._kept or now_s - self._kept_s < _EVERY_S:
            return
        self._kept, self._kept_s = addresses, now_s
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(addresses), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            logger.debug("%s: where the others are is not kept: %s", self._path, error)
