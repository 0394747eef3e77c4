"""A node's own measure of what it trains: loss on shards that nobody trains on, sampled text, published tasks.

`HeldOut` has the tokens and measures a model on them; `Evaluator` says when, during training; `harness` hands an export
to EleutherAI's lm-evaluation-harness, which is optional.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
