"""Shards depend on the documents alone; ids cross the ring unchanged, and a full ring waits for its reader."""

import itertools
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import InputChangedError
from genesis.populate.packer import FilledShard, Packer, Position
from genesis.populate.pool import EncodedBlock
from genesis.populate.remote_ids import RemoteIds, RemoteImage
from genesis.populate.ring import RingReader, RingWriter, anonymous_file
from genesis.sources.base import FileFormat, InputFile, InputPlan, RowGroupTask
from manifests import MAX_LEFTOVER_TOKENS, PartialDocument, ShardImage

FILE = InputFile("f.parquet", "f.parquet", FileFormat.PARQUET, 1, "d")
PLAN = InputPlan("s", "text", (FILE,))
SHARD = 8

# Each document: its length in ids (EOS included) and how many skipped rows stand before it.
documents = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), max_size=30)
leftovers = st.sampled_from([0, 1, 5, 12, MAX_LEFTOVER_TOKENS])
"""The longest tail that a position holds itself."""


def make_blocks(docs, cuts, first=0):
    """Documents ``first …`` of one task as blocks that end after the documents named in ``cuts``."""
    rows = np.cumsum([1 + skipped for _, skipped in docs]) - 1 if docs else np.empty(0, np.int64)
    edges = sorted({first, *[cut for cut in cuts if first < cut < len(docs)], len(docs)})
    task = RowGroupTask(FILE, "text", 0, first_row=0)
    previous_row = int(rows[first - 1]) + 1 if first else 0
    for start, stop in itertools.pairwise(edges):
        ids = [np.full(docs[i][0], 10 + i, np.uint32) for i in range(start, stop)]
        end_row = int(rows[stop - 1]) + 1
        yield EncodedBlock(
            task=task,
            ids=np.concatenate(ids),
            ends=np.cumsum([len(part) for part in ids]),
            rows=rows[start:stop],
            text_bytes=np.cumsum([docs[i][0] for i in range(start, stop)]),
            first_row=previous_row,
            end_row=end_row,
        )
        previous_row = end_row


def pack(blocks, start=None, max_leftover=MAX_LEFTOVER_TOKENS, **limits):
    packer = Packer(PLAN, start or Position(), lambda: ShardImage.empty(SHARD), max_leftover)
    shards = list(packer.start())
    for block in blocks:
        shards.extend(packer.feed(block, **limits))
    return packer, shards


def facts(shard: FilledShard):
    position = shard.position
    return (
        shard.image.ids.tolist(),
        shard.first_document,
        shard.last_document,
        position.documents,
        position.text_bytes,
        position.rows_skipped,
        position.cursor,
        position.leftover.tolist(),
        position.partial,
    )


@pytest.mark.slow
@given(documents, st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)), leftovers)
def test_blocks_do_not_matter(docs, cuts, other_cuts, max_leftover):
    one, shards = pack(make_blocks(docs, cuts), max_leftover=max_leftover)
    other, same = pack(make_blocks(docs, other_cuts), max_leftover=max_leftover)
    assert [facts(shard) for shard in shards] == [facts(shard) for shard in same]
    assert (one.unsharded_tokens, one.unsharded_documents) == (other.unsharded_tokens, other.unsharded_documents)


@given(documents)
def test_every_id_is_kept_in_order(docs):
    packer, shards = pack(make_blocks(docs, []))
    stream = [10 + index for index, (length, _) in enumerate(docs) for _ in range(length)]
    packed = [token for shard in shards for token in shard.image.ids.tolist()]
    assert packed == stream[: len(packed)]
    assert len(stream) - len(packed) == packer.unsharded_tokens < SHARD


@pytest.mark.slow
@given(documents, leftovers, st.data())
def test_resuming_at_any_shard_gives_the_shards_that_follow(docs, max_leftover, data):
    packer, shards = pack(make_blocks(docs, []), max_leftover=max_leftover)
    if not shards:
        return
    at = data.draw(st.integers(0, len(shards) - 1))
    start = shards[at].position
    first = start.documents - (1 if start.partial else 0)
    blocks = make_blocks(docs, data.draw(st.lists(st.integers(0, 30))), first=first)
    if start.partial:
        # A reader that begins at a document has looked at no row before it.
        begun = next(blocks)
        blocks = itertools.chain([replace(begun, first_row=int(begun.rows[0]))], blocks)
    resumed, rest = pack(blocks, start, max_leftover=max_leftover)
    assert [facts(shard) for shard in rest] == [facts(shard) for shard in shards[at + 1 :]]
    assert resumed.unsharded_tokens == packer.unsharded_tokens
    assert resumed.unsharded_documents == packer.unsharded_documents
    assert (resumed.documents, resumed.text_bytes) == (packer.documents, packer.text_bytes)


@given(documents, leftovers)
def test_a_position_holds_no_more_than_it_may(docs, max_leftover):
    _, shards = pack(make_blocks(docs, []), max_leftover=max_leftover)
    rows = np.cumsum([1 + skipped for _, skipped in docs]) - 1
    for shard in shards:
        position = shard.position
        assert len(position.leftover) <= max_leftover
        if position.partial is not None:
            document = position.documents - 1
            assert position.partial.tokens == docs[document][0]
            assert position.partial.tokens_left > max_leftover
            assert position.cursor.row == rows[document]


@given(documents, st.lists(st.integers(0, 30)), leftovers)
def test_pieces_of_ids_elsewhere_are_cut_as_ids_here(docs, cuts, max_leftover):
    """What a cluster's driver does, which has counts alone, comes to the same shards and positions."""
    _, shards = pack(make_blocks(docs, cuts), max_leftover=max_leftover)
    arrays = {}

    def elsewhere(number, block):
        arrays[number] = block.ids
        return replace(block, ids=RemoteIds(number, f"machine-{number % 3}", 0, len(block.ids)))

    def ids_of(pieces):
        return [token for piece in pieces for token in arrays[piece.reference][piece.start : piece.stop].tolist()]

    packer = Packer(PLAN, Position(), lambda: RemoteImage.empty(SHARD), max_leftover)
    remote = []
    for number, block in enumerate(make_blocks(docs, cuts)):
        remote.extend(packer.feed(elsewhere(number, block)))
    for here, there in zip(shards, remote, strict=True):
        assert ids_of(there.image.ids.parts) == here.image.ids.tolist()
        tail = there.position.leftover
        assert (ids_of([tail]) if len(tail) else []) == here.position.leftover.tolist()
        assert replace(there.position, leftover=None) == replace(here.position, leftover=None)
        sizes = {}
        for piece in there.image.ids.parts:
            sizes[piece.node_id] = sizes.get(piece.node_id, 0) + len(piece)
        assert sizes[there.image.home] == max(sizes.values())


@pytest.mark.parametrize("change", ["longer", "another row", "none"])
def test_a_start_inside_a_document_that_is_no_more_is_refused(change):
    docs = [(5, 0), (30, 0), (4, 0)]
    _, shards = pack(make_blocks(docs, []), max_leftover=4)
    start = shards[0].position
    assert start.partial == PartialDocument(tokens_in_shards=3, tokens=30)
    block = next(make_blocks([(5, 0), (31 if change == "longer" else 30, 0)], [], first=1))
    if change == "another row":
        block = replace(block, first_row=block.first_row - 1)
    elif change == "none":
        block = replace(block, ids=block.ids[:0], ends=block.ends[:0], rows=block.rows[:0])
    with pytest.raises(InputChangedError, match=r"inside a document of 30 tokens at row 1 of f\.parquet"):
        pack([block], start, max_leftover=4)


@pytest.mark.slow
@given(documents, st.integers(0, 30))
def test_a_document_limit_gives_what_a_shorter_source_would(docs, limit):
    _, limited = pack(make_blocks(docs, []), max_documents=limit)
    _, short = pack(make_blocks(docs[:limit], []))
    assert [facts(shard) for shard in limited] == [facts(shard) for shard in short]


def test_documents_of_a_shard_are_named_from_first_to_last():
    _, shards = pack(make_blocks([(5, 0), (3, 0), (20, 1), (4, 0)], []))
    spans = [(shard.first_document, shard.last_document) for shard in shards]
    assert spans == [(0, 1), (2, 2), (2, 2), (2, 3)]
    assert [len(shard.position.leftover) for shard in shards] == [0, 12, 4, 0]
    assert [shard.position.rows_skipped for shard in shards] == [0, 1, 1, 1]
    assert shards[0].position.cursor.row == 2


SIZE = 1024  # ids; a page


def make_ring():
    descriptor = anonymous_file(SIZE * 4)
    writer, reader = RingWriter.over(descriptor, SIZE), RingReader.over(descriptor, SIZE)
    os.close(descriptor)
    return writer, reader


@pytest.mark.slow
@given(st.lists(st.integers(0, SIZE // 4), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_blocks_done_with_out_of_order_are_never_overwritten_early(sizes, shuffle):
    writer, reader = make_ring()
    kept = []
    for number, size in enumerate(sizes):
        if len(kept) == 2:
            shuffle.shuffle(kept)
            for position, count, expected in kept:
                assert (reader.view(position, count) == expected).all()
                writer.released_up_to(reader.release(position))
            kept.clear()
        position, out = writer.reserve(size)
        out[:] = number
        reader.receive(position, size)
        kept.append((position, size, number))
    for position, count, expected in kept:
        assert (reader.view(position, count) == expected).all()


def test_unread_blocks_are_not_overwritten():
    writer, reader = make_ring()
    positions = []
    for number in range(2):
        position, out = writer.reserve(SIZE // 2)
        out[:] = number
        reader.receive(position, SIZE // 2)
        positions.append(position)
    waiting = threading.Thread(target=writer.reserve, args=(1,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert [int(reader.view(position, 1)[0]) for position in positions] == [0, 1]
    reader.release(positions[1])
    writer.released_up_to(reader.released)
    waiting.join(0.05)
    assert waiting.is_alive()
    writer.released_up_to(reader.release(positions[0]))
    waiting.join(10)
    assert not waiting.is_alive()


def test_what_the_ring_does_not_do():
    writer, _ = make_ring()
    writer.reserve(SIZE // 2)
    writer.reserve(SIZE // 2)
    threading.Timer(0.05, writer.close).start()
    with pytest.raises(EOFError):
        writer.reserve(1)
    _, reader = make_ring()
    with pytest.raises(ValueError, match="read-only"):
        reader.ids[0] = 1
