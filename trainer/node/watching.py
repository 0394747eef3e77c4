"""What a node shows of itself: tracker, metrics, log and the HTTP interface, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.config import RunConfig
from trainer.observe import ApiServer, EventLog, Observer, ShutdownHook, TrainingMetrics, TrainingTracker, create_app
from trainer.observe.metrics import Sources

__all__ = ["Watch"]


class Watch:
    """Tracker, observer and server of one node; a context manager.

    Args:
        config: of the run.
        peer_id: the node's key; empty if it has none.
        stop: asks the node to stop, as the API may.
        refused: messages refused, by reason.
        traffic: bytes sent and received.
    """

    def __init__(
        self,
        config: RunConfig,
        peer_id: str,
        stop: Callable[[], None],
        refused: Callable[[], Mapping[str, int]],
        traffic: Callable[[], tuple[int, int]],
    ) -> None:
        inner_steps = config.diloco.inner_steps if config.strategy == "diloco" else 0
        self.tracker = TrainingTracker(config.node_id, peer_id=peer_id, inner_steps=inner_steps)
        self.log = EventLog(Path(config.log.directory).expanduser(), config.node_id) if config.log.directory else None
        log = self.log
        sources = Sources(
            status=self.tracker.status,
            refused=refused,
            rpc_bytes=traffic,
            lost_events=(lambda: log.lost_events) if log is not None else (lambda: 0),
        )
        metrics = TrainingMetrics(sources, node_id=config.node_id, run_id=config.run_id)
        self.observer = Observer(self.tracker, metrics, self.log)
        self.server: ApiServer | None = None
        if config.api.enabled:
            hook = ShutdownHook(callback=stop, token=config.checkpoint.token)
            self.server = ApiServer(create_app(self.tracker, metrics, config=config.api, shutdown=hook), config.api)

    def __enter__(self) -> Self:
        if self.server is not None:
            self.server.start()
        if self.log is not None:
            self.log.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.log is not None:
            self.log.close()
        if self.server is not None:
            self.server.stop()
