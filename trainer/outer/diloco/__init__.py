"""DiLoCo: many inner steps on each node, then one outer step all nodes agree on; 500 times less to send."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
