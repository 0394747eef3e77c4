"""The tokenizer toolkit: learn, grow, encode, decode and export one byte-level BPE vocabulary.

- `NeuroTokenizer` is the vocabulary with all that is done with it.
- `FrozenTokenizer` is one made elsewhere (`import_vocabulary`), which is only encoded and decoded with.
- `choose_encoder` says what encodes a store's documents, for whatever process does it.
- `make_engine`, `GigatokenEngine` and `TiktokenEngine` turn bytes into ids; all give the same ids.
- `export_tokenizer` writes the forms that other libraries read.

Importing this package imports none of tokenizers, gigatoken, tiktoken, numpy or pydantic: the names below are looked
up when first used. The learner's helper processes, which need none of them to count words, start 0.3 s sooner for it.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
