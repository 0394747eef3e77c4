"""One training node, put together: what `python -m trainer` runs.

    run_node(RunConfig(node_id="gpu-7", ...), line, stop)

``starting`` builds it: ``resuming`` finds the checkpoint to go on from, ``resolving`` decides sizes, ``cluster`` joins
torchrun's ranks. ``training`` is the loop; ``replica`` the model with all that trains it, ``network`` the side that
talks to others, ``watching`` the side people and programs look at, ``store_watch`` what the store has got meanwhile.

Guarantees: a node that is killed goes on as if it had not been, on a CPU bit for bit; whatever a user can cause is an
error of `trainer.errors` or of the loader. What the loop costs beside the inner step is under 3 % of a `tiny` step.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
