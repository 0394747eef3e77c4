"""Subspace networks: models whose residual stream needs a fraction of the bytes at every stage boundary.

    config = SubspaceConfig(rank=8).applied_to(preset("tiny", 32_000), free_layers=2)   # the model's part
    model = build_model(config, seed)                                 # or build_stage: the same weights
    SubspaceConstraint(model, config).attach(optimizer)               # or its parts by hand, where steps are taken

The residual stream is ``e[ids] + U·c`` at every stage boundary: ``e`` a fixed random embedding that both ends make from
a seed, ``U`` an orthonormal basis of ``rank`` columns, and only ``c`` travels (`trainer.compression.activations`).
Everything that is trained and writes to the stream stays within span(U); layers behind the last boundary are free. The
constraint belongs to the model, so a whole and its cut train alike (gradients agree to 1e-5).
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
