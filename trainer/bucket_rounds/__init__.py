"""Rounds through an object store: no port, no peer's address, outbound requests only.

    contribution ──put if absent──▶ bucket ◀──fetched by everybody, digests and signatures checked
    agreement    ──put if absent──▶ bucket      one a round: what is in it, with which weights
    result = the robust rules over what the agreement lists, in its order: the same bits at every member

Guarantees: of two agreements for a round one exists, since a conditional write has one winner; one that breaks the
rules (`rules`) is void for everybody alike, for it is judged by what does not change: bytes, signatures and the store's
own times. A member that was left out has its work in the next round. A digest verifies every byte that is read, and
every object is bounded before it is. The store being away costs time only.

The trade-off against `trainer.collective`, in which each member reduces a share: everybody fetches every contribution
and computes the whole result, n times as many bytes down as up, but nobody has to be reachable or trusted with a share.
Four members of 125M parameters in int8 fetch 0.4 GB a round each.
"""

from __future__ import annotations

from trainer.bucket_rounds.config import BucketConfig

__all__ = ["BucketConfig"]
