r"""`RunFile`: everything that the nodes of a run must share, in one file that the run's owner has signed.

It is YAML or JSON with one content (``version``, ``name``, ``owner``, ``authorities``, ``config``, ``signature``). The
signature, ed25519 by the owner's key, is over

    genesis run 1\n{"authorities":[…],"config":{…},"name":"…","owner":"…","version":1}

where the JSON is UTF-8 with sorted keys, no white space, numbers as Python writes them (``1e-05``, ``0.1``, ``3.0``)
and infinite ones as the text ``inf``; the SHA-256 of these bytes is the run's digest. It is part of what nodes compare
before they train together (`Terms`), and the first change of the run names it: so a name may be used by two owners
without their nodes or their changes ever being mixed up. A run file is signed once and never changed; what changes are
the records of `RunChange`.

The trade-off: every shared option is written out, some 120 lines, so that a release with other defaults reads the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from genesis.store.durable import TemporaryFile
from manifests.errors import SignatureError
from manifests.serialisation import canonical_json, sha256_hex
from manifests.signing import generate_private_key, load_private_key, private_key_pem
from trainer.errors import RunFileError, TrainerUsageError
from trainer.network.discovery.announcement import Name
from trainer.network.rpc.envelope import first_line, parse_strict_json
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.run.config import RunConfig, from_mapping, merged, nested, to_mapping
from trainer.run.config.reading import parse_yaml
from trainer.run.config.run import SwarmConfig
from trainer.run.signed.fields import OPEN_IN_FILE, option_names, standing_of

MAX_FILE_BYTES: Final = 1 << 18
VERSION: Final = 1
_DOMAIN: Final = b"genesis run 1\n"
_IN_FILE: Final = ("offered", "fixed", "round")
_MAX_AUTHORITIES: Final = 16

Layout: TypeAlias = Literal["whole", "stages", "mixed"]
KeyField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RunFile(BaseModel):
    """A run, as its owner signs it; an empty ``signature`` is that of a draft."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = VERSION
    name: Name
    owner: KeyField
    """The ed25519 key that signs this file and every change of the run."""
    authorities: Annotated[tuple[KeyField, ...], Field(max_length=_MAX_AUTHORITIES)] = ()
    """Keys that may admit nodes; empty: anybody may join."""
    config: dict[str, JsonValue]
    """What all nodes share, nested as in `RunConfig`: the options that are not a node's own (`fields`)."""
    layout: Layout | None = None
    """Whether nodes hold the whole model, a stage of it, or either (``mixed``); None: a file of an earlier release that
    does not say."""
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        if self.layout is None:  # The signature of an earlier release's file is over a content without it.
            fields.pop("layout", None)
        return fields

    @classmethod
    def of(
        cls,
        config: RunConfig,
        owner: str,
        authorities: tuple[str, ...] = (),
        *,
        with_store: bool = True,
        layout: Layout | None = None,
    ) -> Self:
        """Returns an unsigned file with what nodes of this configuration share; without a store each has to name it."""
        left_out = set() if with_store else OPEN_IN_FILE
        shared: dict[str, Any] = {}
        values = to_mapping(config)
        for name in option_names():
            if standing_of(name) in _IN_FILE and name not in left_out:
                shared = merged(shared, nested(name, portable(value_at(values, name))))
        return cls(name=config.run_id, owner=owner, authorities=authorities, config=shared, layout=layout)

    def signed_bytes(self) -> bytes:
        """Returns what the signature is over; see this module."""
        content = self.model_dump(mode="json")
        del content["signature"]
        return _DOMAIN + canonical_json(content)

    def digest(self) -> str:
        """Returns the SHA-256 of the signed bytes: which run this is."""
        return sha256_hex(self.signed_bytes())

    def signed(self, owner: Identity) -> Self:
        """Returns the file signed; raises `RunFileError` where the key is not the owner's."""
        if owner.peer_id != self.owner:
            raise RunFileError(
                f"run {self.name}: expected the key of its owner {self.owner[:16]}…, found that of "
                f"{owner.peer_id[:16]}…; give the key file that run init made"
            )
        return self.model_copy(update={"signature": owner.sign(self.signed_bytes()).hex()})

    def verify(self, where: str) -> None:
        """Raises `RunFileError` unless the owner that the file names has signed exactly this."""
        if not self.signature:
            raise RunFileError(f"{where}: expected a signed run file, found a draft; sign it by run sign")
        if not verify_signature(self.owner, self.signed_bytes(), bytes.fromhex(self.signature)):
            raise RunFileError(
                f"{where}: expected it as its owner {self.owner[:16]}… signed it, found it changed since; take it from "
                "where it was published, or sign it again (run sign)"
            )

    def is_of_stages(self, config: RunConfig) -> bool:
        """Checks whether its model is cut into stages; an earlier release's file says so by its options alone."""
        if self.layout is None:
            return config.swarm != SwarmConfig() or config.strategy == "async_sparta"
        return self.layout in ("stages", "mixed")

    def says(self, name: str) -> bool:
        """Checks whether the file has an option, by its dotted name."""
        return value_at(self.config, name) is not MISSING

    def to_json(self) -> bytes:
        """Returns it as canonical JSON, which is also YAML."""
        return canonical_json(self.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """Returns it as YAML for people."""
        return yaml.safe_dump(
            self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
        )


def is_run_file(values: Mapping[str, Any]) -> bool:
    """Checks whether a mapping is meant as a run file, rather than as options of a node."""
    return "owner" in values and "config" in values


def parsed(body: bytes, where: str) -> dict[str, Any]:
    """Reads a mapping, JSON or YAML, in which ``1e-05`` would be a word; raises `TrainerUsageError`."""
    if body.lstrip().startswith(b"{"):
        try:
            return parse_strict_json(body)
        except ValueError:
            pass  # YAML may begin so too.
    return parse_yaml(body, where)


def read_run_file(body: bytes, where: str) -> RunFile:
    """Reads a run file, YAML or JSON, without checking its signature; raises `RunFileError` where it is none."""
    if len(body) > MAX_FILE_BYTES:
        raise RunFileError(f"{where}: expected a run file of at most {MAX_FILE_BYTES} bytes, found {len(body)}")
    try:
        values = parsed(body, where)
    except RecursionError:
        raise RunFileError(f"{where}: expected a run file, found values nested too deep") from None
    if not is_run_file(values):
        raise RunFileError(f"{where}: expected a run file (run init makes one), found no owner and config in it")
    try:
        found = RunFile.model_validate_json(json.dumps(values, ensure_ascii=False, allow_nan=False))
        found.signed_bytes()
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        raise RunFileError(f"{where}: not a run file: {first_line(error)}") from None
    return found


def check_config(file: RunFile, where: str) -> RunConfig:
    """Returns the options of a run file as a node without any of its own has them.

    Raises:
        RunFileError: an option is a node's own, or unknown to this release, or its value makes no sense.
    """
    for name in names_in(file.config):
        if standing_of(name) == "own":
            raise RunFileError(f"{where}: {name}: expected what all nodes share, found an option that is a node's own")
    try:
        config = from_mapping(RunConfig, {**file.config, "run_id": file.name})
    except TrainerUsageError as error:
        raise RunFileError(f"{where}: {error}") from error
    if config.swarm.whole_nodes != (file.layout == "mixed"):
        raise RunFileError(
            f"{where}: expected the layout mixed in a file with swarm.whole_nodes, and no other, found layout "
            f"{file.layout} with swarm.whole_nodes {config.swarm.whole_nodes}"
        )
    return config


def make_key(path: Path) -> Identity:
    """Makes a run's key in a new file that only its user can read; raises `RunFileError` if there is a file."""
    key = generate_private_key()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(private_key_pem(key))
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError:
        raise RunFileError(
            f"{path}: expected no file, found one, which may be another run's key; move it, or name another (--key)"
        ) from None
    except OSError as error:
        raise RunFileError(f"{path}: the run's key cannot be written: {error.strerror}") from error
    return Identity.of(key)


def read_key(path: Path) -> Identity:
    """Reads a run's key; raises `RunFileError` where there is none."""
    try:
        return Identity.of(load_private_key(path.read_bytes()))
    except OSError as error:
        raise RunFileError(f"{path}: the run's key cannot be read: {error.strerror}") from error
    except SignatureError as error:
        raise RunFileError(f"{path}: {error}") from None


def write_whole(path: Path, body: bytes) -> None:
    """Writes a file whole or not at all; raises `RunFileError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(path.parent) as file:
            file.write(memoryview(body))
            file.replace(path)
    except OSError as error:
        raise RunFileError(f"{path}: cannot be written: {error.strerror}") from error


MISSING: Final = object()
"""Stands for an option that a mapping does not have."""


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Returns what nested mappings have under a dotted name, `MISSING` where they have nothing."""
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return MISSING
        found = found[part]
    return found


def portable(value: Any) -> Any:
    """Returns a value that JSON has: infinity, which it has not, as the text that is read back as a number."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value


def names_in(values: Mapping[str, Any], where: str = "") -> list[str]:
    """Returns the dotted names of the options in nested mappings; what is a mapping by itself is one option."""
    known = frozenset(option_names())
    found: list[str] = []
    for name, value in values.items():
        path = f"{where}{name}"
        if isinstance(value, Mapping) and path not in known:
            found += names_in(value, f"{path}.")
        else:
            found.append(path)
    return found
