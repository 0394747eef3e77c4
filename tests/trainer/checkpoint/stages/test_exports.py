"""What stages were at a moment, in other programs: the same logits there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.checkpoint_actor import write_model
from tests.support.model_configs import NUM_IDS, random_model, small_config
from tests.support.torchtitan_model import REQUIREMENTS, torchtitan_logits
from trainer.checkpoint.stages import assemble, export_torchtitan, newest_set, time_us
from trainer.checkpoint.stages.torchtitan import from_halves, to_halves
from trainer.errors import ExportError
from trainer.model.plan import StagePlan
from trainer.model.subspace import SubspaceConfig

_LLAMA = small_config(vocab_size=300, rope_theta=1000.0, norm_eps=1e-3)
_OLMO = small_config(vocab_size=300, qk_norm=True, reorder_norm=True, norm_eps=1e-3)


def _ids(rows: int = NUM_IDS) -> Tensor:
    return torch.randint(0, rows, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["llama", "subspace"])
def test_torchtitan_s_rotation_gives_the_same_logits(kind: str, tokenizer_json: Path, tmp_path: Path) -> None:
    subspace = SubspaceConfig(rank=4, seed=9).applied_to(_LLAMA, free_layers=1)
    model = random_model(subspace if kind == "subspace" else _LLAMA)
    write_model(tmp_path, model, StagePlan.of(model.config, 3), {"head": 601.0, "body-1": 602.0, "tail": 630.0})
    whole = assemble(newest_set(tmp_path, "run", time_us(1e9)))
    files = export_torchtitan(whole.state, whole.config, tokenizer_json, tmp_path / "titan")

    state = _loaded(tmp_path / "titan")
    arguments = json.loads((tmp_path / "titan" / "genesis_model.json").read_text())["torchtitan"]
    with torch.no_grad():
        theirs, ours = torchtitan_logits(state, arguments, _ids()), model(_ids())[..., :NUM_IDS]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5)
    assert ours.std() > 0.5
    state["layers.0.attention.qkv_linear.wq.weight"] = model.state_dict()["layers.0.attention.q_proj.weight"]
    with torch.no_grad():  # The order of rows is what makes it so.
        assert (torchtitan_logits(state, arguments, _ids()) - ours).abs().max() > 0.01
    assert {path.name for path in files} >= {".metadata", "genesis_model.json", "tokenizer.json"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_torchtitan_itself_gives_the_same_logits(tokenizer_json: Path, tmp_path: Path, torchtitan_path: Path) -> None:
    model = random_model(_LLAMA)
    export_torchtitan(model.state_dict(), _LLAMA, tokenizer_json, tmp_path / "titan")
    torch.save(_ids(), tmp_path / "ids.pt")
    command = [sys.executable, "-m", "tests.support.torchtitan_model", tmp_path / "titan", tmp_path / "ids.pt"]
    subprocess.run(
        [*map(str, command), str(tmp_path / "logits.pt")],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[4]}{os.pathsep}{torchtitan_path}"},
        check=True,
        timeout=300,
    )
    with torch.no_grad():
        ours = model(_ids())[..., :NUM_IDS]
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), ours, rtol=0, atol=2e-5)


@pytest.fixture(scope="session")
def torchtitan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchtitan as released, in a folder of its own: its requirements would bring another torch."""
    folder = tmp_path_factory.mktemp("torchtitan")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *REQUIREMENTS]
    subprocess.run(command, check=True, timeout=500)
    return folder


def _loaded(folder: Path) -> dict[str, Tensor]:
    """What torch's own reader finds, as torchtitan uses it: tensors at the top, by torchtitan's names."""
    target = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, target)
    loaded: dict[str, Tensor] = torch.load(target, weights_only=True)
    return loaded


@given(heads=st.integers(1, 4), half=st.integers(1, 4), dim=st.integers(1, 5))
def test_the_order_of_rows_goes_there_and_back(heads: int, half: int, dim: int) -> None:
    matrix = torch.randn(heads * 2 * half, dim)
    there = from_halves(matrix, heads)
    assert torch.equal(to_halves(there, heads), matrix)
    by_head, of_it = matrix.view(heads, 2 * half, dim), there.view(heads, 2 * half, dim)
    for index in range(half):  # Neighbours there are value and its partner half a head away here.
        assert torch.equal(of_it[:, 2 * index], by_head[:, index])
        assert torch.equal(of_it[:, 2 * index + 1], by_head[:, index + half])


def test_what_torchtitan_has_not_is_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    """The rest as `export_hf` refuses it, which has the weights and the folder from the same functions."""
    state, out = random_model(_LLAMA).state_dict(), tmp_path / "titan"
    for message, config in (("--to hf", _OLMO), ("tie_embeddings", replace(_LLAMA, tie_embeddings=True))):
        with pytest.raises(ExportError, match=message):
            export_torchtitan(random_model(config).state_dict(), config, tokenizer_json, out)
    with pytest.raises(ExportError, match="unknown"):
        export_torchtitan(state | {"layers.9.x": torch.zeros(1)}, _LLAMA, tokenizer_json, out)
    with pytest.raises(ExportError, match="tokenizer"):
        export_torchtitan(state, _LLAMA, tmp_path / "absent.json", out)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    out.mkdir()
    (out / "notes").write_text("mine")
    with pytest.raises(ExportError, match="new or empty folder"):
        export_torchtitan(state, _LLAMA, tokenizer_json, out)
