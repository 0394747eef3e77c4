"""Ids that lie in the memory of some machine of a cluster, and a shard as the list of pieces it will be made of.

They are sliced and measured like the arrays they stand for, so that the packer cuts shards without having the ids.
Nothing here imports Ray: a reference is whatever names the object.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RemoteIds:
    """``stop - start`` ids of the array that ``reference`` names, on the machine ``node_id``."""

    reference: object
    node_id: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> RemoteIds:
        """A part of them, in steps of 1."""
        start, stop, _ = part.indices(len(self))
        return RemoteIds(self.reference, self.node_id, self.start + start, self.start + max(start, stop))

    def copy(self) -> RemoteIds:
        """The same: what is elsewhere is never overwritten."""
        return self


TokenIds = npt.NDArray[np.uint32] | RemoteIds
"""Ids in this process, or the name of ids elsewhere; both are sliced, measured and copied alike."""


@dataclass(slots=True)
class Pieces:
    """The ids of a shard, as pieces in order.

    Attributes:
        num_tokens: ids in the shard.
        parts: the pieces taken so far.
    """

    num_tokens: int
    parts: list[TokenIds] = field(default_factory=list)

    def __len__(self) -> int:
        return self.num_tokens

    def __setitem__(self, place: slice, ids: TokenIds) -> None:
        """Takes the ids that go to ``place``, which begins where those before it end."""
        if place.stop - place.start != len(ids):
            raise ValueError(f"expected {place.stop - place.start} ids, found {len(ids)}")
        self.parts.append(ids)


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """A shard whose ids are elsewhere; what an image in memory is to the packer."""

    ids: Pieces

    @classmethod
    def empty(cls, num_tokens: int) -> RemoteImage:
        """One for ``num_tokens`` ids."""
        return cls(Pieces(num_tokens))

    def clear(self) -> None:
        """Lets go of the pieces, so that their memory is given back, and may be filled again."""
        self.ids.parts.clear()

    @property
    def home(self) -> str:
        """The machine that has most of the ids; empty if none has any."""
        sizes: dict[str, int] = {}
        for part in self.ids.parts:
            if isinstance(part, RemoteIds):
                sizes[part.node_id] = sizes.get(part.node_id, 0) + len(part)
        return max(sizes, key=lambda node_id: (sizes[node_id], node_id), default="")
