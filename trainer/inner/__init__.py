"""The inner loop: what one node does between two synchronisations, on its own data, with its own AdamW.

loop = InnerLoop(model, make_optimizer(model, config), config, iter(dataset), device, on_loss=dataset.report_loss)
result = loop.step()
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
