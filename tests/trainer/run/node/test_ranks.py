"""Ranks that torchrun starts as one node: one loss curve, one checkpoint, one place in rounds, back after a kill."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

from tests.support.small_store import text_store
from tests.support.trainer_command import SMALL, TrainerCommand, differences
from tests.support.training_swarm import TrainingNode, TrainingSwarm, free_port
from tests.trainer.run.node.test_data import check_grown, copy_text_store, grow_text_store
from trainer.inner.rank_place import RankPlace, choose_parallel
from trainer.model import flops_per_token, preset

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
COMMON = tuple("4" if before == "--batch-size" else option for before, option in zip(("", *SMALL), SMALL, strict=False))
NODE = ("--node-id", "pod", "--inner-steps", "5", "--accumulation", "2", "--set", "checkpoint.every_steps=3")
STEPS = 13


def ranks(num_ranks: int, *, restarts: int = 0) -> tuple[str, ...]:
    if num_ranks == 1:
        return (sys.executable, "-m", "trainer")
    options = ("--standalone", "--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts))
    return (*TORCHRUN, *options, "-m", "trainer")


def node_of(folder: Path, num_ranks: int = 1) -> TrainerCommand:
    return TrainerCommand(text_store(), folder, COMMON, ranks(num_ranks))


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def assert_close(found: Mapping[int, float], expected: Mapping[int, float], within: float = 1e-5) -> None:
    assert found
    worst = max(abs(found[step] - expected[step]) for step in found)
    assert worst <= within, f"{worst:.3g} apart"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerCommand, dict[int, float]]:
    """The same run in one process, with its losses."""
    command = node_of(tmp_path_factory.mktemp("alone"))
    return command, losses(command(*NODE, "--json", "--max-steps", str(STEPS)))


@pytest.mark.timeout(200)
def test_two_ranks_train_as_one_node(tmp_path: Path) -> None:
    """The shortest way through all that ranks do: start, steps, a round's end, one checkpoint."""
    command = node_of(tmp_path, 2)
    done = command("--node-id", "pod", "--inner-steps", "1", "--json", "--max-steps", "2")
    assert losses(done).keys() == {0, 1}
    assert command.saved("pod")["training_rounds"] == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")])
def test_losses_batches_and_checkpoint_are_those_of_one_process(
    alone: tuple[TrainerCommand, dict[int, float]], tmp_path: Path, num_ranks: int, kind: str
) -> None:
    expected, expected_losses = alone
    command = node_of(tmp_path, num_ranks)
    done = command(*NODE, "--parallel", kind, "--json", "--max-steps", str(STEPS))
    assert f"{num_ranks} ranks on 1 machines share the model: {kind}" in done.stderr
    found_losses = losses(done)
    assert len(found_losses) == STEPS
    assert_close(found_losses, expected_losses)
    found, whole = command.saved("pod"), expected.saved("pod")
    assert found["loader"]["stream"]["step"] == whole["loader"]["stream"]["step"]
    assert found["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    for layer, values in whole["layers"].items():
        for name, value in values.items():
            torch.testing.assert_close(found["layers"][layer][name], value, rtol=1e-3, atol=5e-4)
    assert found["diloco"]["round_index"] == whole["diloco"]["round_index"] == 2


ODD = ("dim=33", "head_dim=10", "num_heads=3", "num_kv_heads=1", "ffn_dim=51", "num_layers=3", "tie_embeddings=true")
"""A model whose rows are cut into unequal shards; all of FSDP's other tests have rows that divide."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "optimizer"), [("fsdp", "adamw"), ("auto", "muon")])
def test_uneven_shards_ties_masks_and_recomputation_train_as_one_process_does(
    tmp_path: Path, kind: str, optimizer: str
) -> None:
    shape = tuple(option for each in ODD for option in ("--set", f"model.{each}"))
    options = (*NODE, *shape, "--batch-size", "5", "--set", "inner.document_mask=true")
    options += ("--set", f"inner.optimizer={optimizer}", "--set", "inner.activation_checkpointing=selective")
    options += ("--json", "--max-steps", "8")
    whole, cut = node_of(tmp_path / "whole"), node_of(tmp_path / "cut", 2)
    expected = losses(whole(*options))
    found = losses(cut(*options, "--parallel", kind))
    assert len(found) == 8
    within = 1e-4 if optimizer == "muon" else 1e-5  # Muon's matrices are made orthogonal in bf16.
    assert_close(found, expected, within)
    for layer, values in whole.saved("pod")["layers"].items():
        for name, value in values.items():
            torch.testing.assert_close(cut.saved("pod")["layers"][layer][name], value, rtol=1e-3, atol=50 * within)
    further = (*options[:-1], "10")
    assert_close(losses(cut(*further, "--parallel", kind)), losses(whole(*further)), within)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_speed_is_told_of_all_ranks_and_of_one(tmp_path: Path) -> None:
    done = node_of(tmp_path, 2)(*NODE, "--max-steps", "12")
    last = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("step 12  "))
    found = re.search(r" ([\d,]+) a device  MFU ([\d.]+) % of 2 x ([\d.e+-]+) TFLOP/s measured", last)
    assert found is not None, last
    tokens_per_s, share, peak_tflops = float(found[1].replace(",", "")), float(found[2]) / 100, float(found[3])
    flops = flops_per_token(preset("tiny", 1024), 32)
    assert share == pytest.approx(tokens_per_s * flops / (peak_tflops * 1e12), rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stopped_and_gone_on_with_as_many_ranks_is_the_same_run_bit_for_bit(tmp_path: Path, kind: str) -> None:
    options = (*NODE, "--parallel", kind, "--max-steps")
    for folder, stops in (("whole", (STEPS,)), ("parts", (4, 8, STEPS))):
        for steps in stops:
            node_of(tmp_path / folder, 2)(*options, str(steps))
    assert not differences(node_of(tmp_path / "parts").saved("pod"), node_of(tmp_path / "whole").saved("pod"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rounds_beside_training_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    """Every rank merges its own part of what rank 0 has computed meanwhile."""
    overlap = ("--set", "diloco.overlap_steps=2", "--set", "diloco.merge_alpha=0.3")
    options = (*NODE, *overlap, "--parallel", kind, "--json", "--max-steps", str(STEPS))
    found, expected = (losses(node_of(tmp_path / str(ranks), ranks)(*options)) for ranks in (2, 1))
    assert len(found) == STEPS
    assert_close(found, expected)
    assert node_of(tmp_path / "2").saved("pod")["diloco"]["round_index"] == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gone_on_with_on_another_number_of_ranks(
    alone: tuple[TrainerCommand, dict[int, float]], tmp_path: Path
) -> None:
    """Four ranks, then one process, then two, each from what the one before has saved."""
    _, expected = alone
    found: dict[int, float] = {}
    for num_ranks, kind, steps in ((4, "fsdp", 4), (1, "auto", 7), (2, "fsdp", 10), (2, "ddp", STEPS)):
        done = node_of(tmp_path, num_ranks)(*NODE, "--parallel", kind, "--json", "--max-steps", str(steps))
        found |= losses(done)
    assert sorted(found) == list(range(STEPS))
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_several_machines_shard_within_each(alone: tuple[TrainerCommand, dict[int, float]], tmp_path: Path) -> None:
    """Two agents of two ranks each, as on two machines: the second's ranks hold copies of the first's."""
    _, expected = alone
    port = str(free_port())
    meeting = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    options = (*NODE, "--parallel", "hsdp", "--max-steps", str(STEPS))
    agents = [
        replace(node_of(tmp_path), starter=(*TORCHRUN, *meeting, "--node-rank", str(index), "-m", "trainer"))
        for index in (0, 1)
    ]
    with agents[1].running(*options) as second:
        done = agents[0](*options, "--json")
        assert second.wait() == 0
    assert "4 ranks on 2 machines share the model: hsdp" in done.stderr
    assert_close(losses(done), expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_measure_as_one_process_does_and_train_as_if_they_did_not(tmp_path: Path, kind: str) -> None:
    options = (*NODE, "--parallel", kind, "--holdout", "2", "--json", "--max-steps", "9")
    measured = (*options, "--eval-every", "4", "--sample-every", "4", "--set", "eval.tokens=1024")
    alone = node_of(tmp_path / "alone")(*measured[: len(NODE)], *measured[len(NODE) + 2 :])
    on = node_of(tmp_path / "on", 2)(*measured)
    off = node_of(tmp_path / "off", 2)(*options, "--eval-every", "0", "--set", "eval.after_rounds=false")
    assert losses(on) == losses(off)
    found, expected = (
        [line for line in map(json.loads, done.stdout.splitlines()) if line["kind"] in ("held_out", "sample")]
        for done in (on, alone)
    )
    assert [(line["kind"], line["step"]) for line in found] == [(line["kind"], line["step"]) for line in expected]
    assert [line["step"] for line in found if line["kind"] == "held_out"] == [4, 5, 8]
    for line, other in zip(found, expected, strict=True):
        if line["kind"] == "held_out":
            assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_growing_vocabulary_is_taken_up_by_all_ranks(tmp_path: Path, kind: str) -> None:
    store = copy_text_store(tmp_path / "store")
    options = ("--node-id", "a", "--inner-steps", "5", "--plateau", "off", "--parallel", kind, "--max-steps")
    grown = TrainerCommand(store, tmp_path, COMMON, ranks(2))
    still = TrainerCommand(text_store(), tmp_path / "still", COMMON, ranks(2))
    grown(*options, "3")
    grow_text_store(store)
    done = grown(*options, "5", GENESIS_CACHE_DIR=str(tmp_path / "cache of another day"))
    assert "vocabulary: 2048 rows, before 1024" in done.stderr
    still(*options, "5")
    check_grown(still.saved("a"), grown.saved("a"))
    further = losses(grown(*options, "8", "--json"))
    assert sorted(further) == [5, 6, 7]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rounds_with_a_node_of_one_process_end_bit_for_bit_alike(tmp_path: Path, kind: str) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        begin(swarm, "pod", 2, "--parallel", kind)
        swarm.begin("solo")
        swarm.wait(lambda: len(compared(swarm)) >= 3, "the states of both after three rounds of both")
        assert all(code != 0 for code in swarm.stop())  # torchrun's own is 1.
        assert all(compared(swarm).values()), compared(swarm)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_killed_anywhere_is_back_and_current_within_two_rounds(tmp_path: Path, kind: str) -> None:
    """Rounds last some seconds, longer than it takes nodes to hear of each other."""
    chance = random.Random(7)
    with TrainingSwarm(tmp_path, checkpoint={"every_steps": 10}, diloco={"inner_steps": 200}) as swarm:
        swarm.begin("solo")
        begin(swarm, "pod", 2, "--parallel", kind)
        swarm.wait(lambda: bool(together(swarm)), "a round of both")
        for rank in (0, 1, 1, 0, 1):
            steps = swarm["pod"].num_steps() + chance.randrange(1, 400)
            swarm.wait(lambda at=steps: swarm["pod"].num_steps() >= at, "its place")  # type: ignore[misc]
            known = len(rounds_tried(swarm["pod"]))
            processes_of(swarm["pod"])[rank].kill()
            swarm.wait(lambda n=known: True in rounds_tried(swarm["pod"])[n:], "to be back")  # type: ignore[misc]
            assert rounds_tried(swarm["pod"])[known:].index(True) <= 1
        swarm.stop()
        assert len(compared(swarm)) >= 3
        assert all(compared(swarm).values()), compared(swarm)


_WIDTHS = (192, 512)
"""Of eight layers: 5 and 35 million parameters, all but 8 and 3 percent of them in the blocks."""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_state_of_a_node_of_two_ranks_takes_hardly_more_memory_than_that_of_one(tmp_path: Path) -> None:
    """The growth between two sizes, so that what each process takes for its programs neither causes nor hides it.

    On a CPU what a GPU would hold is in the same memory. With FSDP that is one training state, cut in two, whatever the
    number of ranks; DDP has one a rank by its nature. Pages that processes share count once (PSS). Peaks are compared:
    they are in rounds and checkpoints, of which there are several of each. glibc is told to keep no freed tensors: how
    many of under 32 MB it keeps depends on their sizes and order, which are not those of models that fill a machine.
    """
    growth = {}
    for num_ranks in (1, 2):
        small, large = (
            peak_memory_bytes(node_of(tmp_path / f"{num_ranks}-{width}", num_ranks), width) for width in _WIDTHS
        )
        growth[num_ranks] = large - small
    assert growth[1] > 300_000_000, "or the test says nothing"
    assert growth[2] <= 1.15 * growth[1], growth


def peak_memory_bytes(command: TrainerCommand, width: int) -> int:
    """The largest sum of what a node's processes held at one time, in some rounds and checkpoints."""
    sizes = {"dim": width, "num_layers": 8, "ffn_dim": 4 * width, "num_heads": 4, "num_kv_heads": 4}
    shape = [option for name, size in sizes.items() for option in ("--set", f"model.{name}={size}")]
    options = ("--node-id", "pod", "--preset", "auto", "--parallel", "fsdp", "--inner-steps", "4", *shape)
    peak = 0
    options += ("--set", "checkpoint.every_steps=3", "--max-steps", "16")
    with command.running(*options, MALLOC_MMAP_THRESHOLD_=str(1 << 20)) as node:
        agent = psutil.Process(node.process.pid)
        while node.process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, [agent, *agent.children(recursive=True)])))
            time.sleep(0.01)
        assert node.wait() == 0, node.errors
    return peak


def proportional_bytes(process: psutil.Process) -> int:
    """What a process holds, of pages it shares its share; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def begin(swarm: TrainingSwarm, name: str, num_ranks: int, *options: str) -> None:
    swarm.begin(name, program=ranks(num_ranks, restarts=9)[1:], options=options)


def compared(swarm: TrainingSwarm) -> dict[int, bool]:
    """Whether both held the same bits after each round of both whose state both handed out."""
    pod, solo = swarm["pod"].states(), swarm["solo"].states()
    return {step: pod[step] == solo[step] for step in together(swarm) if step in pod and step in solo}


def rounds_tried(node: TrainingNode) -> list[bool]:
    """Whether a node was in each of its rounds with the other: not in one that failed because it was behind."""
    tried = sorted((*node.events("round"), *node.events("round_failed")), key=lambda event: event.time)
    return [event.kind == "round" and len(cast("list[str]", event.fields["members"])) == 2 for event in tried]


def together(swarm: TrainingSwarm) -> list[int]:
    """The outer steps of rounds with both nodes, as the one of one process has them in its log."""
    rounds = swarm["solo"].events("round")
    members: Sequence[tuple[Any, int]] = [(it.fields["members"], int(it.number("outer_step"))) for it in rounds]
    return [step for names, step in members if len(names) == 2]


def processes_of(node: TrainingNode) -> list[psutil.Process]:
    """The ranks of a node that torchrun started, rank 0 first."""
    children = psutil.Process(node._running.pid).children()
    ours = [child for child in children if "trainer" in child.cmdline()]
    return sorted(ours, key=lambda child: int(child.environ()["RANK"]))


@pytest.mark.parametrize(
    ("wanted", "size", "local_size", "memory_bytes", "expected"),
    [
        ("auto", 8, 8, 80 << 30, "ddp"),
        ("auto", 8, 8, 8 << 30, "fsdp"),
        ("auto", 16, 8, 8 << 30, "hsdp"),
        ("auto", 16, 8, 80 << 30, "ddp"),
        ("fsdp", 8, 8, 80 << 30, "fsdp"),
        ("hsdp", 16, 8, 80 << 30, "hsdp"),
    ],
)
def test_how_the_model_is_shared_goes_by_memory(
    wanted: Any, size: int, local_size: int, memory_bytes: int, expected: str
) -> None:
    place = RankPlace(0, size, 0, local_size)
    assert choose_parallel(wanted, preset("1b", 32_768), lambda: memory_bytes, place) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--parallel", "hsdp"), "parallel hsdp: expected several machines"),
        (("--batch-size", "1"), "expected a row for each of the node's 2 ranks"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_ranks_cannot_do_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = node_of(tmp_path, 2).failing(*NODE, *options, "--max-steps", "1")
    assert said in done.stderr
