"""The driver of a pipeline: takes micro-batches through the stages by way of the workers that hold them.

    driver = PipelineDriver(endpoint, plan.names, directory, work, LinkForm(codec, dim), DriverConfig())
    await driver.run()                     # until the work is done, or `stop`

Nothing waits without end except for a stage without workers, which the log names. The trade-off: by hub, a driver
holds the inputs of each stage for what is in flight, and every activation crosses its link twice; by chain, the driver
sees neither activations nor each worker's time.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
