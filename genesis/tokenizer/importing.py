"""From ``--tokenizer`` to a store's vocabulary: a file of Hugging Face's form, or an encoding of tiktoken.

The file goes into the store as it is. What must be found out is which token ends a document: the one asked for, else
the one that ``tokenizer_config.json`` (or ``special_tokens_map.json``) beside the file names, else the first of the
usual names that the vocabulary has. Text must never give its id, or documents could not be told apart; that is tried
at every start (`agreement`), and each batch is looked at again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from genesis.errors import TokenizerError, UsageError
from genesis.tokenizer.frozen import Json, check_form, ids_of, parse_form
from genesis.tokenizer.tiktoken_form import TIKTOKEN_PREFIX, hugging_face_form
from manifests import (
    FIRST_MERGE_ID,
    MAX_VOCABULARY,
    FrozenVocabularyFile,
    SpecialToken,
    max_vocabulary_bytes,
    sha256_hex,
)

USUAL_EOS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""In the order in which they are looked for where nothing names the EOS."""

_CONFIGS: Final = ("tokenizer_config.json", "special_tokens_map.json")
_OTHER_ROLES: Final = ("bos", "pad", "unk")


_MAX_FILE_BYTES: Final = 128 << 20
"""Of a file given; the largest vocabularies in use have 35 MB."""


def import_vocabulary(where: str, eos: str | None = None) -> FrozenVocabularyFile:
    """The vocabulary that ``--tokenizer`` and ``--eos`` name.

    Args:
        where: a ``tokenizer.json``, a folder that has one, or ``tiktoken:NAME``.
        eos: the token that ends a document; None to find it.

    Raises:
        UsageError: there is no such file or encoding, or no such token.
        TokenizerError: it is no byte-level BPE that keeps all text.
    """
    config: dict[str, str] = {}
    if where.startswith(TIKTOKEN_PREFIX):
        text, origin = hugging_face_form(where.removeprefix(TIKTOKEN_PREFIX)), where
    else:
        path = _file_at(where)
        text, config, origin = _read(path), _config_beside(path), "tokenizer.json"
    value = parse_form(text, where)
    check_form(value, where)
    ids = _checked_ids(value, where)
    _check_encodable([*ids, *config.values(), *([eos] if eos is not None else [])], where)
    named = _other_roles(ids, config)
    vocabulary = FrozenVocabularyFile(
        origin=origin,
        next_merge_id=max(ids.values()) + 1,
        eos=_eos(ids, config, eos, where),
        bos=named.get("bos"),
        pad=named.get("pad"),
        unk=named.get("unk"),
        tokenizer_json=text,
        tokenizer_sha256=sha256_hex(text.encode()),
    )
    _check_size(vocabulary, where)
    return vocabulary


def _check_encodable(tokens: Iterable[str], where: str) -> None:
    for token in tokens:
        try:
            token.encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"{where}: expected tokens of valid Unicode, found {token!r}") from None


def _file_at(where: str) -> Path:
    path = Path(where).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            f"--tokenizer: expected a tokenizer.json, a folder with one, or {TIKTOKEN_PREFIX}NAME, found no file {path}"
        )
    return path


def _read(path: Path) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_FILE_BYTES:
            raise TokenizerError(f"{path}: expected at most {_MAX_FILE_BYTES >> 20} MiB, found {size_bytes >> 20}")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--tokenizer {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: expected a tokenizer.json in UTF-8, found other bytes") from None


def _config_beside(path: Path) -> dict[str, str]:
    """The tokens that the files beside a tokenizer name, by their roles; the first file that is there counts."""
    for name in _CONFIGS:
        beside = path.with_name(name)
        if not beside.is_file():
            continue
        try:
            value = json.loads(_read(beside))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{beside}: expected JSON, found {error}; mend it, or name the EOS by --eos") from None
        return _tokens_of(value) if isinstance(value, dict) else {}
    return {}


def _tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string, or an object that holds one as ``content``."""
    found = {}
    for role in ("eos", *_OTHER_ROLES):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            found[role] = token
    return found


def _checked_ids(value: Json, where: str) -> dict[str, int]:
    try:
        ids = ids_of(value)
        numbers = sorted(ids.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{where}: expected tokens with ids, found {type(error).__name__}: {error}") from None
    if not all(type(number) is int for number in numbers) or numbers[0] < 0 or numbers[-1] >= MAX_VOCABULARY:
        raise TokenizerError(f"{where}: expected ids of 0 to {MAX_VOCABULARY - 1}, found {numbers[0]}…{numbers[-1]}")
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, following in pairwise(numbers) if number == following)
        raise TokenizerError(f"{where}: expected an id for each token, found {twice} given to two of them")
    if numbers[-1] + 1 < FIRST_MERGE_ID:
        raise TokenizerError(f"{where}: expected {FIRST_MERGE_ID} ids or more, found {numbers[-1] + 1}")
    return ids


def _eos(ids: Mapping[str, int], config: Mapping[str, str], asked: str | None, where: str) -> SpecialToken:
    if asked is not None:
        if asked not in ids:
            raise UsageError(f"--eos {asked}: expected a token of {where}, found none of that name")
        return SpecialToken(id=ids[asked], token=asked)
    for token in (config.get("eos"), *USUAL_EOS):
        if token is not None and token in ids:
            return SpecialToken(id=ids[token], token=token)
    raise UsageError(
        f"{where}: expected a token that ends a document, found none named beside it and none of "
        f"{', '.join(USUAL_EOS)}; name it by --eos"
    )


def _other_roles(ids: Mapping[str, int], config: Mapping[str, str]) -> dict[str, SpecialToken]:
    """Those that are named beside the tokenizer and that it has."""
    tokens = {role: config[role] for role in _OTHER_ROLES if config.get(role) in ids}
    return {role: SpecialToken(id=ids[token], token=token) for role, token in tokens.items()}


def _check_size(vocabulary: FrozenVocabularyFile, where: str) -> None:
    most = max_vocabulary_bytes(vocabulary.next_merge_id, is_frozen=True)
    found = len(vocabulary.to_json())
    if found > most:
        raise TokenizerError(
            f"{where}: expected at most {most:,} bytes for {vocabulary.next_merge_id:,} ids, which is all that readers "
            f"take, found {found:,}; save it without indentation (tokenizer.save(path, pretty=False))"
        )
