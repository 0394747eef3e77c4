"""One training node, put together: what `python -m trainer` runs.

    run_node(RunConfig(node_id="gpu-7", ...), display, stop)

Guarantees: a node that is killed goes on as if it had not been, on a CPU bit for bit; what a user can cause is an error
of `trainer.errors` or of the loader. The loop costs under 3 % of a `tiny` step beside the inner step.

Modules are imported when one of their names is first used: who needs the peer book alone starts 0.7 s sooner.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
