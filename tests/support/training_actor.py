"""Members of runs in two processes, honest and lying: endpoints, rounds and training, without a store (`TrainingCast`).

A process is told which members live in it and what the run is like, where all are reached, and that the others are
done, and answers each. A member learns the manuals of the standard library, letter by letter, from other places. The
steps are so few and so large that honest members still agree about the direction (cosines of 0.7 and more).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tests.support.child import Child, say
from tests.support.model_configs import SMALL, VOCAB_SIZE, small_model
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.collective.arithmetic import Arithmetic
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.engine.strategy import OuterResult
from trainer.run.node.loop_thread import LoopThread

NUM_ROUNDS = 8
_NUM_PROCESSES = 2
_START_S, _RUN_S = 60.0, 120.0
_INNER_STEPS = 6
_ROWS = 32
_SEQ_LEN = SMALL.max_seq_len
_POISON = 1.0e30
"""What the codec takes, and `_encode_poison` makes NaN of."""

_MANY = 1_000_000_000_000
"""Batches that nobody trained."""


@cache
def _letters() -> Tensor:
    """The manuals: the 63 commonest letters by number, all others alike."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    common = sorted(set(text), key=lambda letter: (-text.count(letter), letter))[: VOCAB_SIZE - 1]
    numbers = {letter: number for number, letter in enumerate(common)}
    return torch.tensor([numbers.get(letter, VOCAB_SIZE - 1) for letter in text])


def _rows(letters: Tensor, starts: Tensor) -> dict[str, Tensor]:
    rows = letters[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def _batches(member: int) -> Iterator[dict[str, Tensor]]:
    """Endless, from all of the text but the last twentieth."""
    letters = _letters()[: 19 * len(_letters()) // 20]
    generator = torch.Generator().manual_seed(member)
    while True:
        yield _rows(letters, torch.randint(0, len(letters) - _SEQ_LEN, (_ROWS,), generator=generator))


def _held_out_loss(model: torch.nn.Module) -> float:
    letters = _letters()[19 * len(_letters()) // 20 :]
    batch = _rows(letters, torch.arange(0, len(letters) - _SEQ_LEN - 1, 23)[:1000])
    with torch.no_grad():
        return float(model(batch["input_ids"], batch["labels"]))


def _noise(vector: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(vector.shape, generator=generator)
    return noise * (vector.norm() / noise.norm())


_LIES: Mapping[str, Callable[[Tensor, torch.Generator], dict[str, Any]]] = {
    "flip": lambda vector, _: {"vector": -10 * vector},
    "nan": lambda vector, _: {"vector": torch.full_like(vector, _POISON)},
    "random": lambda vector, generator: {"vector": _noise(vector, generator)},
    "zero": lambda vector, _: {"vector": torch.zeros_like(vector)},
    "weight": lambda _vector, _: {"num_batches": _MANY},
    "heavy_flip": lambda vector, _: {"vector": -vector, "num_batches": _MANY},
}
ATTACKS = tuple(_LIES)


class _Liar(PeerCollective):
    attack: str
    generator: torch.Generator

    def reduce(self, contribution: Contribution) -> RoundResult:
        return super().reduce(replace(contribution, **_LIES[self.attack](contribution.vector, self.generator)))


def _encode_poison(arithmetic: Arithmetic, part: int) -> bytes:
    """In place of `Arithmetic.encode_own`, whose codec refuses what is not finite."""
    start, stop = arithmetic.agreement.part_bounds(part)
    piece = arithmetic.vector[start:stop]
    if bool((piece == _POISON).all()):
        return np.full(stop - start, np.nan, dtype="<f4").tobytes()
    return bytes(arithmetic.codec.encode(piece))


class _Member:
    def __init__(self, number: int, run: Mapping[str, Any], loop: LoopThread) -> None:
        self._number = number
        self._loop = loop
        self._peers: dict[str, Peer] = {}
        config = RpcConfig(host="127.0.0.1", public_address="127.0.0.1", heartbeat_s=1.0, stall_timeout_s=15.0)
        self.endpoint = Endpoint(Identity.create(), run["run_id"], replace(config, stop_grace_s=0.1))
        rule = RuleConfig(**run["rule"])
        terms = Terms(architecture={}, tokenizer_lineage="0" * 64, synchronisation={"rule": rule.rule})
        times = {"stall_timeout_s": 15.0, "invite_after_s": 60.0, "gather_timeout_s": 60.0, "round_timeout_s": 90.0}
        options = CollectiveConfig(min_members=run["num_members"], **times)
        directory = SimpleNamespace(peers=lambda: self._peers, holds_most_held_state=lambda: True)
        attack = run["liars"].get(str(number))
        kind = PeerCollective if attack is None else _Liar
        self._collective = kind(
            self.endpoint, loop.loop, run["run_id"], terms, rule, options, directory, lambda: VOCAB_SIZE
        )
        if isinstance(self._collective, _Liar):
            self._collective.attack = attack
            self._collective.generator = torch.Generator().manual_seed(1000 + number)
        self._collective.move_to(0)

    def start(self) -> tuple[str, str, str]:
        self._loop.run(self.endpoint.start(), 30.0)
        return self.endpoint.peer_id, self.endpoint.address, (self.endpoint.certificate or b"").decode()

    def meet(self, members: Mapping[str, tuple[str, str, str]]) -> None:
        for peer_id, address, certificate in members.values():
            if peer_id != self.endpoint.peer_id:
                self._peers[peer_id] = Peer(peer_id, address, certificate.encode() or None)

    def train(self) -> dict[str, Any]:
        model = small_model()
        config = InnerConfig(lr=4e-3, warmup_steps=10, schedule="constant", micro_batch_size=_ROWS, seq_len=_SEQ_LEN)
        inner = InnerLoop(model, make_optimizer(model, config), config, _batches(self._number), torch.device("cpu"))
        outer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=_INNER_STEPS), self._collective)
        rounds: list[OuterResult] = []
        while len(rounds) < NUM_ROUNDS:
            inner.step()
            result = outer.after_inner_step(1)
            rounds += [result] if result is not None else []
        anchor = outer.shared_state().anchor
        spelled = ("members", "dropped", "completeness", "validation", "weights", "rule", "note")
        reports = [result.report for result in rounds if result.report is not None]
        return {
            "loss": _held_out_loss(model),
            "digest": hashlib.sha256(anchor.numpy().tobytes()).hexdigest(),
            "failed": [result.error for result in rounds if not result.committed],
            "reports": [{name: getattr(report, name) for name in spelled} for report in reports],
            "peer_id": self.endpoint.peer_id,
        }

    def leave(self) -> None:
        self._collective.close()
        self._loop.run(self.endpoint.stop(), 30.0)


def main() -> None:
    torch.set_num_threads(1)
    Arithmetic.encode_own = _encode_poison  # type: ignore[method-assign]
    loop = LoopThread("actor")
    loop.start()
    while line := sys.stdin.readline():
        run = json.loads(line)
        members = {number: _Member(number, run, loop) for number in run["here"]}
        say({number: member.start() for number, member in members.items()})
        everybody = json.loads(sys.stdin.readline())
        for member in members.values():
            member.meet(everybody)
        with ThreadPoolExecutor(len(members)) as pool:
            results = dict(zip(members, pool.map(_Member.train, members.values()), strict=True))
        say(results)
        sys.stdin.readline()
        for member in members.values():
            member.leave()
        say({})
    loop.stop()


@dataclass(frozen=True)
class Outcome:
    members: dict[int, dict[str, Any]]
    """By number, what its process says of it."""
    liars: tuple[int, ...]

    @property
    def honest(self) -> list[dict[str, Any]]:
        return [member for number, member in self.members.items() if number not in self.liars]

    @property
    def loss(self) -> float:
        assert len({member["digest"] for member in self.honest}) == 1
        assert all(not member["failed"] and len(member["reports"]) == NUM_ROUNDS for member in self.honest)
        return float(self.honest[0]["loss"])

    @property
    def reports(self) -> list[dict[str, Any]]:
        return list(self.honest[0]["reports"])

    def said_of_liars(self, field: str) -> list[set[int]]:
        """Of each round, the liars that ``dropped`` or ``validation`` of the report name."""
        numbers = {member["peer_id"]: number for number, member in self.members.items()}
        return [{numbers[who] for who, _ in report[field]} & set(self.liars) for report in self.reports]


class TrainingCast:
    """Two processes for as many runs as there are; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Child] = []
        self._numbers = itertools.count()
        self._living = ExitStack()

    def __enter__(self) -> Self:
        logs = [self._folder / f"actor-{number}.log" for number in range(_NUM_PROCESSES)]
        self._processes = [self._living.enter_context(Child("training_actor", log=log)) for log in logs]
        return self

    def __exit__(self, *_: object) -> None:
        self._living.close()

    def run(self, num_members: int, rule: Mapping[str, Any], attack: str = "", num_liars: int = 0) -> Outcome:
        """One run to its end, by ``rule`` of `RuleConfig`; the last members lie as ``attack`` of `ATTACKS`."""
        liars = tuple(range(num_members - num_liars, num_members))
        described = {
            "run_id": f"run-{next(self._numbers)}",
            "num_members": num_members,
            "rule": dict(rule),
            "liars": dict.fromkeys(liars, attack),
        }
        for index, process in enumerate(self._processes):
            process.say({**described, "here": list(range(index, num_members, _NUM_PROCESSES))})
        everybody = {key: value for process in self._processes for key, value in process.hear(_START_S).items()}
        for process in self._processes:
            process.say(everybody)
        results = {int(key): value for process in self._processes for key, value in process.hear(_RUN_S).items()}
        for process in self._processes:
            process.say({})
        for process in self._processes:
            process.hear(_START_S)
        return Outcome(results, liars)


if __name__ == "__main__":
    main()
