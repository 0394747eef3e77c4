"""Arithmetic with a basis on one device: coefficients, their span, projection.

A basis of coordinates needs no products: it picks, adds and sets to zero, exactly, in a hundredth of the time. Any
other basis takes matrix products, always in fp32, also under autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.model.subspace.basis import Basis

__all__ = ["Projector", "projector"]

_ROWS = 1 << 14
"""Rows projected at a time, so that the scratch stays small beside an embedding."""


class Projector(Protocol):
    """A basis, ready for use."""

    def coefficients(self, values: Tensor) -> Tensor:
        """[..., rank] of [..., dim]."""
        ...

    def add_span_(self, coefficients: Tensor, onto: Tensor) -> Tensor:
        """Adds what [..., rank] stand for onto [..., dim], in place."""
        ...

    def project_(self, rows: Tensor) -> None:
        """Leaves of every row of [n, dim] its part within the span, in place."""
        ...


def projector(basis: Basis, device: torch.device, dtype: torch.dtype = torch.float32) -> Projector:
    """The basis on a device, for tensors of a type."""
    coordinates = basis.coordinates()
    if coordinates is None:
        return _Matrix(basis.matrix.to(device=device, dtype=dtype))
    kept = torch.zeros(basis.dim, dtype=torch.bool)
    kept[coordinates] = True
    return _Coordinates(coordinates.to(device), kept.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    matrix: Tensor
    """[dim, rank]."""

    def coefficients(self, values: Tensor) -> Tensor:
        """See `Projector.coefficients`."""
        with torch.autocast(values.device.type, enabled=False):
            return values @ self.matrix

    def add_span_(self, coefficients: Tensor, onto: Tensor) -> Tensor:
        """See `Projector.add_span_`."""
        with torch.autocast(coefficients.device.type, enabled=False):
            return onto.add_(coefficients @ self.matrix.T)

    def project_(self, rows: Tensor) -> None:
        """See `Projector.project_`."""
        with torch.autocast(rows.device.type, enabled=False):
            for part in torch.split(rows, _ROWS):
                part.copy_((part @ self.matrix) @ self.matrix.T)


@dataclass(frozen=True, slots=True, eq=False)
class _Coordinates:
    coordinates: Tensor
    """int64[rank]."""
    kept: Tensor
    """bool[dim]: which these are."""

    def coefficients(self, values: Tensor) -> Tensor:
        """See `Projector.coefficients`."""
        return values.index_select(-1, self.coordinates)

    def add_span_(self, coefficients: Tensor, onto: Tensor) -> Tensor:
        """See `Projector.add_span_`."""
        return onto.index_add_(-1, self.coordinates, coefficients)

    def project_(self, rows: Tensor) -> None:
        """See `Projector.project_`."""
        rows.masked_fill_(~self.kept, 0.0)
