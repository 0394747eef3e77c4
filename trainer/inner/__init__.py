"""The inner loop: what one node does between two synchronisations, on its own data, with its own AdamW.

    optimizer = make_optimizer(model, config)
    loop = InnerLoop(model, optimizer, config, iter(dataset), device, on_loss=dataset.report_loss)
    result = loop.step()

Guarantees: a step is applied whole or not at all (a loss or gradient that is not finite touches no parameter and no
moment); the loop's state resumes to the bit on a CPU with a fixed number of threads; no memory the size of the model is
allocated beside the gradients. The trade-off: the host waits for the device once a step, before the optimizer runs, so
that a bad step can be dropped; what follows hides behind the optimizer's kernels.
"""

from __future__ import annotations

from trainer.inner.config import InnerConfig, batch_size_for
from trainer.inner.loop import Batch, InnerLoop, NonFiniteGuard, StepResult
from trainer.inner.optimizer import lr_at, make_optimizer, parameter_groups
from trainer.inner.precision import autocast_for, choose_device, compiled
from trainer.inner.random_state import rng_state, set_rng_state

__all__ = [
    "Batch",
    "InnerConfig",
    "InnerLoop",
    "NonFiniteGuard",
    "StepResult",
    "autocast_for",
    "batch_size_for",
    "choose_device",
    "compiled",
    "lr_at",
    "make_optimizer",
    "parameter_groups",
    "rng_state",
    "set_rng_state",
]
