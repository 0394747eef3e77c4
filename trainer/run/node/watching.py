"""How a node is monitored: tracker, metrics, log and HTTP interface, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer.monitor import ApiServer, EventLog, Observer, ShutdownHook, TrainingMetrics, TrainingTracker, create_app
from trainer.monitor.app import add_pipeline_pages
from trainer.monitor.metrics import Sources
from trainer.monitor.status import PipelineView
from trainer.run.config import RunConfig

if TYPE_CHECKING:
    from trainer.network.discovery import Announcement
    from trainer.run.node.identity import NodeStats
    from trainer.run.node.network import Network


class Watch:
    """Tracker, observer and server of one node; ``further`` returns additional gauges (name, help, value)."""

    def __init__(
        self,
        config: RunConfig,
        network: Network[Any] | None,
        stop: Callable[[], None],
        further: Callable[[], Iterable[tuple[str, str, float]]] = tuple,
    ) -> None:
        inner_steps = config.diloco.inner_steps if config.strategy == "diloco" else 0
        peer_id = network.peer_id if network is not None else ""
        self.tracker = TrainingTracker(config.node_id, peer_id=peer_id, inner_steps=inner_steps)
        self.log = EventLog(Path(config.log.directory).expanduser(), config.node_id) if config.log.directory else None
        log, counters = self.log, network.endpoint.counters if network is not None else None
        sources = Sources(
            status=self.tracker.status,
            refused=lambda: dict(counters.refused) if counters is not None else {},
            rpc_bytes=lambda: (counters.sent_bytes, counters.received_bytes) if counters is not None else (0, 0),
            lost_events=lambda: log.lost_events if log is not None else 0,
            further=further,
        )
        metrics = TrainingMetrics(sources, node_id=config.node_id, run_id=config.run_id)
        self.observer = Observer(self.tracker, metrics, self.log)
        self._shards: tuple[int, ...] = ()
        self.server: ApiServer | None = None
        if config.api.enabled:
            hook = ShutdownHook(callback=stop, token=config.checkpoint.token)
            self._app = create_app(self.tracker, metrics, config=config.api, shutdown=hook)
            self.server = ApiServer(self._app, config.api)

    def with_pipeline(self, view: PipelineView) -> Self:
        """Adds the pages of the pipeline that this node drives; to be called before it is entered."""
        if self.server is not None:
            add_pipeline_pages(self._app, view)
        return self

    def set_shards(self, shards: tuple[int, ...]) -> None:
        """Records which shards the node reads."""
        self._shards = shards
        self.tracker.set_shards(shards)

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """Records the announcements of all other nodes."""
        self.observer.peers(announcements)

    def state(self, outer_step: int, digest: str) -> None:
        """Records that others can fetch this state from now on."""
        self.tracker.set_state(outer_step, digest)
        self.observer.event("state", outer_step=outer_step, digest=digest)

    def progress(self) -> NodeStats:
        """Returns what to announce of this node's training."""
        from trainer.run.node.identity import NodeStats  # Brings grpc, which a node alone does not need.

        return NodeStats(
            inner_step=self.tracker.num_steps,
            loss=self.tracker.smoothed_loss,
            tokens_per_s=self.tracker.tokens_per_s,
            shards=self._shards,
        )

    def __enter__(self) -> Self:
        if self.log is not None:
            self.log.start()
        if self.server is not None:
            self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.log is not None:
            self.log.close()
        if self.server is not None:
            self.server.stop()
