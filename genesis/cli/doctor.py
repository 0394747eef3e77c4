"""``genesis doctor``: what stands in the way of populating, or of reading a store; one line a check, with its cure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from genesis import __version__
from genesis.cli.common import SourcesOption, StoreOption, complete_source, load_sources
from genesis.doctor import Checkup, line_printer
from genesis.doctor.findings import quieten, summary
from genesis.store.opening import folder_of

_MODULES: Final = {"gigatoken": "gigatoken", "pyarrow": "pyarrow", "tokenizers": "tokenizers", "boto3": "boto3"}
_WANTED_FILES: Final = 1024
_LEAST_FILES: Final = 128
_WORKER_BYTES: Final = 500_000_000
"""What a worker process takes with a vocabulary of 32,000 ids and a row group of FineWeb-Edu in hand."""
_WANTED_BYTES: Final = 1_000_000_000
_LEAST_BYTES: Final = 100_000_000


def doctor_command(
    store: StoreOption,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="Ed25519 public key that must have signed the manifest.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", autocompletion=complete_source, help="Also ask the Hub (HF_ENDPOINT) for this source."
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Also probe conditional writes: small objects, removed again.")
    ] = False,
    sources_file: SourcesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/doctor.md) instead.")] = False,
) -> int:
    """Say what is wrong with this machine or the store, and what to do; ends with 1 if anything stands in the way."""
    from genesis.doctor.machine import (
        disk_speed_finding,
        memory_per_core_finding,
        open_files_finding,
        packages_finding,
        python_finding,
        space_findings,
    )
    from genesis.doctor.store import STORE_ERRORS, check_store, conditional_writes_finding, writer_finding
    from genesis.memory import least_free_memory
    from genesis.populate.options import available_cpus

    sources = load_sources(sources_file)
    quieten(("genesis", "loader", "manifests"))
    checkup = Checkup((lambda _: None) if as_json else line_printer(), STORE_ERRORS)
    checkup.add(python_finding())
    checkup.add(packages_finding(_MODULES, __version__))
    checkup.add(memory_per_core_finding(least_free_memory(), available_cpus(), _WORKER_BYTES))
    checkup.add(open_files_finding(_WANTED_FILES, _LEAST_FILES))
    seen = check_store(checkup, store, public_key)
    if seen is not None:
        cure = "a store behind a CDN need not show it: ask where it is written"
        checkup.take("store", "writer", lambda: writer_finding(store), cure)
    if write:
        cure = "give a store that can be written: a folder of this user's, or s3:// with credentials that may write"
        checkup.take("store", "conditional-writes", lambda: conditional_writes_finding(store), cure)
    folder = None if checkup.has_failed("store") and "://" in store else folder_of(store)
    if folder is not None:
        what = [("shards", folder, _WANTED_BYTES, _LEAST_BYTES)]
        checkup.take("machine", "disk-space", lambda: space_findings(what), "give another --store")
        checkup.add(disk_speed_finding(folder, "the store"))
    if source is not None:
        from genesis.doctor.hub import hub_finding
        from genesis.sources import SourceOptions, find_source

        spec = find_source(source, sources, SourceOptions())
        cure = "check the network, https_proxy and HF_ENDPOINT; HF_TOKEN for more requests"
        checkup.take("network", "hub", lambda: hub_finding(spec), cure)
    report = checkup.report()
    typer.echo(report.model_dump_json(indent=2) if as_json else summary(report))
    return 0 if report.ok else 1
