"""An encoding of tiktoken in Hugging Face's form, so that a store has one form of what was made elsewhere.

tiktoken merges the two neighbours whose joined bytes have the lowest rank, however they came about; Hugging Face's BPE
merges listed pairs. So every way to cut a token into two tokens is listed, in the order of ranks, and a word that is a
token is taken whole (``ignore_merges``), as tiktoken does. Patterns are written in another dialect: tiktoken's ``$`` is
the end of the text and its quantifiers are possessive. Whether all of that gives tiktoken's ids is not argued but
tried, on `agreement.check_texts`: an encoding that comes out otherwise is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from genesis.errors import TokenizerError, UsageError
from genesis.tokenizer.agreement import check_texts, first_difference
from genesis.tokenizer.engines import EncodedBatch, HuggingFaceEngine
from genesis.tokenizer.export import PRINTABLE_BYTES

if TYPE_CHECKING:
    from tiktoken import Encoding

T = TypeVar("T")

TIKTOKEN_PREFIX: Final = "tiktoken:"

_DOWNLOAD_TIMEOUT_S: Final = 300.0
"""For a file of 0.5 to 4 MB; tiktoken itself would wait for ever."""

_GPT2_PATTERN: Final = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_PATTERNS: Final = {
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s""": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s++\z|\s*[\r\n]|\s+(?!\S)|\s""",
}
"""cl100k's pattern, in the dialect of Hugging Face's regular expressions; what is not here is taken as it is."""


def hugging_face_form(name: str) -> str:
    """An encoding as a ``tokenizer.json``.

    Args:
        name: as `tiktoken.get_encoding` takes it.

    Raises:
        UsageError: there is no encoding of that name.
        TokenizerError: its files cannot be had, or it cannot be expressed.
    """
    encoding = _encoding(name)
    text = json.dumps(_form(encoding), ensure_ascii=False)
    _check_equal(encoding, text)
    return text


def _encoding(name: str) -> Encoding:
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UsageError(f"--tokenizer: expected {TIKTOKEN_PREFIX} and one of {', '.join(known)}, found {name!r}")
    try:
        return _within(_DOWNLOAD_TIMEOUT_S, lambda: tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong digest is a ValueError.
        raise TokenizerError(
            f"tiktoken cannot get the files of {name!r} ({type(error).__name__}); where there is a network, run "
            f"TIKTOKEN_CACHE_DIR=DIR python -c \"import tiktoken; tiktoken.get_encoding('{name}')\", copy DIR here, "
            "and run the same command with TIKTOKEN_CACHE_DIR=DIR"
        ) from None


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises; `TimeoutError` after ``timeout_s``, while a daemon thread goes on with it."""
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  raised again below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="tiktoken-files", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer in {timeout_s:.0f} s")
    return results[0]


def _form(encoding: Encoding) -> dict[str, object]:
    # tiktoken's own documentation extends encodings by these three attributes; there is no public way.
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    names = {token: _printable(token) for token in ranks}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token, token_id in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(encoding._pat_str, byte_level),
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            # The special tokens as well: Hugging Face numbers those it does not find here by their order.
            "vocab": {names[token]: rank for token, rank in ranks.items()} | special,
            "merges": [[names[left], names[right]] for left, right in _merges(ranks)],
        },
    }


def _pre_tokenizer(pattern: str, byte_level: dict[str, object]) -> dict[str, object]:
    if pattern == _GPT2_PATTERN:
        return {**byte_level, "use_regex": True}
    pattern = _PATTERNS.get(pattern, pattern)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to cut a token into two tokens, tokens in the order of their ranks."""
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _printable(token: bytes) -> str:
    return "".join([PRINTABLE_BYTES[byte] for byte in token])


def _check_equal(encoding: Encoding, text: str) -> None:
    """Holds the form against tiktoken itself.

    Raises:
        TokenizerError: they give other ids for a text.
    """
    texts = check_texts(tuple(encoding.special_tokens_set))
    theirs = [np.array(encoding.encode_ordinary(each.decode()), dtype=np.uint32) for each in texts]
    expected = EncodedBatch(np.concatenate(theirs), np.cumsum([0, *map(len, theirs)]))
    engine = HuggingFaceEngine(text.encode())
    different = first_difference(texts, expected, engine.encode_batch(texts))
    if different is not None:
        raise TokenizerError(
            f"{TIKTOKEN_PREFIX}{encoding.name} cannot be written in Hugging Face's form: {different!r} would get other "
            "ids; take the tokenizer.json of a model that uses it"
        )
