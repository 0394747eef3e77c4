"""`python -m trainer run`: a run's signed file, and changes of the run while it goes on (docs/running-a-run.md)."""

from __future__ import annotations

import asyncio
import json as json_
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.errors import RunFileError, TrainerUsageError
from trainer.run.cli.train import _PATHS, with_given

if TYPE_CHECKING:
    from trainer.network.rpc import Identity
    from trainer.run.signed import ChangeChain, RunChange, RunFile
    from trainer.run.signed.contact import NodeFound, RunContact, Told
    from trainer.run.signed.files import Layout

run_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_ROWS_IN_SWARM = 8
_DIGITS = 16
_MOST_AHEAD = 10_000
"""Rounds by which a change may be made ahead."""

_Key = Annotated[Path, typer.Option(help="The run's own key: whoever has it changes the run.")]
_Peers = Annotated[
    list[str] | None, typer.Option(help="Where to begin to look for its nodes; else as the file says. Repeatable.")
]
_Json = Annotated[bool, typer.Option("--json", help="As one JSON object.")]


@run_app.callback()
def _run() -> None:
    """A run as its owner signs it: its file, and what is changed while it goes on."""


@run_app.command("init")
def init_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the run: its nodes find each other by it.")],
    preset: Annotated[str | None, typer.Option(help="Size of the model: tiny … 7.5b.")] = None,
    stages: Annotated[int | None, typer.Option(min=2, help="Cut the model into so many, for a swarm.")] = None,
    whole_nodes: Annotated[
        bool, typer.Option("--whole-nodes", help="With --stages: nodes that hold the whole model may join as well.")
    ] = False,
    store: Annotated[
        str | None, typer.Option(help="Folder, s3://bucket/prefix or http(s)://host/prefix; else each node names it.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--from", help="YAML file of options to begin with.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any option that nodes share: inner.lr=3e-4.")] = None,
    authority: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY|URL",
            help="Who admits nodes, else all may join: keys, or addresses alone of one with the run's key. Repeatable.",
        ),
    ] = None,
    initial_peers: Annotated[list[str] | None, typer.Option(help="Where nodes begin to look. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order.")] = None,
    lr: Annotated[float | None, typer.Option(help="Greatest learning rate.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch.")] = None,
    inner_steps: Annotated[int | None, typer.Option(help="Steps between two outer steps.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="diloco, sparseloco or grad; in a swarm also async_sparta.")
    ] = None,
    key: _Key = Path("run.key"),
) -> None:
    """Makes a run with a key of its own, and prints its signed file."""
    from trainer.run.config import RunConfig, from_mapping, merged, nested, read_run
    from trainer.run.signed.chain import check_authorities
    from trainer.run.signed.fields import standing_of
    from trainer.run.signed.files import RunFile, check_config, make_key

    values = read_run(config, set_ or [])
    authorities = tuple(each for each in authority or () if "://" not in each)
    urls = [each for each in authority or () if "://" in each]
    given = {option: value for option, value in context.params.items() if option in _PATHS}
    said = {option: value for option, value in (given | {"authority": urls}).items() if value not in (None, [], ())}
    values = with_given(values, said)
    values = merged(values, {"run_id": name})
    if stages is not None:
        values = merged(values, nested("swarm.num_stages", stages))
    if whole_nodes:
        if stages is None:
            raise TrainerUsageError(
                "--whole-nodes: expected --stages, since all nodes of a run without stages are whole, found none"
            )
        values = merged(values, nested("swarm.whole_nodes", True))
        if not values.get("inner", {}).get("micro_batch_size"):
            values = merged(values, nested("inner.micro_batch_size", _ROWS_IN_SWARM))
    for option in _spelt(values):
        if option != "run_id" and standing_of(option) == "own":
            raise TrainerUsageError(f"{option}: expected what all nodes share, found an option that is a node's own")
    found = from_mapping(RunConfig, values)
    if stages is not None and not found.inner.micro_batch_size:
        found = from_mapping(RunConfig, merged(values, nested("inner.micro_batch_size", _ROWS_IN_SWARM)))
    if found.model.shape(1024) is None and not found.model.init_digest:
        raise TrainerUsageError(
            "--preset: expected a size or shape, since all nodes of a run train one model, found none; give one of "
            "tiny … 7.5b"
        )
    check_authorities(authorities)
    with_store = bool(values.get("data", {}).get("store"))
    is_cut = stages is not None or "swarm" in values or found.strategy == "async_sparta"
    layout: Layout = "mixed" if found.swarm.whole_nodes else "stages" if is_cut else "whole"
    draft = RunFile.of(found, "0" * 64, authorities, with_store=with_store, layout=layout)
    check_config(draft, name)
    owner = make_key(key)
    admits = authorities or ((owner.peer_id,) if urls else ())
    signed = draft.model_copy(update={"owner": owner.peer_id, "authorities": admits}).signed(owner)
    typer.echo(f"# The run {name}; signed, so change it by `python -m trainer run set` (docs/running-a-run.md).")
    typer.echo(signed.to_yaml(), nl=False)
    typer.echo(f"{key}: the run's own key; keep it to yourself, and a copy of it elsewhere", err=True)
    if not admits:
        typer.echo(
            f"{name} is open: whoever can reach a node of it may join, and it stays so; --authority makes a run of "
            "members only (docs/admission.md)",
            err=True,
        )


@run_app.command("sign")
def sign_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run file, edited since it was made.")] = Path(
        "run.yaml"
    ),
    key: _Key = Path("run.key"),
) -> None:
    """Signs a run file again, before its run has begun: to nodes that have trained by it, it is another run."""
    from trainer.run.signed.files import check_config, read_key, read_run_file, write_whole
    from trainer.run.signed.sources import changes_beside

    try:
        found = read_run_file(file.read_bytes(), str(file))
    except OSError as error:
        raise RunFileError(f"{file}: cannot be read: {error.strerror}") from error
    check_config(found, str(file))
    if changes_beside(file).exists():
        raise RunFileError(
            f"{changes_beside(file)}: expected a run that has not begun, found changes of it; change it by run set, or "
            "move them away to begin another run"
        )
    signed = found.signed(read_key(key))
    body = signed.to_json() + b"\n" if file.suffix == ".json" else signed.to_yaml().encode()
    write_whole(file, body)
    typer.echo(f"{file}: run {signed.name}, digest {signed.digest()}")


@run_app.command("show")
def show_command(
    run: Annotated[str, typer.Option(help="The run's file: a path or an address.")] = "run.yaml",
    offline: Annotated[bool, typer.Option("--offline", help="Ask no node; what is beside the file.")] = False,
    initial_peers: _Peers = None,
    key: Annotated[
        Path | None,
        typer.Option(help="The run's own key: where it admits the members itself, all of them answer to it."),
    ] = None,
    fields: Annotated[bool, typer.Option("--fields", help="Which options may change, and no more.")] = False,
    json: _Json = False,
) -> None:
    """Prints a run: what its file says, each change of it, what is in force, and how far its nodes are."""
    from trainer.run.signed.fields import table_lines
    from trainer.run.signed.files import read_key

    if fields:
        typer.echo("\n".join(table_lines()))
        return
    file, chain, _ = _opened(run)
    nodes: tuple[NodeFound, ...] = ()
    if not offline:
        nodes = asyncio.run(_met(file, chain, read_key(key) if key else None, initial_peers or []))
    typer.echo(json_.dumps(_as_json(file, chain, nodes)) if json else "\n".join(_as_text(file, chain, nodes)))
    if key is None and nodes and chain.authorities_at(0):
        typer.echo(
            f"{file.name} takes members only: of its nodes those named by --initial-peers were asked; --key run.key "
            "asks all, where the run's own key admits its members",
            err=True,
        )


@run_app.command("set")
def set_command(
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="inner.lr=2e-4, rule.rule=median …")],
    run: Annotated[str, typer.Option(help="The run's file.")] = "run.yaml",
    key: _Key = Path("run.key"),
    at_round: Annotated[
        int | None, typer.Option(min=0, help="In force from this round on; else two behind the furthest node's.")
    ] = None,
    comment: Annotated[str, typer.Option(help="Why; 200 characters, for all to read.")] = "",
    initial_peers: _Peers = None,
) -> None:
    """Changes a run while it goes on, for all its members alike from a named round on; never taken back."""
    from trainer.network.discovery.records import RecordRefusedError
    from trainer.run.signed.files import read_key, write_whole
    from trainer.run.signed.sources import changes_beside, local_file

    owner = read_key(key)
    file, chain, is_local = _opened(run)
    if owner.peer_id != file.owner:
        raise RunFileError(
            f"{key}: expected the key of the owner of {file.name}, {file.owner[:_DIGITS]}…, found that of "
            f"{owner.peer_id[:_DIGITS]}…"
        )
    before = chain.config_with({})
    try:
        values = _values_of(settings, chain)
        nodes, told = asyncio.run(_changed(file, chain, owner, values, at_round, comment, initial_peers))
    except RecordRefusedError as error:
        raise TrainerUsageError(str(error)) from None
    if told.is_refused:
        raise RunFileError(
            f"expected a change that follows what the nodes of {file.name} know, found that "
            f"{len(told.refused)} of {len(nodes)} refuse it, and it is kept nowhere: {told.refused[0][1]}"
        )
    if is_local:
        path = changes_beside(local_file(Path(run).expanduser()))
        write_whole(path, b"".join(wire + b"\n" for wire in chain.newer_than({})))
    change = chain.changes[-1]
    typer.echo(f"change {change.number} of {file.name}, in force from round {change.at_round}:")
    for line in _settings_lines(change, before):
        typer.echo(f"  {line}")
    typer.echo(f"told {len(told.accepted)} of {len(nodes)} nodes; they tell the others")
    for node_id, why in told.refused:
        typer.echo(f"  {node_id} refuses it: {why}", err=True)
    for node_id in told.silent:
        typer.echo(f"  {node_id} does not answer, and hears of it from the others", err=True)
    if not nodes:
        typer.echo("  no node was reached: those that start from this file know it, and tell the others", err=True)


# -- inside ------------------------------------------------------------------------------------------------------------


def _opened(source: str) -> tuple[RunFile, ChangeChain, bool]:
    """Reads a run and the changes beside its file; the last says whether it is a file of this machine."""
    from trainer.run.signed import ChangeChain
    from trainer.run.signed.sources import fetch_run

    fetched = fetch_run(source)
    if fetched is None:
        raise RunFileError(f"{source}: expected a run file (run init makes one), found a node's options")
    chain = ChangeChain(fetched.file)
    chain.add_all(fetched.changes, fetched.where)
    return fetched.file, chain, "://" not in source


async def _met(
    file: RunFile, chain: ChangeChain, owner: Identity | None, initial_peers: Sequence[str]
) -> tuple[NodeFound, ...]:
    from trainer.network.rpc import Identity
    from trainer.run.signed.contact import reached
    from trainer.run.signed.files import check_config

    config = check_config(file, file.name)
    if not (initial_peers or config.discovery.initial_peers):
        return ()
    async with reached(config, chain, owner or Identity.create(), tuple(initial_peers)) as contact:
        await contact.find()
        return contact.nodes


async def _changed(
    file: RunFile,
    chain: ChangeChain,
    owner: Identity,
    settings: dict[str, Any],
    at_round: int | None,
    comment: str,
    initial_peers: Sequence[str] | None,
) -> tuple[tuple[NodeFound, ...], Told]:
    from trainer.run.signed.contact import Told, reached, signed_change
    from trainer.run.signed.files import check_config

    config = check_config(file, file.name)
    named = tuple(initial_peers or ())
    if not (named or config.discovery.initial_peers):
        signed_change(file, chain, owner, settings, _round_for(None, chain, at_round), comment)
        return (), Told((), (), ())
    async with reached(config, chain, owner, named) as contact:
        await contact.find()
        signed_change(file, chain, owner, settings, _round_for(contact, chain, at_round), comment)
        return contact.nodes, await contact.tell()


def _round_for(contact: RunContact | None, chain: ChangeChain, at_round: int | None) -> int:
    from trainer.run.signed.contact import ROUNDS_AHEAD

    furthest = None if contact is None else contact.furthest_round
    newest = chain.changes[-1].at_round if chain.newest else 0
    if at_round is None and furthest is None:
        raise TrainerUsageError(
            "--at-round: expected the round from which the change is in force, since no node of the run could be asked "
            "how far it is; found none"
        )
    if at_round is None:
        return max((furthest or 0) + ROUNDS_AHEAD, newest)
    if furthest is not None and at_round <= furthest:
        raise TrainerUsageError(
            f"--at-round: expected {furthest + 1} or later, since a node is in round {furthest} already, found "
            f"{at_round}"
        )
    if at_round > (most := max(furthest or 0, newest) + _MOST_AHEAD):
        raise TrainerUsageError(
            f"--at-round: expected {most} at most, since no change in force before this one could ever be made behind "
            f"it, found {at_round}"
        )
    return at_round


def _values_of(settings: Sequence[str], chain: ChangeChain) -> dict[str, Any]:
    """Reads ``KEY=VALUE`` as a change has it, in the type of the option.

    Raises `TrainerUsageError`, and what `ChangeChain.config_with` does.
    """
    from pydantic import TypeAdapter, ValidationError

    from trainer.network.discovery.run_change import SettingValue
    from trainer.run.config import to_mapping
    from trainer.run.config.reading import parse_override
    from trainer.run.signed.fields import AUTHORITIES
    from trainer.run.signed.files import portable, value_at

    adapter: TypeAdapter[Any] = TypeAdapter(SettingValue)
    values: dict[str, Any] = {}
    for text in settings:
        name, _, spelling = text.partition("=")
        if not spelling.strip() or spelling.strip() in ("null", "~"):
            raise TrainerUsageError(
                f"{text}: expected a value behind the =, since a change says what holds; found none"
            )
        value: Any = parse_override(text)
        for part in name.split("."):
            value = value[part]
        value = portable(value)
        try:
            values[name] = adapter.validate_python(_as_tuple(value), strict=True)
        except ValidationError:
            raise TrainerUsageError(
                f"{name}: expected a number, a word, true, false or a list of those, found {str(value)[:80]!r}"
            ) from None
    checked = to_mapping(chain.config_with(values))
    return {
        name: value if name == AUTHORITIES else adapter.validate_python(_as_tuple(portable(value_at(checked, name))))
        for name, value in values.items()
    }


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _spelt(values: dict[str, Any]) -> list[str]:
    from trainer.run.signed.files import names_in

    return names_in(values)


def _settings_lines(change: RunChange, before: Any) -> list[str]:
    from trainer.run.config import to_mapping
    from trainer.run.signed.files import MISSING, value_at

    lines = []
    for name, value in sorted(change.settings.items()):
        was = value_at(to_mapping(before), name)
        shown = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name}: {shown}" if was is MISSING else f"{name}: {shown} (was {was})")
    return lines


def _as_json(file: RunFile, chain: ChangeChain, nodes: Sequence[NodeFound]) -> dict[str, Any]:
    rounds = [node.round_index for node in nodes if node.round_index >= 0]
    return {
        "name": file.name,
        "owner": file.owner,
        "digest": file.digest(),
        "authorities": list(file.authorities),
        "config": file.config,
        "changes": [change.model_dump(mode="json") for change in chain.changes],
        "round": max(rounds) if rounds else None,
        "in_force": chain.number_at(max(rounds)) if rounds else None,
        "nodes": [
            {
                "node_id": node.node_id,
                "round": node.round_index,
                "newest_change": node.newest_change,
                "newest_digest": node.newest_digest,
                "is_apart": not _is_of(chain, node),
            }
            for node in nodes
        ],
    }


def _as_text(file: RunFile, chain: ChangeChain, nodes: Sequence[NodeFound]) -> list[str]:
    from trainer.run.config import changed_options
    from trainer.run.signed.files import check_config

    rounds = [node.round_index for node in nodes if node.round_index >= 0]
    lines = [
        f"run {file.name}",
        f"  owner        {file.owner}",
        f"  digest       {file.digest()}",
        f"  authorities  {', '.join(file.authorities) or 'none: anybody may join'}",
    ]
    said = changed_options(check_config(file, file.name))
    lines += [f"  {name}={value}" for name, value in sorted(said.items()) if name != "run_id"]
    lines.append(f"changes: {chain.newest or 'none'}")
    for change in chain.changes:
        when = datetime.fromtimestamp(min(change.issued_at, time.time()), UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        state = ""
        if rounds:
            state = "  in force" if change.at_round <= max(rounds) else "  not yet"
        lines.append(f"  {change.number}  from round {change.at_round}  signed {when}{state}")
        lines += [f"       {name}={_shown(value)}" for name, value in sorted(change.settings.items())]
        lines += [f"       # {change.comment}"] if change.comment else []
    for node in sorted(nodes, key=lambda node: node.node_id):
        place = f"round {node.round_index}" if node.round_index >= 0 else "no rounds"
        apart = "" if _is_of(chain, node) else f": ANOTHER {node.newest_change} than here ({node.newest_digest[:12]})"
        lines.append(f"node {node.node_id}: {place}, {_known(node.newest_change)}{apart}")
    if not all(_is_of(chain, node) for node in nodes):
        lines.append("the owner's key has signed TWO changes of one number: see docs/running-a-run.md for what to do")
    return lines


def _known(newest_change: int) -> str:
    return f"knows change {newest_change}" if newest_change else "knows no change"


def _is_of(chain: ChangeChain, node: NodeFound) -> bool:
    """Whether a node's newest change is the one of that number here, as far as it is known here."""
    number = node.newest_change
    return not 0 < number <= chain.newest or chain.changes[number - 1].digest() == node.newest_digest


def _shown(value: Any) -> str:
    return json_.dumps(list(value) if isinstance(value, tuple) else value)
