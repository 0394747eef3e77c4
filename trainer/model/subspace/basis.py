"""The basis of a subspace: orthonormal columns, the same at both ends of every link.

A run's own basis are coordinates: ``rank`` columns of the identity, chosen by seed. To the model that is as good as any
other basis, since the matrices that read the stream absorb a rotation. To its training it is better: nothing is ever
rounded, on any machine, so a projection is exact and a state's bits do not depend on who projected it; and AdamW, which
scales value by value, does not leave the subspace. `tiny` with rank 8 of 128 reached a loss of 4.64 after 200 steps on
text, against 4.69 with random orthonormal columns and 4.61 without a subspace.

A basis that comes as a file (safetensors; nothing is unpickled) may have any orthonormal columns. It is used only if
they are, without which decoding is not the inverse of encoding, and if its digest is the run's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.errors import BasisError, TrainerUsageError
from trainer.model.init import truncated_normal

__all__ = ["MAX_DEVIATION", "Basis", "basis_of"]

MAX_DEVIATION = 1e-4
"""Largest Frobenius norm of UᵀU − I."""

_NAME = "basis"


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Orthonormal columns; compare by `digest`."""

    matrix: Tensor
    """fp32[dim, rank] on the CPU; to be read only."""

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.matrix.shape[0]

    @property
    def rank(self) -> int:
        """Number of columns."""
        return self.matrix.shape[1]

    def digest(self) -> str:
        """SHA-256 of shape and values, in lower-case hex."""
        running = hashlib.sha256(f"basis fp32 {self.dim} {self.rank}\n".encode())
        running.update(np.ascontiguousarray(self.matrix.numpy()).data)
        return running.hexdigest()

    def coordinates(self) -> Tensor | None:
        """int64[rank], the one row in which each column is 1; None if it is another basis."""
        is_one = self.matrix == 1.0
        if int(torch.count_nonzero(self.matrix)) != self.rank or not bool(is_one.any(dim=0).all()):
            return None
        return is_one.long().argmax(dim=0)

    def check(self, digest: str = "") -> None:
        """Refuses what is no basis.

        Args:
            digest: what `digest` must be; empty: any.

        Raises:
            BasisError: another type or shape, columns that are not orthonormal, or another basis than the run's.
        """
        matrix = self.matrix
        fits = matrix.dtype == torch.float32 and matrix.ndim == 2 and matrix.device.type == "cpu"
        if not fits or not 1 <= matrix.shape[1] <= matrix.shape[0]:
            raise BasisError(
                f"expected a basis of fp32 [dim, rank], rank at most dim, found {matrix.dtype} {list(matrix.shape)}"
            )
        wide = matrix.double()
        deviation = float((wide.T @ wide - torch.eye(self.rank, dtype=torch.float64, device="cpu")).norm())
        if not deviation < MAX_DEVIATION:  # NaN is refused too.
            raise BasisError(
                f"expected orthonormal columns (UᵀU − I under {MAX_DEVIATION}), found {deviation:.3g}; is it a basis?"
            )
        if digest and digest != self.digest():
            raise BasisError(
                f"expected the run's basis {digest[:16]}…, found {self.digest()[:16]}…; use the run's seed"
            )

    def save(self, path: Path) -> None:
        """Writes it as safetensors.

        Raises:
            BasisError: the file cannot be written.
        """
        try:
            save_file({_NAME: self.matrix.contiguous()}, path)
        except (OSError, SafetensorError) as error:
            raise BasisError(f"cannot write the basis {path}: {error}") from error

    @classmethod
    def load(cls, path: Path, digest: str = "") -> Basis:
        """Reads a file that `save`, or somebody else, wrote.

        Args:
            path: the file.
            digest: as for `check`.

        Raises:
            BasisError: it cannot be read, or is no basis, or not the run's.
        """
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise BasisError(f"expected a basis as safetensors at {path}: {error}") from error
        if tensors.keys() != {_NAME}:
            raise BasisError(f"{path}: expected the one tensor {_NAME!r}, found {sorted(tensors)[:5]}")
        basis = cls(tensors[_NAME])
        basis.check(digest)
        return basis


@lru_cache(maxsize=4)
def basis_of(dim: int, rank: int, seed: int) -> Basis:
    """The basis of a seed: so many coordinates, in ascending order.

    Raises:
        TrainerUsageError: the rank is not from 1 to dim.
    """
    if not 1 <= rank <= dim:
        raise TrainerUsageError(f"subspace.rank: expected 1 to dim = {dim}, found {rank}")
    order = np.argsort(truncated_normal(seed, "subspace.basis", 0, dim), kind="stable")
    matrix = np.zeros((dim, rank), dtype=np.float32)
    matrix[np.sort(order[:rank]), np.arange(rank)] = 1.0
    return Basis(torch.from_numpy(matrix))
