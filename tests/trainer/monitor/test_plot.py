"""Curves from logs, and pictures of them."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.errors import TrainerUsageError
from trainer.monitor import plot
from trainer.monitor.event_log import active_path, event_line
from trainer.monitor.plot import read_curves, smoothed

T0 = 1_795_000_000.0


def write_log(directory, node, steps, *, loss=lambda step: 4.0, begin_s=T0, every_s=1.0, rounds=()):
    """A log as a node leaves it, and its curves; ``rounds`` maps a step to 'round' or 'round_failed' after it."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for position, step in enumerate(steps):
        time_s = begin_s + every_s * position
        fields = {"step": step, "loss": loss(step), "num_tokens": 100, "seconds": every_s}
        lines.append(event_line(time_s, node, "step", fields))
        if step in dict(rounds):
            lines.append(event_line(time_s, node, dict(rounds)[step], {"round_index": 0}))
    with active_path(directory, node).open("ab") as file:
        file.write(b"".join(lines))
    return read_curves([directory])


def png_size(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:])


def test_a_curve_has_steps_tokens_and_rounds(tmp_path):
    rounds = {5: "round", 8: "round_failed"}
    (curve,) = write_log(tmp_path, "n", range(10), loss=lambda step: 9.0 - step, rounds=rounds)
    assert curve.label == "n"
    assert curve.steps.tolist() == list(range(10))
    assert curve.tokens.tolist() == list(range(100, 1_100, 100))
    assert curve.losses.tolist() == [9.0 - index for index in range(10)]
    assert [(found.step, found.has_failed) for found in curve.rounds] == [(5, False), (8, True)]


def test_of_a_step_done_twice_the_last_counts_and_steps_missing_at_the_beginning_as_tokens(tmp_path):
    write_log(tmp_path / "twice", "n", range(7), loss=lambda step: 1.0)
    (curve,) = write_log(tmp_path / "twice", "n", range(4, 10), loss=lambda step: 2.0, begin_s=T0 + 100)
    assert curve.steps.tolist() == list(range(10))
    assert curve.losses.tolist() == [1.0] * 4 + [2.0] * 6
    assert curve.tokens[-1] == 1_000
    (curve,) = write_log(tmp_path / "late", "n", range(500, 502))
    assert curve.tokens.tolist() == [50_100, 50_200]


def test_losses_that_are_not_finite_are_gaps(tmp_path):
    losses = [3.0, float("nan"), float("inf"), 3.0]
    (curve,) = write_log(tmp_path, "n", range(4), loss=losses.__getitem__)
    assert np.isnan(curve.losses).tolist() == [False, True, True, False]
    assert smoothed(curve.losses, span=10).tolist() == pytest.approx([3.0] * 4)


def test_one_name_in_two_logs_makes_two_curves(tmp_path):
    for day, node in (("mon", "n"), ("tue", "n"), ("tue", "m10"), ("tue", "m9")):
        write_log(tmp_path / day, node, range(3))
    labels = [curve.label for curve in read_curves([tmp_path / "mon", tmp_path / "tue", tmp_path / "mon"])]
    assert labels == ["m9", "m10", "mon: n", "tue: n"]


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 4, 16])
def test_nodes_are_drawn(tmp_path, num_nodes):
    def loss(step):
        return 10 / step + (1e9 if step == 30 else 0)

    rounds = {20: "round", 40: "round_failed"}
    for node in range(num_nodes):
        write_log(tmp_path / "logs", f"gpu-{node}", range(1, 60), loss=loss, begin_s=T0 + node, rounds=rounds)
    assert png_size(plot([tmp_path / "logs"], tmp_path / "new" / "curves.png")) == (1430, 935)
    smaller = plot([tmp_path / "logs"], tmp_path / "small.png", title="A run", size_inches=(6.0, 4.0))
    assert png_size(smaller) == (660, 440)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [[3.0], [float("nan")] * 3, [3.0, 3.0], [0.0] * 5])
def test_a_run_of_hardly_any_steps_is_drawn(tmp_path, losses):
    write_log(tmp_path, "n", range(len(losses)), loss=losses.__getitem__, every_s=0.0)
    assert min(png_size(plot([tmp_path], tmp_path / "curves.png"))) > 0


@pytest.mark.slow
def test_nothing_to_draw_or_nowhere_to_write_it_is_a_usage_error(tmp_path):
    for log_dirs, message in (([], "--log-dir"), ([tmp_path / "nowhere"], "found nothing"), ([tmp_path], "no events")):
        with pytest.raises(TrainerUsageError, match=message):
            plot(log_dirs, tmp_path / "x.png")
    active_path(tmp_path, "n").write_bytes(event_line(T0, "n", "started", {}))
    with pytest.raises(TrainerUsageError, match="events of 1 nodes but no step"):
        plot([tmp_path], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
    write_log(tmp_path, "n", range(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerUsageError, match="--out"):
        plot([tmp_path], tmp_path / "file" / "x.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_log(tmp_path, "n", range(3))
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TrainerUsageError, match=r"pip install 'genesis-training\[plot\]'"):
        plot([tmp_path], tmp_path / "x.png")


def test_importing_the_package_brings_in_nothing_heavy():
    heavy = ["matplotlib", "fastapi", "uvicorn", "prometheus_client", "numpy", "torch", "grpc", "pydantic"]
    code = f"import sys, trainer.monitor; print([name for name in {heavy!r} if name in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"
