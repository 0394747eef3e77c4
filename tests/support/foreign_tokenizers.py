"""Tokenizers as others make them, trained here with ``tokenizers`` itself: small, and the same on every machine.

`FORMS` are the kinds that models in the wild have; each is Hugging Face's file as its ``save`` would write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.documents import TEXT, documents

_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_PATTERN = _HEAD + r"\p{N}{1,3}" + _TAIL
QWEN_PATTERN = _HEAD + r"\p{N}" + _TAIL
MULTILINGUAL = (
    "人人生而自由，在尊严和权利上一律平等。 すべての人間は、生まれながらにして自由である。 "
    "모든 인간은 태어날 때부터 자유롭다. Все люди рождаются свободными. يولد جميع الناس أحراراً. "
    "सभी मनुष्य स्वतन्त्र हैं। มนุษย์ทั้งหลายเกิดมามีอิสระ Ὅλοι οἱ ἄνθρωποι. cafe\u0301 na\u00efve \u212bngstr\u00f6m "
    "\ufb01n 👩\u200d👩\u200d👧 🇩🇪 \u1112\u1161\u11ab don't I'LL we've\r\n\t1234567 3.14 x_y /tmp/a.b"
)


def training_texts() -> list[str]:
    return [*documents(seed=3, count=200), *[TEXT, MULTILINGUAL] * 20]


def _trained(tokenizer: Tokenizer, vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Tokenizer:
    """The pattern in ByteLevel, the EOS behind all merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _trained(tokenizer, 1500, [])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _llama3() -> Tokenizer:
    """A Split, whole words taken as tokens, and a template that puts a BOS before each text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _split(LLAMA_PATTERN)
    _trained(tokenizer, 1500, [])
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"])
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[begin])
    return tokenizer


def _qwen() -> Tokenizer:
    """NFC, digits one by one, and an added token that is not special behind those that are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(QWEN_PATTERN)
    _trained(tokenizer, 1500, [])
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def _olmo() -> Tokenizer:
    """Special tokens before the bytes, so that the EOS is 0, and runs of spaces as added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _trained(tokenizer, 1500, ["<|endoftext|>", "<|padding|>"])
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in (8, 7, 6, 5, 4, 3, 2)])
    return tokenizer


def _digits() -> Tokenizer:
    """A pre-tokenizer that is not among those of the well-known models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    _trained(tokenizer, 1500, [])
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


FORMS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _gpt2,
    "llama3": _llama3,
    "qwen": _qwen,
    "olmo": _olmo,
    "digits": _digits,
}
EOS = {
    "gpt2": "<|endoftext|>",
    "llama3": "<|end_of_text|>",
    "qwen": "<|endoftext|>",
    "olmo": "<|endoftext|>",
    "digits": "</s>",
}


@cache
def foreign_json(name: str) -> str:
    return FORMS[name]().to_str(pretty=True)


def write_foreign(folder: Path, name: str, **config: Any) -> Path:
    """``tokenizer.json`` in a folder, and a ``tokenizer_config.json`` if anything is given for it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(foreign_json(name), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def reference(name: str) -> Callable[[str], list[int]]:
    """The ids that ``tokenizers`` itself gives a document, its special tokens not matched in text."""
    tokenizer = Tokenizer.from_str(foreign_json(name))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
