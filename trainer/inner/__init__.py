"""The inner loop: what one node does between two synchronisations, on its own data, with its own AdamW.

    optimizer = make_optimizer(model, config)
    loop = InnerLoop(model, optimizer, config, iter(dataset), device, on_loss=dataset.report_loss)
    result = loop.step()

Guarantees: a step is applied whole or not at all (a loss or gradient that is not finite touches no parameter and no
moment); the loop's state resumes to the bit on a CPU with a fixed number of threads; no memory the size of the model is
allocated beside the gradients. The trade-off: the host waits for the device once a step, before the optimizer runs, so
that a bad step can be dropped; what follows hides behind the optimizer's kernels.

Modules that need torch (1 to 2 s) are imported when one of their names is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
