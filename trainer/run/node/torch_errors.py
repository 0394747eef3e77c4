"""Maps errors of torch that a user can mend to one line: no memory left, a rank that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trainer.errors import PeerUnavailableError, TrainerError

__all__ = ["torch_error_message"]

_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for main memory says; it has no class of its own."""
_BACKENDS = ("gloo", "NCCL")


@contextmanager
def torch_error_message() -> Iterator[None]:
    """Turns what torch raises for want of memory, or of a rank, into errors of this package.

    Raises:
        TrainerError: no memory was left.
        PeerUnavailableError: a rank of the process group is gone.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _no_memory(error) from error
    except RuntimeError as error:
        text = str(error)
        if _NO_MEMORY in text:
            raise _no_memory(error) from error
        if isinstance(error, dist.DistError) or any(backend in text for backend in _BACKENDS):
            raise PeerUnavailableError(
                f"a rank of the process group is gone or silent; start the job again from its checkpoints: "
                f"{text.splitlines()[0][:200]}"
            ) from error
        raise


def _no_memory(error: BaseException) -> TrainerError:
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return TrainerError(
        f"expected enough memory for model and activations, found none left ({first}); take a smaller --batch-size, "
        "--seq-len or --preset, or inner.activation_checkpointing=true"
    )
