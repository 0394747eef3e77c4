"""Batch k as rows of windows: each window once an epoch, the mixture right at any length, skips equal to steps."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.stream.schedule import Lane, LanePosition, Rows, Schedule

LANES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 12), st.sampled_from([0.05, 0.3, 1.0, 2.0, 7.5])),
    min_size=1,
    max_size=4,
).map(
    lambda shapes: [
        Lane(tuple(100 * number + shard for shard in range(shards)), windows, weight)
        for number, (shards, windows, weight) in enumerate(shapes)
    ]
)
BATCH_SIZES = st.integers(1, 14)
MIXTURES = st.sampled_from(["exact", "weyl"])
STEPS = st.integers(0, 24)


def windows_of(rows: list[Rows]) -> list[tuple[int, int, int]]:
    """(epoch, shard, window) of every row."""
    return [(part.epoch, part.shard_id, part.first + i) for part in rows for i in range(part.count)]


def take(schedule: Schedule, steps: int) -> list[list[Rows]]:
    return [schedule.next_rows() for _ in range(steps)]


@pytest.mark.slow
@given(LANES, BATCH_SIZES, STEPS)
def test_each_lane_reads_its_windows_in_order_and_each_once_an_epoch(lanes, batch_size, steps):
    taken = [window for rows in take(Schedule(lanes, batch_size), steps) for window in windows_of(rows)]
    assert len(taken) == steps * batch_size
    for lane in lanes:
        own = [window for window in taken if window[1] in lane.shards]
        plain = [
            (epoch, shard, window)
            for epoch in range(len(own) // lane.windows + 1)
            for shard in lane.shards
            for window in range(lane.windows_per_shard)
        ]
        assert own == plain[: len(own)]


@given(st.integers(1, 5), st.integers(1, 12), BATCH_SIZES, st.integers(1, 3))
def test_an_epoch_holds_each_window_once_and_ends_with_a_partial_batch(shards, windows, batch_size, epochs):
    lane = Lane(tuple(range(shards)), windows)
    schedule = Schedule([lane], batch_size, end_epoch=epochs)
    batches = []
    while rows := schedule.next_rows():
        batches.append(windows_of(rows))
    assert schedule.next_rows() == []
    total = epochs * lane.windows
    assert [len(batch) for batch in batches] == [batch_size] * (total // batch_size) + [total % batch_size] * (
        total % batch_size > 0
    )
    assert Counter(window for batch in batches for window in batch) == Counter(
        (epoch, shard, window) for epoch in range(epochs) for shard in range(shards) for window in range(windows)
    )
    assert schedule.step == len(batches)
    assert schedule.positions == [LanePosition(epochs, 0)]


@pytest.mark.slow
@given(LANES, BATCH_SIZES, st.integers(1, 2), MIXTURES)
def test_a_mixture_ends_when_its_first_lane_does(lanes, batch_size, epochs, mixture):
    schedule = Schedule(lanes, batch_size, end_epoch=epochs, mixture=mixture)
    unending = Schedule(lanes, batch_size, mixture=mixture)
    while rows := schedule.next_rows():
        full = windows_of(unending.next_rows())
        assert all(epoch < epochs for epoch, _, _ in windows_of(rows))
        if len(windows_of(rows)) < batch_size:
            break
        assert windows_of(rows) == full
    assert schedule.next_rows() == []
    assert any(position == LanePosition(epochs, 0) for position in schedule.positions)
    schedule.end_epoch = epochs + 1
    assert schedule.next_rows() != []


@pytest.mark.slow
@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5), BATCH_SIZES, st.integers(1, 150), MIXTURES)
def test_shares_are_right_within_a_few_rows(weights, batch_size, steps, mixture):
    lanes = [Lane((number,), 1_000_000, weight) for number, weight in enumerate(weights)]
    rows = steps * batch_size
    batches = take(Schedule(lanes, batch_size, mixture=mixture), steps)
    counts = Counter(shard for batch in batches for _, shard, _ in windows_of(batch))
    for number, weight in enumerate(weights):
        # Finer shares than millionths are rounded to those: at most 4 of them here.
        most = 8 if mixture == "weyl" else 1 + rows * 4e-6
        assert abs(counts[number] - rows * weight / sum(weights)) <= most


@given(LANES, st.lists(BATCH_SIZES, min_size=1, max_size=12), st.integers(1, 3))
def test_an_exact_mixture_stays_exact_over_passes_and_rotations(lanes, batch_sizes, epochs):
    """Rows are counted as they were taken, also in a pass's last batch and where a run goes on with other batches."""
    schedule = Schedule(lanes, 3, epochs=epochs)
    weights = [lane.weight for lane in lanes]
    counts = [0] * len(lanes)
    for batch_size in batch_sizes:
        schedule = Schedule(
            lanes,
            batch_size,
            epochs=epochs,
            end_epoch=schedule.end_epoch,
            step=schedule.step,
            row=schedule.row,
            positions=schedule.positions,
            resumes_pass=not schedule.pass_is_over,
        )
        schedule.begin_pass()
        while rows := schedule.next_rows():
            for part in rows:
                counts[part.shard_id // 100] += part.count
            total = sum(counts)
            for count, weight in zip(counts, weights, strict=True):
                assert abs(count - total * weight / sum(weights)) < 1 + 1e-9
            if len(batch_sizes) % 2:
                schedule.rotate()


@pytest.mark.parametrize("weights", [(1.0, 1e-17), (1e-17, 1.0), (1e300, 1e300, 1.0), (5e-324, 1.0)])
def test_extreme_weights_keep_their_meaning(weights: tuple[float, ...]) -> None:
    lanes = [Lane((number,), 1_000_000, weight) for number, weight in enumerate(weights)]
    counts = Counter(shard for batch in take(Schedule(lanes, 10), 100) for _, shard, _ in windows_of(batch))
    for number, weight in enumerate(weights):
        assert abs(counts[number] - 1_000 * (weight / max(weights)) / sum(w / max(weights) for w in weights)) <= 8


@pytest.mark.slow
@given(LANES, BATCH_SIZES, st.integers(1, 4), STEPS, STEPS, st.none() | st.integers(1, 4), MIXTURES)
def test_skipping_is_stepping(lanes, rank_rows, world_size, first, more, end_epoch, mixture):
    batch_size = rank_rows * world_size
    options = {"end_epoch": end_epoch, "world_size": world_size, "mixture": mixture}
    stepped, skipped = (Schedule(lanes, batch_size, **options) for _ in range(2))
    take(stepped, first)
    take(skipped, first)
    take(stepped, more)
    skipped.seek(first + more)
    assert (skipped.step, skipped.positions) == (stepped.step, stepped.positions)
    assert take(skipped, 5) == take(stepped, 5)


@pytest.mark.slow
@given(LANES, BATCH_SIZES, STEPS)
def test_shards_ahead_copies_and_rotations(lanes: list[Lane], batch_size: int, steps: int) -> None:
    schedule = Schedule(lanes, batch_size)
    take(schedule, steps)
    for number, lane in enumerate(lanes):
        said = [schedule.current_shard(number), schedule.next_shard(number)]
        reference = deepcopy(schedule)
        own: list[int] = []
        while len(dict.fromkeys(own)) < min(2, len(lane.shards)):
            own += [shard for _, shard, _ in windows_of(reference.next_rows()) if shard in lane.shards]
        assert list(dict.fromkeys(own))[:2] == list(dict.fromkeys(said))
    before = list(schedule.positions)
    for _ in range(2):  # The second time all stand at a beginning already.
        schedule.rotate()
        for lane, old, new in zip(lanes, before, schedule.positions, strict=True):
            expected = -(-(old.epoch * lane.windows + old.window) // lane.windows_per_shard) * lane.windows_per_shard
            assert new.epoch * lane.windows + new.window == expected
    schedule.queue_lane(0, Lane((900, 901), 3))
    ahead = take(deepcopy(schedule), 20)
    assert schedule.step == steps
    assert take(schedule, 20) == ahead


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 9), BATCH_SIZES, STEPS, st.booleans())
def test_a_queued_lane_begins_with_the_next_epoch(
    shards: int, windows: int, new_shards: int, new_windows: int, batch_size: int, queued_at: int, skip: bool
) -> None:
    lane = Lane(tuple(range(shards)), windows)
    successor = Lane(tuple(range(50, 50 + new_shards)), new_windows)
    schedule = Schedule([lane], batch_size)
    before = take(schedule, queued_at)
    epoch = schedule.positions[0].epoch
    schedule.queue_lane(0, successor)
    if skip:
        reference = deepcopy(schedule)
        after = take(reference, 24)
        schedule.seek(queued_at + 12)
        assert take(schedule, 12) == after[12:]
    else:
        after = take(schedule, 24)
    taken = [window for rows in [*before, *after] for window in windows_of(rows)]
    assert {shard for at, shard, _ in taken if at <= epoch} <= set(lane.shards)
    assert {shard for at, shard, _ in taken if at > epoch} <= set(successor.shards)
    last = max(at for at, _, _ in taken)
    for at in range(last):
        expected = lane if at <= epoch else successor
        assert sorted(window for window in taken if window[0] == at) == [
            (at, shard, window) for shard in expected.shards for window in range(expected.windows_per_shard)
        ]


@pytest.mark.slow
@given(LANES, BATCH_SIZES, st.lists(STEPS, min_size=1, max_size=4), st.none() | st.integers(1, 6), st.booleans())
def test_lanes_queued_from_the_beginning_are_lanes_queued_as_they_came(lanes, batch_size, stops, end_epoch, skip):
    """What makes a run again that took a grown store several times."""
    live = Schedule(lanes, batch_size, end_epoch=end_epoch)
    queued: list[dict[int, Lane]] = [{} for _ in lanes]
    taken = []
    for growth, steps in enumerate(stops):
        taken += take(live, steps)
        for number, lane in enumerate(lanes):
            successor = Lane(tuple(range(1_000 * growth, 1_000 * growth + growth + 1)), growth + 2, lane.weight)
            queued[number][live.positions[number].epoch + 1] = successor
            live.queue_lane(number, successor)
    taken += take(live, 24)
    again = Schedule(lanes, batch_size, end_epoch=end_epoch)
    for number, successors in enumerate(queued):
        for epoch, successor in successors.items():
            again.queue_lane(number, successor, epoch)
    if skip:
        again.seek(len(taken) - 24)
        assert take(again, 24) == taken[-24:]
    else:
        assert take(again, len(taken)) == taken
    assert (again.positions, again.lanes) == (live.positions, live.lanes)


SHARES = st.lists(st.integers(1, 400), min_size=2, max_size=4).map(lambda parts: [part / 64 for part in parts])


@given(
    st.tuples(st.just("weyl"), st.lists(st.floats(0.01, 100.0), min_size=2, max_size=4))
    | st.tuples(st.just("exact"), SHARES),
    BATCH_SIZES,
    st.integers(0, 2**50),
    st.integers(0, 40),
)
def test_far_steps_of_a_mixture_are_where_steps_lead(mixed, batch_size, far, more):
    mixture, weights = mixed
    lanes = [Lane((number,), 7, weight) for number, weight in enumerate(weights)]
    stepped, skipped = (Schedule(lanes, batch_size, mixture=mixture) for _ in range(2))
    stepped.seek(far)
    take(stepped, more)
    skipped.seek(far + more)
    assert (skipped.step, skipped.positions) == (stepped.step, stepped.positions)
    rows = (far + more) * batch_size
    for position, weight in zip(skipped.positions, weights, strict=True):
        most = 60 if mixture == "weyl" else 1
        assert abs(7 * position.epoch + position.window - rows * (weight / sum(weights))) <= most + rows * 2.0**-45
