"""The state of every random generator of the process: python's, numpy's, torch's on the CPU and on each GPU in use.

Generators that the program seeds itself (the loader's, the init's) are functions of their seeds and need no saving.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from trainer.errors import CheckpointMismatchError

_VERSION: Final = 1
_NUMPY_KIND: Final = "MT19937"

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """Returns the state of all generators, as values that ``torch.load(weights_only=True)`` takes."""
    python_version, python_words, python_gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    cuda_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "version": _VERSION,
        "python": (python_version, torch.tensor(python_words, dtype=torch.int64), python_gauss),
        "numpy": (
            torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ),
        "torch_cpu": torch.get_rng_state(),
        "torch_cuda": torch.cuda.get_rng_state_all() if cuda_in_use else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; with another number of GPUs, for those that both have, with a warning.

    Raises CheckpointMismatchError if it is no such state; no generator was changed then.
    """
    if state.get("version") != _VERSION:
        raise CheckpointMismatchError(
            f"expected random state of version {_VERSION}, found {state.get('version')!r}; "
            "use the release that wrote it"
        )
    try:
        python_version, python_words, python_gauss = state["python"]
        python = (int(python_version), tuple(python_words.tolist()), python_gauss)
        key, position, has_gauss, gauss = state["numpy"]
        numpy = (_NUMPY_KIND, key.numpy().astype(np.uint32), int(position), int(has_gauss), float(gauss))
        cpu, cuda = state["torch_cpu"], list(state["torch_cuda"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(cpu)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointMismatchError(f"expected the state of the random generators, found another: {error}") from error
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda and len(cuda) != count:
        logger.warning("random state was saved with %d GPUs and there are %d: not resumed to the bit", len(cuda), count)
    for index, cuda_state in enumerate(cuda[:count]):
        torch.cuda.set_rng_state(cuda_state, index)
