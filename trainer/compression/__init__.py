"""Fewer bytes between nodes: codecs of vectors (gradients, parameters) and of activations.

`vectors` are fp32, fp16 and int8 with one scale a block, for rounds; `activations` are the codecs on the links between
stages, among them the lossless coordinates of a subspace network (`trainer.model.subspace`).
"""

from __future__ import annotations

__all__: list[str] = []
