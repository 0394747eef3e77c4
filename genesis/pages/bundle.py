"""ES modules → one classic script, by the lines that import and export.

A module becomes a function's body, run once, that returns what it exports; an import takes it apart:

    import { element, poll as again } from "./dom.js";    const {element, poll: again} = module$dom_js;
    export function draw() { … }                          function draw() { … }   …   return {draw};

Only these forms are known, each at the beginning of a line: ``import { … } from "./NAME";`` (over several lines if need
be), ``import * as NAME from "./NAME";``, and ``export`` before a function, class, const or let. Anything else raises
instead of making a script that fails in a reader's browser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_IMPORT = re.compile(
    r"^import\s+(?:\{(?P<names>[^}]*)\}|\*\s+as\s+(?P<all>[\w$]+))\s+from\s+[\"']\./(?P<module>[\w.\-]+)[\"'];[ \t]*$",
    re.MULTILINE,
)
_EXPORT = re.compile(
    r"^export\s+(?P<kept>(?:async\s+)?(?:function\*?|class|const|let)\s+(?P<name>[\w$]+))", re.MULTILINE
)
_LEFT_OVER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """A script that does what loading ``entry`` as a module does.

    Args:
        modules: the text of each by its name.
        entry: the name of the one that imports the others.

    Raises:
        ValueError: a module is missing, imports itself by way of others, or imports or exports in a form not known.
    """
    parts: list[str] = []
    _add(modules, entry, (), {}, parts)
    return '"use strict";\n' + "\n".join(parts)


def _add(
    modules: Mapping[str, str], name: str, importers: tuple[str, ...], done: dict[str, str], parts: list[str]
) -> str:
    """Appends a module behind those it imports; the name of the constant that holds its exports."""
    if name in done:
        return done[name]
    if name in importers:
        raise ValueError(f"expected modules that do not import each other in a circle, found {(*importers, name)}")
    if name not in modules:
        raise ValueError(f"{importers[-1] if importers else 'a page'} imports ./{name}, which is not among its modules")

    def taken_apart(found: re.Match[str]) -> str:
        held = _add(modules, found["module"], (*importers, name), done, parts)
        if found["all"]:
            return f"const {found['all']} = {held};"
        names = re.sub(r"\s+as\s+", ": ", " ".join(found["names"].split()))
        return f"const {{{names}}} = {held};"

    body = _IMPORT.sub(taken_apart, modules[name])
    exported = [found["name"] for found in _EXPORT.finditer(body)]
    body = _EXPORT.sub(lambda found: found["kept"], body)
    if left := _LEFT_OVER.search(body):
        raise ValueError(f"{name}: expected an import or export in a form that can be bundled, found {left[0]!r}")
    constant = "module$" + re.sub(r"\W", "_", name)
    parts.append(f"const {constant} = (() => {{\n{body}\nreturn {{{', '.join(exported)}}};\n}})();")
    done[name] = constant
    return constant
