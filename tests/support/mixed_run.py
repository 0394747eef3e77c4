"""What nodes of a run with whole nodes beside a swarm of stages logged: states and rounds of each stage's part."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.training_swarm import TrainingNode

STAGES = ("head", "tail")


def part_states(node: TrainingNode, stage: str) -> dict[int, str]:
    """Digest of a stage's part by outer step, as the node hands it out."""
    return {
        int(event.number("outer_step")): str(event.fields["digest"])
        for event in node.events("part_state")
        if event.fields["stage"] == stage
    }


def newest(nodes: Iterable[TrainingNode], stage: str) -> int:
    """The newest outer step of a stage's part that every one of these nodes holds."""
    return min(max(part_states(node, stage), default=0) for node in nodes)


def rounds_of(node: TrainingNode, stage: str) -> dict[int, frozenset[str]]:
    """Members of a node's committed rounds of a stage, by the outer step that the round made."""
    return {
        int(event.number("outer_step")): frozenset(event.fields["members"])
        for event in node.events("round")
        if event.fields.get("stage", node.name.partition(".")[0]) == stage
    }


def rounds_of_all(nodes: Iterable[TrainingNode], stage: str) -> set[int]:
    """Outer steps that rounds of a stage made in which every one of these nodes was."""
    rounds = [rounds_of(node, stage) for node in nodes]
    if not all(rounds):
        return set()
    everybody = {node.peer_id for node in nodes}
    return {step for step in set.intersection(*(set(each) for each in rounds)) if everybody <= rounds[0][step]}


def check_one_state(nodes: Iterable[TrainingNode], stage: str) -> int:
    """All members of a round hold the same state of the stage after it; returns of how many rounds two or more do."""
    held: dict[tuple[int, frozenset[str]], list[str]] = {}
    for node in nodes:
        states = part_states(node, stage)
        for step, members in rounds_of(node, stage).items():
            if step in states:  # One that others overtook was not handed out.
                held.setdefault((step, members), []).append(states[step])
    for (step, members), digests in held.items():
        assert len(set(digests)) == 1, f"{stage}, outer step {step} of {len(members)}: {digests}"
    return sum(len(digests) > 1 for digests in held.values())
