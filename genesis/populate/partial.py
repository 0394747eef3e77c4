"""The document inside which a source was left, encoded again with the vocabulary that it was begun with.

That is needed only where the vocabulary grew in between (another source was populated): the ids in shards are the
earlier vocabulary's, so the rest must be too, or it would not join on to them. Every id of an earlier vocabulary means
the same in a later one. It is one document, and this process encodes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from genesis.errors import InputChangedError, TokenizerError
from genesis.populate.pool import EncodedBlock
from genesis.populate.worker import join_documents
from genesis.sources import tasks
from genesis.sources.base import InputPlan, TextBatch, TokenBatch
from genesis.sources.reading import read_any_batches
from genesis.store import Store
from genesis.tokenizer import StoreTokenizer, choose_encoder, read_tokenizer
from manifests import Cursor, sha256_hex, vocabulary_key


def first_document(plan: InputPlan, cursor: Cursor, store: Store, tokenizer_sha256: str) -> EncodedBlock:
    """The document at the cursor, as a block of its own.

    Args:
        plan: the input.
        cursor: stands at a document.
        store: has the vocabulary.
        tokenizer_sha256: of the vocabulary to encode it with.

    Raises:
        InputChangedError: there is no document there.
        TokenizerError: the vocabulary is damaged.
    """
    task = next(tasks(plan, cursor), None)
    batch = next(read_any_batches(task), None) if task is not None else None
    if task is None or batch is None or not len(batch.rows):
        raise InputChangedError(
            f"{plan.source}: expected a document at row {cursor.row} of {cursor.file}, found none; restore the input"
        )
    ids, size_bytes = _first_ids(batch, store, tokenizer_sha256)
    return EncodedBlock(
        task=task,
        ids=ids,
        ends=np.array([len(ids)], dtype=np.int64),
        rows=batch.rows[:1],
        text_bytes=np.array([size_bytes], dtype=np.int64),
        first_row=task.first_row,
        end_row=int(batch.rows[0]) + 1,
        tokenizer_sha256=tokenizer_sha256,
    )


def _first_ids(batch: TextBatch | TokenBatch, store: Store, digest: str) -> tuple[npt.NDArray[np.uint32], int]:
    """The ids of a batch's first document, uint32[N], its EOS included, and its bytes."""
    if isinstance(batch, TokenBatch):  # Whatever the vocabulary: they came as they are.
        return batch.ids[: int(batch.ends[0])], int(batch.stored_bytes[0])
    spec = choose_encoder(_vocabulary(store, digest).to_file())
    encoded = spec.build().encode_batch(batch.texts[:1])
    ids = np.empty(len(encoded.ids) + 1, dtype=np.uint32)
    join_documents(encoded.ids, encoded.offsets, ids, spec.eos_id)
    return ids, len(batch.texts[0])


def _vocabulary(store: Store, digest: str) -> StoreTokenizer:
    key = vocabulary_key(digest)
    body = store.get(key).body
    if sha256_hex(body) != digest:
        raise TokenizerError(
            f"{key}: expected sha256 {digest}, found {sha256_hex(body)}; restore that object from a copy"
        )
    return read_tokenizer(body)
