"""Where a node gets its run's file from, and how the node's own options go together with it.

    run.yaml, runs/corpus-8/                a file, or a folder with run.yaml or run.json
    https://host/corpus-8/run.json          a web server; http:// only with the owner's key behind a #
    s3://bucket/prefix                      the run's store, whose run.json is taken; or any file of a store
    peer://HOST:PORT/corpus-8#OWNER         a node of the run, of which any may be asked

``#OWNER``, the 64 digits of the owner's key, may stand behind each of these: a file of any other owner is refused. It
must where nobody else vouches for the sender. Changes of the run are looked for beside the file, in
``run.changes.jsonl``; those that are missing there are learnt from other nodes. Whoever hands out a file, its signature
decides.

A node says nothing that its run says otherwise: an option that contradicts the file is an error, not an override.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genesis.errors import GenesisError, ObjectNotFoundError
from genesis.store import RetryPolicy, open_readable
from trainer.errors import RpcError, RunFileError, TrainerUsageError
from trainer.network.rpc.config import split_address
from trainer.run.config import RunConfig, from_mapping, merged, nested, to_mapping
from trainer.run.config.reading import parse_override, parse_yaml
from trainer.run.signed.chain import ChangeChain, split_lines
from trainer.run.signed.fields import OPEN_IN_FILE, STANDINGS
from trainer.run.signed.files import (
    MAX_FILE_BYTES,
    RunFile,
    check_config,
    is_run_file,
    parsed,
    portable,
    read_run_file,
    value_at,
)

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_IN_FOLDER: Final = ("run.yaml", "run.yml", "run.json")
_IN_STORE: Final = "run.json"
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_MAX_CHANGES_BYTES: Final = 8 << 20
_FETCH_S: Final = 30.0
_ASK_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class FetchedRun:
    """A run file whose signature holds, the changes that came with it, not checked yet, and where they are from."""

    file: RunFile
    changes: tuple[bytes, ...]
    where: str

    def options(self) -> dict[str, Any]:
        """Returns the options that every node of the run has, as configuration files have them."""
        values = merged(self.file.config, {"run_id": self.file.name, "run_digest": self.file.digest()})
        if self.file.authorities:
            values = merged(values, nested("admission.authorities", list(self.file.authorities)))
        return values


def fetch_run(source: str) -> FetchedRun | None:
    """Reads a run file from wherever it is and verifies it; None: there is a local file, of a node's options.

    Raises:
        RunFileError: it cannot be had, is no run file, changed since it was signed, or of another owner.
    """
    address, _, owner = source.rpartition("#")
    scheme = _SCHEME.match(source)
    if not address or not _KEY.fullmatch(owner):
        if scheme is not None and "#" in source:
            raise RunFileError(f"--run {source}: expected the owner's key behind the #, 64 hexadecimal digits")
        address, owner = source, ""
    if scheme is None:
        found = _from_path(Path(address).expanduser())
        if found is None:
            return None
    elif scheme[1] == "peer":
        found = _from_peer(address, owner)
    else:
        if scheme[1] == "http" and not owner:
            raise RunFileError(
                f"--run {source}: expected https://, or the owner's key behind a #, since anybody on the way could put "
                "another run in its place; found neither"
            )
        found = _from_store(address)
    found.file.verify(found.where)
    if owner and owner != found.file.owner:
        raise RunFileError(
            f"{found.where}: expected a run of owner {owner[:16]}…, found one of {found.file.owner[:16]}…"
        )
    check_config(found.file, found.where)
    return found


def options_of(source: str | Path | None, overrides: Iterable[str]) -> tuple[dict[str, Any], FetchedRun | None]:
    """Reads the options that a ``--run`` and ``--set`` give, and the run they are of, where that is a signed one."""
    fetched = None if source is None else fetch_run(str(source))
    if fetched is not None:
        values = fetched.options()
    else:
        values = {} if source is None else _own_options(Path(str(source)).expanduser())
    for override in overrides:
        values = merged(values, parse_override(override))
    return values, fetched


def config_from(values: dict[str, Any], source: str | Path | None) -> RunConfig:
    """Builds a configuration of options, of which some are from the file ``source``.

    Raises:
        TrainerUsageError: an option is not known or makes no sense; where the file alone says so, it is named.
    """
    try:
        return from_mapping(RunConfig, values)
    except TrainerUsageError as error:
        if source is not None and _is_of_file(error, Path(str(source)).expanduser()):
            raise TrainerUsageError(f"{source}: {error}") from error
        raise


def _is_of_file(error: TrainerUsageError, path: Path) -> bool:
    """Whether a file of a node's options has the same mistake without any other option."""
    if not path.is_file():
        return False
    try:
        from_mapping(RunConfig, _own_options(path))
    except TrainerUsageError as own:
        return str(own) == str(error)
    return False


def check_agrees(config: RunConfig, fetched: FetchedRun) -> None:
    """Raises `TrainerUsageError` where a node's options contradict its run's file."""
    own, said_by_run = to_mapping(config), to_mapping(check_config(fetched.file, fetched.where))
    for name, value in (("run_id", fetched.file.name), ("run_digest", fetched.file.digest())):
        if own[name] != value:
            raise _contradiction(fetched, name, value, own[name])
    authorities, listed = config.admission.authorities, fetched.file.authorities
    if listed and authorities != listed:
        raise _contradiction(fetched, "admission.authorities", list(listed), list(authorities))
    for name, standing in STANDINGS.items():
        if standing not in ("fixed", "round"):
            continue
        if name in OPEN_IN_FILE and not fetched.file.says(name):
            continue
        said, found = portable(value_at(said_by_run, name)), portable(value_at(own, name))
        if said != found:
            raise _contradiction(fetched, name, said, found)


def _contradiction(fetched: FetchedRun, name: str, said: Any, found: Any) -> TrainerUsageError:
    said, found = str(said)[:80], str(found)[:80]
    return TrainerUsageError(
        f"{name}: the run file of {fetched.file.name} says {said}, this node's options {found}; leave the option out, "
        "or have the run's owner change it (run set)"
    )


def _own_options(path: Path) -> dict[str, Any]:
    try:
        return parse_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise TrainerUsageError(f"{path}: cannot be read: {error.strerror}") from error


# -- places ------------------------------------------------------------------------------------------------------------


def changes_beside(path: Path) -> Path:
    """Returns where the changes of a run lie whose file is at ``path``."""
    return path.with_name(f"{path.stem}.changes.jsonl")


def local_file(path: Path) -> Path:
    """Returns the run file in a folder, or the path itself."""
    return next((path / name for name in _IN_FOLDER if (path / name).is_file()), path) if path.is_dir() else path


def _from_path(path: Path) -> FetchedRun | None:
    path = local_file(path)
    try:
        body = path.read_bytes()
        changes = changes_beside(path)
        lines = split_lines(changes.read_bytes()) if changes.exists() else []
    except OSError as error:
        raise TrainerUsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_run_file(parsed(body, str(path))):
        return None
    return FetchedRun(read_run_file(body, str(path)), tuple(lines), str(path))


def _from_store(address: str) -> FetchedRun:
    base, _, last = address.rstrip("/").rpartition("/")
    key = last
    if not last.endswith(_SUFFIXES):
        base, key = address.rstrip("/"), _IN_STORE
    where = f"{base}/{key}"
    try:
        store = open_readable(base, policy=RetryPolicy().lasting(_FETCH_S))
        try:
            body = store.get(key, max_bytes=MAX_FILE_BYTES).body
            changes = _changes_in(store, f"{key.rpartition('.')[0]}.changes.jsonl")
        finally:
            store.close()
    except GenesisError as error:
        raise RunFileError(f"{where}: the run file cannot be had: {error}") from error
    return FetchedRun(read_run_file(body, where), changes, where)


def _changes_in(store: Any, key: str) -> tuple[bytes, ...]:
    try:
        return tuple(split_lines(store.get(key, max_bytes=_MAX_CHANGES_BYTES).body))
    except ObjectNotFoundError:
        return ()


def _from_peer(address: str, owner: str) -> FetchedRun:
    place, _, name = address.removeprefix("peer://").partition("/")
    if not name or not owner:
        raise RunFileError(
            f"--run {address}: expected peer://HOST:PORT/RUN#OWNER, with the name of the run and its owner's key, "
            f"since a node may be anybody's; found no {'owner' if name else 'name'}"
        )
    split_address(place)
    return asyncio.run(_asked(place, name, owner, address))


async def _asked(place: str, name: str, owner: str, where: str) -> FetchedRun:
    from trainer.network.discovery.exchange import RUN_METHOD
    from trainer.network.discovery.record_exchange import RecordExchange  # These bring grpc.
    from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
    from trainer.run.signed.run import RunAnswer, RunQuestion

    endpoint = Endpoint(Identity.create(), name, RpcConfig())
    peer = Peer(None, place)
    try:
        reply = await endpoint.call(peer, RUN_METHOD, RunQuestion(), RunAnswer, timeout_s=_ASK_S)
        file = read_run_file(bytes(reply.payload), where)
        file.verify(where)
        if file.owner != owner or file.name != name:
            raise RunFileError(
                f"{where}: expected run {name} of owner {owner[:16]}…, found {file.name} of {file.owner[:16]}…"
            )
        chain = ChangeChain(file)
        await RecordExchange(endpoint, chain, lambda: ()).pull(peer)
        return FetchedRun(file, tuple(chain.newer_than({})), where)
    except RpcError as error:
        raise RunFileError(f"{where}: the run file cannot be had: {error}") from error
    finally:
        await endpoint.stop()
