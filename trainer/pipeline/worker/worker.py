"""`StageWorker`: the parts of a worker's service put together, for one stage at one endpoint.

worker = StageWorker(endpoint, plan, "body-1", replica, codec, WorkerConfig(), target_tokens=8192, peers=peers)
worker.register()
await endpoint.start()
worker.start()
await worker.run()              # until it is cancelled, or cannot go on
await worker.stop()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from trainer.compression.activations import ActivationCodec, LinkMeter
from trainer.model.plan import StagePlan
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.stage import StageReplica, StageShape
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.link import StageLink
from trainer.pipeline.worker.replies import ReplyCache
from trainer.pipeline.worker.runtime import Runtime
from trainer.pipeline.worker.service import StageService
from trainer.pipeline.worker.stage_executor import StageExecutor
from trainer.pipeline.worker.stepping import StageStepper, Stepped, StepStrategy, Synchronised

__all__ = ["StageWorker"]


class StageWorker:
    """Serves a stage.

    Args:
        endpoint: not started yet; the caller starts and stops it.
        plan: the run's stages.
        stage_name: which of them.
        replica: its weights; after `start` only the compute thread may use it (see `runtime`).
        codec: of activations and gradients, on both sides of the stage.
        config: options.
        target_tokens: of the stage, for one optimizer step.
        peers: returns the stage's other workers.
        strategy: keeps replicas together; it may be set later (`stepper.strategy`), in the compute thread.
        meter: measures what is sent.
        batches: whether forward requests are computed together, as suits `StageConfig.backward` ``recompute``.
        num_fragments: parts the strategy synchronises separately (DiLoCo's fragments, SPARTA's slices).
        max_lead: versions another worker may be ahead and still be followed.
        clock: seconds; CLOCK_BOOTTIME but in tests.
        on_step: called after each step, in the compute thread.
        on_round: called after each round, in the compute thread.
        drivers: whose micro-batches are computed and counted; see `StageService`.
        keeper: who may have any of them refused; see `StageService`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: StagePlan,
        stage_name: str,
        replica: StageReplica,
        codec: ActivationCodec,
        config: WorkerConfig,
        *,
        target_tokens: int,
        peers: Callable[[], tuple[Peer, ...]] = tuple,
        strategy: StepStrategy | None = None,
        meter: LinkMeter | None = None,
        batches: bool = False,
        num_fragments: int = 1,
        max_lead: int = 50,
        clock: Callable[[], float] = boottime_s,
        on_step: Stepped | None = None,
        on_round: Synchronised | None = None,
        drivers: Callable[[], Collection[PeerId]] | None = None,
        keeper: Callable[[], PeerId | None] | None = None,
    ) -> None:
        self.replica = replica
        self.replies = ReplyCache(config, num_fragments=num_fragments, clock=clock)
        self.shared = self.replies.shared
        self.stepper = StageStepper(
            endpoint,
            replica,
            self.replies,
            config,
            target_tokens=target_tokens,
            peers=peers,
            strategy=strategy,
            max_lead=max_lead,
            clock=clock,
            on_step=on_step,
            on_round=on_round,
        )
        self.runtime = Runtime(config, clock=clock, between=self.stepper.between)
        self.stepper.on_news = self.runtime.wake
        self.link = StageLink(StageShape.of(plan.config, replica.kind), codec, meter)
        max_batch_size = config.max_batch_size if batches else 1
        self.executor = StageExecutor(
            stage_name, replica, self.runtime, self.link, self.replies, max_batch_size=max_batch_size
        )
        self.service = StageService(endpoint, plan, self.executor, config, drivers=drivers, keeper=keeper)

    def register(self) -> None:
        """Registers the stage's methods; before the endpoint starts."""
        self.service.register()
        self.stepper.register()

    def start(self) -> None:
        """Starts the compute thread."""
        self.runtime.start()

    async def run(self) -> None:
        """Exchanges progress with the stage's others and detects suspensions of this process, until it is cancelled.

        Raises:
            TrainerError: optimizer or strategy cannot go on.
        """
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.stepper.run()), loop.create_task(self.service.suspend_detector.run())]
        failure = asyncio.wrap_future(self.runtime.failure)
        try:
            done, _ = await asyncio.wait([*tasks, failure], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, timeout_s: float = 30.0) -> bool:
        """Ends the compute thread after its current job; returns whether it ended in time."""
        ended = await asyncio.get_running_loop().run_in_executor(None, self.runtime.stop, timeout_s)
        self.link.close()
        return ended
