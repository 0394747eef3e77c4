"""Comparing nodes by what they announce, liars among them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.observing import Announced
from trainer.monitor.swarm import DigestMemory, average_loss, plausible_node

LIES = [math.nan, math.inf, -math.inf, 1e30, -5.0, 1e308]


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


@pytest.mark.parametrize("lie", LIES)
def test_a_loss_that_cannot_be_is_left_out(lie):
    peer = plausible_node(Announced("p", loss=lie))
    assert peer.loss is None
    assert peer.has_strange_loss
    assert not plausible_node(Announced("p", loss=None)).has_strange_loss


def test_what_is_out_of_all_reason_is_left_out():
    peer = plausible_node(
        Announced(
            "p",
            node_id="n" * 1_000,
            outer_step=-3,
            state_digest="d" * 1_000,
            inner_step=10**18,
            tokens_per_s=math.nan,
            shards=tuple(range(20_000)),
        )
    )
    assert (len(peer.node_id), len(peer.state_digest)) == (128, 128)
    assert (peer.outer_step, peer.num_steps, peer.tokens_per_s, peer.shards) == (0, 0, 0.0, frozenset())
    assert plausible_node(Announced("p", inner_step=-1, tokens_per_s=math.inf)).num_steps == 0


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
@settings(deadline=None)
@given(
    honest=st.lists(st.floats(2.5, 3.5), min_size=2, max_size=15),
    lie=st.floats(0.0, 100.0),
    data=st.data(),
)
def test_one_liar_among_many_moves_the_average_by_its_share_of_a_bound(honest, lie, data):
    mean = sum(honest) / len(honest)
    own = data.draw(st.sampled_from(honest))
    found = average_loss([*honest, lie], own)
    # The others lie within 0.5 of 3, so the bound is at most three deviations of 1, normal-consistent, beyond 3.5.
    assert abs(found - mean) <= (3 * 1.4826 * 1.0 + 1.0) / (len(honest) + 1) + 1.0


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_the_average_lies_within_the_losses(losses):
    assert min(losses) - 1e-9 <= average_loss(losses, losses[0]) <= max(losses) + 1e-9
