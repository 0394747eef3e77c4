"""The driver of a pipeline: takes micro-batches through the stages by way of whichever workers hold them.

    driver = PipelineDriver(endpoint, plan.names, directory, work, links, DriverConfig(), on_result=note)
    await driver.run()                     # until the work is done, or `stop`

Guarantees: a micro-batch is counted in every stage once, or is said to be lost, with the stage and the reason, whatever
workers do: what may have been counted is asked after at the same worker until that is clear, and is never sent to
another one before. The work of a stage is shared in the ratio of its workers' measured speeds; whoever does not answer
or answers nonsense is left out for a while. Nothing waits without end but for a stage that has no worker left, and
then the log says which. The trade-off: a driver holds the inputs of each stage for what is under way (hub), or trusts
the first worker of a chain to say what the others did (chain), whose activations then cross no link twice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.driver.balancer import Balancer, BalancerConfig, Grant, WorkerLoad
    from trainer.driver.bans import Bans
    from trainer.driver.config import DriverConfig, Routing

_MODULES = {
    "Balancer": "trainer.driver.balancer",
    "BalancerConfig": "trainer.driver.balancer",
    "Bans": "trainer.driver.bans",
    "DriverConfig": "trainer.driver.config",
    "Grant": "trainer.driver.balancer",
    "Routing": "trainer.driver.config",
    "WorkerLoad": "trainer.driver.balancer",
}

__all__ = ["Balancer", "BalancerConfig", "Bans", "DriverConfig", "Grant", "Routing", "WorkerLoad"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.driver' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
