"""How one node is watched: its tracker, metrics, event log and curves, and the server with its page.

Everything that a node, a worker or a driver tells of its training goes through its `Watch`, so that page, API, log and
reports to others agree. It changes nothing about training; with API and log off it costs some microseconds a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from trainer.errors import TrainerUsageError
from trainer.inner import undisturbed_rng
from trainer.model.config import stage_names
from trainer.monitor import (
    ApiServer,
    CurveLog,
    EventLog,
    Observer,
    ShutdownHook,
    SpeedMeter,
    TrainingMetrics,
    TrainingTracker,
    create_app,
)
from trainer.monitor.app import add_pipeline_pages
from trainer.monitor.metrics import Sources
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.node_history import NodeHistory, history_path
from trainer.monitor.pages.node_page import NodePage, PageFacts, Role
from trainer.monitor.pages.routes import PageSource
from trainer.monitor.speed import Phase
from trainer.monitor.status import PipelineView
from trainer.monitor.swarm import SeenMember
from trainer.monitor.work import WorkDone, WorkTally
from trainer.run.config import RunConfig
from trainer.run.node.start_facts import start_facts

if TYPE_CHECKING:
    from trainer.network.discovery import Announcement
    from trainer.network.discovery.run_change import RunChange
    from trainer.run.node.bucket_network import BucketNetwork
    from trainer.run.node.identity import NodeStats
    from trainer.run.node.network import Network

logger = logging.getLogger(__name__)

_MAX_SHARDS = 1_000  # Named in an event.


def _moved_bytes(network: Network[Any] | BucketNetwork | None) -> tuple[int, int]:
    """Returns the bytes that went to others, and that came from them."""
    counters = None if network is None else network.counters
    return (0, 0) if counters is None else (counters.sent_bytes, counters.received_bytes)


def _traffic(network: Network[Any] | BucketNetwork) -> Iterable[tuple[str, str, float]]:
    """Returns what a page shows of the bytes of `_moved_bytes`, by whether they went by way of a relay."""
    for index, way in enumerate(("sent", "received")):
        relayed = network.relayed_bytes[index]
        yield f"bytes_{way}_directly", f"Bytes {way}, not by way of a relay.", _moved_bytes(network)[index] - relayed
        yield f"bytes_{way}_by_relay", f"Bytes {way} by way of a relay, which cannot read them.", relayed


class Watch:
    """Tracker, observer and server of one node; ``further`` returns additional gauges (name, help, value).

    ``speed`` measures the node's own training; drivers of a pipeline have none. ``role`` says whose page is at ``/``.
    The log has a ``start`` event with what the process was started with, and an ``end`` event with why it ended: a life
    without one was killed.
    """

    def __init__(
        self,
        config: RunConfig,
        network: Network[Any] | BucketNetwork | None,
        stop: Callable[[], None],
        further: Callable[[], Iterable[tuple[str, str, float]]] = tuple,
        speed: SpeedMeter | None = None,
        curves: CurveLog | None = None,
        role: Role = "node",
        *,
        stage: str = "",
    ) -> None:
        self.about: dict[str, object] = {}
        """What else the log's ``start`` event says of this process, to be set before it is entered."""
        self._config, self._role, self._stage = config, role, stage
        inner_steps = config.outer.inner_steps if config.moves_anchor else 0
        peer_id = network.peer_id if network is not None else ""
        in_stages = role != "node" or (config.swarm.whole_nodes and config.pipeline == "none")
        self.tracker = TrainingTracker(
            config.node_id,
            peer_id=peer_id,
            inner_steps=inner_steps,
            role=role,
            stage=stage,
            stages=stage_names(config.swarm.num_stages) if in_stages else (),
        )
        self.log = EventLog(Path(config.log.directory).expanduser(), config.node_id) if config.log.directory else None
        log = self.log
        sources = Sources(
            status=self.tracker.status,
            refused=lambda: dict(network.counters.refused) if network is not None else {},
            rpc_bytes=lambda: _moved_bytes(network),
            relayed_bytes=lambda: network.relayed_bytes if network is not None else (0, 0),
            lost_events=lambda: log.lost_events if log is not None else 0,
            withdrawals=lambda: self.work.done().withdrawals,
            further=lambda: (*further(), *_device_memory()),
        )
        metrics = TrainingMetrics(sources, node_id=config.node_id, run_id=config.run_id, role=role, stage=stage)
        self.curves = curves
        self.work = WorkTally()
        self._history = history = NodeHistory(self.tracker.status, _history_path(config), config.run_id)
        kept = history if config.api.enabled else None
        self.observer = Observer(self.tracker, metrics, self.log, curves, self.work, kept)
        self._speed = speed
        if speed is not None:
            self.tracker.set_speed(speed.status)
        self._shards: tuple[int, ...] = ()
        self._num_changes = 0
        self.server: ApiServer | None = None
        if config.api.enabled:
            hook = ShutdownHook(callback=stop, token=config.checkpoint.token)
            self._lines = LogLines()
            facts = PageFacts(
                node_id=config.node_id,
                run_id=config.run_id,
                role=role,
                max_steps=config.max_steps,
                max_tokens=config.max_tokens,
            )

            def gauges() -> Iterable[tuple[str, str, float]]:
                found = further() if network is not None or role != "node" else ()
                shown = found if role != "node" else [each for each in found if each[0].startswith("bucket_")]
                return *shown, *(() if config.bucket.is_used or network is None else _traffic(network))

            self.page = NodePage(facts, self.tracker, self.work, history, self._lines, gauges)
            source = PageSource(self.page.view, self.page.course)
            self._app = create_app(self.tracker, metrics, config=config.api, shutdown=hook, page=source)
            self.server = ApiServer(self._app, config.api)

    def with_pipeline(self, view: PipelineView) -> Self:
        """Adds the pages of the pipeline that this node drives; to be called before it is entered."""
        if self.server is not None:
            add_pipeline_pages(self._app, view)
            self.page.pipeline = view
        return self

    def spend(self, phase: Phase, seconds: float) -> None:
        """Adds to what the step under way spends its time on."""
        if self._speed is not None:
            self._speed.add(phase, seconds)

    def end_step(self, num_tokens: int) -> None:
        """Ends a step of so many tokens; with none, begins the first."""
        if self._speed is not None:
            self._speed.end_step(num_tokens)

    def restart_speed(self) -> None:
        """Forgets the steps so far when speed is asked for."""
        if self._speed is not None:
            self._speed.restart()

    def set_shards(self, shards: tuple[int, ...]) -> None:
        """Records which shards the node reads."""
        if shards != self._shards:
            self.observer.event("shards", shards=shards[:_MAX_SHARDS], num_shards=len(shards))
        self._shards = shards
        self.tracker.set_shards(shards)

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """Records the announcements of all other nodes."""
        self.observer.peers(announcements)

    def seen_in_rounds(self, members: Sequence[SeenMember]) -> None:
        """Records who was in the latest rounds through a bucket, whose nodes announce nothing."""
        self.tracker.seen_in_rounds(members)

    def state(self, outer_step: int, digest: str, part: str = "") -> None:
        """Records that others can fetch this state, of a part of the model where it has parts, from now on."""
        if part:
            self.tracker.set_state(outer_step, digest, inner_step=None, stage=part)
            self.observer.event("part_state", stage=part, outer_step=outer_step, digest=digest)
            return
        self.tracker.set_state(outer_step, digest, inner_step=None)
        self.observer.event("state", outer_step=outer_step, digest=digest)

    def changed(self, changes: Sequence[RunChange], round_index: int) -> None:
        """Logs the changes of the run by which this node goes on in a round, each for the first time."""
        for change in changes[self._num_changes :]:
            logger.info("change %d of the run is in force here, in round %d", change.number, round_index)
            self.observer.event(
                "run_change",
                number=change.number,
                at_round=change.at_round,
                round_index=round_index,
                settings=dict(change.settings),
            )
        self._num_changes = max(self._num_changes, len(changes))

    def progress(self) -> NodeStats:
        """Returns what to announce of this node's training."""
        from trainer.run.node.identity import NodeStats  # Brings grpc, which a node alone does not need.

        return NodeStats(
            inner_step=self.tracker.num_steps,
            loss=self.tracker.smoothed_loss,
            tokens_per_s=self.tracker.tokens_per_s,
            shards=self._shards,
        )

    def work_done(self) -> WorkDone:
        """Returns the sums of what this process has done, to be reported to others."""
        return self.work.done()

    def __enter__(self) -> Self:
        if self.log is not None:
            self.log.start()
            self.observer.event("start", **start_facts(self._config, self._role, self._stage), **self.about)
        if self.curves is not None:
            with undisturbed_rng():
                self.curves.start()
        if self.server is not None:
            self._lines.attach()
            self._history.start()
            self.server.start()
            logger.info("Global LLM Status at %s/", self.server.url)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        self.observer.event("end", outcome="ended" if error is None else "failed", reason=reason)
        if self.curves is not None:
            self.curves.close()
        if self.log is not None:
            self.log.close()
        if self.server is not None:
            self.server.stop()
            self._history.close()
            self._lines.detach()


def _history_path(config: RunConfig) -> Path | None:
    """The file of the page's history, beside the node's log if it has one; None: its name makes no file name."""
    directory = Path(config.log.directory or Path(config.state_dir) / "pages")
    try:
        return history_path(directory.expanduser(), config.node_id)
    except TrainerUsageError:
        if config.log.directory:
            raise
        return None


def _device_memory() -> Iterator[tuple[str, str, float]]:
    """Yields name, help and value of the memory of the GPU that this process computes on, if it does."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info()
        yield "device_memory_bytes", "Memory of the GPU.", total
        yield "device_memory_used_bytes", "Of it, in use by any process.", total - free
        yield "device_memory_peak_bytes", "Most that this process's tensors took.", torch.cuda.max_memory_allocated()
