"""Learning merges: first and further ones by the same code, with Hugging Face's BpeTrainer on private code points.

The rule: the pair of highest count first; of equal counts, the lowest left id, then the lowest right id; a pair must
occur ``min_frequency`` times. Words are what the vocabulary's pattern cuts (`words`), each as the vocabulary encodes it
now.

The method: each symbol that occurs becomes one Unicode character, numbered densely in ascending order from U+0001. The
trainer sorts its alphabet as the symbols are sorted and breaks ties by (left, right), which is the tie rule of the
vocabulary, whether symbols are bytes or tokens of a vocabulary that grows. The trainer takes text, not counts, so a
word is fed as often as it occurs, joined by U+0000: 1.1 s for 7.4 million words on two threads, where lists of words
take 5 s.

Guarantees: merges depend on the counts of words alone: they are the same for texts in any order and 1, 2 or 64
processes. Learning A merges and then B gives the merges of learning A + B at once, ties included. Every new id spells
bytes of its own. 31,734 merges from 39 MB of English take half the time BpeTrainer takes on the same text
(docs/tokenizer.md).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from genesis.errors import UsageError
from genesis.tokenizer.engines import EncodedBatch, make_engine
from genesis.tokenizer.export import Pair, token_bytes_of
from genesis.tokenizer.helper import run_helper
from genesis.tokenizer.words import count_words
from manifests.vocabulary import VocabularyFile

SEPARATOR = "\0"
"""Between words; no symbol's character."""

MAX_SYMBOLS = 0x110000 - 0x800 - 1
"""Characters there are: all code points but the surrogates and the separator."""

_FEED_CHARACTERS = 32_768
"""Of a string handed to the trainer; it splits one string at a time."""


def learn_pairs(
    words: Sequence[str],
    counts: Sequence[int],
    symbols: str,
    num_merges: int,
    min_frequency: int,
    *,
    after_feeding: Callable[[], None] | None = None,
    tell_progress: bool = False,
) -> list[tuple[str, str]]:
    """The pairs to merge, in order.

    Args:
        words: distinct, each a string of characters of ``symbols``.
        counts: how often each occurs; no pair may occur 2**31 times or more.
        symbols: the characters, distinct and ascending.
        num_merges: how many pairs are wanted.
        min_frequency: how often a pair must occur, at least.
        after_feeding: called when the last word has been handed over and merging begins.
        tell_progress: have the trainer write to standard error how far it is, if it can; `merges_told` reads that.

    Returns:
        At most ``num_merges`` pairs of strings over ``symbols``, each side a symbol or an earlier pair joined.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(SEPARATOR)
    trainer = trainers.BpeTrainer(
        vocab_size=len(symbols) + num_merges,
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=list(symbols),
    )
    if tell_progress and hasattr(trainer, "progress_format"):  # Since tokenizers 0.22.2.
        trainer.show_progress, trainer.progress_format = True, "json"
    tokenizer.train_from_iterator(_feed(words, counts, after_feeding), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def single_threaded_after() -> None:
    """Turns the trainer's threads off, for `learn_pairs(after_feeding=…)`; only for a process that does nothing else.

    Feeding gains from threads; merging loses by them (2.0 s instead of 3.3 s for 31,734 merges on two cores), since a
    merge touches some 50 words. The trainer looks at the variable each time it begins something.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _feed(words: Sequence[str], counts: Sequence[int], after_feeding: Callable[[], None] | None) -> Iterator[str]:
    parts: list[str] = []
    room = _FEED_CHARACTERS
    for word, count in zip(words, counts, strict=True):
        unit = word + SEPARATOR
        while count > 0:
            times = min(count, room // len(unit) + 1)
            parts.append(unit * times)
            count -= times
            room -= times * len(unit)
            if room < 0:
                yield "".join(parts)
                parts, room = [], _FEED_CHARACTERS
    yield "".join(parts)
    if after_feeding is not None:
        after_feeding()


MAX_PAIR_COUNT = 2**31 - 1
"""BpeTrainer keeps the counts of pairs in signed 32 bits (huggingface/tokenizers#2058)."""

_SMALL_BYTES = 1 << 20
"""Texts below this are learned from in this process: helpers take longer to start than the work takes."""

_HEAR_EVERY_S = 0.1

_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


@dataclass(frozen=True, slots=True)
class WordSample:
    """Words as strings of private characters, for `merging.learn_pairs`."""

    words: list[str]
    counts: npt.NDArray[np.uint64]
    """uint64[W]."""
    symbols: str
    """The characters that occur, ascending."""
    symbol_ids: npt.NDArray[np.uint32]
    """uint32[S], ascending: the id each character of ``symbols`` stands for."""


def learn(
    vocabulary: VocabularyFile,
    texts: Iterable[bytes],
    num_merges: int,
    *,
    processes: int = 1,
    min_frequency: int = 2,
    on_merge: Callable[[int], None] | None = None,
) -> list[Pair]:
    """The merges to add to ``vocabulary``.

    Args:
        vocabulary: what there is.
        texts: documents, UTF-8; words that hold other bytes count for nothing. All are held at once.
        num_merges: how many are wanted.
        processes: how many cores to use.
        min_frequency: how often a pair must occur.
        on_merge: told now and then how many merges there are, where learning takes long enough.

    Returns:
        At most ``num_merges`` pairs of ids; fewer if not so many occur often enough.

    Raises:
        UsageError: the texts are more than the trainer can count.
        WorkerError: the helper process died.
    """
    documents = list(texts)
    size_bytes = sum(map(len, documents))
    words = count_words(documents)
    encoded = make_engine("gigatoken", vocabulary).encode_batch([word.encode() for word in words])
    sample = symbolise(encoded, np.fromiter(words.values(), dtype=np.uint64, count=len(words)))
    if not sample.words:
        return []
    find = _learn_here if size_bytes <= _SMALL_BYTES else _learn_in_helper
    pairs = find(sample, num_merges, min_frequency, processes, on_merge)
    return append_pairs(vocabulary, sample, pairs)


def symbolise(encoded: EncodedBatch, counts: npt.NDArray[np.uint64]) -> WordSample:
    """Words of ids as words of characters; those of one id, in which nothing is left to merge, are left out.

    Args:
        encoded: the words, a document each.
        counts: uint64[D], how often each occurs.

    Raises:
        UsageError: more distinct ids occur than there are characters, or a pair occurs too often to be counted.
    """
    ids, offsets = encoded
    lengths = np.diff(offsets)
    kept = lengths > 1
    symbol_ids, dense = _densely(ids[np.repeat(kept, lengths)])
    if len(symbol_ids) > MAX_SYMBOLS:
        raise UsageError(f"expected at most {MAX_SYMBOLS} distinct tokens in the texts, found {len(symbol_ids)}")
    lengths, counts = lengths[kept], counts[kept]
    _check_pair_counts(dense, lengths, counts)
    text = _characters(dense)
    ends = np.cumsum(lengths).tolist()
    words = [text[start:end] for start, end in pairwise([0, *ends])]
    return WordSample(words, counts, _characters(np.arange(len(symbol_ids))), symbol_ids)


def _densely(ids: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """The distinct ids, ascending, and each id's place among them; `numpy.unique` without its sort."""
    occurs = np.zeros(int(ids.max(initial=0)) + 1, dtype=bool)
    occurs[ids] = True
    places = np.cumsum(occurs, dtype=np.int64) - 1
    return np.flatnonzero(occurs).astype(np.uint32), places[ids]


def _characters(dense: npt.NDArray[np.int64]) -> str:
    points = dense + 1
    points += np.where(points >= _FIRST_SURROGATE, _NUM_SURROGATES, 0)
    return points.astype("<u4").tobytes().decode("utf-32-le")


def _check_pair_counts(
    dense: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.uint64]
) -> None:
    # Merging never makes a pair more frequent than the most frequent one of the beginning: each occurrence of a new
    # token is one of the pair it was made of.
    if float(np.dot(lengths - 1, counts.astype(np.float64))) <= MAX_PAIR_COUNT:
        return
    inside = np.ones(len(dense), dtype=bool)
    inside[np.cumsum(lengths) - 1] = False
    left = np.flatnonzero(inside)
    pairs, order = np.unique(dense[left] * (MAX_SYMBOLS + 1) + dense[left + 1], return_inverse=True)
    occurrences = np.bincount(order, weights=np.repeat(counts, lengths)[left], minlength=len(pairs))
    if occurrences.max() > MAX_PAIR_COUNT:
        raise UsageError(
            f"expected no pair of tokens more than {MAX_PAIR_COUNT:,} times in the texts to learn from, found one "
            f"{int(occurrences.max()):,} times; learn from fewer documents"
        )


def _learn_here(
    sample: WordSample,
    num_merges: int,
    min_frequency: int,
    processes: int,
    on_merge: Callable[[int], None] | None,
) -> list[tuple[str, str]]:
    del processes, on_merge
    return learn_pairs(sample.words, sample.counts.tolist(), sample.symbols, num_merges, min_frequency)


def _learn_in_helper(
    sample: WordSample,
    num_merges: int,
    min_frequency: int,
    processes: int,
    on_merge: Callable[[int], None] | None,
) -> list[tuple[str, str]]:
    request = [
        SEPARATOR.join(sample.words).encode(),
        sample.counts.tobytes(),
        sample.symbols.encode(),
        str(num_merges).encode(),
        str(min_frequency).encode(),
    ]
    heard_at = 0.0

    def hear(line: bytes) -> None:  # The trainer tells of every single merge.
        nonlocal heard_at
        if on_merge is None or time.monotonic() - heard_at < _HEAR_EVERY_S:
            return
        heard_at = time.monotonic()
        told = merges_told(line, len(sample.symbols), num_merges)
        if told is not None:
            on_merge(told)

    sides = [side.decode() for side in run_helper("merge", request, num_threads=processes, on_line=hear)]
    return list(zip(sides[::2], sides[1::2], strict=True))


def merges_told(line: bytes, num_symbols: int, num_merges: int) -> int | None:
    """How many merges a line of the trainer's progress tells of; None for any other line."""
    try:
        told = json.loads(line) if line.startswith(b"{") else None
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("stage") != "Compute merges":
        return None
    current, total = told.get("current"), told.get("total")
    if not isinstance(current, int) or total != num_symbols + num_merges:
        return None
    return min(max(current, 0), num_merges)


def append_pairs(vocabulary: VocabularyFile, sample: WordSample, pairs: Iterable[tuple[str, str]]) -> list[Pair]:
    """Pairs of characters as pairs of ids, numbered on from the vocabulary's last.

    A pair that would spell what another id spells already is left out, and so is every pair made of it. No vocabulary
    that was learned has such pairs, since a stretch of bytes between two borders of tokens has one state at a time; one
    that was put together by hand can.
    """
    token_bytes = token_bytes_of(vocabulary.pairs())
    taken = set(token_bytes)
    ids = dict(zip(sample.symbols, sample.symbol_ids.tolist(), strict=True))
    added: list[Pair] = []
    for left, right in pairs:
        if left not in ids or right not in ids:
            continue
        spelled = token_bytes[ids[left]] + token_bytes[ids[right]]
        if spelled in taken:
            continue
        taken.add(spelled)
        ids[left + right] = len(token_bytes)
        token_bytes.append(spelled)
        added.append((ids[left], ids[right]))
    return added
