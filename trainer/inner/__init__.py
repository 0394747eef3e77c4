"""The inner loop: what one node does between two synchronisations, on its own data, with its own AdamW.

    optimizer = make_optimizer(model, config)
    loop = InnerLoop(model, optimizer, config, iter(dataset), device, on_loss=dataset.report_loss)
    result = loop.step()

Guarantees: a step is applied whole or not at all (a loss or gradient that is not finite touches no parameter and no
moment); the loop's state resumes to the bit on a CPU with a fixed number of threads; the host waits for the device once
a step and no memory the size of the model is allocated beside the gradients. The trade-off: that one wait, taken before
the optimizer runs, so that a bad step can be dropped; what follows it hides behind the optimizer's kernels.

What brings torch (1 to 2 s) is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.inner.config import InnerConfig
from trainer.inner.schedule import lr_at

if TYPE_CHECKING:
    from trainer.inner.batch_size import batch_size_for
    from trainer.inner.guard import NonFiniteGuard
    from trainer.inner.loop import Batch, InnerLoop, StepResult
    from trainer.inner.optimizer import make_optimizer, parameter_groups
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

_MODULES = {
    "Batch": "trainer.inner.loop",
    "InnerLoop": "trainer.inner.loop",
    "NonFiniteGuard": "trainer.inner.guard",
    "StepResult": "trainer.inner.loop",
    "autocast_for": "trainer.inner.precision",
    "batch_size_for": "trainer.inner.batch_size",
    "choose_device": "trainer.inner.precision",
    "compiled": "trainer.inner.precision",
    "make_optimizer": "trainer.inner.optimizer",
    "parameter_groups": "trainer.inner.optimizer",
    "rng_state": "trainer.inner.random_state",
    "set_rng_state": "trainer.inner.random_state",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.inner' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
