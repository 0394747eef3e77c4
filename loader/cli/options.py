"""Options that several commands share, spelt once, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loader.cache import settings as cache_settings
from loader.cache.settings import DEFAULT_CACHE_DIR
from loader.cache.sizes import parse_size
from loader.errors import LoaderUsageError
from loader.options import StoreOptions, default_store

__all__ = [
    "AssignmentOption",
    "AssignmentRule",
    "BandwidthOption",
    "BatchSizeOption",
    "CacheBytesOption",
    "CacheDirOption",
    "CountOption",
    "HoldoutOption",
    "JsonOption",
    "MirrorOption",
    "NodeIdOption",
    "NodesFromOption",
    "PublicKeyOption",
    "SeedOption",
    "SeqLenOption",
    "SourceOption",
    "SplitName",
    "SplitOption",
    "StoreOption",
    "TimeoutOption",
    "TotalShardsOption",
    "node_ids_of",
    "numbers_of",
    "only_node",
    "sources_of",
    "store_options",
]


class AssignmentRule(StrEnum):
    """`loader.stream.assignment.Assignment`, as typer wants it."""

    MODULO = "modulo"
    RENDEZVOUS = "rendezvous"


class SplitName(StrEnum):
    """`loader.options.Split`, as typer wants it."""

    TRAIN = "train"
    HOLDOUT = "holdout"


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        default_factory=default_store,
        show_default="$GENESIS_STORE or ~/.neuroshard/genesis-store",
        help="The store: a folder, s3://bucket/prefix or http(s)://host/path.",
    ),
]
MirrorOption = Annotated[
    list[str] | None, typer.Option("--mirror", help="A further address of the same store; may be repeated.")
]
PublicKeyOption = Annotated[
    Path | None, typer.Option("--public-key", help="Ed25519 public key that must have signed the manifest.")
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", show_default=f"$GENESIS_CACHE_DIR or {DEFAULT_CACHE_DIR}", help="The folder of the cache."
    ),
]
CacheBytesOption = Annotated[
    str | None,
    typer.Option(
        "--cache-bytes", metavar="SIZE", show_default="$GENESIS_CACHE_BYTES or 20GB", help="The cache's bound."
    ),
]
BandwidthOption = Annotated[
    str | None,
    typer.Option("--max-bandwidth", metavar="SIZE", help="Download at most so many bytes a second, such as 10MB."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout-s", min=0.1, help="Seconds to try for an object, over all mirrors.")
]
NodeIdOption = Annotated[list[str] | None, typer.Option("--node-id", help="The node; may be repeated.")]
NodesFromOption = Annotated[
    str | None, typer.Option("--nodes-from", metavar="FILE", help="More nodes, one a line; '-' reads them from stdin.")
]
CountOption = Annotated[int, typer.Option("--count", min=1, help="Shards a node is given, of each source.")]
AssignmentOption = Annotated[AssignmentRule, typer.Option("--assignment", help="How a node's shards are chosen.")]
SourceOption = Annotated[
    list[str] | None,
    typer.Option("--source", metavar="NAME=WEIGHT", help="Read this source with this weight; may be repeated."),
]
HoldoutOption = Annotated[
    int, typer.Option("--holdout", min=0, help="The first so many shards of every source are not trained on.")
]
SplitOption = Annotated[SplitName, typer.Option("--split", help="holdout: exactly those, all of them.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The run's: decides the order of windows, not of shards.")]
SeqLenOption = Annotated[int, typer.Option("--seq-len", min=1, help="Ids a row.")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Rows a batch.")]
TotalShardsOption = Annotated[
    int | None,
    typer.Option("--total-shards", min=1, help="Shards the store had when the run began. [default: all there are]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


def store_options(
    store: str,
    mirrors: Sequence[str] | None,
    public_key: Path | None,
    cache_dir: Path | None,
    cache_bytes: str | None,
    max_bandwidth: str | None,
    timeout_s: float,
) -> StoreOptions:
    """Where the shards come from and are kept.

    Raises:
        LoaderUsageError: a value makes no sense.
    """
    return StoreOptions(
        mirrors=(store, *(mirrors or ())),
        public_key=public_key,
        cache_dir=cache_settings.cache_dir(cache_dir),
        cache_bytes=cache_settings.cache_bytes(cache_bytes),
        max_bytes_per_s=parse_size(max_bandwidth.removesuffix("/s")) if max_bandwidth is not None else None,
        timeout_s=timeout_s,
    )


def sources_of(options: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """Names and weights; a name alone weighs 1.

    Raises:
        LoaderUsageError: a weight is no number above 0, or a name comes twice.
    """
    found: list[tuple[str, float]] = []
    for option in options or ():
        name, separator, weight = option.partition("=")
        try:
            found.append((name, float(weight) if separator else 1.0))
        except ValueError:
            raise LoaderUsageError(f"--source: expected NAME=WEIGHT such as c4=0.3, found {option!r}") from None
    return tuple(found)


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas.

    Raises:
        LoaderUsageError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise LoaderUsageError(f"{option}: expected whole numbers between commas such as 3,4,5, found {text[:60]!r}")
    return tuple(int(part) for part in parts)


def node_ids_of(node_ids: Sequence[str] | None, nodes_from: str | None = None) -> tuple[str, ...]:
    """The nodes that were named, each once.

    Raises:
        LoaderUsageError: there is none, one is empty or not UTF-8, or the file cannot be read.
    """
    named = [_checked_id("--node-id", node_id) for node_id in node_ids or ()]
    if nodes_from is not None:
        named += [_checked_id(f"--nodes-from, line {line.number}", line.text) for line in _lines_of(nodes_from)]
    if not named:
        raise LoaderUsageError("expected --node-id ID, found none")
    return tuple(dict.fromkeys(named))


def only_node(node_ids: Sequence[str] | None, what: str) -> str:
    """The node, for what concerns one.

    Raises:
        LoaderUsageError: there is none, or more.
    """
    found = node_ids_of(node_ids)
    if len(found) != 1:
        raise LoaderUsageError(f"{what}: expected one --node-id, found {len(found)}")
    return found[0]


def _lines_of(nodes_from: str) -> list[_Line]:
    """The lines of a file that hold something."""
    try:
        body = sys.stdin.buffer.read() if nodes_from == "-" else Path(nodes_from).read_bytes()
        text = body.decode("utf-8-sig")
    except OSError as error:
        raise LoaderUsageError(f"--nodes-from {nodes_from}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LoaderUsageError(f"--nodes-from {nodes_from}: expected UTF-8, found byte {error.start} is not") from None
    lines = [_Line(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    return [line for line in lines if line.text]


def _checked_id(what: str, node_id: str) -> str:
    try:
        node_id.encode()
    except UnicodeEncodeError:
        raise LoaderUsageError(f"{what}: expected the id of a node in UTF-8, found {node_id!r}") from None
    if not node_id:
        raise LoaderUsageError(f"{what}: expected the id of a node, found nothing")
    return node_id
