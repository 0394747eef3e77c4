"""The monitor's process: a look every minute, kept, shown and served, until it is asked to stop.

Its event loop asks the nodes; a thread beside it writes to the disk, and the HTTP interface has a thread of its own.
A look that fails is logged and the next one is tried: only a disk that cannot be written, or options with which a
monitor cannot begin, end it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from genesis.doctor.findings import quieten
from loader import LoaderError
from trainer.errors import PeerUnavailableError, TrainerError
from trainer.model.config import stage_names
from trainer.model.sizing import stage_flops_per_token
from trainer.monitor import ApiConfig, ApiServer
from trainer.monitor.alarms import AlarmLimits
from trainer.monitor.history import History
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.page_view import PageView
from trainer.monitor.pages.routes import PageSource
from trainer.monitor.pages.run_page import run_page
from trainer.monitor.pages.seen_course import run_course
from trainer.monitor.run_app import create_run_app
from trainer.monitor.run_view import RunView
from trainer.network.rpc import Identity, load_or_create_identity
from trainer.run.config import RunConfig
from trainer.run.monitoring.summary import RunSummary, utc
from trainer.run.monitoring.watcher import Look, RunWatcher
from trainer.run.node.stopping import StopRequest

logger = logging.getLogger(__name__)

_FIRST_NODES_S = 20.0
_DHT_START_S = 20.0  # Time for a DHT to start on a busy machine.
_LOOK_STOP_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """How a monitor looks and what it does with what it sees."""

    once: bool = False
    """Look once, show and end."""
    interval_s: float = 60.0
    """Between two looks."""
    path: Path | None = None
    """The history's file; None: in memory."""
    key: Path | None = None
    """File of the monitor's key; None: a new one each time, which is enough wherever strangers may ask."""
    api: ApiConfig | None = None
    """Where to serve what is seen; None: nowhere."""
    limits: AlarmLimits = field(default_factory=AlarmLimits)
    has_run_file: bool = False
    """Whether the configuration is the run's own, so that its keeper can be believed."""
    is_swarm: bool = False
    """Whether it has a part on a model in stages, so that the stages it names are the run's."""


def run_monitor(config: RunConfig, options: MonitorOptions, stop: StopRequest, show: Callable[[RunView], None]) -> None:
    """Looks at a run until it is asked to stop; ``show`` gets each view.

    Raises `TrainerUsageError` for options or a file that cannot be used, `PeerUnavailableError` where a single look
    finds nobody, `TrainerError` where the history cannot be written.
    """
    quieten(("trainer.network.rpc.endpoint",))  # Whoever reads "answers at" there would take it for the page's address.
    # It listens at a port of its own, which nobody is told of, and serves no part of the DHT.
    config = replace(
        config,
        rpc=replace(config.rpc, port=0, public_address=""),
        discovery=replace(config.discovery, dht_port=0, dht_client_mode=True),
    )
    with stop.on_signals(), History(options.path, config.run_id) as history:
        asyncio.run(_Monitor(config, options, stop, show, history).run())


class _Monitor:
    def __init__(
        self,
        config: RunConfig,
        options: MonitorOptions,
        stop: StopRequest,
        show: Callable[[RunView], None],
        history: History,
    ) -> None:
        self._config = config
        self._options = options
        self._stop = stop
        self._show = show
        self._history = history
        self._view: RunView | None = None
        self._page: PageView | None = None
        self._lines = LogLines()

    async def run(self) -> None:
        """Looks again and again."""
        config, options = self._config, self._options
        stages, flops = await asyncio.to_thread(_stages_of, config) if options.is_swarm else ((), {})
        summary = RunSummary(
            config.run_id,
            self._history,
            options.limits,
            stages,
            flops,
            knows_keeper=options.has_run_file and config.swarm.ledger.keeper_is_key,
            max_steps=config.max_steps if options.has_run_file else 0,
            max_tokens=config.max_tokens if options.has_run_file else 0,
        )
        identity = Identity.create() if options.key is None else load_or_create_identity(options.key)
        watcher = RunWatcher(config, identity, stages)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._lines)
            stack.push_async_callback(watcher.stop)
            await watcher.start()
            if options.api is not None:
                page = PageSource(lambda: self._page, partial(run_course, self._history.rows_of))
                server = ApiServer(
                    create_run_app(lambda: self._view, self._course, page, options.api),
                    options.api,
                    first_path="/api/run",
                )
                await asyncio.to_thread(server.start)
                stack.callback(server.stop)
                logger.info("the run is shown at %s", server.url)
            timeout_s = _FIRST_NODES_S + (_DHT_START_S if config.discovery.uses_dht else 0.0)
            is_there = await self._unless_stopped(watcher.wait_for_nodes(timeout_s))
            if options.once and not is_there and not self._stop():
                raise PeerUnavailableError(
                    f"--initial-peers: expected a node of run {config.run_id}, found none within {timeout_s:.0f} s: "
                    f"{watcher.silence()}; --run FILE or --run-id names another run"
                )
            await self._look_on(watcher, summary)

    async def _look_on(self, watcher: RunWatcher, summary: RunSummary) -> None:
        while not self._stop():
            began_s = time.monotonic()
            seen = await self._unless_stopped(watcher.look())
            if seen is None:
                return
            view, page = await asyncio.to_thread(self._summarised, summary, seen)
            self._view, self._page = view, page
            self._show(view)
            if self._options.once:
                return
            while not self._stop() and time.monotonic() - began_s < self._options.interval_s:
                await asyncio.sleep(_LOOK_STOP_S)

    def _summarised(self, summary: RunSummary, seen: Look) -> tuple[RunView, PageView]:
        view = summary.take(seen)
        return view, run_page(view, self._history.rows_of, self._lines, utc)

    async def _unless_stopped(self, waiting: Any) -> Any:
        """Returns a coroutine's result; None: the monitor is asked to stop before that."""
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                if self._stop():
                    return None
                await asyncio.wait([task], timeout=_LOOK_STOP_S)
            return task.result()
        finally:
            task.cancel()

    def _course(self, since: float) -> list[dict[str, Any]]:
        return [asdict(look) for look in self._history.looks(since)]


def _stages_of(config: RunConfig) -> tuple[tuple[str, ...], dict[str, float]]:
    """The stages of a run file, and the FLOPs of a micro-batch in each; none where the model cannot be told here."""
    names = stage_names(config.swarm.num_stages)
    rows, seq_len = config.inner.micro_batch_size, config.inner.seq_len
    if not rows:
        return names, {}
    # It brings torch, 220 MB that a monitor of whole models does without.
    from trainer.run.swarm.shape import shape_of

    try:
        plan = shape_of(config).plan
    except (TrainerError, LoaderError, OSError) as error:
        logger.info("what a micro-batch takes is judged by the workers' median: %s", error)
        return names, {}
    each = {
        name: stage_flops_per_token(plan.config, layers, has_output=name == plan.names[-1], seq_len=seq_len)
        for name, layers in zip(plan.names, plan.ranges, strict=True)
    }
    return names, {name: float(rows * seq_len * count) for name, count in each.items()}
