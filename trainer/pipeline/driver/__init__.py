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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
