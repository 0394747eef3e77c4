"""``genesis verify``: what is wrong with a store, down to every id. ``genesis keygen``: keys to sign manifests with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tqdm import tqdm

from genesis.cli.common import JsonOption, StoreOption, count
from genesis.errors import UsageError
from genesis.progress import CountProgress, format_duration, format_size, showing_progress
from genesis.store import open_readable
from manifests import generate_private_key, key_id, load_public_key, private_key_pem, public_key_pem

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from genesis.verification import Problem, VerifyReport

logger = logging.getLogger("genesis")


def verify_command(
    store: StoreOption,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="Ed25519 public key that must have signed the manifest.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", help="Read only a share (1%) or a number (100) of the shards.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Chooses the sample. [default: at random, printed]")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=256, help="Shards read at once.")] = 8,
    as_json: JsonOption = False,
) -> int:
    """Check a store: signature, every digest, every id, counts, vocabularies. Ends with 1 if anything is wrong."""
    from genesis.verification import EVERY_SHARD, ShardSample, verify_store

    key = read_public_key(public_key)
    chosen = ShardSample.parse(sample) if sample is not None else EVERY_SHARD
    with closing(open_readable(store)) as readable, _progress() as progress:
        report = verify_store(
            readable,
            public_key=key,
            sample=chosen,
            seed=seed,
            threads=threads,
            on_problem=None if as_json else _print_problem,
            on_progress=progress,
        )
    typer.echo(report.model_dump_json(indent=2) if as_json else "\n".join(_lines(report)))
    return 0 if report.ok else 1


def read_public_key(path: Path | None) -> Ed25519PublicKey | None:
    """The key in ``path``; None if there is no path.

    Raises:
        UsageError: it cannot be read.
        SignatureError: it holds no such key.
    """
    if path is None:
        return None
    try:
        return load_public_key(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--public-key {path}: {error.strerror}") from None


def _print_problem(problem: Problem) -> None:
    with tqdm.external_write_mode():
        typer.echo(f"problem: {problem}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """What to tell of progress: (shards read, shards to read)."""
    progress = CountProgress(None, lambda done: f"{done:,} of {count(progress.total)} shards")

    def show(done: int, total: int) -> None:
        progress.total = total
        progress.update(done)

    with showing_progress("verifying", progress.state, logger):
        yield show


def _lines(report: VerifyReport) -> list[str]:
    counts = report.counts
    signature = {
        "verified": f"signature by {report.key_id} verified",
        "invalid": "SIGNATURE INVALID",
        "not checked": f"signed by {report.key_id} (give --public-key to check it)",
        "unsigned": "unsigned",
    }[report.signature]
    sampled = f" (sample, --seed {report.seed})" if report.seed is not None else ""
    lines = [f"note: {note}" for note in report.notes]
    lines.append(
        f"{report.url}: commit {report.sequence if report.sequence is not None else '-'}, {signature}; "
        f"{count(counts.segments)} segments, {count(counts.vocabularies)} vocabularies"
    )
    lines.append(
        f"{count(counts.shards_verified)} of {count(counts.shards)} shards sound{sampled}: "
        f"{count(counts.tokens_verified)} tokens, {count(counts.documents_verified)} documents end in them; "
        f"{format_size(counts.bytes_read)} read in {_duration(report.seconds)}"
    )
    lines.append("no problem found" if report.ok else f"{count(report.num_problems)} problems")
    return lines


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def keygen_command(
    output: Annotated[
        Path, typer.Option("--output", help="Where the private key goes; the public one beside it, as PATH.pub.")
    ] = Path("~/.neuroshard/genesis-key.pem"),
) -> int:
    """Make a key pair: the private key for 'genesis populate --sign-key', the public one for 'genesis verify'."""
    private_path = output.expanduser()
    public_path = private_path.with_name(private_path.name + ".pub")
    for path in (private_path, public_path):
        if path.exists() or path.is_symlink():
            raise UsageError(f"expected no file {path}, found one; keys are never overwritten: give another --output")
    key = generate_private_key()
    _create(private_path, private_key_pem(key), 0o600)
    _create(public_path, public_key_pem(key.public_key()), 0o644)
    typer.echo(f"private key: {private_path} (keep it to yourself)")
    typer.echo(f"public key:  {public_path} (hand it out)")
    typer.echo(f"key id:      {key_id(key.public_key())}")
    return 0


def _create(path: Path, body: bytes, mode: int) -> None:
    """Writes a new file that has ``mode`` from the moment it exists, and waits until it is on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None
