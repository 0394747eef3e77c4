"""One thread for torch: the tests share two cores, and sums in a fixed order are part of what they check."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
