"""From what a user types to a source: a name of sources.json, an address on the Hub, or a name of one's own.

``hf://owner/name[/pattern][@revision]`` is any data set of the Hub, without an entry in sources.json; the Hub's own
spelling, ``hf://datasets/owner/name@revision/pattern``, is the same. Its name is ``owner-name`` in lower case (with the
configuration, if one is given) unless ``--name`` says otherwise. Two data sets never share a name in a store: the
checkpoint has the repository, and another is refused.

A name that is not known is a new source where ``--input`` says what to read; unless it is nearly a known one, which is
a typing error far more often.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from pydantic import ValidationError

from genesis.errors import UnknownSourceError, UsageError
from genesis.sources.hub_configurations import folder_or_pattern
from genesis.sources.planning import PYTHON_DOCS
from manifests import SourcesFile, SourceSpec

HUB = "hf://"
_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<rest>.*)", re.DOTALL)
_REVISION_FIRST = re.compile(r"@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+)(?:/(?P<pattern>.*))?", re.DOTALL)
RESERVED_NAMES = ("format", "writer", "manifest", "all")
"""No source may be called so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What the command line says of a source, beyond what it is."""

    name: str | None = None
    text_field: str | None = None
    hf_name: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


def find_source(
    text: str, sources_file: SourcesFile, options: SourceOptions = SourceOptions(), *, inputs: Sequence[str] = ()
) -> SourceSpec:
    """The source that a user names.

    Args:
        text: a name of the file, ``python-docs`` (a file's own goes before the built-in), an address on the Hub, or,
            with ``inputs``, a new name.
        sources_file: the sources that have names.
        options: what else was said.
        inputs: files to read it from.

    Raises:
        UnknownSourceError: there is none of that name; the message says which is nearest.
        UsageError: the address or an option makes no sense.
    """
    spec = _hub_source(text) if text.startswith(HUB) else _named_source(text, sources_file, options, inputs)
    if options.hf_name is not None:
        spec = _configured(spec, text, options.hf_name)
    changes = {
        "name": options.name or (_slug(spec) if text.startswith(HUB) else spec.name),
        "text_field": options.text_field or spec.text_field,
        "include": spec.include + options.include,
        "exclude": spec.exclude + options.exclude,
    }
    if spec.name == PYTHON_DOCS.name and spec.hf_path is None and changes["name"] != spec.name and not inputs:
        raise UsageError(f"--name: {PYTHON_DOCS.name} keeps its name; leave the option out")
    return _checked({**spec.model_dump(), **changes})


def _hub_source(text: str) -> SourceSpec:
    found = _REPOSITORY.fullmatch(_without_kind(text.removeprefix(HUB)))
    rest = found["rest"] if found else "?"
    revision_first = _REVISION_FIRST.fullmatch(rest)
    if revision_first:
        revision, pattern = revision_first["revision"], revision_first["pattern"] or ""
    elif rest in ("", "/") or rest.startswith("/"):
        pattern, _, revision = rest[1:].partition("@")
    else:
        found = None
    if found is None or "@" in pattern:
        raise UsageError(
            f"--source {text}: expected hf://owner/name[/pattern][@revision], such as "
            "hf://HuggingFaceTB/cosmopedia/data/stories/*.parquet"
        )
    data_files = (folder_or_pattern(pattern),) if pattern.strip("/") else ()
    return SourceSpec(name="hub", hf_path=found["repo"], revision=unquote(revision) or "main", data_files=data_files)


def _without_kind(address: str) -> str:
    """Without the ``datasets/`` of the Hub's own spelling; what has but two parts is an owner of that name."""
    return address.removeprefix("datasets/") if address.count("/") > 1 else address


def _named_source(name: str, sources_file: SourcesFile, options: SourceOptions, inputs: Sequence[str]) -> SourceSpec:
    spec = sources_file.get(name) or (PYTHON_DOCS if name == PYTHON_DOCS.name else None)
    if spec is not None:
        return spec
    known = sorted({source.name for source in sources_file.sources} | {PYTHON_DOCS.name})
    near = difflib.get_close_matches(name.lower(), known, n=1)
    if inputs and (not near or options.name == name):
        return _checked({"name": name})
    asked = f": did you mean {near[0]!r}?" if near else ";"
    if inputs:
        advice = f"a new source of this name is asked for with --name {name}"
    else:
        advice = "add others to sources.json, give --input with a new name, or name any data set as hf://owner/name"
    raise UnknownSourceError(f"no source is named {name!r}{asked} known: {', '.join(known)}; {advice}")


def _configured(spec: SourceSpec, text: str, hf_name: str) -> SourceSpec:
    if spec.hf_path is None:
        raise UsageError(f"--hf-name {hf_name}: {text} is not on the Hub; leave the option out")
    if spec.data_files and text.startswith(HUB):
        raise UsageError(f"--hf-name {hf_name}: the address says which files already; give one of the two")
    return spec.model_copy(update={"hf_name": hf_name, "data_files": ()})


def _slug(spec: SourceSpec) -> str:
    parts = [spec.hf_path or "", *([spec.hf_name] if spec.hf_name else [])]
    slug = re.sub(r"[^a-z0-9._-]+", "-", "-".join(parts).lower()).strip("-._")
    return slug[:64].rstrip("-._") or "hub"


def _checked(fields: dict[str, object]) -> SourceSpec:
    if fields["name"] in RESERVED_NAMES:
        raise UsageError(f"--name {fields['name']}: the name has another meaning; give another")
    try:
        return SourceSpec.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = str(problem["loc"][0]) if problem["loc"] else "source"
        if where == "name":
            raise UsageError(
                f"expected a source's name of 1 to 64 of a-z 0-9 . _ - that begins with a letter or digit, found "
                f"{fields['name']!r}; give --name"
            ) from None
        raise UsageError(f"--{where.replace('_', '-')}: {problem['msg']}, found {problem.get('input')!r}") from None
