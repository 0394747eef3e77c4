"""What turns bytes into ids: gigatoken for speed, tiktoken as the reference to hold it to.

Guarantees: on valid UTF-8 both engines give the same ids, those of Hugging Face's ``tokenizers`` on the exported file;
on any bytes at all the ids decode to the same bytes; text never yields a special id, also where it spells one's name.
Two limits of the first: the vocabulary must have been learned (for tokens that their own merges never reach, tiktoken
goes by bytes and the others by pairs), and of the 4,657 letters and digits that came with Unicode 17 only gigatoken
0.10.0 knows yet, so before ``'s`` and its like the others cut them differently. gigatoken's ids are what shards hold.
Results are flat arrays (a list of Python integers costs more than the encoding). Each engine runs on the calling
thread alone: processes scale linearly with gigatoken, threads do not (measured: 380 MB/s with 2 processes, 173 with 2
threads, 201 with one). tiktoken has a fifteenth of gigatoken's speed and is there for tests and for a machine that
gigatoken has no wheel for.

A vocabulary made elsewhere is encoded by gigatoken too where it gives the ids of ``tokenizers`` (`agreement`), else by
``tokenizers`` itself. `EncoderSpec` is what a process needs to have the engine that was decided on.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from genesis.errors import InvalidTextError, TokenizerError, UsageError
from genesis.tokenizer.export import hf_tokenizer_json, token_ranks
from manifests import BYTE_OFFSET, EOS_ID, VocabularyFile

if TYPE_CHECKING:
    import tokenizers
    from gigatoken.gigatoken_rs import BPETokenizer, SentencePieceTokenizer
    from tiktoken import Encoding

MAX_GROWTH_BYTES = 512 << 20
"""How far a process may grow before its gigatoken encoder is built anew; a worker begins at 0.2 GB, 1 GB is allowed."""

_PAGE_BYTES = resource.getpagesize()

logger = logging.getLogger(__name__)


class EncodedBatch(NamedTuple):
    """The ids of D documents, one after the other."""

    ids: npt.NDArray[np.uint32]
    """uint32[N]."""
    offsets: npt.NDArray[np.int64]
    """int64[D + 1]: document *i* is ``ids[offsets[i]:offsets[i + 1]]``."""


class Engine(Protocol):
    """What encodes with one vocabulary. Not for several threads at once."""

    def encode_batch(self, texts: list[bytes]) -> EncodedBatch:
        """Encodes documents, any bytes, in order."""


class GigatokenEngine:
    """gigatoken, rebuilt whenever its cache has made the process grow by ``max_growth_bytes``.

    The released wheel (0.10.0) remembers every word it has ever seen and has no limit on that: about 125 bytes a word,
    a terabyte over some terabytes of web text (its issue #36). Building it anew takes 0.1 s for 32,000 ids and gives
    the memory back; the words are learned again over the next 50 MB or so.
    """

    def __init__(self, hf_json: bytes, max_growth_bytes: int = MAX_GROWTH_BYTES) -> None:
        """Notes the vocabulary; the encoder is built at the first use.

        Args:
            hf_json: the vocabulary as `genesis.tokenizer.export.hf_tokenizer_json` writes it. The exported form rather
                than the vocabulary, since many processes build encoders of one vocabulary and exporting 32,000 ids
                takes longer than building does.
            max_growth_bytes: growth of the process at which the encoder is built anew.
        """
        self._hf_json = hf_json
        self._max_growth_bytes = max_growth_bytes
        self._encoder: BPETokenizer | SentencePieceTokenizer | None = None
        self._least_resident_bytes = 0
        self._num_builds = 0

    @property
    def num_builds(self) -> int:
        """How often the encoder has been built."""
        return self._num_builds

    def encode_batch(self, texts: list[bytes]) -> EncodedBatch:
        """Encodes documents, any bytes, in order."""
        encoder = self._encoder
        if encoder is None or self._has_grown():
            encoder = self._build()
        layout = encoder.encode_batch(texts, parallel=False).layout
        return EncodedBatch(layout.content.data, layout.offsets.data)

    def _has_grown(self) -> bool:
        # Against the least seen since the encoder was built: what other parts of the process gave back meanwhile must
        # not become room for the cache.
        resident = resident_bytes()
        self._least_resident_bytes = min(self._least_resident_bytes, resident)
        return resident - self._least_resident_bytes > self._max_growth_bytes

    def _build(self) -> BPETokenizer | SentencePieceTokenizer:
        import gigatoken

        self._encoder = None  # Before the next one is built, or both caches would be held at once.
        encoder = gigatoken.Tokenizer.from_json(self._hf_json).backend
        self._encoder = encoder
        self._least_resident_bytes = resident_bytes()
        self._num_builds += 1
        logger.debug("built encoder %d, %d MiB resident", self._num_builds, self._least_resident_bytes >> 20)
        return encoder


class TiktokenEngine:
    """tiktoken: the reference.

    tiktoken reads strings, so bytes that are not UTF-8 are encoded one by one and the text between them as text.
    """

    def __init__(self, vocabulary: VocabularyFile) -> None:
        self._vocabulary = vocabulary
        self._encoding: Encoding | None = None

    def encode_batch(self, texts: list[bytes]) -> EncodedBatch:
        """Encodes documents, any bytes, in order."""
        encoding = self._encoding or self._build()
        parts = [_encode_with_tiktoken(encoding, text) for text in texts]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return EncodedBatch(np.concatenate([np.empty(0, dtype=np.uint32), *parts]), offsets)

    def _build(self) -> Encoding:
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "genesis",
            pat_str=self._vocabulary.pattern,
            mergeable_ranks=token_ranks(self._vocabulary),
            special_tokens={},
        )
        return self._encoding


class HuggingFaceEngine:
    """Hugging Face's ``tokenizers``, in its batch form without offsets: a hundredth of gigatoken's speed.

    Special tokens are not matched in text (``encode_special_tokens``), other added tokens are. It uses as many threads
    as ``TOKENIZERS_PARALLELISM`` allows; `EncoderSpec.build` sets that to one.
    """

    def __init__(self, hf_json: bytes) -> None:
        """Notes the vocabulary, in Hugging Face's form; the encoder is built at the first use."""
        self._hf_json = hf_json
        self._encoder: tokenizers.Tokenizer | None = None

    def encode_batch(self, texts: list[bytes]) -> EncodedBatch:
        """Encodes documents in order.

        Raises:
            InvalidTextError: a document is not UTF-8.
        """
        encoder = self._encoder or self._build()
        decoded = _decoded(texts)
        try:
            encodings = encoder.encode_batch_fast(decoded, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  its panics are no `Exception`
            raise TokenizerError(
                f"tokenizers cannot encode one of {len(texts)} documents: {error}; leave it out of the input"
            ) from None
        parts = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return EncodedBatch(np.concatenate([np.empty(0, dtype=np.uint32), *parts]), offsets)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None if there is none."""
        return (self._encoder or self._build()).token_to_id(token)

    def _build(self) -> tokenizers.Tokenizer:
        import tokenizers

        encoder = tokenizers.Tokenizer.from_buffer(self._hf_json)
        encoder.encode_special_tokens = True
        self._encoder = encoder
        return encoder


def _decoded(texts: list[bytes]) -> list[str]:
    try:
        return [text.decode() for text in texts]
    except UnicodeDecodeError as error:
        raise InvalidTextError(
            f"expected UTF-8, which is all that tokenizers encodes, found {bytes(error.object[error.start :][:8])!r} "
            f"at byte {error.start}; leave that text out, or replace those bytes"
        ) from None


EncoderName = Literal["gigatoken", "tokenizers"]
"""What may encode the documents of a store."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What a process needs to encode a store's documents: plain values, sent to workers as they are."""

    hf_json: bytes
    """The vocabulary in Hugging Face's form, as the engine of that name wants it."""
    name: EncoderName = "gigatoken"
    eos_id: int = EOS_ID
    """Follows each document."""
    is_frozen: bool = False
    """The vocabulary was made elsewhere, so nothing but a look tells that no text gives ``eos_id``."""

    def build(self) -> Engine:
        """The engine, for a process that only encodes: ``tokenizers`` keeps to one thread of it from here on."""
        if self.name == "gigatoken":
            return GigatokenEngine(self.hf_json)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return HuggingFaceEngine(self.hf_json)


_INVALID = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not UTF-8, as ``surrogateescape`` decodes them."""


def _encode_with_tiktoken(encoding: Encoding, text: bytes) -> npt.NDArray[np.uint32]:
    parts: list[npt.NDArray[np.uint32]] = [np.empty(0, dtype=np.uint32)]
    for order, piece in enumerate(_INVALID.split(text.decode(errors="surrogateescape"))):
        if order % 2:
            invalid = np.frombuffer(piece.encode(errors="surrogateescape"), dtype=np.uint8)
            parts.append(invalid.astype(np.uint32) + BYTE_OFFSET)
        elif piece:
            parts.append(np.array(encoding.encode_ordinary(piece), dtype=np.uint32))
    return np.concatenate(parts)


ENGINES: Mapping[str, Callable[[VocabularyFile], Engine]] = {
    "gigatoken": lambda vocabulary: GigatokenEngine(hf_tokenizer_json(vocabulary)),
    "tiktoken": TiktokenEngine,
}
"""The engines by name."""


def make_engine(name: str, vocabulary: VocabularyFile) -> Engine:
    """The engine of that name; it is built at its first use.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in ENGINES:
        raise UsageError(f"expected an engine among {', '.join(sorted(ENGINES))}, found {name!r}")
    return ENGINES[name](vocabulary)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; where there is no /proc, the most it ever was. About 10 µs."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _peak_resident_bytes()
    try:
        return int(os.read(descriptor, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def _peak_resident_bytes() -> int:
    # Linux counts KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
