"""Many real members of rounds in few processes: an endpoint and sockets each, one event loop for those of a process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.support.round_actor import RUN_ID, KnownPeers, identity_of, terms
from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective
from trainer.errors import RoundFailedError
from trainer.network.rpc import Endpoint, Peer, RpcConfig
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.run.node.loop_thread import LoopThread

MEAN = RuleConfig(rule="mean", validation="off")
_FIRST = 1000  # Numbers of keys, apart from those of other tests.


def vector_of(number: int, round_index: int, num_values: int) -> torch.Tensor:
    """A member's contribution, which any test can compute."""
    return torch.randn(num_values, generator=torch.Generator().manual_seed(1000 * round_index + number))


def peer_id_of(number: int) -> str:
    return identity_of(_FIRST + number).peer_id


class GroupedMember:
    """One node; ``loop`` may be shared."""

    def __init__(self, number: int, loop: LoopThread, rule: RuleConfig, **options: Any) -> None:
        self.number = number
        self.loop = loop
        stall_timeout_s = options.get("stall_timeout_s", 3.0)
        rpc = RpcConfig(
            host="127.0.0.1",
            tls=False,
            heartbeat_s=0.5,
            stall_timeout_s=stall_timeout_s,
            stop_grace_s=0.1,
            max_calls=2048,
            max_streams=1024,
            max_waiting_per_host=2048,
            max_connections=4096,
        )
        self.endpoint = Endpoint(identity_of(_FIRST + number), RUN_ID, rpc)
        self.directory = KnownPeers(holds_most_held_state=True)
        config = CollectiveConfig(
            **{
                "invite_after_s": 0.5,
                "gather_timeout_s": 20.0,
                "stall_timeout_s": stall_timeout_s,
                "round_timeout_s": 90.0,
                "max_members": 2048,
                "max_group_members": 8,
            }
            | options
        )
        self.collective = PeerCollective(
            self.endpoint, loop.loop, RUN_ID, terms(), rule, config, self.directory, lambda: 1024
        )
        loop.run(self.endpoint.start(), 20)

    def know(self, peers: Mapping[str, Peer]) -> None:
        """Tells this node of all others."""
        self.directory.known = {peer_id: peer for peer_id, peer in peers.items() if peer_id != self.endpoint.peer_id}

    def round(self, round_index: int, vector: torch.Tensor, **changes: Any) -> RoundResult | Exception:
        """Takes part in one round; returns its result or why there is none."""
        facts = {
            "num_batches": 25,
            "age_s": 0.0,
            "reference": torch.zeros_like(vector),
            "state_digest": hashlib.sha256(f"state {round_index}".encode()).hexdigest(),
        }
        try:
            return self.collective.reduce(Contribution(round_index=round_index, vector=vector, **facts | changes))
        except RoundFailedError as error:
            return error

    def kill(self) -> None:
        """Is gone at once: it neither answers nor says anything any more."""
        self.collective.close()
        self.loop.run(self.endpoint.stop(), 10)


class GroupedMembers:
    """Members of one process, who go through rounds together."""

    def __init__(self, numbers: Sequence[int], *, rule: RuleConfig = MEAN, num_loops: int = 1, **options: Any) -> None:
        self.loops = [LoopThread(f"members-{number}") for number in range(num_loops)]
        for loop in self.loops:
            loop.start()
        self.all = [
            GroupedMember(number, self.loops[place % num_loops], rule, **options)
            for place, number in enumerate(numbers)
        ]

    def know_each_other(self) -> None:
        peers = {member.endpoint.peer_id: member.endpoint.peer for member in self.all}
        for member in self.all:
            member.know(peers)

    def round(
        self, round_index: int, num_values: int, only: Sequence[GroupedMember] | None = None, **changes: Any
    ) -> dict[int, RoundResult | Exception]:
        """What each has at the end, by its number."""
        members = self.all if only is None else list(only)
        for member in members:
            member.collective.move_to(round_index)
        with ThreadPoolExecutor(len(members)) as pool:
            futures = {
                member.number: pool.submit(
                    member.round, round_index, vector_of(member.number, round_index, num_values), **changes
                )
                for member in members
            }
            return {number: future.result() for number, future in futures.items()}

    def close(self) -> None:
        for member in self.all:
            member.kill()
        for loop in self.loops:
            loop.stop()


def digest_of(vector: torch.Tensor) -> str:
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()
