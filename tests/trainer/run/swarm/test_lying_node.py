"""One node of four sends minus ten times its pseudo-gradient, and nobody has chosen a rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.text_store import text_store
from tests.support.training_swarm import TrainingSwarm
from trainer.model import build_model, preset

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

INNER_STEPS, OUTER_STEPS = 15, 4
TOLERANCE = 1.05
LYING = ("-m", "tests.support.lying_node")
TOGETHER = {"min_members": 4, "invite_after_s": 60.0, "gather_timeout_s": 60.0}


def held_out_loss(anchor: torch.Tensor) -> float:
    """Of the first shard, which nobody trains on."""
    model = build_model(preset("tiny", 1024), 0)
    torch.nn.utils.vector_to_parameters(anchor, model.parameters())
    ids = torch.load(text_store() / "shard_0.pt", weights_only=True)[: 256 * 33].view(256, 33)
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:]))


def loss_of_a_swarm(folder: Path, *, lying: bool) -> float:
    with TrainingSwarm(
        folder, max_steps=INNER_STEPS * OUTER_STEPS, diloco={"inner_steps": INNER_STEPS}, collective=TOGETHER
    ) as swarm:
        swarm.begin("a", "b", "c")
        swarm.begin("d", program=LYING if lying else ("-m", "trainer"))
        assert [node.exit_code() for node in swarm.nodes.values()] == [0] * 4
        honest = [swarm[name] for name in ("a", "b", "c")]
        liar = swarm["d"].peer_id
        for node in honest:
            for event in node.events("round"):
                named = {who for who, _ in event.fields["dropped"]}
                assert event.fields["rule"] == "trimmed_mean"
                assert not lying or liar in named, node.tail()
            assert not lying or f"{liar[:8]} left out: direction" in node.output()
        fragments = [node.checkpoint()["diloco"]["fragments"][0] for node in honest]
        assert all(torch.equal(fragment["anchor"], fragments[0]["anchor"]) for fragment in fragments)
        return held_out_loss(fragments[0]["anchor"])


def test_by_default_the_others_learn_as_if_it_were_not_there(tmp_path: Path) -> None:
    for name in ("honest", "lied-to"):
        (tmp_path / name).mkdir()
    honest = loss_of_a_swarm(tmp_path / "honest", lying=False)
    assert loss_of_a_swarm(tmp_path / "lied-to", lying=True) < TOLERANCE * honest
