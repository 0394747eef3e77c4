"""A driver as a process: the data and their account on one side, the workers of the stages on the other.

    store → rows of leased micro-batches → stages, through their workers → settlements → account

One driver keeps the account for all: the one that the run file names (``swarm.ledger.keeper``), in a journal under
``state_dir``; or, where the journal outlives its machine (``swarm.ledger.journal``), whichever has it. The keeper's
``max_steps`` bounds the run, and it stays until the other drivers know that all is done (`account_keeping`). A driver
holds nothing that is worth saving: killed, it begins again with a new lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from loader.session import Session
from trainer.errors import TrainerError, TrainerUsageError
from trainer.inner import StepResult, lr_at
from trainer.network.discovery.record_exchange import RecordExchange
from trainer.network.reachability import ReachabilityService
from trainer.network.rpc import Endpoint
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.outer.sparta import frontier_of
from trainer.pipeline.driver.driver import PipelineDriver
from trainer.pipeline.driver.results import MicroBatchResult, StepLoss
from trainer.pipeline.driver.stage_caller import LinkForm
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.ledger import (
    LedgerClient,
    MicroBatches,
    preferred_shards,
)
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client, reach_of
from trainer.run.node.data import open_session
from trainer.run.node.identity import identity_of
from trainer.run.node.remembered_peers import RememberedPeers
from trainer.run.node.reporting import NodeFigures
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import TrainingDisplay
from trainer.run.node.watch import Watch
from trainer.run.signed import SignedRun
from trainer.run.swarm.account_keeping import STORE_THREAD, AccountKeeping, lanes_and_spec, repeated
from trainer.run.swarm.building import codec_of
from trainer.run.swarm.driver_view import DriverView
from trainer.run.swarm.keeper import check_keeper, write_last_account
from trainer.run.swarm.peer_view import DriverPeerView
from trainer.run.swarm.shape import SwarmShape, only_process, shape_of, target_tokens_of

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_SHOW_END_S = 1.5
_NOTE_WORKERS_S = 2.0
_HEARD_S = 1.0  # For others to take note of an announcement, which they do twice a second.
_FIRST_KEEPER_S, _FIRST_WORKERS_S = 15.0, 30.0
"""How long processes that were started together with the driver may take to be there."""

T = TypeVar("T")


def run_driver(config: RunConfig, stop: StopRequest, line: TrainingDisplay) -> None:
    """Drives a pipeline until the data are used up, the run's ``max_steps`` are done, or it is asked to stop."""
    if not config.inner.micro_batch_size:
        raise TrainerUsageError(
            "inner.micro_batch_size: expected rows of a micro-batch in the run file, since all drivers and the account "
            "must agree on them; found 0"
        )
    with only_process(config):
        check_keeper(config)
        shape = shape_of(config)
        node = DriverNode(config, shape, open_session(config.data), stop, line)
        with stop.on_signals():
            asyncio.run(node.run())


class DriverNode:
    """One driver; ``session`` is the open store, and ``line`` shows its steps to people."""

    def __init__(
        self, config: RunConfig, shape: SwarmShape, session: Session, stop: StopRequest, line: TrainingDisplay
    ) -> None:
        remembered = RememberedPeers.of(config)
        self._config = config = remembered.completed(config)
        self._shape = shape
        self._session = session
        self._stop = stop
        self._line = line
        self._steps = 0
        self._step_began_s = time.perf_counter()
        self._admission = admission_client(config, identity_of(config), "driver")
        admission = None if self._admission is None else self._admission.admission
        reach = reach_of(config, self._admission)
        self._endpoint = Endpoint(identity_of(config), config.run_id, config.rpc, admission, reach)
        self._peers = DriverPeerView(
            config, self._endpoint, shape, lambda: self._watch.progress(), lambda others: self._watch.peers(others)
        )
        self._peers.remembered = remembered
        self._account = AccountKeeping(config, shape, session, self._endpoint, self._peers)
        self._driver: PipelineDriver | None = None
        self._run = SignedRun.open(config)
        self._num_changes = 0
        self._inner = config.inner
        self.view = DriverView(config, shape, self._peers)
        self._watch = Watch(config, None, stop.ask, self.view.figures, role="driver")
        self._watch.about = {"peer_id": self._endpoint.peer_id, "model": shape.model.to_dict()}
        self._peers.figures = NodeFigures(self._watch, "driver", makes_checkpoints=False)

    async def run(self) -> None:
        """Drives until it is done."""
        config, shape = self._config, self._shape
        async with AsyncExitStack() as stack:
            data = await self._unless_stopped(
                in_daemon_thread(lambda: lanes_and_spec(config, shape, self._session), STORE_THREAD)
            )
            if data is None:
                return
            lanes, spec = data
            self._account.open(lanes, spec)
            self._peers.register()
            reachability = ReachabilityService(self._endpoint, tls=config.rpc.tls)
            reachability.register()
            stack.push_async_callback(reachability.close)
            records = self._connected_run()
            if self._admission is not None:
                self._admission.register(self._endpoint)
            await self._endpoint.start()
            stack.push_async_callback(self._endpoint.stop)
            if self._admission is not None:  # Before anybody is called: without a credential, all would refuse.
                await self._admission.join(self._endpoint.address, self._stop)
                self._admission.start(lambda: self._endpoint.address, self._peers.discovery, self._endpoint)
                stack.push_async_callback(self._admission.stop)
            await self._peers.start()
            stack.push_async_callback(self._peers.stop)
            if records is not None:
                records.start()
                stack.push_async_callback(records.close)
            await self._peers.check_fit(config.swarm.join.first_peers_s, self._stop)
            await self._account.start()
            stack.push_async_callback(self._account.stop)
            stack.push_async_callback(self._leave_account)
            name = config.swarm.ledger.keeper_text
            find = self._peers.keeper_peer
            await self._wait_for(lambda: [] if find() else [name], _FIRST_KEEPER_S, "the keeper of the account:")
            if self._account.service is None:  # The keeper leases only to drivers that it has heard of.
                await asyncio.sleep(_HEARD_S + config.discovery.poll_interval_s)
            work = LedgerClient(
                self._endpoint,
                self._peers.keeper_peer,
                MicroBatches(self._session, config.seed, spec.layout),
                spec,
                config.swarm.ledger,
                preferred_shards(config.node_id, lanes, config.data.shards_per_node, config.data.assignment),
            )
            self._account.client = work
            await work.start()
            stack.push_async_callback(work.close)
            self._driver = PipelineDriver(
                self._endpoint,
                shape.plan.names,
                self._peers,
                work,
                LinkForm(codec_of(config, shape), shape.model.dim),
                config.swarm.driver,
                target_tokens=target_tokens_of(config),
                on_result=self._ended,
                on_step=self._stepped,
                on_ban=self._banned,
            )
            self.view.begin(self._driver, lambda: self._account.service, self._endpoint, work)
            await self.view.refresh()
            self._steps = self.view.num_steps
            stack.enter_context(self._watch.with_pipeline(self.view))
            logger.info("%s drives %s at %s", config.node_id, config.run_id, self._endpoint.address)
            await self._drive(self._driver)
            await self.view.refresh()
            self.view.look()
            if config.api.enabled and not self._stop():
                await asyncio.sleep(_SHOW_END_S)  # For those who look once a second to see how it has ended.
        logger.info("stopped after %d steps", self._steps)

    def _connected_run(self) -> RecordExchange | None:
        peers = self._peers
        if self._run is None:
            return None
        return self._run.connect(self._endpoint, lambda: [said.peer() for said in peers.heard()], peers.discovery)

    def _go_by_changes(self) -> None:
        """Counts steps by the target that is in force at the workers; a driver has no rounds, and takes theirs."""
        if self._run is None or self._driver is None:
            return
        if self._admission is not None:
            self._admission.go_by(self._run.authorities())
        rounds = [report.round_index for report in self._peers.reports() if report.status == "serving"]
        frontier = frontier_of(rounds)
        number = self._run.number_at(frontier) if rounds else 0
        if number <= self._num_changes:
            return
        self._num_changes = number
        config = self._run.config_by(number)
        self._inner, self._driver.target_tokens = config.inner, target_tokens_of(config)
        self._watch.changed(self._run.chain.changes[:number], frontier)

    async def _leave_account(self) -> None:
        """Writes the account, if this driver keeps it, when everything is settled or handed back."""
        if self._account.service is None:
            return
        try:
            await self.view.refresh()
        except TrainerError as error:
            logger.warning("%s", error)
            return
        account = self.view.account()
        if account is not None:
            write_last_account(self._config, account)

    async def _drive(self, driver: PipelineDriver) -> None:
        """Runs until there is nothing left to do here, or one of the tasks beside it fails."""
        running: list[Coroutine[None, None, None]] = [
            self._work(driver),
            self._look(),
            repeated(_NOTE_WORKERS_S, self._note_workers),
            self._peers.watch_fit(),
            *self._account.tasks(self._note_workers),
        ]
        if self._admission is not None:
            running.append(self._admission.failed())
        tasks = [asyncio.create_task(each) for each in running]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, driver: PipelineDriver) -> None:
        """Drives; the keeper then stays until all other drivers have been told that nothing is left."""

        def missing() -> list[str]:
            there = {worker.stage for worker in self._peers.workers()}
            return [name for name in self._shape.plan.names if name not in there]

        if not self._config.max_steps or self._steps < self._config.max_steps:
            await self._wait_for(missing, _FIRST_WORKERS_S, "workers of")
        await driver.run()
        await self._account.stay(self._stop)

    async def _wait_for(self, missing: Callable[[], Sequence[str]], timeout_s: float, what: str) -> None:
        deadline_s, logged = time.monotonic() + timeout_s, False
        while (names := missing()) and time.monotonic() < deadline_s and not self._stop():
            if not logged:
                logger.info("waiting for %s %s", what, ", ".join(names))
                logged = True
            await asyncio.sleep(_LOOK_S)

    def _ended(self, result: MicroBatchResult) -> None:
        self.view.ended(result)
        end = result.outcome
        if end.fate != "done":
            event = {"fate": end.fate, "stage": end.stage, "reason": end.reason}
            self._watch.observer.event("micro_batch", micro_batch=result.micro_batch, **event)

    def _banned(self, worker: StageWorker, seconds: float, reason: str) -> None:
        fields = {"worker": worker.uid, "peer_id": worker.key, "stage": worker.stage, "seconds": round(seconds, 1)}
        self._watch.observer.event("ban", **fields, reason=reason)

    def _stepped(self, step: StepLoss) -> None:
        """Numbers steps as the run's: other drivers' and earlier ones included, as far as the keeper has told."""
        now_s = time.perf_counter()
        self._steps = max(self._steps, self.view.num_steps - 1)  # This one may be among them already.
        result = StepResult(
            step=self._steps,
            loss=step.loss,
            grad_norm=math.nan,
            lr=lr_at(self._steps, self._inner),
            num_tokens=step.num_tokens,
            skipped=False,
            seconds=now_s - self._step_began_s,
        )
        self._steps, self._step_began_s = self._steps + 1, now_s
        self.view.stepped(step)
        self._watch.observer.step(result)
        self._line.step(result)

    async def _look(self) -> None:
        """Looks whether to stop, and takes snapshots for the API; waits for nobody."""
        while True:
            if self._stop() and self._driver is not None:
                self._driver.stop()
            self._go_by_changes()
            self.view.look()
            await asyncio.sleep(_LOOK_S)

    async def _unless_stopped(self, coroutine: Coroutine[None, None, T]) -> T | None:
        """The coroutine's result; None: the driver is asked to stop before that."""
        task = asyncio.ensure_future(coroutine)
        try:
            while not task.done():
                if self._stop():
                    return None
                await asyncio.wait([task], timeout=_LOOK_S)
            return task.result()
        finally:
            task.cancel()

    async def _note_workers(self) -> None:
        try:
            await self._account.note_workers()
            await self.view.refresh()
        except TrainerError as error:
            logger.warning("%s", error)
