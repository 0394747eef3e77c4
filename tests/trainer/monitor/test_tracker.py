"""The status a node gives of its run: its losses, and the other nodes, liars among them."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.observing import Announced, Report, Step
from trainer.errors import CheckpointMismatchError
from trainer.monitor import TrainingTracker
from trainer.monitor.losses import TrackedLosses, has_fallen, loss_trend
from trainer.monitor.swarm import DigestMemory, average_loss, plausible_node

ME = "f" * 64
CLOCK = SimpleNamespace(now=1_795_000_000.0)
"""Goes on by a quarter of a second with each step of `train`."""


@pytest.fixture
def tracker():
    return TrainingTracker("gpu-7", peer_id=ME, inner_steps=100, clock=lambda: CLOCK.now)


def train(tracker, losses, **fields):
    for index, loss in enumerate(losses):
        CLOCK.now += 0.25
        tracker.add_step(Step(step=index, loss=float(loss), **fields))
    return tracker.status()


def learning(length, seed=0):
    return 4 + 6 * np.exp(-np.arange(length) / (length / 4)) + np.random.default_rng(seed).normal(0, 0.1, length)


def test_before_the_first_step_nothing_is_claimed(tracker):
    status = tracker.status()
    assert not status.training_verified
    assert status.reasons == ("too early to judge: 0 losses of the 100 needed; wait",)
    assert (status.loss_trend, status.global_loss, status.loss) == ("unknown", None, None)
    assert (status.hash_agreement_rate, status.hash_agreement.reason) == (None, "no outer step yet")
    assert (status.sync_success_rate, status.sync_success.reason) == (None, "no round yet")
    assert (status.model_convergence, status.training_nodes, status.total_steps) == (None, 1, 0)
    assert (tracker.smoothed_loss, tracker.tokens_per_s, tracker.num_steps) == (None, 0.0, 0)
    assert tracker.health().last_step_age_s is None


def test_a_single_node_is_the_whole_run(tracker):
    """With one node all metrics reflect that node, and outer syncs are 0 until the first."""
    tracker.set_shards([3, 4])
    status = train(tracker, learning(400))
    assert status.training_verified and not status.reasons
    assert status.loss_trend == "improving"
    assert status.global_loss == tracker.smoothed_loss == pytest.approx(4.1, abs=0.2)
    assert (status.total_steps, status.data_shards, status.training_nodes) == (400, 2, 1)
    assert status.tokens_per_s == 4096 / 0.25
    assert (status.diloco.outer_syncs, status.diloco.inner_step) == (0, 400)
    assert status.sync_success_rate is None

    tracker.add_round(Report(members=(ME,)), outer_step=1, state_digest="d1")
    status = tracker.status()
    assert (status.diloco.outer_syncs, status.diloco.rounds_alone, status.diloco.inner_step) == (1, 1, 0)
    assert (status.hash_agreement_rate, status.model_convergence) == (100.0, 100.0)
    assert (status.sync_success_rate, status.sync_success.reason) == (None, "no other node was there in any round")
    assert [node.is_self for node in status.nodes] == [True]


def test_a_loss_that_does_not_fall_or_rises_again_is_not_verified(tracker):
    status = train(tracker, np.random.default_rng(0).normal(4, 0.1, 400))
    assert (status.training_verified, status.loss_trend) == (False, "stable")
    assert "not below the first ones" in status.reasons[0]
    again = TrainingTracker("gpu-7")
    assert train(again, learning(400)).training_verified
    status = train(again, np.linspace(4, 12, 100))
    assert (status.training_verified, status.loss_trend) == (False, "degrading")


def test_skipped_steps_are_counted_and_many_are_a_reason(tracker):
    train(tracker, learning(400))
    status = train(tracker, [math.nan] * 20, skipped=True)
    assert (status.training_verified, status.steps_skipped) == (True, 20)
    status = train(tracker, [math.inf] * 10, skipped=True)
    assert status.reasons == ("most of the latest steps were skipped: loss or gradient is not finite",)
    assert math.isfinite(status.global_loss)
    json.dumps(status.model_dump(), allow_nan=False)


def test_nodes_of_one_outer_step_are_compared_and_others_are_behind(tracker):
    tracker.set_state(5, "good")
    others = enumerate([(5, "good"), (5, "bad"), (4, "old")])
    tracker.peers([Announced(f"{at:064x}", outer_step=step, state_digest=it) for at, (step, it) in others])
    status = tracker.status()
    assert (status.hash_agreement_rate, status.model_convergence, status.training_nodes) == (66.67, 50.0, 4)
    assert tuple(status.hash_agreement.model_dump().values()) == (5, 3, 2, 1, None)
    tracker.peers([Announced("a" * 64, outer_step=2, state_digest="d2")])
    status = tracker.status()
    assert (status.hash_agreement_rate, status.model_convergence) == (None, None)
    assert status.hash_agreement.reason == "no two nodes have the same outer step"


@pytest.mark.parametrize("stages", [(), ("head", "body-1", "tail")])
def test_stages_that_the_run_does_not_have_are_neither_compared_nor_remembered(stages):
    tracker = TrainingTracker("gpu-7", peer_id=ME, inner_steps=100, clock=lambda: CLOCK.now, stages=stages)
    for stage in stages or ("",):
        tracker.set_state(5, "good", stage=stage)
    before = tracker.status()
    parts = tuple((f"body-{number}", 0, "of nothing") for number in range(100, 132))
    liars = [Announced(f"{at:064x}", stage_name="body-9999", outer_step=0, state_digest="x") for at in range(20)]
    tracker.peers([*liars, *(Announced(f"{at:064x}", part_states=parts) for at in range(100, 120))])
    after = tracker.status()
    assert after.training_nodes == 41
    assert after.hash_agreement == before.hash_agreement  # Each alone with its stage would agree with itself.
    assert after.model_convergence == before.model_convergence == 100.0
    assert len(tracker._digests._digests) <= max(1, len(stages))


def test_the_run_is_summed_over_its_nodes(tracker):
    tracker.set_shards([1, 2])
    train(tracker, [3.0] * 100)
    near = Announced("a" * 64, "gpu-8", inner_step=250, loss=3.2, tokens_per_s=500.0, shards=(2, 3))
    tracker.peers([near, Announced("b" * 64, "gpu-9", inner_step=50, loss=3.4, tokens_per_s=250.0, shards=(9,))])
    status = tracker.status()
    assert (status.total_steps, status.data_shards, status.training_nodes) == (400, 4, 3)
    assert status.global_loss == pytest.approx(3.2)
    assert status.tokens_per_s == pytest.approx(16_384 + 750)
    assert [node.node_id for node in status.nodes] == ["gpu-7", "gpu-8", "gpu-9"]


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, 1e30, -1.0, 1e308])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_lying_peer_does_not_poison_the_global_loss(tracker, lie, others):
    train(tracker, [3.0] * 100)
    honest = [Announced(f"{number:064x}", loss=3.0) for number in range(others)]
    tracker.peers([*honest, Announced("e" * 64, loss=lie)])
    status = tracker.status()
    assert status.global_loss == pytest.approx(3.0)
    assert (status.losses_left_out, status.training_nodes) == (1, 2 + others)


def test_what_a_node_hears_of_itself_and_twice_counts_once_and_until_it_expires(tracker):
    tracker.set_state(1, "d1")
    own, near = Announced(ME, outer_step=9, state_digest="x"), Announced("a" * 64, expires_at=CLOCK.now + 10)
    tracker.peers([own, near, near, Announced("b" * 64, expires_at=CLOCK.now + 30)])
    for num_nodes in (3, 2, 1):
        assert (tracker.status().training_nodes, tracker.status().hash_agreement_rate) == (num_nodes, 100.0)
        CLOCK.now += 20


def test_rounds_with_others_known_count_as_attempts(tracker):
    tracker.add_round(Report(members=(ME,)), outer_step=1, state_digest="d")  # Nobody there: no attempt.
    tracker.peers([Announced("a" * 64, expires_at=CLOCK.now + 10)])
    tracker.add_round(Report(), outer_step=2, state_digest="d")
    tracker.add_round(Report(members=(ME,)), outer_step=3, state_digest="d")  # Somebody there, and missed.
    tracker.add_failed_round()
    CLOCK.now += 60
    tracker.add_round(Report(members=(ME,)), outer_step=4, state_digest="d")
    tracker.add_round(Report(dropped=(("c", "dead"),), completeness=0.75), outer_step=5, state_digest="d")
    status = tracker.status()
    assert (status.sync_success.num_attempted, status.sync_success.num_succeeded) == (4, 2)
    assert status.sync_success_rate == 50.0
    assert (status.diloco.outer_syncs, status.diloco.rounds_alone, status.diloco.rounds_failed) == (5, 3, 1)
    assert (status.diloco.last_round.num_dropped, status.diloco.last_round.completeness) == (1, 0.75)
    for _ in range(150):
        tracker.add_round(Report(), outer_step=6, state_digest="d")
    assert tracker.status().sync_success_rate == 100.0  # Of the latest hundred.


def test_a_node_that_trains_apart_from_the_others_is_not_verified(tracker):
    train(tracker, learning(400))
    tracker.peers([Announced(peer_id="b", node_id="b")])
    for index in range(4):
        tracker.add_round(Report(members=(ME,)), outer_step=index + 1, state_digest="d")
    status = tracker.status()
    assert (status.training_verified, status.sync_success_rate) == (False, 0.0)
    assert "apart from the others" in status.reasons[0]


def test_memory_does_not_grow_with_peers(tracker):
    tracker.peers([Announced(f"{number:064x}", expires_at=1e12 + number) for number in range(5_000)])
    assert (tracker.status().training_nodes, len(tracker.status().nodes)) == (4_097, 256)


def test_a_restarted_node_remembers_where_it_began(tracker, tmp_path):
    torch = pytest.importorskip("torch")
    train(tracker, learning(300))
    torch.save(tracker.state_dict(), tmp_path / "state.pt")
    again, fresh = TrainingTracker("gpu-7"), TrainingTracker("gpu-7")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (again.state_dict(), again.smoothed_loss) == (tracker.state_dict(), tracker.smoothed_loss)
    plateau = np.random.default_rng(1).normal(4, 0.1, 200)
    assert train(again, plateau).training_verified and not train(fresh, plateau).training_verified
    assert again.num_steps == 500


def test_another_release_s_state_is_refused(tracker):
    for state in ({}, {"version": 2}, {"version": 1, "losses": 3, "num_steps": 1, "num_skipped": 0}):
        with pytest.raises(CheckpointMismatchError, match="version 1"):
            tracker.load_state_dict(state)


def test_one_thread_writes_while_others_read():
    tracker, stop = TrainingTracker("gpu-7", peer_id=ME), threading.Event()

    def read():
        last = 0
        while not stop.is_set():
            status = tracker.status()
            assert status.total_steps >= last and status.steps_skipped * 2 <= status.total_steps
            last = status.total_steps

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        for index in range(3_000):
            tracker.add_step(Step(step=index, loss=3.0, skipped=index % 3 == 2))
            if index % 100 == 0:
                tracker.peers([Announced("a" * 64, inner_step=0)])
                tracker.add_round(Report(), outer_step=index, state_digest=str(index))
        stop.set()
    assert [reader.result() for reader in readers] == [None, None]
    assert tracker.num_steps == 3_000


def test_health_and_speed_are_by_the_clock_with_the_waits_in_it(tracker):
    tracker.add_step(Step())
    CLOCK.now += 7.5
    health = tracker.health()
    assert (health.status, health.node_id, health.uptime_s, health.last_step_age_s) == ("ok", "gpu-7", 7.5, 7.5)
    train(tracker, [3.0] * 60)
    assert tracker.tokens_per_s == 4096 / 0.25
    CLOCK.now += 12.5  # A round.
    train(tracker, [3.0])
    assert tracker.tokens_per_s == pytest.approx(50 * 4096 / 25)
    CLOCK.now -= 3_600
    train(tracker, [3.0])
    assert tracker.tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], (None, 0, 0, 0)),
        ([""], (None, 0, 0, 0)),
        (["3x"], (3, 1, 1, 0)),
        (["3x", "3x"], (3, 2, 2, 0)),
        (["3x", "3y"], (3, 2, 1, 0)),
        (["3x", "2x"], (None, 0, 0, 0)),
        (["3x", ""], (None, 0, 0, 0)),
        # One announces the next step already: the step before is what they have in common.
        (["3x 4z", "3x", "3x"], (3, 3, 3, 0)),
        # Two of three are further: the third is behind, and different digests of theirs differ.
        (["3x 4z", "3x 4z", "3x"], (4, 2, 2, 1)),
        (["4z", "4y", "4z", "3x"], (4, 3, 2, 1)),
        # A joiner without a state is behind.
        (["4z", "4z", ""], (4, 2, 2, 1)),
        # Two liars in the far future do not make six others look behind.
        (["9l", "9l", "4z", "4z", "4z", "4z", "4z"], (4, 5, 5, 0)),
        # No majority anywhere: where most are.
        (["5x", "5x", "4z", "4z", "3w"], (5, 2, 2, 3)),
    ],
)
def test_nodes_are_compared_at_the_newest_step_most_have(held, expected):
    """A node holds '5x 6y': digest x after step 5, y after step 6."""
    memory = DigestMemory()
    for node, digests in enumerate(held):
        for text in digests.split():
            memory.add(str(node), int(text[0]), text[1:])
    assert compared(memory, *map(str, range(len(held)))) == expected


def compared(memory, *nodes):
    found = memory.agreement(nodes)
    assert (found.reason is None) == (found.num_compared > 0)
    return found.outer_step, found.num_compared, found.num_agreeing, found.num_behind


def test_the_digests_of_the_latest_steps_are_remembered():
    memory = DigestMemory()
    for step in range(20):
        memory.add("a", step, f"d{step}")
    for step, agreed in ((11, None), (12, 12), (19, 19)):
        memory.add("b", step, f"d{step}")
        assert compared(memory, "a", "b")[0] == agreed
    memory.add("a", 15, "other")  # It went back to a checkpoint, and no longer holds the newer ones.
    assert compared(memory, "a", "b") == (12, 2, 2, 0)
    memory.keep(["b"])
    assert compared(memory, "a") == (None, 0, 0, 0)


def test_what_is_out_of_all_reason_is_left_out():
    far = {"node_id": "n" * 1_000, "outer_step": -3, "state_digest": "d" * 1_000, "inner_step": 10**18}
    peer = plausible_node(Announced("p", **far, tokens_per_s=math.nan, shards=tuple(range(20_000))))
    assert (len(peer.node_id), len(peer.state_digest)) == (128, 128)
    assert (peer.outer_step, peer.num_steps, peer.tokens_per_s, peer.shards) == (0, 0, 0.0, frozenset())
    peer = plausible_node(Announced("p", inner_step=-1, tokens_per_s=math.inf, loss=None))
    assert (peer.num_steps, peer.tokens_per_s, peer.has_strange_loss) == (0, 0.0, False)


@pytest.mark.parametrize(
    ("losses", "own", "mean"),
    [
        *(([3.0], 3.0, 3.0), ([3.0, 3.2], 3.0, 3.1), ([3.0, 3.1, 2.9, 3.2], 3.0, 3.05), ([2.0], None, 2.0)),
        *(([3.0, 100.0], 3.0, 3.375), ([3.0, 0.0], 3.0, 2.625)),  # A single other node is held near the own loss.
    ],
)
def test_the_average_is_the_mean_of_honest_losses(losses, own, mean):
    assert average_loss(losses, own) == pytest.approx(mean)
    assert average_loss([], None) is None


@pytest.mark.slow
@given(honest=st.lists(st.floats(2.5, 3.5), min_size=2, max_size=15), lie=st.floats(0.0, 100.0), data=st.data())
def test_one_liar_among_many_moves_the_average_by_its_share_of_a_bound(honest, lie, data):
    mean = sum(honest) / len(honest)
    own = data.draw(st.sampled_from(honest))
    found = average_loss([*honest, lie], own)
    # The others lie within 0.5 of 3, so the bound is at most three deviations of 1, normal-consistent, beyond 3.5.
    assert abs(found - mean) <= (3 * 1.4826 * 1.0 + 1.0) / (len(honest) + 1) + 1.0


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_the_average_lies_within_the_losses(losses):
    assert min(losses) - 1e-9 <= average_loss(losses, losses[0]) <= max(losses) + 1e-9


NOISE = 0.2


def noisy(values, seed=0, noise=NOISE):
    return np.asarray(values) + np.random.default_rng(seed).normal(0, noise, len(values))


@pytest.mark.parametrize("length", [0, 1, 40, 79, 80, 400, 2_000, 5_000])
def test_a_loss_that_falls_improves_and_one_that_rises_degrades_and_few_tell_nothing(length):
    falling = noisy(6.0 - 2.0 * np.linspace(0, 1, length))
    expected = ("improving", "degrading") if length >= 80 else ("unknown", "unknown")
    assert (loss_trend(falling), loss_trend(falling[::-1])) == expected


@pytest.mark.slow
def test_noise_alone_is_stable():
    verdicts = [loss_trend(noisy(np.full(2_000, 3.0), seed)) for seed in range(200)]
    assert verdicts.count("stable") >= 196


def test_spikes_do_not_make_a_trend():
    for seed in range(50):
        losses = noisy(np.full(400, 3.0), seed)
        losses[np.random.default_rng(seed).choice(400, 4, replace=False)] = 1e30
        assert loss_trend(losses) == "stable"


@pytest.mark.parametrize("since", [20, 40, 60, 100, 150, 300])
def test_a_jump_shows_wherever_it_lies(since):
    fell_and_jumped = np.concatenate([np.linspace(6, 3, 2_000 - since), np.full(since, 6.0)])
    assert loss_trend(noisy(fell_and_jumped)) == "degrading"
    assert loss_trend(noisy(9.0 - fell_and_jumped)) == "improving"


def test_the_shortest_window_that_shows_a_change_decides():
    assert loss_trend(noisy([*np.linspace(3, 9, 1_900), *np.linspace(9, 6, 100)])) == "improving"
    assert loss_trend(noisy([*np.linspace(9, 3, 1_900), *np.linspace(3, 5, 100)])) == "degrading"


def test_having_fallen_needs_more_than_noise():
    assert has_fallen(noisy(np.full(50, 10.4)), noisy(np.full(50, 4.0), 1))
    assert not has_fallen(noisy(np.full(50, 4.0)), noisy(np.full(50, 10.4), 1))
    same = [has_fallen(noisy(np.full(50, 4.0), seed), noisy(np.full(50, 4.0), 1_000 + seed)) for seed in range(100)]
    assert sum(same) <= 2


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200))
def test_the_average_is_finite_and_within_the_losses(losses):
    history = TrackedLosses()
    for loss in losses:
        history.add(loss)
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert list(history.recent) == finite
    assert history.first == finite[:50]
    if finite:
        slack = 1e-9 * max(map(abs, finite))
        assert min(finite) - slack <= history.smoothed <= max(finite) + slack
    else:
        assert history.smoothed is None


def test_memory_is_bounded_and_the_beginning_stays_and_it_goes_on_from_its_state():
    whole, resumed = TrackedLosses(), TrackedLosses()
    for step in range(10_000):
        if step == 170:
            resumed.load_state_dict(whole.state_dict())
        for history in (whole, resumed)[: 1 + (step >= 170)]:
            history.add(float(step))
    assert whole.first == list(range(50))
    assert list(whole.recent) == list(range(8_000, 10_000))
    assert resumed.state_dict() == whole.state_dict()
