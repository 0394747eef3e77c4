"""The status a node gives of its run."""

import json
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.observing import Announced, Report, Step
from trainer.errors import CheckpointMismatchError
from trainer.monitor import TrainingTracker

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
    assert status.reasons == ("expected 100 losses or more to judge by, found 0; wait",)
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


@pytest.mark.parametrize(
    ("others", "rate", "convergence", "compared"),
    [
        ([(5, "good"), (5, "bad"), (4, "old")], 66.67, 50.0, (5, 3, 2, 1, None)),
        ([(2, "d2")], None, None, (None, 0, 0, 0, "no two nodes have the same outer step")),
    ],
)
def test_nodes_of_one_outer_step_are_compared_and_others_are_behind(tracker, others, rate, convergence, compared):
    tracker.set_state(5, "good")
    tracker.peers([Announced(f"{at:064x}", outer_step=step, state_digest=it) for at, (step, it) in enumerate(others)])
    status = tracker.status()
    assert (status.hash_agreement_rate, status.model_convergence) == (rate, convergence)
    assert tuple(status.hash_agreement.model_dump().values()) == compared
    assert status.training_nodes == 1 + len(others)


def test_between_two_rounds_nobody_is_called_different_for_an_old_announcement(tracker):
    tracker.add_round(Report(), outer_step=5, state_digest="d5")
    tracker.add_round(Report(), outer_step=6, state_digest="d6")
    for outer_step, digest in ((5, "d5"), (6, "d6")):
        tracker.peers([Announced(name * 64, outer_step=outer_step, state_digest=digest) for name in "abc"])
        agreed = tracker.status().hash_agreement
        assert tracker.status().hash_agreement_rate == 100.0
        assert (agreed.outer_step, agreed.num_compared, agreed.num_behind) == (outer_step, 4, 0)


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


@pytest.mark.parametrize("lie", [math.nan, math.inf, 1e30, -1.0, 1e308])
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


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": 1, "losses": 3, "num_steps": 1, "num_skipped": 0}])
def test_another_release_s_state_is_refused(tracker, state):
    with pytest.raises(CheckpointMismatchError, match="version 1"):
        tracker.load_state_dict(state)


def test_one_thread_writes_while_others_read():
    tracker = TrainingTracker("gpu-7", peer_id=ME)
    stop, wrong = threading.Event(), []

    def read():
        last = 0
        while not stop.is_set():
            status = tracker.status()
            if status.total_steps < last or status.steps_skipped * 2 > status.total_steps:
                wrong.append(status)
            last = status.total_steps

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for index in range(3_000):
        tracker.add_step(Step(step=index, loss=3.0, skipped=index % 3 == 2))
        if index % 100 == 0:
            tracker.peers([Announced("a" * 64, inner_step=0)])
            tracker.add_round(Report(), outer_step=index, state_digest=str(index))
    stop.set()
    for reader in readers:
        reader.join(30)
    assert not wrong
    assert tracker.num_steps == 3_000


def test_health_tells_when_it_last_trained(tracker):
    tracker.add_step(Step())
    CLOCK.now += 7.5
    health = tracker.health()
    assert (health.status, health.node_id, health.uptime_s, health.last_step_age_s) == ("ok", "gpu-7", 7.5, 7.5)


def test_speed_is_by_the_clock_with_the_waits_in_it(tracker):
    train(tracker, [3.0] * 60)
    assert tracker.tokens_per_s == 4096 / 0.25
    CLOCK.now += 12.5  # A round.
    train(tracker, [3.0])
    assert tracker.tokens_per_s == pytest.approx(50 * 4096 / 25)
    CLOCK.now -= 3_600
    train(tracker, [3.0])
    assert tracker.tokens_per_s == 0.0


def test_the_other_packages_values_are_taken_as_they_are():
    from trainer.inner.loop import StepResult
    from trainer.network.discovery.announcement import Announcement
    from trainer.outer.engine.collective import RoundReport

    tracker = TrainingTracker("gpu-7", peer_id=ME)
    tracker.add_step(StepResult(0, 4.0, 0.5, 1e-4, 4096, False, 0.1))
    tracker.add_round(RoundReport(round_index=0, members=(ME, "a" * 64)), outer_step=1, state_digest="d" * 64)
    names = {"peer_id": "a" * 64, "node_id": "gpu-8", "run_id": "run", "address": "127.0.0.1:1"}
    tracker.peers([Announcement(**names, outer_step=1, state_digest="d" * 64, loss=4.0, expires_at=4e9)])
    status = tracker.status()
    assert (status.hash_agreement_rate, status.training_nodes, status.global_loss) == (100.0, 2, 4.0)
