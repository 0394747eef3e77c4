"""The model: what a node trains, from its shape to the files other programs read.

A decoder of the Llama family (RMSNorm, rotary positions, SwiGLU, grouped-query attention) with OLMo-2's normalisation
as an option. The whole and its cut into any stages give bit-identical losses and gradients (fp32 on a CPU). The
trade-off: projections stay one matrix each, so that stages, growth and export only rename; a fused query-key-value
matrix would save two launches a layer.

Modules that need torch (1 to 2 s) are imported when one of their names is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
