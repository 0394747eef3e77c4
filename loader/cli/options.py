"""The options that several commands share, declared once, and the objects made of them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from loader.cache.settings import DEFAULT_CACHE_DIR, cache_bytes, cache_dir, parse_size
from loader.errors import LoaderUsageError
from loader.options import StoreOptions, StreamOptions, default_store
from loader.shares import Shares, parse_share, parse_shares
from loader.stream.assignment import DEFAULT_COUNT


class _AssignmentRule(StrEnum):
    """`loader.stream.assignment.Assignment`, as typer wants it."""

    MODULO = "modulo"
    RENDEZVOUS = "rendezvous"


class _MixtureName(StrEnum):
    """`loader.stream.mixture.Mixture`, as typer wants it."""

    EXACT = "exact"
    WEYL = "weyl"


class _SplitName(StrEnum):
    """`loader.options.Split`, as typer wants it."""

    TRAIN = "train"
    HOLDOUT = "holdout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The values of the shared options; a command that does not take one has its default."""

    store: Annotated[
        str,
        typer.Option(
            "--store",
            default_factory=default_store,
            show_default="$GENESIS_STORE or ~/.neuroshard/genesis-store",
            help="The store: a folder, s3://bucket/prefix or http(s)://host/path.",
        ),
    ]
    node_id: Annotated[list[str] | None, typer.Option("--node-id", help="The node; may be repeated.")] = None
    nodes_from: Annotated[
        str | None,
        typer.Option("--nodes-from", metavar="FILE", help="More nodes, one a line; '-' reads them from stdin."),
    ] = None
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Ids a row.")] = 1024
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows a batch.")] = 8
    seed: Annotated[int, typer.Option("--seed", help="The run's: decides the order of windows, not of shards.")] = 0
    count: Annotated[int, typer.Option("--count", min=1, help="Shards a node is given, of each source.")] = (
        DEFAULT_COUNT
    )
    assignment: Annotated[_AssignmentRule, typer.Option("--assignment", help="How a node's shards are chosen.")] = (
        _AssignmentRule.MODULO
    )
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME=WEIGHT", help="Read this source with this weight; may be repeated."),
    ] = None
    shares: Annotated[
        str | None,
        typer.Option(
            "--shares",
            metavar="NAME=SHARE,...|FILE",
            help="Token shares of the sources, or a sources.json that has them.",
        ),
    ] = None
    mixture: Annotated[
        _MixtureName, typer.Option("--mixture", help="weyl: the order of sources in runs begun before 'exact'.")
    ] = _MixtureName.EXACT
    holdout: Annotated[
        int, typer.Option("--holdout", min=0, help="The first so many shards of every source are not trained on.")
    ] = 0
    split: Annotated[_SplitName, typer.Option("--split", help="holdout: exactly those, all of them.")] = (
        _SplitName.TRAIN
    )
    total_shards: Annotated[
        int | None,
        typer.Option("--total-shards", min=1, help="Shards the store had when the run began. [default: all there are]"),
    ] = None
    mirror: Annotated[
        list[str] | None, typer.Option("--mirror", help="A further address of the same store; may be repeated.")
    ] = None
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="Ed25519 public key that must have signed the manifest.")
    ] = None
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", show_default=f"$GENESIS_CACHE_DIR or {DEFAULT_CACHE_DIR}", help="The folder of the cache."
        ),
    ] = None
    cache_bytes: Annotated[
        str | None,
        typer.Option(
            "--cache-bytes", metavar="SIZE", show_default="$GENESIS_CACHE_BYTES or 20GB", help="The cache's bound."
        ),
    ] = None
    max_bandwidth: Annotated[
        str | None,
        typer.Option("--max-bandwidth", metavar="SIZE", help="Download at most so many bytes a second, such as 10MB."),
    ] = None
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds to try for an object, over all mirrors.")
    ] = 600.0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False

    def store_options(self) -> StoreOptions:
        """Where the shards come from and are kept.

        Raises:
            LoaderUsageError: a value is invalid.
        """
        bandwidth = self.max_bandwidth
        return StoreOptions(
            mirrors=(self.store, *(self.mirror or ())),
            public_key=self.public_key,
            cache_dir=cache_dir(self.cache_dir),
            cache_bytes=cache_bytes(self.cache_bytes),
            max_bytes_per_s=parse_size(bandwidth.removesuffix("/s")) if bandwidth is not None else None,
            timeout_s=self.timeout_s,
        )

    def stream_options(self, node_id: str, *, epochs: int | None = None) -> StreamOptions:
        """The stream of a node.

        Raises:
            LoaderUsageError: a value is invalid.
        """
        return StreamOptions(
            node_id=node_id,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            seed=self.seed,
            count=self.count,
            assignment=self.assignment.value,
            sources=self._sources(),
            mixture=self.mixture.value,
            holdout=self.holdout,
            split=self.split.value,
            epochs=epochs,
        )

    def _sources(self) -> Shares:
        if self.shares is None:
            return tuple(parse_share("--source", option) for option in self.source or ())
        if self.source:
            raise LoaderUsageError("expected --shares or --source, found both")
        return parse_shares(self.shares)

    def node_ids(self) -> tuple[str, ...]:
        """The nodes, each once.

        Raises:
            LoaderUsageError: there is none, one is empty or not UTF-8, or the file is unreadable.
        """
        named = [_checked_id("--node-id", node_id) for node_id in self.node_id or ()]
        if self.nodes_from is not None:
            for number, line in enumerate(_read_text(self.nodes_from).split("\n"), start=1):
                if line.strip():
                    named.append(_checked_id(f"--nodes-from, line {number}", line.strip()))
        if not named:
            raise LoaderUsageError("expected --node-id ID, found none")
        return tuple(dict.fromkeys(named))

    def only_node(self, what: str) -> str:
        """The node of a command or option ``what`` that concerns one.

        Raises:
            LoaderUsageError: there is none, or more than one.
        """
        found = self.node_ids()
        if len(found) != 1:
            raise LoaderUsageError(f"{what}: expected one --node-id, found {len(found)}")
        return found[0]


def with_common_options(*omitted: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command the shared options, but for ``omitted``, as its first argument, a `CommonOptions`."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        hints = get_type_hints(CommonOptions, include_extras=True)
        common = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.name == "store" else field.default,
                annotation=hints[field.name],
            )
            for field in fields(CommonOptions)
            if field.name not in omitted
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        ]

        @functools.wraps(command)
        def run(**values: Any) -> int:
            own_values = {parameter.name: values.pop(parameter.name) for parameter in own}
            return command(CommonOptions(**values), **own_values)

        num_first = sum(parameter.name in ("store", "node_id", "nodes_from") for parameter in common)
        parameters = [*common[:num_first], *own, *common[num_first:]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parses whole numbers between commas.

    Raises:
        LoaderUsageError: the text has another form.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise LoaderUsageError(f"{option}: expected whole numbers between commas such as 3,4,5, found {text[:60]!r}")
    return tuple(int(part) for part in parts)


def _read_text(nodes_from: str) -> str:
    try:
        body = sys.stdin.buffer.read() if nodes_from == "-" else Path(nodes_from).read_bytes()
        return body.decode("utf-8-sig")
    except OSError as error:
        raise LoaderUsageError(f"--nodes-from {nodes_from}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LoaderUsageError(f"--nodes-from {nodes_from}: expected UTF-8, found byte {error.start} is not") from None


def _checked_id(what: str, node_id: str) -> str:
    try:
        node_id.encode()
    except UnicodeEncodeError:
        raise LoaderUsageError(f"{what}: expected the id of a node in UTF-8, found {node_id!r}") from None
    if not node_id:
        raise LoaderUsageError(f"{what}: expected the id of a node, found nothing")
    return node_id
