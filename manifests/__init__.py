"""The contracts: a typed model of every file that crosses a border between the parts, and its one serialised form.

README.md beside this file is the format page. Guarantees: what was written is read back equal; the same value gives
the same bytes; whatever breaks a contract raises a `ContractError` that says what was expected and found. Nothing
here opens a network connection or unpickles anything.

A name's module is imported when the name is first used: a training node that starts on shards it has already needs no
model of a file, and so neither pydantic nor cryptography, 0.15 s of its 1.2 s.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
