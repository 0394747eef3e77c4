"""``genesis sources``: the configured sources, with their targets, priorities, shares and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from genesis.cli.options import JsonOption, SourcesOption, load_sources
from genesis.cli.tables import count, table
from manifests import TOTAL_MERGES, SourcesFile, SourceSpec


def sources_command(sources_file: SourcesOption = None, as_json: JsonOption = False) -> int:
    """List the sources that can be populated."""
    from genesis.sources import PYTHON_DOCS

    sources = load_sources(sources_file)
    specs = sorted(sources.sources, key=lambda spec: spec.priority)
    if sources.get(PYTHON_DOCS.name) is None:
        specs.append(PYTHON_DOCS)
    if as_json:
        typer.echo(_json(specs, sources_file))
    else:
        typer.echo("\n".join(_lines(specs, sources, sources_file)))
    return 0


def _json(specs: list[SourceSpec], path: Path | None) -> str:
    value = {
        "format": 1,
        "file": str(path) if path else None,
        "sources": [spec.model_dump(mode="json") for spec in specs],
    }
    return json.dumps(value, ensure_ascii=False, indent=2)


def _lines(specs: list[SourceSpec], sources: SourcesFile, path: Path | None) -> list[str]:
    header = ("source", "priority", "target", "merges", "enabled", "from")
    rows = [
        (
            spec.name,
            str(spec.priority),
            count(spec.target_shards or None),
            count(spec.merges),
            "yes" if spec.enabled else "no",
            _origin(spec),
        )
        for spec in specs
    ]
    shares = sum(spec.merges for spec in sources.sources)
    return [
        *table(header, rows, left=frozenset({0, 4, 5})),
        "",
        f"{path or 'built-in sources.json'}: shares of {count(shares)} merges of {count(TOTAL_MERGES)}; "
        "--source all takes the enabled ones by priority",
    ]


def _origin(spec: SourceSpec) -> str:
    if spec.hf_path is None:
        return "this Python's standard library" if spec.name == "python-docs" else "local files (--input)"
    return f"{spec.hf_path}@{spec.revision[:12]} {' '.join(spec.data_files)}"
