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
from trainer.pipeline.worker.applying import StageReplies
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.link import StageLink
from trainer.pipeline.worker.replies import ReplyCache
from trainer.pipeline.worker.runtime import Runtime
from trainer.pipeline.worker.service import StageService
from trainer.pipeline.worker.sharing import SharedThrough
from trainer.pipeline.worker.stepping import StageStepper, Stepped, StepStrategy, Synchronised

__all__ = ["StageWorker"]


def _nobody() -> tuple[Peer, ...]:
    return ()


class StageWorker:
    """Serves a stage.

    Args:
        endpoint: not started yet; the caller starts and stops it.
        plan: the run's stages.
        stage_name: which of them.
        replica: its weights; once `start` was called, the compute thread's alone (see `runtime`).
        codec: of what crosses the stage's borders, on both sides.
        config: options.
        target_tokens: of the stage, for one optimizer step.
        peers: the stage's other workers, now.
        strategy: keeps replicas together; it may be set later (`stepper.strategy`), in the compute thread.
        meter: told what is sent.
        batches: whether forward requests are computed together, as suits `StageConfig.backward` ``recompute``.
        num_fragments: parts the strategy synchronises one by one (DiLoCo's fragments, SPARTA's slices).
        max_lead: versions to follow another worker over.
        clock: seconds; CLOCK_BOOTTIME but in tests.
        on_step: told of each step, in the compute thread.
        on_round: told of each round that has ended, there.
        keepers: whose micro-batches are computed and counted; see `StageService`.
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
        peers: Callable[[], tuple[Peer, ...]] = _nobody,
        strategy: StepStrategy | None = None,
        meter: LinkMeter | None = None,
        batches: bool = False,
        num_fragments: int = 1,
        max_lead: int = 50,
        clock: Callable[[], float] = boottime_s,
        on_step: Stepped | None = None,
        on_round: Synchronised | None = None,
        keepers: Callable[[], Collection[PeerId]] | None = None,
        keeper: Callable[[], PeerId | None] | None = None,
    ) -> None:
        self.replica = replica
        self.shared = SharedThrough(num_fragments)
        self.replies: StageReplies = ReplyCache(config, clock=clock)
        self.stepper = StageStepper(
            endpoint,
            replica,
            self.replies,
            self.shared,
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
        self._link = StageLink(StageShape.of(plan.config, replica.kind), codec, meter)
        self.service = StageService(
            endpoint,
            plan,
            stage_name,
            replica=replica,
            runtime=self.runtime,
            link=self._link,
            replies=self.replies,
            shared=self.shared,
            config=config,
            batches=batches,
            keepers=keepers,
            keeper=keeper,
        )

    def register(self) -> None:
        """Makes the stage's methods answerable; before the endpoint starts."""
        self.service.register()
        self.stepper.register()

    def start(self) -> None:
        """Starts the compute thread."""
        self.runtime.start()

    async def run(self) -> None:
        """Exchanges progress with the stage's others, and watches for stops of this process, until it is cancelled.

        Raises:
            TrainerError: optimizer or strategy cannot go on.
        """
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.stepper.run()), loop.create_task(self.service.pulse.run())]
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
        """Ends the compute thread behind what it computes now; False: it did not end in time."""
        ended = await asyncio.get_running_loop().run_in_executor(None, self.runtime.stop, timeout_s)
        self._link.close()
        return ended
