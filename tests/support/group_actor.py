"""Processes that hold some members of a large round each, for tests that kill them (`GroupSwarm`).

Run as ``python -m tests.support.group_actor``: reads its settings as one JSON line, says where its members are reached,
then goes through a round for each command, and says what each of them ended with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.child import Child, say
from tests.support.grouped_members import GroupedMembers, digest_of
from trainer.aggregation import RuleConfig
from trainer.collective.levels.grouped_round import GroupedRound
from trainer.network.rpc import Peer

_START_S = 400.0


def _die_at(place: str) -> None:
    """Kills this process when one of its members first comes to a step of the round."""
    original = getattr(GroupedRound, place)

    async def wrapped(self: GroupedRound, *arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return await original(self, *arguments, **options)

    setattr(GroupedRound, place, wrapped)


def main() -> None:
    torch.set_num_threads(1)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("trainer.network").setLevel(logging.WARNING)
    settings = json.loads(sys.stdin.readline())
    members = GroupedMembers(settings["numbers"], rule=RuleConfig(**settings["rule"]), **settings["options"])
    say({member.number: [member.endpoint.peer_id, member.endpoint.address] for member in members.all})
    for line in sys.stdin:
        command = json.loads(line)
        peers = {peer_id: Peer(peer_id, address) for peer_id, address in command["peers"]}
        for member in members.all:
            member.know(peers)
        if command.get("ready") is not None:
            for member in members.all:
                member.collective.move_to(command["ready"])
            say({"ready": True})
            continue
        if command["die_at"]:
            _die_at(command["die_at"])
        found = members.round(command["round"], command["num_values"])
        say(
            {
                number: {"failed": f"{type(result).__name__}: {result}"}
                if isinstance(result, Exception)
                else {
                    "digest": digest_of(result.vector),
                    "members": list(result.report.members),
                    "note": result.report.note,
                    "seconds": result.report.seconds,
                    "sent_bytes": result.report.sent_bytes,
                    "received_bytes": result.report.received_bytes,
                    "values": result.vector[:8].tolist(),
                }
                for number, result in found.items()
            }
        )
    os._exit(0)


class GroupSwarm:
    """``num_processes`` of them with ``per_process`` members each."""

    def __init__(
        self, folder: Path, num_processes: int, per_process: int, *, rule: dict[str, Any], **options: Any
    ) -> None:
        self.children: list[Child] = []
        self.peer_ids: dict[int, str] = {}
        self._addresses: dict[int, str] = {}
        self.numbers = [list(range(place * per_process, (place + 1) * per_process)) for place in range(num_processes)]
        for place, numbers in enumerate(self.numbers):
            child = Child("group_actor", log=folder / f"actor-{place}.log")
            child.say({"numbers": numbers, "rule": rule, "options": options})
            self.children.append(child)
        for child in self.children:
            for number, (peer_id, address) in child.hear(_START_S).items():
                self.peer_ids[int(number)], self._addresses[int(number)] = peer_id, address

    def close(self) -> None:
        for child in self.children:
            child.__exit__()

    def round(
        self, round_index: int, num_values: int, living: list[int], die_at: dict[int, str], timeout_s: float
    ) -> dict[int, dict[str, Any]]:
        """Lets the processes ``living`` go through a round; ``die_at``: the step at which one dies, by process.

        Returns:
            What each member of a process that lived ended with, by its number.
        """
        known = [(self.peer_ids[number], self._addresses[number]) for place in living for number in self.numbers[place]]
        for place in living:
            self.children[place].say({"peers": known, "ready": round_index})
        for place in living:
            self.children[place].hear(_START_S)
        for place in living:
            command = {"round": round_index, "num_values": num_values, "die_at": die_at.get(place, "")}
            self.children[place].say({"peers": known, **command})
        found: dict[int, dict[str, Any]] = {}
        for place in living:
            if place not in die_at:
                heard = self.children[place].hear(timeout_s)
                found |= {int(number): outcome for number, outcome in heard.items()}
        return found


if __name__ == "__main__":
    main()
