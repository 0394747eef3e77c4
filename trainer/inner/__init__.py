"""The inner loop: what one node does between two synchronisations, on its own data, with its own AdamW.

loop = InnerLoop(model, make_optimizer(model, config), config, iter(dataset), device, on_loss=dataset.report_loss)
result = loop.step()
"""

from __future__ import annotations

from trainer.inner.config import InnerConfig, batch_size_for
from trainer.inner.loop import Batch, InnerLoop, NonFiniteGuard, StepResult, make_optimizer, parameter_groups
from trainer.inner.machine import (
    autocast_for,
    choose_device,
    compiled,
    rng_state,
    set_rng_state,
    undisturbed_rng,
    use_device,
)
from trainer.inner.schedule import lr_at

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
    "undisturbed_rng",
    "use_device",
]
