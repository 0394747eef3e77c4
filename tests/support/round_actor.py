"""Members of rounds as processes of their own (`RoundSwarm`), which die or stop where a test says.

Run as ``python -m tests.support.round_actor``: reads its settings as one JSON line, prints where it is reached, then
one line for each command. A contribution is a function of the member's number and the round: a test knows all results.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.child import Child, say
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.collective.commit_vote import CommitVote
from trainer.collective.config import RoundSettings
from trainer.collective.joining import Joining
from trainer.collective.member import RoundMember
from trainer.collective.messages import Agreement, JoinRequest, Member
from trainer.collective.planning import coordinator_order, cut_values
from trainer.collective.reduction import Reduction, ReductionPass
from trainer.compression.vectors import codec_named
from trainer.errors import RoundFailedError, StateBehindError
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig, Stream
from trainer.outer.engine.collective import Collective, Contribution
from trainer.outer.engine.powersgd import with_powersgd
from trainer.run.node.loop_thread import LoopThread

RUN_ID = "round-test"
NUM_VALUES = 40_000
FACTORED_SHAPES = ((160, 200), (8_000,))  # Of contributions, for rounds of two phases.
_START_S = 240.0


def identity_of(number: int) -> Identity:
    """The same key for the same number, always."""
    seed = hashlib.sha256(f"round actor {number}".encode()).digest()
    return Identity.of(Ed25519PrivateKey.from_private_bytes(seed))


PEER_IDS = [identity_of(number).peer_id for number in range(12)]


def agreement_of(num_members: int, num_values: int, most_values: int = 1 << 18) -> Agreement:
    return Agreement(
        round_index=3,
        attempt=0,
        coordinator=PEER_IDS[0],
        state_digest="0" * 64,
        num_values=num_values,
        part_values=cut_values(num_values, num_members, most_values),
        vocabulary_rows=1024,
        members=tuple(
            Member(peer_id=peer_id, address="127.0.0.1:1", certificate=None, weight=1.0)
            for peer_id in sorted(PEER_IDS[:num_members])
        ),
    )


def contribution_of(number: int, round_index: int) -> torch.Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1000 * round_index + number))


def terms(**changes: Any) -> Terms:
    synchronisation = {"inner_steps": 20, **changes}
    return Terms(architecture={"dim": 8}, tokenizer_lineage="0" * 64, synchronisation=synchronisation)


def join_request(**changes: Any) -> JoinRequest:
    return JoinRequest(
        round_index=5,
        terms=terms(),
        state_digest="ab" * 32,
        num_values=5_000,
        num_batches=10,
        age_s=1.0,
        vocabulary_rows=1024,
        address="127.0.0.1:9",
        certificate=None,
        tried=(),
    ).model_copy(update=changes)


class KnownPeers:
    def __init__(self, known: Mapping[str, Peer] | None = None, *, holds_most_held_state: bool = False) -> None:
        self.known = dict(known or {})
        self._holds_most_held_state = holds_most_held_state

    def peers(self) -> Mapping[str, Peer]:
        return self.known

    def holds_most_held_state(self) -> bool:
        return self._holds_most_held_state


def settings_of(own_id: str, known: Mapping[str, Peer] | None = None, **options: Any) -> RoundSettings:
    return RoundSettings(
        run_id=RUN_ID,
        terms=terms(),
        rule=RuleConfig(),
        codec=codec_named("fp32"),
        config=CollectiveConfig(**options),
        endpoint=cast(Endpoint, SimpleNamespace(peer_id=own_id)),
        directory=KnownPeers(known),
    )


class _Fault:
    """A signal to this process at a place in the code, after it was passed a number of times."""

    def __init__(self) -> None:
        self.place = ""
        self.left = 0
        self.signal = signal.SIGKILL

    def set(self, spelling: str) -> None:
        """``place:count:SIGNAL``; empty for none."""
        self.place = ""
        if spelling:
            place, count, name = spelling.split(":")
            self.left, self.signal = int(count), signal.Signals[name]
            self.place = place

    def at(self, place: str) -> None:
        if self.place != place or not place:
            return
        self.left -= 1
        if self.left < 0:
            self.place = ""
            os.kill(os.getpid(), self.signal)


def _install(fault: _Fault) -> None:
    """Puts the fault's places into the round's code; in this process only."""

    def around(owner: type, name: str, before: str, after: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        async def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            fault.at(before)
            result = await original(self, *arguments, **options)
            fault.at(after)
            return result

        def wrapped_call(self: Any, *arguments: Any) -> None:
            fault.at(before)
            original(self, *arguments)
            fault.at(after)

        setattr(owner, name, wrapped if inspect.iscoroutinefunction(original) else wrapped_call)

    around(RoundMember, "_join", "before_joining", "")
    around(Joining, "_acknowledge", "before_acknowledging", "")
    around(RoundMember, "_carry_out", "begun", "")
    around(ReductionPass, "_send_parts", "before_sending", "")
    around(Stream, "send", "", "sent")
    around(Reduction, "_reduce", "before_publishing", "published")
    around(RoundMember, "_vote", "before_voting", "")
    around(CommitVote, "_decide", "before_deciding", "decided")


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = json.loads(sys.stdin.readline())
    number = settings["number"]
    fault = _Fault()
    _install(fault)
    loop = LoopThread("actor")
    loop.start()
    stall_timeout_s = settings["stall_timeout_s"]
    rpc = {"heartbeat_s": 0.25, "stall_timeout_s": stall_timeout_s, "stop_grace_s": 0.2}
    endpoint = Endpoint(identity_of(number), RUN_ID, RpcConfig(host="127.0.0.1", tls=settings.get("tls", False), **rpc))
    others = KnownPeers()
    config = CollectiveConfig(
        stall_timeout_s=stall_timeout_s,
        invite_after_s=0.5,
        gather_timeout_s=10.0,
        round_timeout_s=60.0,
        compression=settings.get("compression", "fp32"),
    )
    rule = RuleConfig(**{"rule": "mean", "validation": "log"} | settings.get("rule", {}))
    collective = PeerCollective(endpoint, loop.loop, RUN_ID, terms(), rule, config, others, lambda: 1024)
    rank = settings.get("powersgd_rank", 0)
    reducing = with_powersgd(collective, lambda _round_index: FACTORED_SHAPES, rank)
    loop.run(endpoint.start(), 10)
    say({"address": endpoint.address, "certificate": endpoint.certificate.decode() if endpoint.certificate else None})
    for line in sys.stdin:
        command = json.loads(line)
        others.known = {
            peer_id: Peer(peer_id, address, certificate.encode() if certificate else None)
            for peer_id, (address, certificate) in command["peers"].items()
        }
        if "move_to" in command:
            collective.move_to(command["move_to"])
            say({"done": True})
            continue
        fault.set(command.get("fault", ""))
        say(_round(reducing, number, command) | {"vocabulary_rows": collective.agreed_vocabulary_rows})
    loop.run(endpoint.stop(), 10)
    loop.stop()
    os._exit(0) if threading.active_count() > 1 else None


def _round(collective: Collective, number: int, command: Mapping[str, Any]) -> dict[str, Any]:
    round_index = command["round"]
    vector = contribution_of(number, round_index)
    try:
        result = collective.reduce(
            Contribution(
                round_index=round_index,
                vector=vector,
                num_batches=command.get("num_batches", 20),
                age_s=1.0,
                reference=torch.zeros_like(vector),
                state_digest=command["state"],
            )
        )
    except StateBehindError as error:
        return {"behind": str(error)}
    except RoundFailedError as error:
        return {"failed": str(error)}
    report = result.report
    torch.save(result.vector, command["save_to"])
    return {
        "digest": hashlib.sha256(result.vector.numpy().tobytes()).hexdigest(),
        "members": list(report.members),
        "dropped": [list(entry) for entry in report.dropped],
        "completeness": report.completeness,
        "num_passes": report.num_passes,
        "seconds": report.seconds,
        "weights": list(report.weights),
        "basis": None if result.basis is None else hashlib.sha256(result.basis.numpy().tobytes()).hexdigest(),
    }


class Actor(Child):
    def __init__(self, number: int, log: Path) -> None:
        super().__init__("round_actor", log=log)
        self.peer_id = identity_of(number).peer_id
        self.address = ""
        self.certificate: str | None = None


class RoundSwarm:
    """Actors 0 to n-1, with one set of settings; started again where one has died."""

    def __init__(self, folder: Path, num_actors: int, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"stall_timeout_s": 2.5, **settings}
        self.actors: dict[int, Actor] = {}
        self.next_round = 0
        for step in (self._launch, self._await_start, self._make_ready):
            for number in range(num_actors):
                step(number)

    def close(self) -> None:
        for actor in self.actors.values():
            actor.__exit__()

    def order(self, round_index: int) -> list[int]:
        """Numbers in the order in which they would coordinate a round."""
        numbers = {actor.peer_id: number for number, actor in self.actors.items()}
        return [numbers[peer_id] for peer_id in coordinator_order(RUN_ID, round_index, numbers)]

    def begin(
        self, numbers: list[int], *, faults: Mapping[int, str] | None = None, each: Mapping[int, Any] | None = None
    ) -> int:
        """Lets these take part in the next round, each perhaps with options of its own; returns its number."""
        round_index = self.next_round
        self.next_round += 1
        command = {"round": round_index, "state": hashlib.sha256(f"state {round_index}".encode()).hexdigest()}
        for number in numbers:
            own = {"fault": (faults or {}).get(number, ""), "save_to": str(self._result_path(number))}
            own |= (each or {}).get(number, {})
            self.actors[number].say({"peers": self._peers_of(number), **command, **own})
        return round_index

    def outcome(self, number: int, timeout_s: float = 60.0) -> dict[str, Any]:
        return self.actors[number].hear(timeout_s)

    def result(self, number: int) -> torch.Tensor:
        return torch.load(self._result_path(number), weights_only=True)

    def restart(self, number: int) -> None:
        """A new process in the place of one that has died; at another port."""
        self.actors[number].__exit__()
        for step in (self._launch, self._await_start, self._make_ready):
            step(number)

    def _make_ready(self, number: int) -> None:
        """As a node that has taken up the others' state: invited to the next round, it will say that it comes."""
        self.actors[number].say({"move_to": self.next_round, "peers": self._peers_of(number)})
        self.actors[number].hear(_START_S)

    def _peers_of(self, number: int) -> dict[str, tuple[str, str | None]]:
        return {
            actor.peer_id: (actor.address, actor.certificate) for other, actor in self.actors.items() if other != number
        }

    def _result_path(self, number: int) -> Path:
        return self.folder / f"result-{number}.pt"

    def _launch(self, number: int) -> None:
        actor = self.actors[number] = Actor(number, self.folder / f"actor-{number}.log")
        actor.say({"number": number, **self.settings})

    def _await_start(self, number: int) -> None:
        actor = self.actors[number]
        started = actor.hear(_START_S)
        actor.address, actor.certificate = started["address"], started["certificate"]


def mean_of(numbers: list[int], round_index: int) -> torch.Tensor:
    return torch.stack([contribution_of(number, round_index) for number in numbers]).mean(0)


if __name__ == "__main__":
    main()
