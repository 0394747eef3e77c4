"""What tests of batches have in common: a digest to compare them by, and taking some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from manifests import sha256_hex


def digest(batch: Mapping[str, Any]) -> str:
    """Identifies a batch: names, types, shapes and contents of its tensors."""
    parts = [f"{name}:{batch[name].dtype}:{tuple(batch[name].shape)}" for name in sorted(batch)]
    bodies = [sha256_hex(batch[name].numpy().tobytes()) for name in sorted(batch)]
    return sha256_hex("\n".join([*parts, *bodies]).encode())[:24]


def take(batches: Iterable[Mapping[str, Any]], count: int | None = None) -> list[str]:
    """The digests of the next ``count`` batches; of all that come, without one."""
    return [digest(batch) for batch in islice(iter(batches), count)]
