"""Whether two folders hold the same model, told without reading all of it.

The digest is over the files of weights, in the order of their names: each one's size, and its bytes, all of them up to
64 MiB, else the first and last MiB (where safetensors says which tensors are where) and 256 blocks of 64 KiB at even
distances: 18 MiB a file, however large, 20 ms from a page cache. Another model, another step of the same, a fine-tuned
one differ in nearly every block. Not found is a difference that lies between two blocks, in some part of a tensor; this
is for mistakes, not for forgers. What is beside the weights (config, tokenizer, notes) does not count, nor how the
folder and the files are called.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trainer.checkpoint.stages.huggingface import CONFIG_NAME, HfFolder
from trainer.errors import CheckpointError, CorruptCheckpointError

__all__ = ["fingerprint"]

_METADATA_NAME: Final = ".metadata"
"""As in `trainer.checkpoint.stages.dcp`, with which a third of what a worker needs to start would be imported."""
_WHOLE_BYTES: Final = 64 << 20
_EDGE_BYTES: Final = 1 << 20
_NUM_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 1 << 16


def fingerprint(path: str | Path) -> str:
    """16 hexadecimal digits for the weights of a folder that `load_initial_state` reads.

    Raises:
        CheckpointError: it is no such folder.
        CorruptCheckpointError: a file of it cannot be read.
    """
    folder = Path(path).expanduser()
    digest = hashlib.blake2b(digest_size=8)
    try:
        for file in _files(folder):
            with file.open("rb") as opened:
                size_bytes = os.fstat(opened.fileno()).st_size
                digest.update(size_bytes.to_bytes(8, "big"))
                for offset, num_bytes in _samples(size_bytes):
                    opened.seek(offset)
                    digest.update(opened.read(num_bytes))
    except OSError as error:
        raise CorruptCheckpointError(f"{folder}: expected files that can be read, found: {error}") from error
    return digest.hexdigest()


def _files(folder: Path) -> Sequence[Path]:
    if (folder / _METADATA_NAME).is_file():
        return sorted(folder.glob("*.distcp"))
    if (folder / CONFIG_NAME).is_file():
        return HfFolder(folder).files
    raise CheckpointError(
        f"{folder}: expected a Hugging Face folder ({CONFIG_NAME} and safetensors) or a torchtitan checkpoint "
        f"({_METADATA_NAME}), found neither; name the folder of one step"
    )


def _samples(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what is read of a file."""
    if size_bytes <= _WHOLE_BYTES:
        yield from ((offset, _EDGE_BYTES) for offset in range(0, size_bytes, _EDGE_BYTES))
        return
    yield 0, _EDGE_BYTES
    for number in range(_NUM_BLOCKS):
        yield number * (size_bytes - _BLOCK_BYTES) // (_NUM_BLOCKS - 1), _BLOCK_BYTES
    yield size_bytes - _EDGE_BYTES, _EDGE_BYTES
