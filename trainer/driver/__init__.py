"""The driver of a pipeline: takes micro-batches through the stages by way of whichever workers hold them.

    driver = PipelineDriver(endpoint, plan.names, directory, work, LinkForm(codec, dim), DriverConfig())
    await driver.run()                     # until the work is done, or `stop`

Guarantees: a micro-batch is counted in every stage once, or is said to be lost, with the stage and the reason, whatever
workers do: what may have been counted is asked after at the same worker until that is clear, and is never sent to
another one before. The work of a stage is shared in the ratio of its workers' measured speeds; whoever does not answer
or answers nonsense is left out for a while. Nothing waits without end but for a stage that has no worker left, and
then the log says which. The trade-off: a driver holds the inputs of each stage for what is under way, and every
activation crosses its link twice (hub); or activations go from worker to worker, and it sees neither them nor what each
worker's part of the time was (chain).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.driver.balancer import Balancer, BalancerConfig, Grant, WorkerLoad
    from trainer.driver.bans import Bans
    from trainer.driver.config import DriverConfig, Routing
    from trainer.driver.driver import PipelineDriver
    from trainer.driver.links import LinkForm
    from trainer.driver.results import DriverStatus, Fate, HopTime, MicroBatchResult, Outcome, StageStatus
    from trainer.driver.steps import StepLoss
    from trainer.driver.workers import StageDirectory, StageWorker, workers_in

_MODULES = {
    "Balancer": "balancer",
    "BalancerConfig": "balancer",
    "Bans": "bans",
    "DriverConfig": "config",
    "DriverStatus": "results",
    "Fate": "results",
    "Grant": "balancer",
    "HopTime": "results",
    "LinkForm": "links",
    "MicroBatchResult": "results",
    "Outcome": "results",
    "PipelineDriver": "driver",
    "Routing": "config",
    "StageDirectory": "workers",
    "StageStatus": "results",
    "StageWorker": "workers",
    "StepLoss": "steps",
    "WorkerLoad": "balancer",
    "workers_in": "workers",
}

__all__ = [
    "Balancer",
    "BalancerConfig",
    "Bans",
    "DriverConfig",
    "DriverStatus",
    "Fate",
    "Grant",
    "HopTime",
    "LinkForm",
    "MicroBatchResult",
    "Outcome",
    "PipelineDriver",
    "Routing",
    "StageDirectory",
    "StageStatus",
    "StageWorker",
    "StepLoss",
    "WorkerLoad",
    "workers_in",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
