"""Codecs of activations on the links between stages, and what they cost.

    codec = activation_codec("subspace+fp16", basis_of(128, 8, 0), fixed_table_of(config))
    codec.decode(codec.encode(hidden, ids).tensors, ids)              # hidden, to 2e-8 (fp16: 5e-4)

fp32, fp16 and int8 send the stream itself. With a subspace network (`trainer.model.subspace`) only the coordinates
travel: dim / rank times fewer bytes, both ways. The codec belongs to the link, and loses nothing of a constrained model
in fp32 (2e-8 after 100 AdamW steps, averages and a reload). The trade-off: both ends hold the fixed embedding.

Modules are imported when a name is first used, since torch takes 1 to 2 s.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
