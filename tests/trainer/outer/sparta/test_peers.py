"""Replicas among strangers: real endpoints, real rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from tests.support.replica_group import Replica, parameter_bits
from tests.support.round_actor import KnownPeers
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.outer.sparta import SpartaConfig, frontier_of
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "sparta-test"
TERMS = Terms(architecture={"dim": 8}, tokenizer_lineage="0" * 64, synchronisation={"strategy": "async_sparta"})
CONFIG = SpartaConfig(every_steps=2, num_slices=4, ghost_rounds=2)


class Node:
    """A replica with an endpoint, perhaps informed of the others' rounds as by announcements."""

    def __init__(self, number: int, gather_timeout_s: float, informed: bool, every_steps: int):
        self.informed = informed
        self.loop = LoopThread(f"replica-{number}")
        self.loop.start()
        rpc = RpcConfig(host="127.0.0.1", port=0, tls=False, heartbeat_s=0.25, stop_grace_s=0.1)
        self.endpoint = Endpoint(Identity.create(), RUN_ID, rpc)
        self.directory = KnownPeers()
        waits = {"invite_after_s": 0.1, "gather_timeout_s": gather_timeout_s, "stall_timeout_s": 5.0}
        config = CollectiveConfig(min_members=2, round_timeout_s=20.0, **waits)
        context = (self.endpoint, self.loop.loop, RUN_ID, TERMS, RuleConfig(), config, self.directory)
        self.collective = PeerCollective(*context, lambda: 0)
        self.others: list[Node] = []
        self.replica = Replica(replace(CONFIG, every_steps=every_steps), self.collective, number=number, others=self)
        self.loop.run(self.endpoint.start(), 10)

    def frontier(self) -> int:
        rounds = [other.replica.trainer.round_index for other in self.others]
        return frontier_of(rounds) if self.informed else 0

    def move_to(self, round_index: int) -> None:
        self.collective.move_to(round_index)

    def close(self) -> None:
        self.collective.close()
        self.loop.run(self.endpoint.stop(), 10)
        self.loop.stop()


@contextmanager
def nodes(*, gather_timeout_s=15.0, informed=True, every_steps=2) -> Iterator[list[Node]]:
    """Three that know each other; informed of each other's rounds, or not."""
    with ExitStack() as stack:
        found = []
        for number in range(3):
            found.append(Node(number, gather_timeout_s, informed, every_steps))
            stack.callback(found[-1].close)
        for node in found:
            node.others = [other for other in found if other is not node]
            node.directory.known = {other.endpoint.peer_id: other.endpoint.peer for other in node.others}
            node.move_to(0)
        yield found


def turn(taking_part: list[Node], until: Callable[[], bool], *, train: bool, step_s: float = 0.01) -> None:
    """Lets them take steps, one after the other, until something is so."""
    deadline_s, index = time.monotonic() + 60, 0
    while not until():
        assert time.monotonic() < deadline_s, [node.replica.results[-3:] for node in taking_part]
        for node in taking_part:
            if train:
                node.replica.step(index)
            node.replica.turn()
        index += 1
        time.sleep(step_s)


def spread(taking_part: list[Node]) -> float:
    vectors = torch.stack([node.replica.vector() for node in taking_part])
    return (vectors - vectors.mean(dim=0)).abs().max().item()


def committed(node: Node) -> int:
    return sum(result.committed for result in node.replica.results)


@pytest.mark.slow
def test_three_train_and_become_alike_when_they_rest() -> None:
    with nodes() as found:
        turn(found, lambda: min(map(committed, found)) >= 5, train=True)
        apart, before = spread(found), [committed(node) for node in found]
        assert apart > 1e-4
        # The first of these may have begun in training; those behind it are a cycle of rest.
        enough = [was + 2 + CONFIG.num_slices for was in before]
        turn(found, lambda: all(committed(it) >= least for it, least in zip(found, enough, strict=True)), train=False)
        assert len({parameter_bits(node.replica.model) for node in found}) == 1
        assert all(result.committed for node in found for result in node.replica.results)
        assert {len(result.report.members) for node in found for result in node.replica.results} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("informed", [True, False])
def test_one_that_was_away_goes_on_with_the_others_without_a_reload(informed: bool) -> None:
    with nodes(gather_timeout_s=1.0, informed=informed, every_steps=10) as found:
        turn(found, lambda: min(map(committed, found)) >= 1, train=True)
        away, present = found[2], found[:2]
        before = away.replica.trainer.round_index
        turn(present, lambda: min(it.replica.trainer.round_index for it in present) >= before + 2, train=True)
        was = len(away.replica.results)

        def with_both() -> bool:
            reports = [result.report for result in away.replica.results[was:] if result.report is not None]
            return any(len(report.members) == 3 and report.round_index >= before + 2 for report in reports)

        # Rounds some steps apart, as in training: a late node gets none of rounds that follow each other at once.
        turn(found, with_both, train=True, step_s=0.1)
        trainer = away.replica.trainer
        assert not trainer.behind and not trainer.must_rejoin and trainer.standing.failed_in_a_row == 0


@pytest.mark.slow
def test_a_joiner_takes_over_a_state_and_counts_for_nothing_at_first() -> None:
    with nodes() as found:
        old, joiner = found[:2], found[2]
        joiner.move_to(-1)  # It has no state yet, and declines invitations.
        turn(old, lambda: min(map(committed, old)) >= 3, train=True)
        joiner.replica.trainer.adopt(old[0].replica.trainer.shared_state())
        assert not joiner.replica.trainer.standing.counts
        turn(found, lambda: joiner.replica.trainer.standing.counts and committed(joiner) >= 4, train=True)
        reports = [result.report for result in joiner.replica.results if result.report is not None]
        place = [report.members.index(joiner.endpoint.peer_id) for report in reports]
        weights = [report.weights[at] for report, at in zip(reports, place, strict=True)]
        assert weights[:2] == [0, 0] and all(weight > 0 for weight in weights[2:])
