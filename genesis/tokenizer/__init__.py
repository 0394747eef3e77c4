"""The tokenizer toolkit: learn, grow, encode, decode and export one byte-level BPE vocabulary.

- `NeuroTokenizer` is the vocabulary with all that is done with it.
- `make_engine`, `GigatokenEngine` and `TiktokenEngine` turn bytes into ids; all give the same ids.
- `export_tokenizer` writes the forms that other libraries read.

Importing this package imports none of tokenizers, gigatoken, tiktoken, numpy or pydantic: the names below are looked
up when first used. The learner's helper processes, which need none of them to count words, start 0.3 s sooner for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genesis.tokenizer.engines import EncodedBatch, Engine, GigatokenEngine, TiktokenEngine, make_engine
    from genesis.tokenizer.export import (
        export_tokenizer,
        hf_tokenizer_config,
        hf_tokenizer_json,
        tiktoken_ranks,
    )
    from genesis.tokenizer.neuro import NeuroTokenizer

__all__ = [
    "EncodedBatch",
    "Engine",
    "GigatokenEngine",
    "NeuroTokenizer",
    "TiktokenEngine",
    "export_tokenizer",
    "hf_tokenizer_config",
    "hf_tokenizer_json",
    "make_engine",
    "tiktoken_ranks",
]

_HOMES = {
    "EncodedBatch": "engines",
    "Engine": "engines",
    "GigatokenEngine": "engines",
    "NeuroTokenizer": "neuro",
    "TiktokenEngine": "engines",
    "export_tokenizer": "export",
    "hf_tokenizer_config": "export",
    "hf_tokenizer_json": "export",
    "make_engine": "engines",
    "tiktoken_ranks": "export",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
