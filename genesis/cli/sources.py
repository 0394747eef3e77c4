"""``genesis sources``: where text comes from; ``genesis sources check``: one row of a source, and what was found.

Also the options that say which files of a source are read and as what; ``genesis populate`` has them too.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from genesis.cli.common import JsonOption, SourcesOption, count, load_sources, printable, shorten, table
from genesis.errors import MissingFieldError, SourceError
from genesis.populate.progress import format_size
from genesis.sources import PYTHON_DOCS, InputPlan, SourceOptions, find_source, read_batches, resolve, tasks
from manifests import TOTAL_MERGES, SourcesFile, SourceSpec

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="The source's name in the store. [default: its own, owner-name of the Hub's]"),
]
TextFieldOption = Annotated[
    str | None, typer.Option("--text-field", help="Column or field that holds the text. [default: the source's, text]")
]
HubNameOption = Annotated[
    str | None, typer.Option("--hf-name", help="A configuration that the Hub's repository declares in its README.md.")
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option("--include", help="Of the files, only those whose name this pattern fits; may be repeated."),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="Of those, none that this pattern fits; may be repeated.")
]

app = typer.Typer(help="List the sources that can be populated, or look into one.", invoke_without_command=True)

_BEGINNING_CHARS = 200
_MAX_BATCHES = 64
"""Batches looked into for a first document: some 256 MB of text, or 64 files without any."""


def source_options(
    name: str | None, text_field: str | None, hf_name: str | None, include: list[str] | None, exclude: list[str] | None
) -> SourceOptions:
    """The options above as one value."""
    return SourceOptions(
        name=name,
        text_field=text_field,
        hf_name=hf_name,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
    )


@app.callback()
def sources_command(context: typer.Context, sources_file: SourcesOption = None, as_json: JsonOption = False) -> int:
    """List the sources that can be populated."""
    if context.invoked_subcommand is not None:
        return 0
    sources = load_sources(sources_file)
    specs = sorted(sources.sources, key=lambda spec: spec.priority)
    if sources.get(PYTHON_DOCS.name) is None:
        specs.append(PYTHON_DOCS)
    if as_json:
        typer.echo(_sources_json(specs, sources_file))
    else:
        typer.echo("\n".join(_source_lines(specs, sources, sources_file)))
    return 0


def _sources_json(specs: list[SourceSpec], path: Path | None) -> str:
    value = {
        "format": 1,
        "file": str(path) if path else None,
        "sources": [spec.model_dump(mode="json") for spec in specs],
    }
    return json.dumps(value, ensure_ascii=False, indent=2)


def _source_lines(specs: list[SourceSpec], sources: SourcesFile, path: Path | None) -> list[str]:
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
    files = " ".join(spec.data_files) or f"configuration {spec.hf_name or '(its only one)'}"
    return f"{spec.hf_path}@{spec.revision[:12]} {files}"


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """The first document of a source."""

    file: str
    row: int
    """In its row group, lines, elements or records; from 0."""
    row_group: int
    size_bytes: int
    """Of its UTF-8."""
    beginning: str


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """What was found in a source."""

    source: str
    hf_path: str | None
    revision: str
    """Commit of the repository; empty for files."""
    text_field: str
    files: int
    size_bytes: int
    """Of the files as they are stored."""
    formats: dict[str, int]
    """Files of each format."""
    first_file: str
    document: FoundDocument | None
    """None: there is a problem."""
    problem: str | None
    fields: tuple[str, ...]
    """Those there are, where the text field is not among them."""

    def lines(self) -> list[str]:
        """For people."""
        where = f"{self.hf_path} at {self.revision[:12]}" if self.hf_path else "files"
        formats = ", ".join(f"{number} {name}" for name, number in self.formats.items())
        lines = [
            f"{self.source}: {where}",
            f"  files  {count(self.files)}, {format_size(self.size_bytes)} ({formats}); first {self.first_file}",
        ]
        if self.document is not None:
            found = self.document
            beginning = printable(found.beginning).replace("\n", "\\n").replace("\t", "\\t")
            dots = "…" * (len(found.beginning.encode()) < found.size_bytes)
            lines.append(
                f"  text   {self.text_field!r}, row {found.row} of {found.file}: {format_size(found.size_bytes)}"
            )
            lines.append(f"         {beginning}{dots}")
        if self.fields:
            lines.append(f"  fields {shorten(', '.join(self.fields), 400)}")
        return lines


@app.command("check")
def check_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A source's name, or hf://owner/name[/pattern].")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="As of 'genesis populate'; may be repeated.")
    ] = None,
    name: NameOption = None,
    text_field: TextFieldOption = None,
    hf_name: HubNameOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    sources_file: SourcesOption = None,
    as_json: JsonOption = False,
) -> int:
    """Read one row of a source, and say what was found; ends with 1 if it has no text."""
    options = source_options(name, text_field, hf_name, include, exclude)
    spec = find_source(source, load_sources(sources_file), options, inputs=inputs or ())
    found = check_source(spec, resolve(spec, inputs or ()))
    typer.echo(json.dumps({"format": 1, **asdict(found)}, ensure_ascii=False) if as_json else "\n".join(found.lines()))
    if found.problem is not None:
        typer.echo(f"genesis: {found.problem}", err=True)
        return 1
    return 0


def check_source(spec: SourceSpec, plan: InputPlan) -> SourceCheck:
    """Reads on in a plan until there is a document."""
    document: FoundDocument | None = None
    problem: str | None = None
    fields: tuple[str, ...] = ()
    try:
        document = _first_document(plan)
        if document is None:
            problem = f"{spec.name}: no document in the rows looked at; check the text field {spec.text_field!r}"
    except MissingFieldError as error:
        problem, fields = str(error), error.fields
    except SourceError as error:
        problem = str(error)
    return SourceCheck(
        source=spec.name,
        hf_path=plan.repo or None,
        revision=plan.revision,
        text_field=plan.text_field,
        files=len(plan.files),
        size_bytes=plan.size_bytes,
        formats=dict(Counter(file.format.value for file in plan.files).most_common()),
        first_file=plan.files[0].name,
        document=document,
        problem=problem,
        fields=fields,
    )


def _first_document(plan: InputPlan) -> FoundDocument | None:
    batches = ((task, batch) for task in tasks(plan) for batch in read_batches(task))
    for (task, batch), _ in zip(batches, range(_MAX_BATCHES), strict=False):
        if batch.texts:
            behind = task.cursor(int(batch.rows[0]) + 1, plan)
            text = batch.texts[0]
            beginning = text[: 4 * _BEGINNING_CHARS].decode(errors="ignore")[:_BEGINNING_CHARS]
            return FoundDocument(behind.file, behind.row - 1, behind.row_group, len(text), beginning)
    return None
