"""Async SPARTA (spec P-33): replicas take optimizer steps of their own and average a slice of parameters now and then.

    trainer = SpartaTrainer(model, SpartaConfig(), collective, optimizer=optimizer)
    loop.step(); outcome = trainer.after_inner_step(num_batches)

``num_slices`` rounds in a row touch each parameter exactly once; a round changes parameters only when its result is
whole, and keeps the steps taken meanwhile; moments are never averaged. Replicas are close, never bit-identical.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
