"""The baseline: gradients averaged in every step, by PyTorch's DistributedDataParallel.

What DiLoCo is compared with, in loss at equal tokens and in bytes on the wire (4 bytes a parameter, out and in, each
step). The model is wrapped, and the outer strategy has nothing to do: replicas that take equal steps stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.outer.engine.strategy import OuterResult, StateValue

__all__ = ["EveryStepStrategy", "ddp_model"]

_VERSION = 1


def ddp_model(
    model: nn.Module, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Wrap a model so that each backward pass averages gradients over the group.

    Parameters become those of the group's first rank. Gradients are views of the communication buckets, which saves a
    copy of them.

    Args:
        model: on ``device`` already.
        device: where it lives; None or a CPU for gloo.
        group: whom to average with; all ranks by default.

    Raises:
        TrainerUsageError: there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TrainerUsageError("DDP needs a process group, found none: start the ranks with torchrun")
    device_ids = [device] if device is not None and device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group, gradient_as_bucket_view=True)


class EveryStepStrategy:
    """No outer step: gradients were averaged in the step itself."""

    def __init__(self) -> None:
        self._num_steps = 0

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Count the step."""
        self._num_steps += 1
        return None

    def drain(self) -> OuterResult | None:
        """Nothing is under way."""
        return None

    def state_dict(self) -> dict[str, StateValue]:
        """The number of steps, for the checkpoint to be of the same form."""
        return {"version": _VERSION, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on counting.

        Raises:
            CheckpointMismatchError: another version, or another strategy's state.
        """
        num_steps = state.get("num_steps")
        if state.get("version") != _VERSION or not isinstance(num_steps, int):
            raise CheckpointMismatchError(
                f"expected every-step state of version {_VERSION}, found {sorted(state)}; was it DiLoCo's?"
            )
        self._num_steps = num_steps
