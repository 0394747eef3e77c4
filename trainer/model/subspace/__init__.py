"""Subspace networks: models whose residual stream needs a fraction of the bytes at every stage boundary.

    config = SubspaceConfig(rank=8).applied_to(preset("tiny", 32_000), free_layers=2)   # the model's part
    model = build_model(config, seed)                                 # or build_stage: the same weights
    SubspaceConstraint(model, config).attach(optimizer)               # or its parts by hand, where steps are taken

The residual stream is ``e[ids] + U·c`` at every stage boundary: ``e`` a fixed random embedding that both ends make from
a seed, ``U`` an orthonormal basis of ``rank`` columns, and only ``c`` travels (`trainer.compression.activations`).
Everything that is trained and writes to the stream (embedding rows, ``o_proj``, ``down_proj``) stays within span(U),
and re-ordered norms have a constant gain, which keeps it there. Behind the last boundary layers are free.

Guarantees: the constraint belongs to the model, so a whole and its cut train alike (gradients agree to 1e-5); ``U`` and
``e`` are the same bits on every machine. The trade-off: each stage holds ``e`` (vocabulary · dim · 4 bytes), and
context moves through ``rank`` dimensions instead of ``dim``: with 16 times fewer bytes `tiny`, 1,024 ids, two of four
layers free, had a loss of 4.587 on held-out text after 200 steps, against 4.566 (0.5 %).
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
