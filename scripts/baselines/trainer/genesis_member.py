"""Ours: real endpoints, `PeerCollective` rounds, and DiLoCo over them with the library's own inner loop.

A process can hold several nodes (``name``): one with TLS, one without, one for each compression. Where the time of a
round goes is seen from outside, by timing the three phases of `RoundMember`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.collective.member import RoundMember
from trainer.collective.reduction import ReductionPass
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Contribution
from trainer.outer.engine.powersgd import with_powersgd
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "bench"
_TERMS = Terms(architecture={}, tokenizer_lineage="bench", synchronisation={})
_START_S = 20.0


@dataclass(slots=True)
class Book:
    """Who else is there: a list that is given once."""

    known: dict[str, Peer] = field(default_factory=dict)

    def peers(self) -> Mapping[str, Peer]:
        """See `trainer.collective.Directory`."""
        return self.known

    def holds_most_held_state(self) -> bool:
        """See `trainer.collective.Directory`."""
        return True


class Phases:
    """Seconds of the last round by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        """The method, its time noted under a name."""

        async def run(*arguments: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            try:
                return await method(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began_s

        return run


PHASES = Phases()
RoundMember._join = PHASES.timed("agreement", RoundMember._join)  # type: ignore[method-assign]
ReductionPass.run = PHASES.timed("exchange", ReductionPass.run)  # type: ignore[method-assign]
RoundMember._vote = PHASES.timed("vote", RoundMember._vote)  # type: ignore[method-assign]


@dataclass(slots=True)
class Node:
    """One endpoint and its rounds."""

    endpoint: Endpoint
    book: Book
    collective: PeerCollective


class GenesisMember:
    """One process with its nodes."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loop = LoopThread("bench")
        self._loop.start()
        self._nodes: dict[str, Node] = {}
        self._carried: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        """Residual and basis of the last factored round of each."""

    def open(self, name: str, host: str, tls: bool, compression: str) -> dict[str, Any]:
        """Starts a node; how to reach it."""
        rpc = RpcConfig(host=host, public_address=host, tls=tls)
        endpoint = Endpoint(Identity.create(), RUN_ID, rpc)
        book = Book()
        config = CollectiveConfig(compression=compression)  # type: ignore[arg-type]
        collective = PeerCollective(
            endpoint, self._loop.loop, RUN_ID, _TERMS, RuleConfig(), config, book, vocabulary_rows=lambda: 0
        )
        self._loop.run(endpoint.start(), _START_S)
        self._nodes[name] = Node(endpoint, book, collective)
        certificate = endpoint.certificate.decode() if endpoint.certificate else None
        return {"peer": [endpoint.peer_id, endpoint.address, certificate]}

    def meet(self, name: str, peers: list[list[str | None]], next_round: int = 0) -> dict[str, Any]:
        """Tells a node of the others, a list of all will do, and which round comes next."""
        node = self._nodes[name]
        found = [
            Peer(str(peer_id), str(address), certificate.encode() if certificate else None)
            for peer_id, address, certificate in peers
        ]
        node.book.known = {str(peer.peer_id): peer for peer in found if peer.peer_id != node.endpoint.peer_id}
        node.collective.move_to(next_round)
        return {}

    def round(
        self,
        name: str,
        index: int,
        values: int,
        seed: int,
        shapes: Sequence[Sequence[int]] = (),
        powersgd_rank: int = 0,
    ) -> dict[str, Any]:
        """One round, the ``index``-th of these members, with a random vector; factored, if that has a rank."""
        vector = torch.randn(values, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)
        node = self._nodes[name]
        collective = with_powersgd(node.collective, lambda _round_index: shapes, powersgd_rank)
        residual, basis = self._carried.get(name, (None, None))
        contribution = Contribution(
            round_index=index,
            vector=vector,
            num_batches=500,
            age_s=60.0,
            reference=torch.zeros(values),
            state_digest="0" * 64,
            residual=residual,
            basis=basis,
        )
        PHASES.seconds = {}
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        result = collective.reduce(contribution)
        report = result.report
        if powersgd_rank:
            self._carried[name] = result.residual, result.basis
        return {
            "from_s": began_s,
            "until_s": time.monotonic(),
            "round_cpu_s": time.process_time() - began_cpu_s,
            "phases_s": dict(PHASES.seconds),
            "members": len(report.members),
            "passes": report.num_passes,
            "sent_bytes": report.sent_bytes,
            "received_bytes": report.received_bytes,
        }

    def train(
        self,
        name: str,
        workload: dict[str, Any],
        rank: int,
        members: int,
        steps: int,
        diloco: dict[str, Any],
        sleep_s: float = 0.0,
    ) -> dict[str, Any]:
        """DiLoCo from the first weights; with ``sleep_s`` the inner steps are slept instead of computed."""
        made = Workload(**workload)
        model = made.model()
        strategy = DiLoCoTrainer(model, DiLoCoConfig(**diloco), self._nodes[name].collective)
        inner = InnerConfig(micro_batch_size=made.batch_size, seq_len=made.seq_len, warmup_steps=0)
        loop = InnerLoop(model, make_optimizer(model, inner), inner, made.batches(rank, members), torch.device("cpu"))
        strategy.state_digest()
        waiting_s, training_s, outcomes = 0.0, 0.0, []
        for _ in range(steps):
            began_s = time.monotonic()
            if sleep_s:
                time.sleep(sleep_s)
            else:
                loop.step()
            stepped_s = time.monotonic()
            outcomes.append(strategy.after_inner_step(1))
            training_s += stepped_s - began_s
            waiting_s += time.monotonic() - stepped_s
        began_s = time.monotonic()
        outcomes.append(strategy.drain())
        waiting_s += time.monotonic() - began_s
        rounds = [outcome for outcome in outcomes if outcome is not None]
        return {
            "tokens": steps * made.tokens_per_step,
            "training_s": training_s,
            "waiting_s": waiting_s,
            "rounds": len(rounds),
            "committed": sum(outcome.committed for outcome in rounds),
            "members": [len(outcome.report.members) for outcome in rounds if outcome.report is not None],
            "passes": [outcome.report.num_passes for outcome in rounds if outcome.report is not None],
            "sent_bytes": sum(outcome.report.sent_bytes for outcome in rounds if outcome.report is not None),
            "rounds_s": [outcome.report.seconds for outcome in rounds if outcome.report is not None],
            "state_digest": strategy.state_digest(),
            "values": sum(layout.num_values for layout in strategy.plan.layouts),
        }

    def close(self, name: str) -> dict[str, Any]:
        """Ends a node."""
        node = self._nodes.pop(name)
        self._carried.pop(name, None)
        node.collective.close()
        self._loop.run(_stopped(node.endpoint), _START_S)
        return {}


async def _stopped(endpoint: Endpoint) -> None:
    async with asyncio.timeout(_START_S):
        await endpoint.stop()


if __name__ == "__main__":
    member = GenesisMember()
    serve(
        {
            "open": member.open,
            "meet": member.meet,
            "round": member.round,
            "train": member.train,
            "close": member.close,
        }
    )
