"""Replicas that average gradients among strangers: real endpoints, real rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from tests.support.gradient_group import INNER, GradReplica
from tests.support.replica_group import Regression
from tests.support.round_actor import KnownPeers
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.errors import IncompatiblePeerError
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.outer.grad import GradConfig, GradFit
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "grad-test"
TERMS = Terms(architecture={"dim": 8}, tokenizer_lineage="0" * 64, synchronisation={"strategy": "grad"})
CONFIG = GradConfig(ahead_s=0.5, average_state_every=2, num_slices=4)


class Node:
    """A replica with an endpoint; each sees what the others have counted, as by an exchange of progress."""

    def __init__(self, number: int, codec: str, rule: RuleConfig, config: GradConfig, powersgd_rank: int) -> None:
        self.loop = LoopThread(f"replica-{number}")
        self.loop.start()
        rpc = RpcConfig(host="127.0.0.1", port=0, tls=False, heartbeat_s=0.25, stop_grace_s=0.1)
        self.endpoint = Endpoint(Identity.create(), RUN_ID, rpc)
        self.directory = KnownPeers()
        waits = {"invite_after_s": 0.0, "gather_timeout_s": 15.0, "stall_timeout_s": 5.0, "round_timeout_s": 20.0}
        collective = CollectiveConfig(min_members=2, compression=codec, max_weight_ratio=16.0, **waits)
        context = (self.endpoint, self.loop.loop, RUN_ID, TERMS, rule, collective, self.directory)
        self.collective = PeerCollective(*context, lambda: 0, weighing="linear")
        self.replica = GradReplica(
            Regression(number),
            self.collective,
            config,
            replace(INNER, lr=1e-3),
            target_tokens=192,
            powersgd_rank=powersgd_rank,
            clock=time.monotonic,
        )
        self.number, self.batch = number, 0
        self.loop.run(self.endpoint.start(), 10)

    def turn(self, everybody: list[Node], *, counts: bool) -> None:
        if counts:
            self.replica.count(self.batch, tokens=32 * (1 + self.number))
            self.batch += 1
        self.replica.known_tokens = sum(it.counted_tokens for it in everybody)
        self.replica.look()

    @property
    def counted_tokens(self) -> int:
        """Also those in a round under way, as progress is reported."""
        current = self.replica.trainer._round
        taken = None if current is None else current.taken
        return self.replica.sums.num_tokens + (0 if taken is None else taken.num_tokens)

    def close(self) -> None:
        self.collective.close()
        self.loop.run(self.endpoint.stop(), 10)
        self.loop.stop()


@contextmanager
def nodes(
    count: int = 3,
    codec: str = "fp32",
    rule: RuleConfig | None = None,
    config: GradConfig = CONFIG,
    powersgd_rank: int = 0,
) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        found: list[Node] = []
        for number in range(count):
            used = RuleConfig(rule="mean") if rule is None else rule
            found.append(Node(number, codec, used, config, powersgd_rank))
            stack.callback(found[-1].close)
        for node in found:
            node.directory.known = {it.endpoint.peer_id: it.endpoint.peer for it in found if it is not node}
            node.collective.move_to(0)
        yield found


def train(taking_part: list[Node], until: Callable[[], bool], idle: tuple[Node, ...] = ()) -> None:
    """Each in a thread of its own, until something is so; those that are idle count nothing."""
    ends_s = time.monotonic() + 60

    def go(node: Node) -> None:
        while not until():
            assert time.monotonic() < ends_s, [it.replica.outcomes[-2:] for it in taking_part]
            node.turn(taking_part, counts=node not in idle)
            time.sleep(0.02)

    with ThreadPoolExecutor(len(taking_part)) as pool:
        for future in [pool.submit(go, node) for node in taking_part]:
            future.result()


def bits_by_step(node: Node, kept: dict[int, bytes]) -> None:
    """Remembers the state after each round."""
    install = node.replica.trainer._install

    def installed(state) -> None:
        install(state)
        kept[state.round_index] = node.replica.bits()

    node.replica.trainer._install = installed  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("powersgd_rank", [0, 2])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("delayed", [False, True])
def test_three_hold_the_same_bits_after_every_round(codec: str, delayed: bool, powersgd_rank: int) -> None:
    with nodes(codec=codec, config=replace(CONFIG, delayed=delayed), powersgd_rank=powersgd_rank) as found:
        # First weights differ by nothing: the model's seed is the same, and so is the first lineage.
        kept: list[dict[int, bytes]] = [{} for _ in found]
        for node, each in zip(found, kept, strict=True):
            bits_by_step(node, each)
        train(found, lambda: min(node.replica.trainer.num_steps for node in found) >= 8)
        common = set.intersection(*(set(each) for each in kept))
        assert len(common) >= 10, "steps, and slices between them"
        for index in sorted(common):
            assert len({each[index] for each in kept}) == 1, f"round {index}"
        steps = [outcome for outcome in found[0].replica.outcomes if outcome.step is not None]
        assert all(outcome.result.committed for node in found for outcome in node.replica.outcomes)
        assert {len(outcome.result.report.members) for outcome in steps if outcome.result.report} == {3}
        counted = sum(32 * (1 + node.number) * node.batch for node in found)
        left = sum(node.replica.sums.num_tokens for node in found)
        flights = [node.replica.trainer._round for node in found]
        left += sum(it.taken.num_tokens for it in flights if it is not None and it.taken is not None)
        least, most = (f(node.replica.trainer.num_tokens for node in found) for f in (min, max))
        if least == most:  # Nobody is a step ahead: what was counted is in the steps, or waits.
            assert least == counted - left


@pytest.mark.slow
@pytest.mark.parametrize("powersgd_rank", [0, 2])
def test_a_joiner_fetches_the_state_follows_with_weight_0_and_counts_then(powersgd_rank: int) -> None:
    with nodes(powersgd_rank=powersgd_rank) as found:
        old, joiner = found[:2], found[2]
        for node in old:
            node.directory.known.pop(joiner.endpoint.peer_id)
        train(old, lambda: min(node.replica.trainer.num_steps for node in old) >= 3)
        for node in old:  # Now they learn of it.
            node.directory.known[joiner.endpoint.peer_id] = joiner.endpoint.peer
        newest = max(old, key=lambda node: node.replica.trainer.round_index).replica.trainer
        fit = GradFit.of(newest.layout, 0, powersgd_rank)
        packed = fit.pack(newest.shared_state())
        assert packed is not None
        joiner.replica.trainer.adopt(fit.unpack(*packed))
        joiner.collective.move_to(joiner.replica.trainer.round_index)
        begun = joiner.replica.trainer.num_steps
        train(found, lambda: joiner.replica.trainer.num_steps >= begun + 3, idle=(joiner,))
        reports = [it.result.report for it in joiner.replica.outcomes if it.step is not None]
        assert all(it is not None and it.weights[it.members.index(joiner.endpoint.peer_id)] == 0 for it in reports)
        train(found, lambda: joiner.replica.trainer.num_steps >= begun + 6)
        last = joiner.replica.outcomes[-1].result.report
        assert last is not None and len(last.members) == 3
        by_round = {node.replica.trainer.round_index: node.replica.bits() for node in found}
        for node in found:
            assert node.replica.bits() == by_round[node.replica.trainer.round_index]


@pytest.mark.slow
def test_one_that_missed_a_round_is_told_to_take_up_the_state() -> None:
    with nodes() as found:
        away, present = found[2], found[:2]
        train(found, lambda: min(node.replica.trainer.num_steps for node in found) >= 2)
        for node in present:
            node.directory.known.pop(away.endpoint.peer_id)
        train(present, lambda: min(node.replica.trainer.num_steps for node in present) >= 5)
        for node in present:
            node.directory.known[away.endpoint.peer_id] = away.endpoint.peer
        train(found, lambda: any(not it.result.committed for it in away.replica.outcomes))
        assert away.collective.behind
        assert away.replica.sums.num_tokens > 0, "until it takes up the state"
        with pytest.raises(IncompatiblePeerError):
            GradFit(away.replica.trainer.layout, vocab_rows=7).unpack(
                *(GradFit(away.replica.trainer.layout).pack(present[0].replica.trainer.shared_state()) or ({}, {}))
            )
