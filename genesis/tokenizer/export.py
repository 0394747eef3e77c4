"""What each id of a vocabulary spells, and the forms other libraries read: Hugging Face's and tiktoken's.

Guarantees: every form gives the ids of `NeuroTokenizer`, also for text that spells a special token: ``<|eos|>`` in a
document is seven bytes, never id 2. Three decisions make it so:

- The ten special tokens stand in ``model.vocab`` only. Listed in ``added_tokens`` they would be searched for in every
  text (one of 8,200 documents of documentation contained ``<|pad|>``).
- ``tokenizer_config.json`` names pad, bos, eos and unk, which makes transformers add them as special tokens after
  all; ``split_special_tokens: true`` keeps it from matching them in text. To have prompts parsed for ``<|eos|>``,
  pass ``split_special_tokens=False`` to ``from_pretrained``.
- No beginning or end is added by itself: in the shards one EOS follows each document, and that is the trainer's job.

The same vocabulary gives the same bytes. 32,000 ids take 1.9 MB and 0.1 s.

Of the bytes: every id from 10 up spells at least one byte, no two the same bytes, none more than `MAX_TOKEN_BYTES`; a
list of merges that breaks this is refused before memory is spent on it. Both rules hold for whatever was learned (the
learner cuts words at `MAX_TOKEN_BYTES`), and both are needed: rank files name tokens by their bytes, and forty merges
of a token with itself would spell a terabyte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from genesis.errors import TokenizerError, UsageError
from genesis.store.durable import TemporaryFile, make_folders, sync_folder
from genesis.store.folder import folder_errors
from manifests import BYTE_OFFSET, SPECIAL_TOKENS, FrozenVocabularyFile, Vocabulary, VocabularyFile

MAX_TOKEN_BYTES = 1024
"""The longest token: 256 code points of 4 bytes, where the learner cuts words (`words.MAX_WORD_CHARACTERS`)."""

Pair = tuple[int, int]
"""The ids a merge joins, left and right."""

_REMEDY = "take a sound copy from the store's vocabulary/ folder"


def token_bytes_of(pairs: Sequence[Pair]) -> list[bytes]:
    """The bytes of every id; those of the ten special tokens are empty, so that decoding drops them.

    Args:
        pairs: the merges, in the order of their ids.

    Returns:
        bytes of id *i* at index *i*; ``266 + len(pairs)`` entries.

    Raises:
        TokenizerError: a token would be longer than `MAX_TOKEN_BYTES`.
    """
    token_bytes = [b""] * BYTE_OFFSET + [bytes([byte]) for byte in range(256)]
    for left, right in pairs:
        spelled = token_bytes[left] + token_bytes[right]
        if len(spelled) > MAX_TOKEN_BYTES:
            raise TokenizerError(
                f"tokenizer.json: expected tokens of at most {MAX_TOKEN_BYTES} bytes, found {len(spelled)} bytes for "
                f"id {len(token_bytes)} ({left}_{right}); {_REMEDY}"
            )
        token_bytes.append(spelled)
    return token_bytes


def check_token_bytes(token_bytes: Sequence[bytes]) -> None:
    """Refuses a vocabulary two of whose ids spell the same bytes.

    Raises:
        TokenizerError: naming the first such id.
    """
    tokens = token_bytes[BYTE_OFFSET:]
    if len(set(tokens)) == len(tokens):
        return
    first_ids: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens, start=BYTE_OFFSET):
        first_id = first_ids.setdefault(token, token_id)
        if first_id != token_id:
            raise TokenizerError(
                f"tokenizer.json: expected every id to spell bytes of its own, found {token[:40]!r} for ids {first_id} "
                f"and {token_id}; {_REMEDY}"
            )


ExportTarget = Literal["hf", "tiktoken"]

_NO_LENGTH_LIMIT = 10**30
"""What transformers writes for a tokenizer that has no longest input."""


def hf_tokenizer_json(vocabulary: VocabularyFile) -> bytes:
    """``tokenizer.json`` as ``tokenizers``, transformers and gigatoken read it.

    Raises:
        TokenizerError: two ids spell the same bytes, or one spells the name of a special token.
    """
    pairs = vocabulary.pairs()
    names = _printable(_checked_token_bytes(vocabulary))
    vocab = {name: token_id for token_id, name in enumerate(names)}
    if len(vocab) != len(names):
        clash = next(name for token_id, name in enumerate(names) if vocab[name] != token_id)
        raise TokenizerError(f"tokenizer.json: expected no token spelt like a special token, found {clash!r}")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [[names[left], names[right]] for left, right in pairs],
    }
    return _json(_pipeline(vocabulary.pattern) | {"model": model})


def hf_tokenizer_config(vocabulary: VocabularyFile) -> bytes:
    """``tokenizer_config.json``, for ``PreTrainedTokenizerFast.from_pretrained``; the same for every vocabulary."""
    del vocabulary
    pad, bos, eos, unk = SPECIAL_TOKENS[:4]
    config = {
        "add_prefix_space": False,
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": _NO_LENGTH_LIMIT,
        "pad_token": pad,
        "split_special_tokens": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
    }
    return _json(config)


def _frozen_config(vocabulary: FrozenVocabularyFile) -> bytes:
    """``tokenizer_config.json`` of a vocabulary made elsewhere; special tokens in prompts are parsed, as is usual.

    The class leaves tokenizer.json as it is; a class named after a model would put its own parts in.
    """
    config: dict[str, object] = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LENGTH_LIMIT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    config |= {f"{role}_token": token.token for role, token in vocabulary.special_tokens.items()}
    return _json(dict(sorted(config.items())))


def token_ranks(vocabulary: VocabularyFile) -> dict[bytes, int]:
    """The id of every token but the special ones, by its bytes: tiktoken's ``mergeable_ranks``.

    Raises:
        TokenizerError: two ids spell the same bytes.
    """
    token_bytes = _checked_token_bytes(vocabulary)
    return {token: token_id for token_id, token in enumerate(token_bytes) if token_id >= BYTE_OFFSET}


def tiktoken_ranks(vocabulary: VocabularyFile) -> bytes:
    """The ranks as ``tiktoken.load.load_tiktoken_bpe`` reads them: a line ``base64 id`` for each token, ids from 10.

    Raises:
        TokenizerError: two ids spell the same bytes.
    """
    ranks = token_ranks(vocabulary)
    return b"".join(b"%s %d\n" % (base64.b64encode(token), token_id) for token, token_id in ranks.items())


def _tiktoken_description(vocabulary: VocabularyFile) -> bytes:
    special_tokens = {name: token_id for token_id, name in enumerate(SPECIAL_TOKENS)}
    return _json(
        {
            "name": "genesis",
            "pat_str": vocabulary.pattern,
            "ranks": "genesis.tiktoken",
            "special_tokens": special_tokens,
        }
    )


_TARGETS: Mapping[str, Mapping[str, Callable[[VocabularyFile], bytes]]] = {
    "hf": {"tokenizer.json": hf_tokenizer_json, "tokenizer_config.json": hf_tokenizer_config},
    "tiktoken": {"genesis.tiktoken": tiktoken_ranks, "genesis.json": _tiktoken_description},
}


def export_files(vocabulary: Vocabulary, target: str) -> dict[str, bytes]:
    """The files of an export, by the names they have below a store's or a folder's root.

    Args:
        vocabulary: what to export; one made elsewhere goes to Hugging Face's form only, as its maker's own file.
        target: ``hf`` or ``tiktoken``.

    Raises:
        UsageError: there is no such target.
        TokenizerError: the vocabulary cannot be exported.
    """
    if target not in _TARGETS:
        raise UsageError(f"expected an export to {' or '.join(_TARGETS)}, found {target!r}")
    if isinstance(vocabulary, FrozenVocabularyFile):
        if target != "hf":
            raise UsageError(f"expected an export to hf of a vocabulary made elsewhere, found {target!r}")
        return {
            "hf/tokenizer.json": vocabulary.tokenizer_json.encode(),
            "hf/tokenizer_config.json": _frozen_config(vocabulary),
        }
    return {f"{target}/{name}": write(vocabulary) for name, write in _TARGETS[target].items()}


def export_tokenizer(vocabulary: Vocabulary, target: ExportTarget, folder: Path) -> list[Path]:
    """Writes an export into a folder: ``hf/…`` or ``tiktoken/…`` below it.

    Returns:
        The files written.

    Raises:
        UsageError: there is no such target.
        TokenizerError: the vocabulary cannot be exported.
        StoreError: a file cannot be written; those written before are whole.
    """
    paths = []
    for name, body in export_files(vocabulary, target).items():
        write_file(folder / name, body)
        paths.append(folder / name)
    return paths


def _checked_token_bytes(vocabulary: VocabularyFile) -> list[bytes]:
    token_bytes = token_bytes_of(vocabulary.pairs())
    check_token_bytes(token_bytes)
    return token_bytes


def _pipeline(pattern: str) -> dict[str, object]:
    """All of ``tokenizer.json`` but the model: split by the pattern, nothing normalised, bytes made printable."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
    }


def _printable_bytes() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: 0x100 + order for order, byte in enumerate(others)}


_PRINTABLE = _printable_bytes()

PRINTABLE_BYTES = bytes(range(256)).decode("latin-1").translate(_PRINTABLE)
"""The character that stands for each byte in a byte-level vocabulary's file."""


def _printable(token_bytes: list[bytes]) -> list[str]:
    tokens = [token.decode("latin-1").translate(_PRINTABLE) for token in token_bytes[BYTE_OFFSET:]]
    return [*SPECIAL_TOKENS, *tokens]


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def write_file(path: Path, body: bytes) -> None:
    """Puts ``body`` at ``path``: the old file or the new one is there at any moment, and the new one is durable.

    Raises:
        StoreError: it cannot be written; the message says why.
    """
    with folder_errors(path.parent, f"write {path}", size_bytes=len(body)):
        make_folders(path.parent)
        with TemporaryFile(path.parent) as file:
            file.write(memoryview(body))
            file.replace(path)
        sync_folder(path.parent)
