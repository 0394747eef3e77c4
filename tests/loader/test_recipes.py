"""docs/recipes.md does what it says: each script runs as it stands, with the real library, on two processes.

What the model was given is compared with what one process reads: every window once, in the same steps, also behind a
restart. A library that is not installed is skipped; the extra `recipes` has all but torchtitan.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import GenesisDataset
from tests.support.token_store import TokenStore

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
SCRIPTS = {
    found[1]: found[2]
    for found in re.finditer(r"^```python\n# recipe: (\w+)\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.DOTALL | re.M)
}
TIMEOUT_S = 250
pytestmark = pytest.mark.timeout(
    3 * TIMEOUT_S
)  # Two processes that import torch take 10 s, or minutes on a busy machine.

# A model of one process's own: it notes what it is given, and by which rank.
PROJECT = """
import json, os
import torch
from torch import distributed


class Output(dict):
    loss = property(lambda self: self["loss"])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 4)
        self.head = torch.nn.Linear(4, 1000)

    def forward(self, input_ids, labels):
        assert labels.equal(input_ids)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps([rank, input_ids.tolist()]) + "\\n")
        logits = self.head(self.embedding(input_ids[:, :-1]))
        return Output(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def make_model():
    torch.manual_seed(0)
    return Model()
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install '.[recipes]'")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 3)


@pytest.fixture
def run(tmp_path: Path, store: TokenStore) -> Run:
    """Runs a script in a folder of its own, on processes that torchrun starts."""

    def start(script: str, *, processes: int = 2, torchrun: bool = True) -> subprocess.CompletedProcess[str]:
        (tmp_path / "my_project.py").write_text(PROJECT)
        (tmp_path / "train.py").write_text(script.replace("https://cdn.example.org", store.url))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        path = [str(tmp_path), str(DOCUMENT.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "GENESIS_CACHE_DIR": str(tmp_path / "cache"),
            "SEEN": str(tmp_path / "seen.jsonl"),
            "ACCELERATE_USE_CPU": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return subprocess.run(
            [sys.executable, *(launcher if torchrun else []), "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return start


@pytest.fixture
def seen(tmp_path: Path) -> Callable[[], list[tuple[int, list[list[int]]]]]:
    """For each batch of each rank, in the order of a rank's steps, the rank and its rows."""
    return lambda: [tuple(json.loads(line)) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]


def rows_of_steps(store: TokenStore, folder: Path, batch_size: int, steps: int) -> list[Counter[tuple[int, ...]]]:
    """What one process reads in each of its first steps."""
    dataset = GenesisDataset(store.url, "pod-1", seq_len=64, batch_size=batch_size, cache_dir=folder / "own-cache")
    return [Counter(map(tuple, batch["input_ids"].tolist())) for batch in islice(dataset, steps)]


def steps_of(batches: Sequence[tuple[int, list[list[int]]]], ranks: int) -> list[Counter[tuple[int, ...]]]:
    """What the ranks were given together in each step, in the order of each one's batches."""
    own = [[rows for rank, rows in batches if rank == number] for number in range(ranks)]
    assert len({len(rows) for rows in own}) == 1
    return [Counter(tuple(row) for rows in step for row in rows) for step in zip(*own, strict=True)]


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-4_000:]


@pytest.mark.slow
def test_torchrun_and_another_number_of_ranks(run, seen, store, tmp_path):
    check(run(SCRIPTS["torchrun"]))
    check(run(SCRIPTS["torchrun"]))
    expected = rows_of_steps(store, tmp_path, 8, 10)
    assert steps_of(seen(), 2) == expected
    (tmp_path / "seen.jsonl").unlink()
    check(run(SCRIPTS["torchrun"].replace("batch_size=4", "batch_size=8"), processes=1))
    assert steps_of(seen(), 1) == rows_of_steps(store, tmp_path, 8, 15)[10:]


@pytest.mark.slow
def test_accelerate(run, seen, store, tmp_path):
    needs("accelerate")
    for _ in range(2):
        check(run(SCRIPTS["accelerate"]))
    assert steps_of(seen(), 2) == rows_of_steps(store, tmp_path, 8, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "configuration", "problem"),
    [
        ("DataLoader(dataset, batch_size=None)", "", "reads the first rank's dataset only"),
        ("DataLoader(dataset, batch_size=None, num_workers=1)", "", "reads the first rank's dataset only"),
        (
            "DataLoader(dataset, batch_size=1, collate_fn=lambda batches: batches[0])",
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False)",
            "drops all but one of 2",
        ),
    ],
)
def test_accelerate_that_would_split_what_is_split_already(run, loader, configuration, problem):
    needs("accelerate")
    script = f"""
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from loader import GenesisDataset

accelerator = Accelerator({configuration})
dataset = GenesisDataset("https://cdn.example.org", "pod-1", rank="auto", seq_len=64, batch_size=4)
for batch in accelerator.prepare({loader}):
    print("a batch")
    break
"""
    done = run(script)
    assert done.returncode != 0
    assert "a batch" not in done.stdout
    assert "LoaderUsageError: expected each of 2 ranks to iterate over its own GenesisDataset" in done.stderr
    assert problem in done.stderr
    assert "leave the data loader out of accelerator.prepare()" in done.stderr


@pytest.mark.slow
def test_accelerate_on_one_process_may_prepare_it(run):
    needs("accelerate")
    script = """
from accelerate import Accelerator
from torch.utils.data import DataLoader
from loader import GenesisDataset

dataset = GenesisDataset("https://cdn.example.org", "pod-1", rank="auto", seq_len=64, batch_size=4, epochs=1)
print(sum(len(batch["input_ids"]) for batch in Accelerator().prepare(DataLoader(dataset, batch_size=None))))
"""
    done = run(script, torchrun=False)
    check(done)
    assert done.stdout.split() == [str(3 * 31)]


@pytest.mark.slow
def test_trainer(run, seen, store, tmp_path):
    needs("accelerate")
    check(run(SCRIPTS["trainer"].replace("max_steps=10", "max_steps=5")))
    check(run(SCRIPTS["trainer"]))
    assert steps_of(seen(), 2) == rows_of_steps(store, tmp_path, 8, 20)  # Two batches a step.


@pytest.mark.slow
def test_lightning(run, seen, store, tmp_path):
    needs("pytorch_lightning")
    check(run(SCRIPTS["lightning"].replace("max_steps=10", "max_steps=5"), torchrun=False))
    check(run(SCRIPTS["lightning"], torchrun=False))
    assert steps_of(seen(), 2) == rows_of_steps(store, tmp_path, 8, 10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchtitan(store, tmp_path, monkeypatch):
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed; pip install torchtitan")
    from torch.distributed import checkpoint

    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    exec(compile(SCRIPTS["torchtitan"], str(DOCUMENT), "exec"), names)

    def loaders(ranks: int, rows: int) -> list[Any]:
        config = names["GenesisLoader"].Config(store=store.url, node_id="pod-1")
        sizes = {"dp_world_size": ranks, "seq_len": 64, "local_batch_size": rows, "tokenizer": None}
        return [config.build(dp_rank=rank, **sizes) for rank in range(ranks)]

    two = loaders(2, 4)
    found = [list(islice(loader, 6)) for loader in two]
    for step in range(6):
        for inputs, labels in (found[rank][step] for rank in range(2)):
            assert inputs["input"][:, 1:].equal(labels[:, :-1])
    checkpoint.save({"dataloader": two[1]}, checkpoint_id=tmp_path / "saved")
    three = loaders(3, 2)
    for loader in three:
        checkpoint.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved")
    found_by_three = [list(islice(loader, 8)) for loader in three]
    expected = rows_of_steps(store, tmp_path, 48, 2)
    for batches, rows in zip((found, found_by_three), expected, strict=True):
        given = torch.cat([inputs["input"] for each in batches for inputs, _ in each])
        assert Counter(map(tuple, given.tolist())) == rows


@pytest.mark.slow
def test_labels_of_a_model_of_transformers(store, tmp_path):
    """What its loss compares is each next id: with the loader's own shift it would be the one after it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1_000, max_position_embeddings=64, **sizes))
    dataset = GenesisDataset(
        store.url, "pod-1", seq_len=64, batch_size=4, labels="input_ids", cache_dir=tmp_path / "cache"
    )
    batch = next(iter(dataset))
    output = model(**batch)
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_every_script_is_run() -> None:
    assert set(SCRIPTS) == {"torchrun", "accelerate", "trainer", "lightning", "torchtitan"}
    assert DOCUMENT.read_text("utf-8").count("```python") == len(SCRIPTS)
