"""Averaged gradients (spec P-36, P-37): replicas add up gradients, and take one step together, the same at all of them.

    trainer = GradTrainer(model, GradConfig(), collective, optimizer=adamw, lr_of=schedule, source=replica, …)
    outcome = trainer.look()       # between two micro-batches

After each round all members have the same bits, moments included. Codecs (fp32, fp16, int8 with error feedback) are the
collective's; with ``powersgd_rank`` matrices travel as two thin factors, by `trainer.outer.engine.powersgd`.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
