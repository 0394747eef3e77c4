"""`HeldOut`: tokens of the shards that no node trains on, and a model's loss on them.

The windows are the same at every measurement, at every node and after every restart: evenly spaced over each source's
first `data.holdout` shards, which stay the same as a store grows. So two figures differ by the model and never by the
sample. Ranks of a node share the rows of each pass among them (`trainer.run.node.ranked`).

The loss is told in nats a token, which depends on the vocabulary, and in bits a byte of the text that the tokens spell,
which does not. What the shards' text has in bytes is in no index; it follows from the ids, each of which spells the
same bytes everywhere. An EOS spells none, and its loss counts: a model must know where documents end.

Nothing here draws a random number or touches the training stream: shards are read by a session of its own, copied, and
let go (65,536 tokens: 1 MB). Gradients, optimizer and training mode are as before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from genesis.tokenizer import tokenizer_of
from loader.options import StreamOptions
from loader.plan import shard_pool
from loader.session import Session
from loader.stream.windows import WindowView, num_windows
from manifests import SPECIAL_TOKENS
from trainer.errors import TrainerUsageError
from trainer.model import Transformer
from trainer.model.loss import IGNORED_LABEL, filled_up

_UNK_ID: Final = SPECIAL_TOKENS.index("<|unk|>")
_BITS_A_NAT: Final = 1.0 / math.log(2.0)

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """The sum of the losses of some tokens, and what they are."""

    nats: float
    num_tokens: int
    num_bytes: int
    """Bytes of the text that the tokens spell."""

    @property
    def nats_per_token(self) -> float:
        """NaN where there are no tokens."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """NaN where the tokens spell nothing."""
        return self.nats * _BITS_A_NAT / self.num_bytes if self.num_bytes else math.nan

    def __add__(self, other: SourceLoss) -> SourceLoss:
        return SourceLoss(self.nats + other.nats, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """One measurement."""

    by_source: Mapping[str, SourceLoss]
    seconds: float

    @property
    def whole(self) -> SourceLoss:
        """Of all sources together; each has as many tokens as any other, or all that it holds out."""
        return sum(self.by_source.values(), SourceLoss(0.0, 0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Windows of held-out shards, by source, and how many bytes each id spells."""

    windows: Mapping[str, tuple[Tensor, Tensor]]  # Inputs and labels, int64[N, T] each.
    bytes_of: Tensor  # int64[ids]: of those that are labels; 0 for all others.

    @classmethod
    def of(
        cls, session: Session, *, holdout: int, seq_len: int, num_tokens: int, sources: tuple[str, ...] = ()
    ) -> Self:
        """Reads them from a store.

        Args:
            session: the store.
            holdout: how many shards of each source are held out, 1 or more.
            seq_len: T.
            num_tokens: about how many tokens to take; 0: all of the shards.
            sources: those that count; empty: all there are.

        Raises:
            TrainerUsageError: ``holdout`` is 0.
            LoaderError: the store has no such source, or cannot be read.
        """
        if holdout < 1:
            raise TrainerUsageError(f"holdout: expected 1 or more shards to measure the loss on, found {holdout}")
        catalog = session.catalog
        names = sources or tuple(sorted(name for name, shards in catalog.manifest.sources.items() if shards))
        wanted = -(-num_tokens // (seq_len * len(names))) if num_tokens else None
        options = StreamOptions(node_id="held-out", seq_len=seq_len, holdout=holdout, split="holdout")
        windows = {}
        for name in names:
            shards = shard_pool(catalog, options, name, catalog.manifest.total_shards)
            windows[name] = _spread(session, list(shards), seq_len, wanted)
        tokenizer = tokenizer_of(catalog.vocabulary())
        labels = np.unique(np.concatenate([labels.numpy().ravel() for _, labels in windows.values()]))
        bytes_of = torch.zeros(int(labels[-1]) + 1, dtype=torch.int64)
        for each in labels.tolist():
            bytes_of[each] = len(tokenizer.decode_bytes([each]))
        return cls(windows, bytes_of)

    def measure(
        self, model: Transformer, device: torch.device, *, rows: int, autocast: Autocast = nullcontext
    ) -> HeldOutLoss:
        """Returns the loss of a model as it is; ``rows`` windows go through it at once, each time: it may be compiled.

        Ids that the model has no row for are read as UNK, and not measured: as in training.
        """
        began_s = time.perf_counter()
        by_source = {}
        with evaluating(model):
            for name, (inputs, labels) in self.windows.items():
                sums, num_tokens, num_bytes = [], 0, 0
                for start in range(0, len(inputs), rows):
                    ids, wanted = inputs[start : start + rows], labels[start : start + rows]
                    known = wanted < model.readout.num_ids
                    count = int(known.sum())
                    num_tokens += count
                    num_bytes += int(self.bytes_of[wanted[known]].sum())
                    ids = torch.where(ids < model.config.vocab_size, ids, _UNK_ID)
                    wanted = torch.where(known, wanted, IGNORED_LABEL)
                    ids, wanted = filled_up(ids, wanted, rows)
                    with autocast():
                        sums.append(model(ids.to(device), wanted.to(device)).float() * count)
                by_source[name] = SourceLoss(math.fsum(torch.stack(sums).tolist()), num_tokens, num_bytes)
        return HeldOutLoss(by_source, time.perf_counter() - began_s)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Encloses forward passes that leave no trace in a model that is being trained."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _spread(session: Session, shards: list[int], seq_len: int, wanted: int | None) -> tuple[Tensor, Tensor]:
    """Returns so many windows of some shards, evenly spaced; all of them where there are no more."""
    each = num_windows(session.catalog.manifest.shard_tokens, seq_len)
    if not each:
        most = session.catalog.manifest.shard_tokens - 1
        raise TrainerUsageError(f"inner.seq_len: expected at most {most} tokens, which a shard holds, found {seq_len}")
    total = len(shards) * each
    count = total if wanted is None else min(wanted, total)
    chosen = np.arange(count, dtype=np.int64) * total // count
    parts = []
    for ordinal, shard in enumerate(shards):
        here = chosen[(chosen >= ordinal * each) & (chosen < (ordinal + 1) * each)] - ordinal * each
        if len(here):
            parts.append(WindowView.of(session.open_shard(shard).ids, seq_len).gather(here))
    inputs, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return inputs, labels
