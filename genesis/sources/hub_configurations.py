"""Which files of a dataset repository are a configuration's: what the front matter of its README.md declares.

The Hub's own form: ``configs`` is a list, each with ``config_name``, ``data_files`` (a pattern, several, or one a
split) and ``data_dir``. Of several splits ``train`` is read; a configuration without one is read whole. A repository
that declares none is read whole too, in natural order: every file that can be read, but README and hidden ones and the
descriptions that libraries write.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from genesis.errors import InputNotFoundError, SourceError
from genesis.sources.base import is_pattern
from genesis.sources.opening import format_of
from manifests import SourceSpec

logger = logging.getLogger(__name__)

MAX_CARD_BYTES = 4 << 20
"""A README.md is read no further. The longest front matter of the Hub's large data sets is some 300 kB."""
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_SPLIT = "train"


def configured_patterns(spec: SourceSpec, card: str) -> tuple[str, ...]:
    """Patterns of the files to read.

    Args:
        spec: names the configuration, or none.
        card: the text of the repository's README.md.

    Raises:
        InputNotFoundError: there is no such configuration, or none is named and there are several.
        SourceError: what is declared cannot be understood.
    """
    declared = _configurations(spec, card)
    if spec.hf_name is None and not declared:
        logger.info("%s: %s declares no configurations; all its files of text are read", spec.name, spec.hf_path)
        return ("**",)
    names = list(declared)
    name = spec.hf_name or (names[0] if len(names) == 1 else _default(declared))
    if name is None or name not in declared:
        known = f"it declares {', '.join(names[:30])}" if names else "its README.md declares none"
        asked = "several configurations, and none was named" if name is None else f"no configuration {name!r}"
        raise InputNotFoundError(
            f"{spec.name}: {spec.hf_path} has {asked}; {known}: give one with --hf-name, or files as "
            f"hf://{spec.hf_path}/PATTERN"
        )
    patterns = _patterns(declared[name])
    if not patterns:
        raise SourceError(
            f"{spec.name}: the configuration {name!r} of {spec.hf_path} names no files in a form that is known; give "
            f"them as hf://{spec.hf_path}/PATTERN"
        )
    logger.info("%s: the configuration %r of %s: %s", spec.name, name, spec.hf_path, " ".join(patterns))
    return patterns


def folder_or_pattern(text: str) -> str:
    """A pattern of files; a name that is neither of a file that can be read nor a pattern means all in that folder."""
    if is_pattern(text) or format_of(text) is not None:
        return text
    return f"{text.rstrip('/')}/**"


def _configurations(spec: SourceSpec, card: str) -> dict[str, Mapping[str, object]]:
    found = _FRONT_MATTER.match(card.removeprefix("\ufeff"))
    if found is None:
        return {}
    import yaml  # Wanted here alone, and every worker imports what is above.

    try:
        front_matter = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"{spec.name}: the README.md of {spec.hf_path} does not begin with YAML ({reason}); give files as "
            f"hf://{spec.hf_path}/PATTERN"
        ) from None
    configurations = front_matter.get("configs") if isinstance(front_matter, Mapping) else None
    entries = configurations if isinstance(configurations, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, Mapping)}


def _default(declared: Mapping[str, Mapping[str, object]]) -> str | None:
    marked = [name for name, entry in declared.items() if entry.get("default") is True]
    return marked[0] if marked else "default" if "default" in declared else None


def _patterns(entry: Mapping[str, object]) -> tuple[str, ...]:
    folder = entry.get("data_dir")
    prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/.") else ""
    declared = entry.get("data_files")
    if declared is None:
        return (f"{prefix}**",) if prefix else ()
    splits = [each for each in declared if isinstance(each, Mapping)] if isinstance(declared, list) else []
    chosen = [each.get("path") for each in splits if each.get("split") == _SPLIT] or [
        each.get("path") for each in splits
    ]
    texts = [text for each in (chosen or [declared]) for text in (each if isinstance(each, list) else [each])]
    return tuple(
        prefix + folder_or_pattern(text.removeprefix("./")) for text in texts if isinstance(text, str) and text
    )
