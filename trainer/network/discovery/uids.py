"""Which number a worker has among those of its stage: ``head.0.42``, told apart for people.

Nobody hands numbers out. A worker takes a free one and looks, with every look-up, whether another one has it too; of
two with one number the one with the smaller key keeps it and the other takes another. The smallest key of a stage never
has to move, the second smallest only for the first, and so on: once announcements have gone round, all are distinct.
Programs know a worker by its key, so two of one number for a moment harm nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import StageUid, free_number

__all__ = ["settled_uid", "workers_of"]


def workers_of(stage: str, announcements: Iterable[Announcement]) -> dict[str, int]:
    """The workers of a stage: number by peer id."""
    uids = {found.peer_id: StageUid.parse(found.stage.uid) for found in announcements if found.stage is not None}
    return {peer_id: uid.number for peer_id, uid in uids.items() if uid.stage == stage}


def settled_uid(stage: str, own_peer_id: str, own: StageUid | None, announcements: Iterable[Announcement]) -> StageUid:
    """The name a worker is to have, as far as it can see; to be asked again whenever it has looked.

    Args:
        stage: the one it holds.
        own_peer_id: its key.
        own: its name so far; None, or one of another stage: it has none yet.
        announcements: what is known of the others (`Discovery.peers`).

    Returns:
        Its name so far, unless a worker with a smaller key has that number in this stage; else one that nobody has.
    """
    others = workers_of(stage, announcements)
    others.pop(own_peer_id, None)
    is_taken = own is not None and any(
        number == own.number and peer_id < own_peer_id for peer_id, number in others.items()
    )
    if own is not None and own.stage == stage and not is_taken:
        return own
    return StageUid(stage, free_number(int(own_peer_id[:15], 16), set(others.values())))
