"""SparseLoCo: DiLoCo's rounds with 64 of 4,096 values of two bits each, 0.17 bits a parameter (arXiv 2508.15706).

After H inner steps from the shared θ, with AdamW or Muon inside:

    Δ = θ − θ_local      m = β·e + Δ      ĥ = Q(TopK(m))      e ← m − ĥ      θ ← θ − α · mean of the members' ĥ

This is the cycle of `trainer.outer.diloco` without momentum: the same transaction (prepare, round, commit or nothing),
checkpoints, late joiners, fragments and overlap. Its own are the codec (`trainer.compression.sparse`), the aggregation
(`trainer.aggregation.sparse`) and the decay of e (`trainer.outer.engine.chunk_order`). A joiner begins with θ and no e.
Where a round failed, e stays as it was, since θ_local goes on and the next Δ has that work in it. It is dropped where
the others left a member out for what it sent, and keeps everything where that did not arrive.

The trade-off against int8 is memory for bytes: 4 bytes a parameter for e, 47 times less to send at equal H. Momentum
and last result, which this strategy does not read, are still part of what members share and joiners fetch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
