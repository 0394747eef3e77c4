"""`NeuroTokenizer`: one vocabulary and all that is done with it.

Guarantees: ``decode(encode(s)) == s`` for every valid string and ``decode_bytes(encode(b)) == b`` for any bytes; text
never yields an id below 10; ids once given never change their meaning, however the vocabulary grows. Encoding is the
engine's (`engines`), learning is `learning`'s; this class holds the vocabulary and refuses what does not fit it.

Nothing is built before it is needed: a tokenizer that is only loaded, compared and saved imports no engine. Not for
several threads at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from genesis.errors import InvalidTextError, UsageError, VocabularyMismatchError
from genesis.store.folder import folder_errors
from genesis.tokenizer.engines import EncodedBatch, Engine, make_engine
from genesis.tokenizer.export import Pair, token_bytes_of, write_file
from manifests import FIRST_MERGE_ID, InvalidDocumentError, VocabularyFile, sha256_hex

logger = logging.getLogger(__name__)


class NeuroTokenizer:
    """A byte-level BPE vocabulary that encodes, decodes and grows."""

    def __init__(self, vocabulary: VocabularyFile, pairs: Sequence[Pair], engine: str = "gigatoken") -> None:
        """Use `load`, `from_bytes`, `from_file` or `empty`.

        Args:
            vocabulary: the contents of ``tokenizer.json``.
            pairs: its merges, ``vocabulary.pairs()``.
            engine: what encodes, a name in `engines.ENGINES`.
        """
        self._vocabulary = vocabulary
        self._pairs = pairs
        self._engine_name = engine
        self._engine: Engine | None = None
        self._token_bytes: list[bytes] | None = None

    @classmethod
    def empty(cls, *, engine: str = "gigatoken") -> Self:
        """The 256 bytes and the special tokens."""
        return cls.from_file(VocabularyFile.from_pairs([], {}), engine=engine)

    @classmethod
    def from_file(cls, vocabulary: VocabularyFile, *, engine: str = "gigatoken") -> Self:
        """A tokenizer for a vocabulary file that was read.

        Raises:
            InvalidDocumentError: its merges are not sound, or it holds more than its cap.
        """
        if vocabulary.next_merge_id > vocabulary.vocab_size:
            raise InvalidDocumentError(
                f"tokenizer.json: expected at most vocab_size {vocabulary.vocab_size} ids, found next_merge_id "
                f"{vocabulary.next_merge_id}; take a sound copy from the store's vocabulary/ folder"
            )
        return cls(vocabulary, vocabulary.pairs(), engine)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str | None = None, engine: str = "gigatoken") -> Self:
        """A tokenizer from the bytes of a ``tokenizer.json``, called ``name`` in messages.

        Raises:
            ContractError: it is not one, is damaged, or was written by a newer program.
        """
        return cls.from_file(VocabularyFile.from_json(data, name=name), engine=engine)

    @classmethod
    def load(cls, path: Path | str, *, engine: str = "gigatoken") -> Self:
        """A tokenizer from a ``tokenizer.json`` on the disk.

        Raises:
            StoreError: it cannot be read.
            ContractError: it is damaged.
        """
        path = Path(path)
        with folder_errors(path.parent, f"read {path}"):
            data = path.read_bytes()
        return cls.from_bytes(data, name=str(path), engine=engine)

    def save(self, path: Path | str) -> None:
        """Writes ``tokenizer.json``, whole or not at all, durably.

        Raises:
            StoreError: it cannot be written.
        """
        write_file(Path(path), self._vocabulary.to_json())

    def to_file(self) -> VocabularyFile:
        """The contents of ``tokenizer.json``."""
        return self._vocabulary

    @property
    def next_merge_id(self) -> int:
        """The id the next merge will have."""
        return self._vocabulary.next_merge_id

    @property
    def current_vocab_size(self) -> int:
        """How many ids there are; `next_merge_id`, as they have no gaps."""
        return self._vocabulary.next_merge_id

    @property
    def merges(self) -> Sequence[Pair]:
        """The pairs of ids that are merged; the first makes id 266."""
        return self._pairs

    @property
    def sources_contributed(self) -> dict[str, int]:
        """Merges learned from each source."""
        return dict(self._vocabulary.sources_contributed)

    @property
    def sha256(self) -> str:
        """Digest of the file `save` writes; computed at each call (20 ms for 32,000 ids)."""
        return sha256_hex(self._vocabulary.to_json())

    def encode(self, text: str | bytes) -> npt.NDArray[np.uint32]:
        """The ids of one text.

        Args:
            text: a string, or any bytes.

        Returns:
            uint32[N], each at least 10. ``.tolist()`` gives Python integers.

        Raises:
            InvalidTextError: a string with a lone surrogate, which no bytes stand for.
        """
        return self.encode_batch([text]).ids

    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """The ids of many texts; the way to encode much.

        Args:
            texts: strings or bytes, D of them.

        Returns:
            ``(ids, offsets)``: uint32[N] and int64[D + 1]; text *i* is ``ids[offsets[i]:offsets[i + 1]]``.

        Raises:
            InvalidTextError: a string with a lone surrogate.
        """
        engine = self._engine
        if engine is None:
            engine = self._engine = make_engine(self._engine_name, self._vocabulary)
        return engine.encode_batch(
            [text if type(text) is bytes else as_bytes(text, order) for order, text in enumerate(texts)]
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of ids; special tokens spell nothing, and bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidTextError: an id is not in the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
        """The bytes of ids, exactly; special tokens spell nothing.

        Raises:
            InvalidTextError: an id is not in the vocabulary.
        """
        if self._token_bytes is None:
            self._token_bytes = token_bytes_of(self._pairs)
        return joined_bytes(ids, self._token_bytes)

    def learn_merges(
        self,
        texts: Iterable[str | bytes],
        num_merges: int,
        *,
        source: str,
        processes: int = 1,
        min_frequency: int = 2,
        on_merge: Callable[[int], None] | None = None,
    ) -> int:
        """Learns merges and adds them behind those there are.

        Learning A and then B from the same texts gives the vocabulary of learning A + B.

        Args:
            texts: documents; all are held in memory.
            num_merges: how many to add, at most; the cap of the vocabulary counts too.
            source: the source credited in ``sources_contributed``, also if there are no merges.
            processes: how many cores to use; the result does not depend on it.
            min_frequency: how often a pair must occur; 2 keeps noise out.
            on_merge: told now and then, from another thread, how many merges there are; not where it takes no time.

        Returns:
            How many were added: fewer if no more pairs occur ``min_frequency`` times.

        Raises:
            UsageError: a number out of range, or more text than can be counted.
            InvalidTextError: a string with a lone surrogate.
            WorkerError: a helper process died; the vocabulary is as before.
        """
        # Here, as it brings pyarrow and regex, 27 MB that a process which only encodes need not hold.
        from genesis.tokenizer.learning import learn

        _check_learning(num_merges, source, processes, min_frequency)
        wanted = min(num_merges, self._vocabulary.vocab_size - self.next_merge_id)
        if wanted < num_merges:
            logger.warning("the vocabulary has room for %d of %d merges", wanted, num_merges)
        documents = (text if type(text) is bytes else as_bytes(text, order) for order, text in enumerate(texts))
        added: list[Pair] = []
        if wanted:
            added = learn(
                self._vocabulary,
                documents,
                wanted,
                processes=processes,
                min_frequency=min_frequency,
                on_merge=on_merge,
            )
        credit = self.sources_contributed
        credit[source] = credit.get(source, 0) + len(added)
        self._adopt(_extended(self._vocabulary, [*self._pairs, *added], credit))
        return len(added)

    def update_from_dict(self, value: Mapping[str, Any]) -> bool:
        """Takes over a newer ``tokenizer.json``, given as the object it holds.

        Args:
            value: the parsed file. Its merges must begin with this vocabulary's. A file whose merges this vocabulary
                begins with is older: it changes nothing.

        Returns:
            Whether the vocabulary has grown.

        Raises:
            VocabularyMismatchError: neither extends the other; names the first merge that differs.
            ContractError: it is not a sound ``tokenizer.json``.
        """
        newer = type(self).from_file(VocabularyFile.from_object(dict(value)), engine=self._engine_name)
        self._check_same_lineage(newer.merges)
        if len(newer.merges) < len(self._pairs):
            logger.info("kept %d merges: the other vocabulary has %d of them", len(self._pairs), len(newer.merges))
            return False
        has_grown = len(newer.merges) > len(self._pairs)
        self._adopt(newer._vocabulary)
        return has_grown

    def _check_same_lineage(self, others: Sequence[Pair]) -> None:
        for order, (own, other) in enumerate(zip(self._pairs, others, strict=False)):
            if own != other:
                raise VocabularyMismatchError(
                    f"tokenizer.json: expected a vocabulary that extends this one ({len(self._pairs)} merges), found "
                    f"another merge for id {FIRST_MERGE_ID + order}: {other[0]}_{other[1]} instead of "
                    f"{own[0]}_{own[1]}; one vocabulary belongs to one store"
                )

    def _adopt(self, vocabulary: VocabularyFile) -> None:
        self._vocabulary = vocabulary
        self._pairs = vocabulary.pairs()
        self._engine = None
        self._token_bytes = None


def _check_learning(num_merges: int, source: str, processes: int, min_frequency: int) -> None:
    least = {"num_merges": (num_merges, 0), "processes": (processes, 1), "min_frequency": (min_frequency, 1)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise UsageError(f"expected {name} of at least {minimum}, found {value}")
    try:
        VocabularyFile.from_object({"next_merge_id": FIRST_MERGE_ID, "merges": {}, "sources_contributed": {source: 0}})
    except InvalidDocumentError:
        raise UsageError(f"expected the name of a source such as 'fineweb-edu', found {source!r}") from None


def _extended(vocabulary: VocabularyFile, pairs: list[Pair], credit: dict[str, int]) -> VocabularyFile:
    return VocabularyFile.from_pairs(pairs, credit).model_copy(update={"vocab_size": vocabulary.vocab_size})


def joined_bytes(ids: Sequence[int] | npt.NDArray[np.integer[Any]], token_bytes: Sequence[bytes]) -> bytes:
    """The bytes of ids, by a table of each id's.

    Raises:
        InvalidTextError: an id is not in the table.
    """
    numbers: list[int] = np.asarray(ids).tolist()
    if numbers and (min(numbers) < 0 or max(numbers) >= len(token_bytes)):
        wrong = next(number for number in numbers if not 0 <= number < len(token_bytes))
        raise InvalidTextError(
            f"expected ids of 0…{len(token_bytes) - 1}, found {wrong}; load the vocabulary they were written with or a "
            "newer one"
        )
    return b"".join([token_bytes[number] for number in numbers])


def as_bytes(text: str | bytes, order: int) -> bytes:
    """The UTF-8 of text number ``order``; bytes are left as they are.

    Raises:
        InvalidTextError: a string with a lone surrogate.
    """
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            f"text {order}: expected valid Unicode, found the lone surrogate {text[error.start]!a} at character "
            f"{error.start}; replace it, or pass bytes"
        ) from None
