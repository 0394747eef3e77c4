"""Comparing nodes by what they announce, liars among them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.observing import Announced
from trainer.monitor.swarm import DigestMemory, StateAgreement, average_loss, plausible_node, state_agreement

LIES = [math.nan, math.inf, -math.inf, 1e30, -5.0, 1e308]


def at(**digests):
    """Nodes by what they hold: a='5x' is digest x after step 5."""
    return {name: {int(text[0]): text[1:] for text in held.split()} for name, held in digests.items()}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, StateAgreement(None, 0, 0, 0)),
        (at(a=""), StateAgreement(None, 0, 0, 0)),
        (at(a="3x"), StateAgreement(3, 1, 1, 0)),
        (at(a="3x", b="3x"), StateAgreement(3, 2, 2, 0)),
        (at(a="3x", b="3y"), StateAgreement(3, 2, 1, 0)),
        (at(a="3x", b="2x"), StateAgreement(None, 0, 0, 0)),
        (at(a="3x", b=""), StateAgreement(None, 0, 0, 0)),
        # One announces the next step already: the step before is what they have in common.
        (at(a="3x 4z", b="3x", c="3x"), StateAgreement(3, 3, 3, 0)),
        # Two of three are further: the third is behind, and different digests of theirs differ.
        (at(a="3x 4z", b="3x 4z", c="3x"), StateAgreement(4, 2, 2, 1)),
        (at(a="4z", b="4y", c="4z", d="3x"), StateAgreement(4, 3, 2, 1)),
        # A joiner without a state is behind.
        (at(a="4z", b="4z", c=""), StateAgreement(4, 2, 2, 1)),
        # Two liars in the far future do not make six others look behind.
        (at(a="9l", b="9l", c="4z", d="4z", e="4z", f="4z", g="4z"), StateAgreement(4, 5, 5, 0)),
        # No majority anywhere: where most are.
        (at(a="5x", b="5x", c="4z", d="4z", e="3w"), StateAgreement(5, 2, 2, 3)),
    ],
)
def test_nodes_are_compared_at_the_newest_step_most_have(held, expected):
    assert state_agreement(held) == expected


def test_the_digests_of_the_latest_steps_are_remembered():
    memory = DigestMemory()
    for step in range(20):
        memory.add("a", step, f"d{step}")
    memory.add("b", 3, "")
    assert memory.of(["a", "b", "c"]) == {"a": {step: f"d{step}" for step in range(12, 20)}, "b": {}, "c": {}}
    memory.add("a", 15, "other")  # It went back to a checkpoint.
    assert memory.of(["a"])["a"] == {12: "d12", 13: "d13", 14: "d14", 15: "other"}
    memory.keep(["b"])
    assert memory.of(["a"]) == {"a": {}}


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


def test_the_average_is_the_mean_of_honest_losses():
    assert average_loss([], None) is None
    assert average_loss([3.0], 3.0) == 3.0
    assert average_loss([3.0, 3.2], 3.0) == pytest.approx(3.1)
    assert average_loss([3.0, 3.1, 2.9, 3.2], 3.0) == pytest.approx(3.05)
    assert average_loss([2.0], None) == 2.0


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


def test_a_single_other_node_that_lies_is_held_near_the_own_loss():
    assert average_loss([3.0, 100.0], 3.0) == pytest.approx(3.375)
    assert average_loss([3.0, 0.0], 3.0) == pytest.approx(2.625)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_the_average_lies_within_the_losses(losses):
    assert min(losses) - 1e-9 <= average_loss(losses, losses[0]) <= max(losses) + 1e-9
