"""What a meter says of steps whose lengths are known, and where it is told."""

from __future__ import annotations

import pytest

from tests.trainer.monitor.test_app import read
from trainer.monitor import Peak, SpeedMeter
from trainer.monitor.speed import PHASES, speed_text

PEAK = Peak(1e9, "measured", "CPU, fp32")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _trained(steps: int, seconds: float = 2.0, num_devices: int = 1) -> SpeedMeter:
    clock = Clock()
    meter = SpeedMeter(flops_per_token=1_000, peak=PEAK, clock=clock, num_devices=num_devices)
    meter.end_step()
    for _ in range(steps):
        for phase, share in zip(PHASES, (0.05, 0.6, 0.1, 0.05, 0.1), strict=True):
            meter.add(phase, share * seconds)
        clock.now_s += seconds
        meter.end_step(500_000)
    return meter


def test_utilisation_is_of_wall_time_and_what_no_phase_has_is_other():
    found = _trained(4).status()
    assert found is not None
    assert (found.tokens_per_s, found.mfu) == (250_000.0, 0.25)
    assert (found.peak_flops_per_s, found.peak_kind, found.peak_device) == (1e9, "measured", "CPU, fp32")
    expected = {"data": 0.05, "compute": 0.6, "optimizer": 0.1, "outer_step": 0.05, "checkpoint": 0.1, "other": 0.1}
    assert found.time_shares == pytest.approx(expected)
    assert list(found.time_shares) == [*PHASES, "other"]
    text = speed_text(found)
    assert "MFU 25.0 % of 0.001 TFLOP/s measured" in text and "compute 60, " in text and "outer step 5, " in text


def test_a_node_of_several_devices_is_held_against_the_peak_of_all_of_them():
    found = _trained(4, num_devices=8).status()
    assert found is not None
    assert (found.tokens_per_s, found.tokens_per_s_per_device, found.num_devices) == (250_000.0, 31_250.0, 8)
    assert found.mfu == pytest.approx(0.25 / 8, abs=1e-4)
    assert "31,250 a device  MFU 3.1 % of 8 x 0.001 TFLOP/s measured" in speed_text(found)


def test_only_the_latest_fifty_steps_count_and_none_before_the_first_or_after_a_restart():
    meter = _trained(0)
    assert meter.status() is None
    clock = Clock()
    meter = SpeedMeter(1_000, PEAK, clock)
    meter.end_step()
    for step in range(60):
        clock.now_s += 100.0 if step < 10 else 1.0
        meter.end_step(1_000)
    found = meter.status()
    assert found is not None and found.tokens_per_s == 1_000.0
    meter.restart()
    assert meter.status() is None


def test_phases_that_overlap_leave_nothing_rather_than_less():
    clock = Clock()
    meter = SpeedMeter(1, PEAK, clock)
    meter.end_step()
    meter.add("compute", 1.0)
    meter.add("data", 0.5)
    clock.now_s += 1.0
    meter.end_step(1)
    found = meter.status()
    assert found is not None and found.time_shares["other"] == 0.0


def test_the_api_and_the_metrics_tell_it(client, node):
    assert client.get("/api/training/global").json()["speed"] is None
    assert "mfu_ratio" not in read(node)
    node.tracker.set_speed(_trained(3).status)
    told = client.get("/api/training/global").json()["speed"]
    assert (told["mfu"], told["peak_kind"], told["time_shares"]["compute"]) == (0.25, "measured", 0.6)
    expected = {"mfu_ratio": 0.25, "tokens_per_second": 250_000.0, "time_share_ratio outer_step": 0.05}
    found = read(node)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
