"""Nodes of whole models as processes: they agree, come late, stop, hang, die and come back, and turn strangers away."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.dht_processes import descendants, wait_until_gone
from tests.support.text_store import text_store
from tests.support.training_swarm import TERMINATED, TrainingNode, TrainingSwarm, check_agreement, free_port, wait_until
from trainer.model import build_model, preset

NAMES = ("north", "east", "south")
FOUR = (*NAMES, "west")


def newest(swarm: TrainingSwarm, *names: str) -> int:
    """The newest outer step of these nodes; of all by default."""
    return max(swarm[name].outer_step for name in names or swarm.nodes)


def check_all_agree(swarm: TrainingSwarm, ahead: int) -> None:
    """All nodes agree on two outer steps, the first of which is so far ahead."""
    together = newest(swarm) + ahead
    swarm.wait_for_step(together + 1)
    check_agreement(swarm.nodes.values(), together, together + 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_nodes_hold_one_state_after_every_outer_step(tmp_path: Path) -> None:
    num_rounds, inner_steps = 10, 20
    with TrainingSwarm(tmp_path, max_steps=num_rounds * inner_steps, collective={"min_members": 4}) as swarm:
        swarm.begin(*FOUR)
        swarm.wait_for_step(num_rounds // 2)
        nodes = list(swarm.nodes.values())
        assert [node.api("/api/training/verify")["hash_agreement_rate"] for node in nodes] == [100] * 4
        assert [node.exit_code() for node in nodes] == [0] * 4

        states = [node.states() for node in nodes]
        assert set(states[0]) == set(range(1, num_rounds + 1))
        assert all(other == states[0] for other in states)
        assert len(set(states[0].values())) == num_rounds
        for node in nodes:
            rounds = node.events("round")
            assert [event.fields["round_index"] for event in rounds] == list(range(num_rounds))
            assert all(len(event.fields["members"]) == 4 for event in rounds)
            assert all(event.fields["completeness"] == 1 and not event.fields["dropped"] for event in rounds)
            assert not node.events("round_failed")
            assert node.num_steps() == num_rounds * inner_steps

        first, *others = (node.checkpoint() for node in nodes)
        for other in others:
            for vector in ("anchor", "momentum", "reference"):
                ours, theirs = (saved["diloco"]["fragments"][0][vector] for saved in (first, other))
                assert torch.equal(ours, theirs)
            assert all(
                torch.equal(first["layers"][layer][name], value)
                for layer, values in other["layers"].items()
                for name, value in values.items()
            )
        assert first["current_loss"] < math.log(1024) - 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_all_are_asked_to_stop_and_start_again(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*NAMES)
        nodes = [swarm[name] for name in NAMES]
        swarm.wait_for_step(3)
        assert swarm.stop() == [TERMINATED] * 3
        saved = {node.name: node.checkpoint() for node in nodes}
        logged = {node.name: node.num_steps() for node in nodes}
        reached = newest(swarm)
        assert reached >= 3

        for node in nodes:
            node.start()
        swarm.wait_for_step(reached + 4)
        for node in nodes:
            again = node.events("step")[logged[node.name]]
            assert int(again.number("step")) == saved[node.name]["training_rounds"]
        check_agreement(nodes, reached + 2, reached + 4)
        assert swarm.stop() == [TERMINATED] * 3
        # What was learned was not learned again: losses go on from where they were.
        for node in nodes:
            losses = [event.number("loss") for event in node.events("step")]
            later = losses[logged[node.name] : logged[node.name] + 20]
            assert sum(later) / len(later) < losses[0] - 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_all_are_killed_at_different_outer_steps(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*NAMES)
        for number, name in enumerate(NAMES):
            left = NAMES[number:]
            swarm.wait_for_step(newest(swarm, *left) + 2 if number else 2, *left)
            swarm[name].kill()
        nodes = [swarm[name] for name in NAMES]
        steps = [int(node.checkpoint()["diloco"]["outer_step"]) for node in nodes]
        assert len(set(steps)) > 1

        for node in nodes:
            node.start()
        swarm.wait_for_step(max(steps) + 3)
        check_agreement(nodes, max(steps) + 2, max(steps) + 3)
        assert all(node.events("adopted") for node, step in zip(nodes, steps, strict=True) if step < max(steps))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_hangs_and_another_dies_and_both_come_back(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*FOUR)
        west, south = swarm["west"], swarm["south"]
        swarm.wait_for_step(2)

        west.send(signal.SIGSTOP)
        hung_at = newest(swarm, *NAMES)
        swarm.wait_for_step(hung_at + 4, *NAMES)
        west.send(signal.SIGCONT)
        swarm.wait(lambda: west.outer_step > hung_at + 4, "west to catch up")
        check_all_agree(swarm, 2)

        south.kill()
        died_at = newest(swarm, "north", "east")
        swarm.wait_for_step(died_at + 3, "north", "east", "west")
        south.start()
        swarm.wait(lambda: south.outer_step > died_at + 3, "south to catch up")
        together = newest(swarm) + 2
        check_all_agree(swarm, 2)

        for name in ("north", "east"):
            assert not swarm[name].events("round_failed")
            assert all(event.fields["completeness"] == 1 for event in swarm[name].events("round")[together:])
        assert swarm.stop() == [TERMINATED] * 4


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_donor_dies_in_mid_transfer(tmp_path: Path) -> None:
    inner_steps = 400  # Some 15 s; were a transfer to take longer than that, the others would always be ahead.
    state = {"max_upload_bytes_per_s": 1_500_000}  # Of 15 MB: with three donors it takes 3 s, with two 5.
    with TrainingSwarm(tmp_path, state=state, diloco={"inner_steps": inner_steps}) as swarm:
        swarm.begin(*NAMES)
        swarm.wait_for_step(1, timeout_s=120)
        swarm.begin("late")
        late, lost = swarm["late"], swarm["south"]
        swarm.wait(lambda: "fetching state" in late.output(), "the late node to fetch the state")
        found = re.search(r"fetching state ([0-9a-f]+) from (\d+) nodes", late.output())
        assert found is not None
        assert int(found[2]) == len(NAMES)
        time.sleep(0.5)
        lost.kill()

        left = [swarm["north"], swarm["east"], late]
        swarm.wait(lambda: bool(late.events("adopted")), "the late node to have the state", 120, left)
        assert re.search(rf"{lost.peer_id[:16]}… at \S+ is asked no more", late.output())
        adopted = int(late.events("adopted")[-1].number("outer_step"))
        together = max(node.outer_step for node in left) + 1
        assert together <= adopted + 2
        swarm.wait_for_step(together + 1, *(node.name for node in left), timeout_s=150)
        check_agreement(left, together, together + 1)
        # It began where the others were, not at the beginning of the schedule.
        assert late.events("step")[0].number("step") == inner_steps * adopted
        for node in left[:2]:
            assert not node.events("round_failed")


def first_round_with(node: TrainingNode, peer_id: str, after: int) -> int | None:
    """The first outer step behind ``after`` that a node made together with another."""
    rounds = ((int(event.number("outer_step")), event.fields["members"]) for event in node.events("round"))
    return next((step for step, members in rounds if step > after and peer_id in members), None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_and_restarted_is_a_member_again_within_three_rounds(tmp_path: Path) -> None:
    """Six times, every 20 s, among others whose inner loops are short."""
    with TrainingSwarm(tmp_path, diloco={"inner_steps": 6}) as swarm:
        swarm.begin(*NAMES)
        swarm.wait_for_step(3)
        north, south = swarm["north"], swarm["south"]
        for _ in range(6):
            south.kill()
            came_s, answers = time.monotonic(), south.output().count("answers at")
            south.start()
            swarm.wait(lambda least=answers: south.output().count("answers at") > least, "south to answer again")
            back = north.outer_step
            swarm.wait(lambda least=back: first_round_with(north, south.peer_id, least) is not None, "south in a round")
            joined = first_round_with(north, south.peer_id, back)
            assert joined is not None and joined <= back + 3, f"a member of round {joined}, back at round {back}"
            time.sleep(max(0.0, came_s + 20.0 - time.monotonic()))


@contextmanager
def seed(folder: Path, name: str, *initial_peers: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A seed, and the address it says to give to nodes."""
    command = [sys.executable, "-m", "trainer", "seed", "--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--identity", str(folder / f"{name}.id")]
    command += [part for address in initial_peers for part in ("--initial-peers", address)]
    said = folder / f"{name}.out"
    root = Path(__file__).resolve().parents[4]
    with said.open("wb") as output:
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    family: set[int] = set()
    try:
        wait_until(lambda: "--initial-peers /ip4/" in said.read_text(), f"the seed {name} to be ready")
        family = descendants(process.pid)
        yield process, said.read_text().split("--initial-peers ")[1].split()[0]
    finally:
        process.kill()
        process.wait(30)
        wait_until_gone(family)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_meet_through_seeds_also_when_one_of_the_seeds_is_gone(tmp_path: Path) -> None:
    with (
        seed(tmp_path, "first") as (first, first_address),
        seed(tmp_path, "second", first_address) as (_, second_address),
        TrainingSwarm(tmp_path, discovery={"dht_host": "127.0.0.1"}) as swarm,
    ):
        seeds = [first_address, second_address]
        swarm.begin("north", "south", initial_peers=seeds)
        swarm.wait_for_step(2)
        check_all_agree(swarm, 1)

        first.kill()
        first.wait(30)
        swarm.begin("late", initial_peers=seeds)
        swarm.wait(lambda: bool(swarm["late"].events("adopted")), "the late node to have the others' state")
        check_all_agree(swarm, 2)
        assert all(not swarm[name].events("round_failed") for name in ("north", "south"))
        assert swarm.stop() == [TERMINATED] * 3


_NEXT_PROTOCOL = """
import sys
from trainer.network.rpc import envelope

envelope.PROTOCOL_VERSION += 1
envelope.HEARTBEAT = envelope._PREFIX.pack(envelope.MAGIC, envelope.PROTOCOL_VERSION, 0, 0)
from trainer.run.cli.app import run

sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_who_does_not_fit_is_told_why_and_harms_no_round(tmp_path: Path) -> None:
    residents = ("north", "south")
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*residents)
        swarm.wait_for_step(1)
        swarm.begin("larger", options=["--preset", "15m"])
        swarm.begin("foreign", options=["--store", str(text_store("other"))])
        swarm.begin("slower", options=["--inner-steps", "30"])
        swarm.begin("careful", options=["--rule", "median"])
        swarm.begin("newer", program=["-c", _NEXT_PROTOCOL])
        told = {
            "larger": ("dim 128", "192"),
            "foreign": ("vocabulary",),
            "slower": ("diloco.inner_steps 20", "30"),
            "careful": ("rule.rule trimmed_mean", "median"),
            "newer": ("protocol version",),
        }
        for name, words in told.items():
            assert swarm[name].exit_code() == 1, swarm[name].tail()
            last = swarm[name].output().splitlines()[-1]
            assert last.startswith("trainer: ")
            assert all(word in last for word in words), last
        seen = newest(swarm, *residents)
        swarm.wait_for_step(seen + 2, *residents)
        assert swarm.stop(*residents) == [TERMINATED] * 2

        ours, theirs = (swarm[name].states() for name in residents)
        common = ours.keys() & theirs.keys()
        assert len(common) >= seen + 2
        assert all(ours[step] == theirs[step] for step in common)
        for name in residents:
            assert not swarm[name].events("round_failed")
            rounds = swarm[name].events("round")[:seen]
            assert all(event.fields["completeness"] == 1 and not event.fields["dropped"] for event in rounds)
            assert all(len(event.fields["members"]) == len(residents) for event in rounds)


def loss_of_a_swarm(folder: Path, *, lying: bool) -> float:
    """Of the shard that nobody trains on; one of four sends minus ten times its pseudo-gradient, if told to."""
    together = {"min_members": 4, "invite_after_s": 60.0, "gather_timeout_s": 60.0}
    with TrainingSwarm(folder, max_steps=4 * 15, diloco={"inner_steps": 15}, collective=together) as swarm:
        swarm.begin("a", "b", "c")
        swarm.begin("d", program=("-m", "tests.support.lying_node" if lying else "trainer"))
        assert [node.exit_code() for node in swarm.nodes.values()] == [0] * 4
        honest = [swarm[name] for name in ("a", "b", "c")]
        liar = swarm["d"].peer_id
        for node in honest:
            for event in node.events("round"):
                named = {who for who, _ in event.fields["dropped"]}
                assert event.fields["rule"] == "trimmed_mean"
                assert not lying or liar in named, node.tail()
            assert not lying or f"{liar[:8]} left out: direction" in node.output()
        anchors = [node.checkpoint()["diloco"]["fragments"][0]["anchor"] for node in honest]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    model = build_model(preset("tiny", 1024), 0)
    torch.nn.utils.vector_to_parameters(anchors[0], model.parameters())
    ids = torch.load(text_store() / "shard_0.pt", weights_only=True)[: 256 * 33].view(256, 33)
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:]))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_by_default_the_others_learn_as_if_one_that_lies_were_not_there(tmp_path: Path) -> None:
    for name in ("honest", "lied-to"):
        (tmp_path / name).mkdir()
    honest = loss_of_a_swarm(tmp_path / "honest", lying=False)
    assert loss_of_a_swarm(tmp_path / "lied-to", lying=True) < 1.05 * honest
