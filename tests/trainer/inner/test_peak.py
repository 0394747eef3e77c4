"""The peak of a device: by the name that its driver gives, else by a product, and which of the two it is."""

from __future__ import annotations

import pytest
import torch

from trainer.inner.peak import measured_flops_per_s, peak_of, stated_flops_per_s

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
        ("CPU", None),
    ],
)
def test_what_is_stated_is_that_of_this_very_device(name, tflops):
    found = stated_flops_per_s(name)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_cpu_is_measured_and_says_so():
    found = peak_of(CPU, "auto")
    assert (found.kind, found.device) == ("measured", "CPU, fp32")
    assert peak_of(CPU, "bf16").device == "CPU, bf16"
    assert 1e8 < found.flops_per_s < 1e14
    assert 1e7 < measured_flops_per_s(CPU, torch.float32, 64) < 1e14
