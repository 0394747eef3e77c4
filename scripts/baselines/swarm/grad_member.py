"""Ours: a replica that averages gradients (`GradTrainer`) over real endpoints, with a model of so many values."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from scripts.baselines.trainer.genesis_member import Book
from scripts.baselines.trainer.serving import serve
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.outer.diloco import FlatLayout
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.grad import GradConfig, GradientSum, GradTrainer, Progress
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "bench-grad"
_TERMS = Terms(architecture={}, tokenizer_lineage="bench", synchronisation={})
_START_S = 20.0
_OWN_TOKENS, _TARGET_TOKENS = 1000, 4000
_BEGIN_S = 5.0
_COLUMNS = 1000


class Noting:
    """A collective that notes when a round has its result."""

    def __init__(self, collective: PeerCollective) -> None:
        self._collective = collective
        self.requested, self.close = collective.requested, collective.close
        self.averaged_s = self.cpu_s = 0.0

    def reduce(self, contribution: Contribution) -> RoundResult:
        """See `Collective`."""
        result = self._collective.reduce(contribution)
        self.averaged_s, self.cpu_s = time.monotonic(), time.process_time()
        return result


class GradMember:
    """One replica, whose gradients are random; a source of gradients (`GradientSource`)."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loop = LoopThread("bench")
        self._loop.start()
        self._progress = Progress(0, 0)
        self._sum: torch.Tensor | None = None

    def open(self, values: int, compression: str, rule: dict[str, str]) -> dict[str, Any]:
        """Starts a node with such a model; how to reach it."""
        rpc = RpcConfig(host="127.0.0.1", public_address="127.0.0.1", tls=False)
        self._endpoint = Endpoint(Identity.create(), RUN_ID, rpc)
        self._book = Book()
        config = CollectiveConfig(compression=compression, invite_after_s=0.0)  # type: ignore[arg-type]
        self._collective = PeerCollective(
            self._endpoint,
            self._loop.loop,
            RUN_ID,
            _TERMS,
            RuleConfig(**rule),  # type: ignore[arg-type]
            config,
            self._book,
            lambda: 0,
            weighing="linear",
        )
        self._noting = Noting(self._collective)
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.zeros(values // _COLUMNS, _COLUMNS)))
        self._trainer = GradTrainer(
            model,
            GradConfig(average_state_every=0),
            self._noting,
            optimizer=torch.optim.AdamW(model.parameters()),
            lr_of=lambda *_: 1e-4,
            source=self,
            max_norm=1.0,
            target_tokens=_TARGET_TOKENS,
        )
        self._trainer.progress = lambda: self._progress
        self._loop.run(self._endpoint.start(), _START_S)
        return {"peer": [self._endpoint.peer_id, self._endpoint.address]}

    def meet(self, peers: list[list[str]]) -> dict[str, Any]:
        """Tells the node of the others."""
        own_id = self._endpoint.peer_id
        self._book.known = {peer_id: Peer(peer_id, address) for peer_id, address in peers if peer_id != own_id}
        self._collective.move_to(0)
        return {}

    def prepare(self, seed: int, ahead: bool) -> dict[str, Any]:
        """Adds up gradients; ``ahead``: the target is so near that the round is agreed on."""
        generator = torch.Generator().manual_seed(seed)
        self._sum = torch.randn(self._trainer.layout.num_values, generator=generator).mul_(_OWN_TOKENS * 1e-3)
        if not ahead:
            return {}
        self._progress, ends_s = Progress(_OWN_TOKENS, _TARGET_TOKENS - 1), time.monotonic() + _BEGIN_S
        while self._trainer._round is None and time.monotonic() < ends_s:
            self._trainer.look()
            time.sleep(0.01)
        return {"begun": self._trainer._round is not None}

    def round(self) -> dict[str, Any]:
        """The target is reached: hands over, waits for the mean (until then it is a round), clips, and steps."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        self._progress = Progress(_OWN_TOKENS, _TARGET_TOKENS)
        outcome = self._trainer.look()
        stepped_s, stepped_cpu_s = time.monotonic(), time.process_time()
        self._progress = Progress(0, 0)
        if outcome is None or outcome.result.report is None:
            raise RuntimeError(f"expected a step, found {outcome}")
        return {
            "from_s": began_s,
            "until_s": self._noting.averaged_s,
            "stepped_s": stepped_s,
            "round_cpu_s": self._noting.cpu_s - began_cpu_s,
            "step_cpu_s": stepped_cpu_s - began_cpu_s,
            "phases_s": outcome.result.report.phases,
            "members": len(outcome.result.report.members),
            "sent_bytes": outcome.result.report.sent_bytes,
            "lineage": self._trainer.state_digest(),
        }

    def step(self) -> dict[str, Any]:
        """The clipping and the optimizer alone, and torch's fused kernel for the same."""
        state, gradient = self._trainer.shared_state(), torch.randn(self._trainer.layout.num_values)
        began_s = time.monotonic()
        self._trainer._updated(gradient, 1.0, 1e-4)
        ours_s = time.monotonic() - began_s
        weight = nn.Parameter(state.parameters.clone())
        weight.grad = gradient
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()
        began_s = time.monotonic()
        optimizer.step()
        return {"ours_s": ours_s, "fused_s": time.monotonic() - began_s}

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        """See `GradientSource`."""
        if self._sum is None:
            raise RuntimeError("expected gradients to have been added up")
        taken, self._sum = self._sum, None
        return GradientSum(taken, _OWN_TOKENS, 1)

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """See `GradientSource`."""
        self._sum = gradient.vector


if __name__ == "__main__":
    member = GradMember()
    serve(
        {
            "open": member.open,
            "meet": member.meet,
            "prepare": member.prepare,
            "round": member.round,
            "step": member.step,
        }
    )
