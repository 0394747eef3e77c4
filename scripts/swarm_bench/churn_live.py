"""The same with real workers: processes with the real service, which come and go while they are asked.

As in the simulation but four times as fast: a fast worker takes 0.25 s a micro-batch, a slow one 2.5 s, both asleep, so
that eight of them fit on two cores. A worker that leaves closes its endpoint whatever it is at, and who had asked it
asks another; in the same moment it is back under a new identity, at an endpoint opened just before. Rules are tried one
after another, on the same processes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from scripts.baselines.swarm.stage_call import DIM
from scripts.baselines.swarm.stage_member import RUN_ID, STAGE
from scripts.swarm_bench.churn import RULES, ChurnPlan, Rule, rule_of
from scripts.trainer_bench.crew import ROOT, Crew, crew, progress
from trainer.errors import RpcError
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.pipeline.protocol.messages import FORWARD, ForwardAsk, StageAnswer
from trainer.pipeline.protocol.tensors import ask_tensors

_FOLDER = ROOT / "scripts" / "baselines" / "swarm"
_FASTER = 4.0
_POSITIONS = 16
_CALL_S = 30.0
_START_S = 120.0
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a worker lives, one after another."""

    number: int
    process: Crew
    pass_s: float
    is_slow: bool


class _Swarm:
    """Asks workers under one rule while the slow ones come and go."""

    def __init__(self, endpoint: Endpoint, rule: Rule, plan: ChurnPlan, label: str) -> None:
        self._endpoint = endpoint
        self._rule = rule
        self._plan = plan
        self._label = label
        self._random = random.Random(plan.seed)
        self._peers: dict[str, Peer] = {}
        self._lives = itertools.count()
        self._numbers = itertools.count()
        self._done = 0

    async def run(self, places: list[_Place]) -> float:
        """Micro-batches a second."""
        names = [self._add(await self._served(place)) for place in places]
        began_s = time.monotonic()
        until_s = began_s + self._plan.duration_s
        leaving = [
            asyncio.create_task(self._come_and_go(place, name, until_s))
            for place, name in zip(places, names, strict=True)
            if place.is_slow
        ]
        await asyncio.gather(*(self._ask_on(until_s) for _ in range(self._plan.in_flight)))
        passed_s = time.monotonic() - began_s
        names = [*names[: len(places) - len(leaving)], *await asyncio.gather(*leaving)]
        for place, name in zip(places, names, strict=True):
            await asyncio.to_thread(place.process.all, "leave", name=name)
        return self._done / passed_s

    async def _served(self, place: _Place) -> tuple[str, Peer]:
        """A new worker that nobody knows of yet."""
        name = f"{self._label}-{place.number}.{next(self._lives)}"
        answer = await asyncio.to_thread(
            place.process.all, "serve", name=name, tls=False, pass_s=place.pass_s, timeout_s=_START_S
        )
        peer_id, address, _ = answer[0]["peer"]
        return name, Peer(peer_id, address)

    def _add(self, worker: tuple[str, Peer]) -> str:
        name, self._peers[worker[0]] = worker
        self._rule.add(name)
        return name

    async def _come_and_go(self, place: _Place, name: str, until_s: float) -> str:
        """Returns the name of the last life."""
        while True:
            stay_s = self._plan.stay_s * self._random.uniform(0.5, 1.5)
            if time.monotonic() + stay_s > until_s:
                return name
            await asyncio.sleep(stay_s)
            following = await self._served(place)
            self._rule.remove(name)
            del self._peers[name]
            left, name = name, self._add(following)
            await asyncio.to_thread(place.process.all, "leave", name=left)

    async def _ask_on(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            ticket = self._rule.grant(_now_s())
            if ticket is None:
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await self._ask(self._peers[ticket.worker], max(0.1, until_s - time.monotonic()))
            except RpcError:
                self._rule.failed(ticket, _now_s())
                continue
            if ticket.worker in self._peers:
                self._rule.done(ticket, _now_s())
            else:
                self._rule.failed(ticket, _now_s())
            self._done += 1

    async def _ask(self, peer: Peer, timeout_s: float) -> None:
        x = torch.zeros(1, _POSITIONS, DIM)
        ask = ForwardAsk(
            micro_batch=f"e0.s0.r{next(self._numbers)}",
            stage=STAGE,
            num_rows=1,
            num_positions=_POSITIONS,
            answer_within_s=_CALL_S,
        )
        tensors, size_bytes = {"activation": x}, x.numel() * x.element_size()
        await ask_tensors(
            self._endpoint, peer, FORWARD, ask, tensors, StageAnswer, answer_bytes=size_bytes, timeout_s=timeout_s
        )


def _now_s() -> float:
    """In the simulation's time, since two of the rules take a newcomer's throughput for one a second."""
    return time.monotonic() * _FASTER


async def _one_rule(rule: str, plan: ChurnPlan, places: list[_Place]) -> float:
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(host="127.0.0.1", tls=False))
    await endpoint.start()
    try:
        return await _Swarm(endpoint, rule_of(rule), plan, rule).run(places)
    finally:
        await endpoint.stop()


def measure_live(plan: ChurnPlan, seconds: float) -> dict[str, Any]:
    """All rules, one after another.

    Args:
        plan: of the simulation; its times are divided by four.
        seconds: of each rule.

    Returns:
        Micro-batches a second under each rule, in the simulation's time, and ours over the others'.
    """
    quick = replace(plan, stay_s=plan.stay_s / _FASTER, duration_s=seconds)
    found: dict[str, float] = {}
    with ExitStack() as stack:
        places = [
            _Place(
                number,
                stack.enter_context(crew("stage", 1, folder=_FOLDER)),
                (plan.fast_s if number < plan.num_fast else plan.slow_s) / _FASTER,
                number >= plan.num_fast,
            )
            for number in range(plan.num_fast + plan.num_slow)
        ]
        for place in places:
            place.process.all("cpu", timeout_s=_START_S)
        for rule in RULES:
            found[rule] = asyncio.run(_one_rule(rule, quick, places)) / _FASTER
            progress(f"real workers, {rule}: {found[rule]:.2f} micro-batches a second")
    return {
        "stay_s": plan.stay_s,
        **{f"{rule}_per_s": rate for rule, rate in found.items()},
        "ours_over_swarm": found["ours"] / found["swarm"],
        "ours_over_bottom": found["ours"] / found["bottom"],
    }
