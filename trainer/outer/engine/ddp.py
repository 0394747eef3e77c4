"""The every-step baseline: gradients averaged in every step by PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.outer.engine.strategy import OuterResult, StateValue

_VERSION = 1


def ddp_model(model: nn.Module, device: torch.device | None = None) -> DistributedDataParallel:
    """Wraps a model, on ``device`` already, so that each backward pass averages gradients over all ranks.

    It starts as that of the first rank. The device is None or a CPU for gloo.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TrainerUsageError("DDP needs a process group, found none: start the ranks with torchrun")
    device_ids = [device] if device is not None and device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


class EveryStepStrategy:
    """An outer strategy without outer steps: replicas that take equal steps stay equal."""

    def __init__(self) -> None:
        self._num_steps = 0

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts the step."""
        self._num_steps += 1
        return None

    def drain(self) -> OuterResult | None:
        """Returns None: there are no rounds."""
        return None

    def state_dict(self) -> dict[str, StateValue]:
        """Returns the number of steps, so that checkpoints have the same form."""
        return {"version": _VERSION, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on counting; raises CheckpointMismatchError (another version, or another strategy's state)."""
        num_steps = state.get("num_steps")
        if state.get("version") != _VERSION or not isinstance(num_steps, int):
            raise CheckpointMismatchError(
                f"expected every-step state of version {_VERSION}, found {sorted(state)}; was it DiLoCo's?"
            )
        self._num_steps = num_steps
