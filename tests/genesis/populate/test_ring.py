"""Ids cross the ring unchanged, blocks never wrap, and a full ring waits for the reader."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.populate.ring import RingReader, RingWriter, anonymous_file

SIZE = 1024  # ids; a page


def make_ring():
    descriptor = anonymous_file(SIZE * 4)
    writer, reader = RingWriter.over(descriptor, SIZE), RingReader.over(descriptor, SIZE)
    os.close(descriptor)
    return writer, reader


@pytest.mark.slow
@given(st.lists(st.integers(0, SIZE // 2), min_size=1, max_size=40))
def test_blocks_arrive_as_they_were_written(sizes):
    writer, reader = make_ring()
    for number, size in enumerate(sizes):
        position, out = writer.reserve(size)
        out[:] = number
        reader.receive(position, size)
        assert (reader.view(position, size) == number).all()
        assert len(reader.view(position, size)) == size
        writer.released_up_to(reader.release(position))


@pytest.mark.slow
@given(st.lists(st.integers(1, SIZE // 4), min_size=1, max_size=60), st.randoms(use_true_random=False))
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


def test_a_waiting_writer_is_told_when_the_reader_is_gone():
    writer, _ = make_ring()
    writer.reserve(SIZE // 2)
    writer.reserve(SIZE // 2)
    threading.Timer(0.05, writer.close).start()
    with pytest.raises(EOFError):
        writer.reserve(1)


def test_a_block_over_half_the_ring_does_not_fit():
    writer, _ = make_ring()
    assert writer.fits(SIZE // 2)
    assert not writer.fits(SIZE // 2 + 1)


def test_the_writer_writes_what_the_reader_maps_read_only():
    _, reader = make_ring()
    with pytest.raises(ValueError, match="read-only"):
        reader.ids[0] = 1
    assert reader.ids.dtype == np.uint32
