"""Which engine encodes a vocabulary made elsewhere: gigatoken if it gives the ids of ``tokenizers``, else that.

gigatoken is a hundred times as fast, but reimplements patterns and models one by one, and what it does not know it
may refuse or get wrong. So at every start both encode the same check texts, and one different id decides for
``tokenizers``. The texts are the same on every machine: passages in some 100 languages that are packaged beside this
file, every pair of fragments known for trouble, characters of all of Unicode in contexts in which patterns look around,
long runs, and the vocabulary's own added tokens spelled out; 0.5 MB. It is a test and no proof: what no check
text holds may differ. The letters of Unicode 17 are left out, which gigatoken 0.10.0 alone knows (`engines`).

The same texts tell whether text can give the EOS, which no store may have.
"""

from __future__ import annotations

import itertools
import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from genesis.errors import TokenizerError
from genesis.tokenizer.engines import EncodedBatch, EncoderSpec, GigatokenEngine, HuggingFaceEngine
from genesis.tokenizer.export import hf_tokenizer_json
from genesis.tokenizer.frozen import encoding_form, parse_form
from manifests import FrozenVocabularyFile, Vocabulary, VocabularyFile

logger = logging.getLogger(__name__)

_PASSAGES: Final = Path(__file__).with_name("check_texts.json")

_FRAGMENTS: Final = (
    *("'s", "'S", "'ſ", "'LL", "'re", "don't", "’s", "'", "\r", "\n", "\r\n", "\n \n", " \n", "\t", " ", "   "),
    *("\x0b", "\x0c", "\x1c", "\x00", "\x7f", "\u0085", "\u00a0", "\u1680", "\u180e", "\u2003", "\u2028", "\u3000"),
    *("\u200b", "\ufeff", "1", "12", "1234567", "½", "²", "Ⅷ", "٣", "a", "word", "Word", "İ", "ß", "é", "e\u0301"),
    *("\u0301", "\u1e9b\u0323", "\u212b", "ﬁ", "中文", "ไทย", "한", "\u1112\u1161\u11ab", "Ж", "ا", "😀", "🇩🇪"),
    *("👩\u200d👧", ".", "...", "!?", "--", "(", "<|eos|>", "<|endoftext|>", "/tmp", "_", "€", "#", "{}"),
)
_RUNS: Final = ("a", "1", " ", "\n", "\t", "=", "ab", " a", "中", "é", "😀", "'s", "\r\n", "0 ")
_CONTEXT: Final = "a{c}b {c}1{c}  {c}\n{c}'s"
_EVERY: Final = 11
"""Of all code points, so many apart; coprime to what blocks are laid out by."""
_MOST_ADDED: Final = 100
"""Some vocabularies reserve hundreds of names that differ in a number."""


@cache
def check_texts(added: tuple[str, ...] = ()) -> list[bytes]:
    """The texts on which encoders are compared, UTF-8, none empty.

    Args:
        added: a vocabulary's added tokens, which are spelled out between others.
    """
    passages: list[str] = json.loads(_PASSAGES.read_bytes())["texts"]
    pairs = ["".join(pair) for pair in itertools.product(_FRAGMENTS, repeat=2)]
    runs = [run * count for run in _RUNS for count in (2, 17, 1000)]
    spelled = [
        form.format(t=token) for token in added[:_MOST_ADDED] for form in ("{t}", "a{t}b", " {t} ", "{t}{t}", "\n{t}.")
    ]
    texts = [*passages, "\n\n".join(passages), *pairs, "".join(pairs), *runs, *_characters(), *spelled]
    return [text.encode() for text in texts]


def _characters() -> list[str]:
    """Characters of every block in `_CONTEXT`, a few hundred a text; none that this Python's Unicode does not know."""
    points = [*range(0x80, 0x250), *range(0x250, 0x30000, _EVERY), *range(0xE0000, 0xE0200, _EVERY)]
    known = [chr(point) for point in points if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co")]
    contexts = [_CONTEXT.replace("{c}", character) for character in known]
    return ["".join(contexts[at : at + 100]) for at in range(0, len(contexts), 100)]


def first_difference(texts: Sequence[bytes], left: EncodedBatch, right: EncodedBatch) -> str | None:
    """The first text that two engines gave different ids for, shortened; None if there is none."""
    for order, text in enumerate(texts):
        ours = left.ids[left.offsets[order] : left.offsets[order + 1]]
        theirs = right.ids[right.offsets[order] : right.offsets[order + 1]]
        if not np.array_equal(ours, theirs):
            return text.decode()[:60]
    return None


def choose_encoder(vocabulary: Vocabulary) -> EncoderSpec:
    """What encodes the documents of a store, as a worker process needs it.

    Args:
        vocabulary: of our own, which gigatoken always encodes, or made elsewhere.

    Raises:
        TokenizerError: ``tokenizers`` does not take the vocabulary, or text that spells its EOS gives its id.
    """
    if isinstance(vocabulary, VocabularyFile):
        return EncoderSpec(hf_tokenizer_json(vocabulary))
    form = parse_form(vocabulary.tokenizer_json, vocabulary.FILE)
    names = {added["content"]: added["id"] for added in form.get("added_tokens") or []}
    names.update({token.token: token.id for token in vocabulary.special_tokens.values()})
    texts = check_texts(tuple(names))
    slow = encoding_form(vocabulary)
    expected = _reference(vocabulary, slow, texts, names)
    fast = encoding_form(vocabulary, without_special=True)
    different = _difference_of_gigatoken(fast, texts, expected)
    what = f"{vocabulary.next_merge_id:,} ids of {vocabulary.origin}, EOS {vocabulary.eos.token} ({vocabulary.eos_id})"
    if different is not None:
        logger.info("vocabulary: %s; encoded by tokenizers, since gigatoken %s", what, different)
        return EncoderSpec(slow, "tokenizers", vocabulary.eos_id, is_frozen=True)
    logger.info(
        "vocabulary: %s; encoded by gigatoken, which gives tokenizers' ids for %s check texts", what, f"{len(texts):,}"
    )
    return EncoderSpec(fast, "gigatoken", vocabulary.eos_id, is_frozen=True)


def _reference(
    vocabulary: FrozenVocabularyFile, hf_json: bytes, texts: list[bytes], names: Mapping[str, int]
) -> EncodedBatch:
    """What ``tokenizers`` gives, once it is known to mean the same ids by the same names."""
    engine = HuggingFaceEngine(hf_json)
    try:
        expected = engine.encode_batch(texts)
    except Exception as error:  # noqa: BLE001  tokenizers raises nothing more exact
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"tokenizers does not take this vocabulary ({reason}); mend its tokenizer.json") from None
    for name, token_id in names.items():
        if engine.id_of(name) != token_id:
            raise TokenizerError(
                f"expected the id {token_id} for {name!r}, as tokenizer.json says, found that tokenizers gives it "
                f"{engine.id_of(name)}; load the file with tokenizers and save it again"
            )
    at = int(np.argmax(expected.ids == vocabulary.eos_id))
    if len(expected.ids) and expected.ids[at] == vocabulary.eos_id:
        text = texts[int(np.searchsorted(expected.offsets, at, side="right")) - 1].decode()[:60]
        raise TokenizerError(
            f"expected an EOS that text never gives, found that the text {text!r} gives {vocabulary.eos.token!r} "
            f"({vocabulary.eos_id}); name another token by --eos"
        )
    return expected


def _difference_of_gigatoken(hf_json: bytes, texts: list[bytes], expected: EncodedBatch) -> str | None:
    """Why gigatoken cannot encode a vocabulary; None if it can."""
    try:
        found = GigatokenEngine(hf_json).encode_batch(texts)
    except Exception as error:  # noqa: BLE001  whatever it does not support, tokenizers does
        return f"refuses it ({' '.join(str(error).split()).partition(' Location:')[0][:200]})"
    different = first_difference(texts, found, expected)
    return None if different is None else f"gives other ids for {different!r}"
