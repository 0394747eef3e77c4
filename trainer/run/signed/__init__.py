"""A run as its owner signs it: the file that all nodes share, and the changes of it while the run goes on.

    fields.py   which option is shared, and which may change
    files.py    `RunFile`: signed, read, written
    chain.py    `ChangeChain`: the changes, checked, in their order
    run.py      `SignedRun`: what is in force at a node, and how changes reach it; `ChangesInForce`: and its training
    sources.py  the file from a path, a web server, a store or a peer; a node's options beside it
    contact.py  a run as its owner meets it: asked how far it is, told of a change

The whole is described in docs/running-a-run.md.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
