"""Three nodes 1 : 2 : 4 fast, as ``python -m trainer`` runs them: what closing rounds by a quorum gains in wall time.

Each rule has the same wall time, data and seeds. Nodes are processes of their own whose inner steps are padded to their
pace; so on a machine with a core for each, and on one that they share, they are 1 : 2 : 4 fast. Counted are the tokens
of steps that went into a round, and the loss on held-out shards of the state that the nodes had in common at that time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.small_store import text_store
from tests.support.training_swarm import free_port
from trainer.model import build_model, preset
from trainer.outer.diloco.flat import FlatLayout, synchronised_parameters

ROOT: Final = Path(__file__).resolve().parents[2]
PACES: Final = (1.0, 0.5, 0.25)
"""Relative to the fastest."""
NUM_HELD_OUT: Final = 2
_ROWS, _SEQ_LEN = 4, 32
_START_S = 600.0  # On a machine that is busy with much else.
_END_S = 60.0

RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "barrier": ("collective.invite_after_s=600", "collective.gather_timeout_s=600"),
    "today": ("collective.invite_after_s={invite_s}",),
    "quorum 2": ("collective.quorum=2", "collective.invite_after_s=600", "collective.gather_timeout_s=600"),
    "quorum 2, invited": ("collective.quorum=2", "collective.invite_after_s={invite_s}"),
    "quorum 2, fragments, overlap": (
        "collective.quorum=2",
        "collective.invite_after_s={invite_s}",
        "diloco.num_fragments=2",
        "diloco.overlap_steps=2",
    ),
    "quorum 1": ("collective.quorum=1", "collective.invite_after_s=600", "collective.gather_timeout_s=600"),
}
"""Waits for all; asks the others to come with what they have some time after the first, as is the default; closes with
two, without and with that; closes with one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSetting:
    """How long a run is, and how fast its nodes are."""

    seconds: float = 240.0
    step_s: float = 0.3  # Of the fastest.
    inner_steps: int = 20
    lr: float = 3e-3
    seed: int = 0
    measured_at: Sequence[float] = (0.25, 0.5, 0.75, 1.0)  # Shares of the time.


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """What one rule came to."""

    tokens_counted_per_s: float
    """Of all nodes, in rounds that were committed."""
    tokens_per_s: float  # Trained, whether they were counted or not.
    share_of_paces: float  # The latter over what the paces allow.
    num_rounds: int
    held_out: Mapping[str, float]  # Loss in nats a token by share of the time.
    num_left_out: int  # Rounds that a node was left out of, and then fetched the state.
    differing: int  # Rounds after which two nodes held different states.


def live(rule: str, setting: LiveSetting, folder: Path) -> LiveResult:
    """Runs three nodes under a rule of `RULES`."""
    ports = [free_port() for _ in PACES]
    store = text_store()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_ending(_start(rule, setting, folder, number, ports, store)))
            for number in range(len(PACES))
        ]
        began_s = _wait_for_all(folder, processes)
        time.sleep(max(0.0, began_s + setting.seconds - time.time()))
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    return _result(setting, folder, began_s, store)


def _start(
    rule: str, setting: LiveSetting, folder: Path, number: int, ports: Sequence[int], store: Path
) -> subprocess.Popen[bytes]:
    invite_s = 0.02 * setting.inner_steps * setting.step_s  # As the default's 10 s of 500 steps of a second.
    own = [
        *("--store", str(store), "--node-id", f"node-{number}", "--port", str(ports[number])),
        *("--preset", "tiny", "--seq-len", str(_SEQ_LEN), "--batch-size", str(_ROWS), "--threads", "1", "--no-api"),
        *("--checkpoint-dir", str(folder / f"checkpoints-{number}"), "--inner-steps", str(setting.inner_steps)),
        *("--lr", str(setting.lr), "--json"),
    ]
    options = [
        f"state_dir={folder / f'state-{number}'}",
        f"seed={setting.seed}",
        f"data.holdout={NUM_HELD_OUT}",
        "inner.warmup_steps=20",
        "inner.schedule=constant",
        "rpc.host=127.0.0.1",
        "rpc.public_address=127.0.0.1",
        "discovery.announce_interval_s=0.5",
        "discovery.poll_interval_s=0.25",
        "eval.every_steps=0",
        "eval.after_rounds=false",
        "checkpoint.every_steps=1000000",
        "rule.validation=log",
        *(option.format(invite_s=invite_s) for option in RULES[rule]),
    ]
    if number:
        own += ["--initial-peers", f"127.0.0.1:{ports[0]}"]
    sets = [each for option in options for each in ("--set", option)]
    line = [sys.executable, "-m", "tests.support.throttled_node", str(setting.step_s / PACES[number])]
    with (folder / f"log-{number}").open("wb") as log:
        return subprocess.Popen(
            [*line, str(folder / f"node-{number}"), *own, *sets],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=_environment(folder),
        )


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GENESIS_")}
    return {**kept, "OMP_NUM_THREADS": "1", "GENESIS_CACHE_DIR": str(folder / "cache")}


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Has a process not outlive the ``with``."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _lines(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / f"node-{number}" / "rounds.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _wait_for_all(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Returns when the last node had made its first step."""
    deadline_s = time.time() + _START_S
    while not all(_lines(folder, number) for number in range(len(processes))):
        gone = [number for number, process in enumerate(processes) if process.poll() is not None]
        if gone or time.time() > deadline_s:
            raise SystemExit(f"nodes did not start: {(folder / f'log-{(gone or [0])[0]}').read_text()[-2000:]}")
        time.sleep(0.2)
    return time.time()


def _result(setting: LiveSetting, folder: Path, began_s: float, store: Path) -> LiveResult:
    ends_s = began_s + setting.seconds
    lines = [[each for each in _lines(folder, number) if each["at_s"] <= ends_s] for number in range(len(PACES))]
    rounds = [[each for each in own if each["kind"] == "round"] for own in lines]
    steps = [[each for each in own if each["kind"] == "step" and each["at_s"] > began_s] for own in lines]
    per_batch = _ROWS * _SEQ_LEN
    counted = sum(each["batches"] for own in rounds for each in own if each["ok"] and each["at_s"] > began_s)
    trained = sum(each["tokens"] for own in steps for each in own)
    digests: dict[int, set[str]] = {}
    for own in rounds:
        for each in own:
            if each["ok"]:
                digests.setdefault(each["round"], set()).add(each["digest"])
    allowed = sum(pace / setting.step_s for pace in PACES) * setting.seconds * per_batch
    return LiveResult(
        tokens_counted_per_s=counted * per_batch / setting.seconds,
        tokens_per_s=trained / setting.seconds,
        share_of_paces=trained / allowed,
        num_rounds=max(digests, default=-1) + 1,
        held_out={
            f"{share:g}": _held_out(folder, rounds, began_s + share * setting.seconds, store, setting.seed)
            for share in setting.measured_at
        },
        num_left_out=sum(not each["ok"] for own in rounds for each in own),
        differing=sum(len(found) > 1 for found in digests.values()),
    )


def _held_out(folder: Path, rounds: Sequence[Sequence[dict[str, Any]]], at_s: float, store: Path, seed: int) -> float:
    """Loss of the newest state that a node had at a time; of the first weights, if that was before any round."""
    held = [
        (each["round"] + 1, number)
        for number, own in enumerate(rounds)
        for each in own
        if each["ok"] and each["at_s"] <= at_s
    ]
    model = build_model(preset("tiny", 1024), seed)
    if held:
        round_index, number = max(held)
        saved = torch.load(folder / f"node-{number}" / f"anchor-{round_index}.pt", weights_only=True)
        parameters = synchronised_parameters(model)  # In the order of the fragments.
        FlatLayout.of({name: parameters[name] for name in saved["names"]}).scatter(saved["anchor"], parameters)
    ids = torch.cat([torch.load(store / f"shard_{shard}.pt", weights_only=True) for shard in range(NUM_HELD_OUT)])
    starts = torch.arange(0, len(ids) - _SEQ_LEN - 1, 61)[:768]
    rows = ids[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
    with torch.no_grad():
        return float(model(rows[:, :-1], rows[:, 1:]))


def main() -> None:
    """For trying out: ``python -m scripts.trainer_bench.quorum_live RULE SECONDS``."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(live(sys.argv[1], LiveSetting(seconds=float(sys.argv[2])), Path(folder)))


if __name__ == "__main__":
    main()
