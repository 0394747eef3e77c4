"""From a source's name to its plan: which files, in which order, at which revision.

Three kinds of input give the same `InputPlan`: local files (``--input``), the built-in ``python-docs``, and a dataset
repository on the Hub. `huggingface_hub` is imported only for the last: it costs 0.3 s that a local run does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from genesis.errors import InputNotFoundError, UnknownSourceError
from genesis.sources.base import InputPlan
from genesis.sources.local import local_plan
from genesis.sources.python_docs import PYTHON_DOCS, python_docs_plan
from manifests import SourcesFile, SourceSpec


def find_source(name: str, sources_file: SourcesFile) -> SourceSpec:
    """The source of that name, of the file or built in (a file's own ``python-docs`` goes before the built-in).

    Raises:
        UnknownSourceError: there is none; the message lists those there are.
    """
    spec = sources_file.get(name) or (PYTHON_DOCS if name == PYTHON_DOCS.name else None)
    if spec is None:
        known = ", ".join(sorted({source.name for source in sources_file.sources} | {PYTHON_DOCS.name}))
        raise UnknownSourceError(f"no source is named {name!r}; known: {known}; add others to sources.json")
    return spec


def resolve(spec: SourceSpec, inputs: Sequence[str] = (), *, pinned_revision: str | None = None) -> InputPlan:
    """The plan of a source.

    Args:
        spec: the source.
        inputs: local files, folders or glob patterns to read instead of the source's own files.
        pinned_revision: the commit a checkpoint's cursor stands in; the Hub's files are taken from exactly it,
            whatever the branch holds by now. None: the spec's ``revision``, resolved to a commit here.

    Raises:
        InputNotFoundError: no file matches, or repository or revision do not exist.
        SourceError: a file is of a kind that is not read, or the Hub refuses or cannot be reached.
    """
    if inputs:
        return local_plan(spec.name, spec.text_field, inputs)
    if spec.hf_path is not None:
        from genesis.sources.hub import hub_plan

        return hub_plan(spec, pinned_revision=pinned_revision)
    if spec.name == PYTHON_DOCS.name:
        return python_docs_plan()
    raise InputNotFoundError(
        f"{spec.name}: expected hf_path in sources.json or local files, found neither; give --input"
    )
