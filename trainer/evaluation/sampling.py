"""Text that a model writes, for a person to look at.

Each token is a forward pass of one row of one length, the same for every sample of a run, so that nothing is compiled
for it twice; without a cache of keys and values 64 tokens cost as much as some 64 rows of evaluation. Tokens are drawn
on the CPU from a generator of their own, seeded by run, step and prompt: the same weights write the same text, and the
process's generators do not move. Every sample has all its passes, also behind an EOS, since the ranks of a sharded
model must make equally many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from genesis.tokenizer import StoreTokenizer
from trainer.evaluation.held_out import Autocast, evaluating
from trainer.model import Transformer


@dataclass(frozen=True, slots=True)
class Sample:
    """What a model wrote behind a prompt, up to the end of the document."""

    prompt: str
    text: str


def sample_text(
    model: Transformer,
    tokenizer: StoreTokenizer,
    prompts: Sequence[str],
    device: torch.device,
    *,
    eos_id: int,
    num_tokens: int,
    temperature: float,
    seed: str,
    autocast: Autocast = nullcontext,
) -> tuple[Sample, ...]:
    """Returns what the model writes behind each prompt, of at most ``num_tokens`` tokens.

    ``eos_id`` ends a document, and stands before each prompt. A prompt that leaves no room within the model's longest
    sequence is cut at its beginning. ``seed`` is any text.
    """
    longest = model.config.max_seq_len
    num_tokens = min(num_tokens, longest - 1)
    num_ids = min(model.readout.num_ids, tokenizer.next_merge_id)
    begun = [[eos_id, *tokenizer.encode(prompt).tolist()][-(longest - num_tokens) :] for prompt in prompts]
    length = max(map(len, begun)) + num_tokens
    samples = []
    with evaluating(model):
        for number, (prompt, known) in enumerate(zip(prompts, begun, strict=True)):
            digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            ids = torch.full((1, length), eos_id, dtype=torch.int64)
            ids[0, : len(known)] = torch.tensor(known)
            for place in range(len(known), len(known) + num_tokens):
                with autocast():
                    scores = model(ids.to(device))[0, place - 1, :num_ids]
                ids[0, place] = _drawn(scores.float().cpu(), temperature, generator)
            samples.append(
                Sample(prompt, _decoded(ids[0, len(known) : len(known) + num_tokens].tolist(), eos_id, tokenizer))
            )
    return tuple(samples)


def _drawn(scores: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(scores.argmax())
    probabilities = torch.softmax((scores - scores.max()) / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _decoded(ids: list[int], eos_id: int, tokenizer: StoreTokenizer) -> str:
    end = ids.index(eos_id) if eos_id in ids else len(ids)
    return tokenizer.decode(ids[:end])
