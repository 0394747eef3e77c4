"""What a failed request says: whether anything was counted, what to think of the worker, and where to try again.

| what happened                          | counted there? | the worker         | then                        |
|----------------------------------------|----------------|--------------------|-----------------------------|
| ``busy``, ``rate``, ``not-a-driver``   | no             | rests for a moment | same or another, no attempt |
| ``stopping``                           | no             | rests longer       | another, no attempt         |
| ``no-input``                           | no             | –                  | same, with the input        |
| ``expired``, ``stale``, ``tainted``    | no             | five: banned       | another                     |
| ``nonfinite``, ``stage``, wrong key, … | no             | banned for a while | another                     |
| ``already-applied``                    | yes            | banned for a while | the answer is gone          |
| ``counted-for-another``                | yes            | –                  | the answer is gone          |
| ``malformed``                          | not clear      | banned for a while | another; twice: give up     |
| ``internal``, ``timeout``, no answer   | not clear      | banned for a while | another, when it is clear   |
| an answer that is none                 | not clear      | banned for long    | another, when it is clear   |

``not-a-driver`` says a worker that has not heard of this driver yet.

``already-applied`` is honest of a repetition only; as the answer to the first request it is what a worker would say
that wants to see nothing trained. `Bans` tells how those that do nothing but refuse are found out.

Only requests that apply something can be unclear; a forward pass is simply done again elsewhere. A refusal says so of
the request it answers only: of an earlier one of the same micro-batch whose answer did not come it says nothing.
A worker that was told not to count a micro-batch any more refuses it as ``expired`` for some 20 s, so a few of these in
a row are no reason to give it up: each uses up a quarter of an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc.reasons import Reason

__all__ = ["Blame", "Effect", "Verdict", "verdict_of"]

Effect = Literal["none", "unclear", "counted"]
Blame = Literal["none", "rest", "leave", "doubt", "ban", "firm-ban", "long-ban"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed request says."""

    reason: str
    """One word for counters: the refusal's if it is one that is known (``refused``: another), ``unavailable`` or
    ``malformed-answer``. A worker chooses its words freely; they end up in settlements and counters."""
    effect: Effect
    blame: Blame
    attempts: float = 1.0
    """How many of a micro-batch's attempts in a stage it uses up; 0: it may go on for ever."""


_BEFORE_ANYTHING = frozenset(
    {
        *("no_request", "size", "magic", "protocol", "head", "kind", "run", "recipient", "sender", "certificate"),
        *("method", "payload_size", "clock", "signature", "replayed", "sequence", "digest", "body"),
        *("stage", "nonfinite"),
    }
)
"""Refusals that come before anything is counted, and that a worker that fits this run and stage does not make."""
_VERDICTS = {
    "busy": Verdict("busy", "none", "rest", 0.0),
    "rate": Verdict("rate", "none", "rest", 0.0),
    "stopping": Verdict("stopping", "none", "leave", 0.0),
    "no-input": Verdict("no-input", "none", "none", 0.5),
    "expired": Verdict("expired", "none", "doubt", 0.25),
    "stale": Verdict("stale", "none", "doubt"),
    "tainted": Verdict("tainted", "none", "doubt"),
    "already-applied": Verdict("already-applied", "counted", "firm-ban"),
    "counted-for-another": Verdict("counted-for-another", "counted", "none"),
    "not-a-driver": Verdict("not-a-driver", "none", "rest", 0.0),
    "malformed": Verdict("malformed", "unclear", "ban", 3.0),
}
_KNOWN_WORDS = frozenset(map(str, Reason))


def verdict_of(error: RpcError) -> Verdict:
    """What a failed request says, if it is the first of its micro-batch at this worker."""
    if isinstance(error, MalformedAnswerError):
        return Verdict("malformed-answer", "unclear", "long-ban")
    if isinstance(error, RefusedError):
        if error.reason in _BEFORE_ANYTHING:
            return Verdict(error.reason, "none", "ban")
        word = error.reason if error.reason in _KNOWN_WORDS else "refused"
        return _VERDICTS.get(error.reason, Verdict(word, "unclear", "ban"))
    if isinstance(error, PeerUnavailableError):
        return Verdict("unavailable", "unclear", "ban")
    return Verdict("failed", "unclear", "ban")
