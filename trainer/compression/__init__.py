"""Fewer bytes between nodes: codecs of vectors (`vectors`) and of links between stages (`activations`).

What options need of them, names and bounds, stands here, so that reading a configuration does not import torch.
"""

from __future__ import annotations

from typing import Final, Literal

CodecName = Literal["fp32", "fp16", "int8", "int4", "e3m0", "sparse"]
"""Codecs of vectors (`trainer.compression.vectors`)."""
DEFAULT_RANK: Final = 64
"""Columns of PowerSGD's factors (`trainer.compression.powersgd`)."""
MAX_RANK: Final = 4096
