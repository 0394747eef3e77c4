"""Aggregation that a minority of broken or lying members cannot subvert: rules, gradient validation, weights.

    found = sum of moments(part_rows, reference_part) over the parts, the slices of all reducers added in one order
    decision = decide(found, weights, config)            # the same at every member
    result = reduce_part(part_rows, weights, config, decision, reference_part)   # part by part, by its reducer

Guarantees: a NaN, an infinity or a claimed weight of 1e12 changes nothing or is bounded; every function is
deterministic, and ``decide`` across machines too; if the members are too few for a rule, the note names the fallback.
The trade-off: exact second moments (float64), the only barrier of a round, wherever a rule looks at whole vectors.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
