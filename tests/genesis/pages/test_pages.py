"""The base of all pages: bundling, the one-file form, the headers of what is served."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import GenesisError, UsageError
from genesis.pages import Asset, Page, bundle, data_script, page_routes, print_pdf, single_file
from genesis.pages.page import DOM_JS, POLICY

TEMPLATE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>T</title>\n<!-- page:head -->\n'
    '</head><body><main id="main"></main></body></html>'
)
MODULE = 'import { byId, embeddedData } from "./dom.js";\nbyId("main").append(embeddedData().text);\n'


@dataclass(frozen=True)
class TextAsset(Asset):
    """A file that only the test has."""

    text: str = ""

    def read(self) -> str:
        return self.text


def small_page(module: str = MODULE) -> Page:
    return Page(TextAsset("t", "page.html", TEMPLATE), (TextAsset("t", "static/own.js", module),))


def run_script(script: str) -> str:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_bundle_does_what_the_modules_do() -> None:
    modules = {
        "a.js": 'import { two as zwei, Three } from "./b.js";\nimport * as all from "./c.js";\n'
        "const one = 1;\nconsole.log(one, zwei(), new Three().value, all.four, all.five);\n",
        "b.js": 'import {\n  four,\n} from "./c.js";\nconst one = "b";\nexport function two() { return four / 2; }\n'
        "export class Three { value = 3; }\n",
        "c.js": "export const four = 4;\nexport let five = 5;\n",
    }
    assert run_script(bundle(modules, "a.js")) == "1 2 3 4 5\n"


@pytest.mark.parametrize(
    "modules",
    [
        {"a.js": 'import "./b.js";\n', "b.js": ""},
        {"a.js": "export default 1;\n"},
        {"a.js": "export { x };\n"},
        {"a.js": 'import { x } from "./gone.js";\n'},
        {"a.js": 'import { x } from "https://elsewhere.example/b.js";\n'},
        {"a.js": 'import { x } from "./b.js";\n', "b.js": 'import { y } from "./a.js";\n'},
    ],
)
def test_a_bundle_that_would_fail_in_the_browser_is_refused(modules: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected|imports"):
        bundle(modules, "a.js")


def test_the_base_can_be_bundled_and_parsed() -> None:
    script = bundle({DOM_JS.name: DOM_JS.read()}, DOM_JS.name)
    assert run_script(script + "\nconsole.log(typeof module$dom_js.DataTable);") == "function\n"


def dom_value(expression: str) -> str:
    script = bundle({DOM_JS.name: DOM_JS.read()}, DOM_JS.name)
    return run_script(f"{script}\nconst dom = module$dom_js; process.stdout.write(String({expression}));")


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("dom.formatNumber(NaN)", "–"),
        ("dom.formatNumber('1')", "–"),
        ("dom.formatNumber(85000)", "85,000"),
        ("dom.formatCompact(320e6)", "320 M"),
        ("dom.formatCompact(9512)", "9,512"),
        ("dom.formatBytes(20001480)", "20.0 MB"),
        ("dom.formatBytes(null)", "–"),
        ("dom.formatDuration(0.25)", "250 ms"),
        ("dom.formatDuration(3599.7)", "1 h 00 min"),
        ("dom.formatDuration(86400 * 12 + 3600 * 5)", "12 d 5 h"),
        ("dom.formatDuration(Infinity)", "–"),
        ("dom.formatPercent(0.254)", "25 %"),
        ("dom.formatPercent(0.00081)", "0.08 %"),
        ("dom.formatTime('not a time')", "–"),
        ("dom.visibleText('a\\u202eb\\u0007\\ud800')", "a⟨U+202E⟩b␇⟨U+D800⟩"),
        ("dom.visibleText('x'.repeat(1e7)).length", "301"),
        ("dom.visibleText('x'.repeat(300)).length", "300"),
        ("dom.visibleText('😀'.repeat(300)).endsWith('…')", "false"),
        ("dom.visibleText({})", "[object Object]"),
    ],
)
def test_figures_and_strangers_texts(expression: str, shown: str) -> None:
    assert dom_value(expression) == shown


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters())
    | st.sampled_from(["</script>", "<!--", "<script", "\u2028", "]]>", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_data_stays_data(data: object) -> None:
    written = data_script(data)
    body = re.fullmatch(r'<script type="application/json" id="page-data">(.*)</script>', written, re.DOTALL)
    assert body is not None
    assert "<" not in body[1] and ">" not in body[1] and "\u2028" not in body[1]
    body[1].encode()
    assert json.loads(body[1]) == data


def test_data_that_is_no_json_or_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        data_script([float("nan")])
    with pytest.raises(UsageError, match="ask for less"):
        data_script("x" * (65 << 20))


def test_one_file_allows_its_own_parts_alone() -> None:
    html = single_file(small_page(MODULE + 'const end = "</script><!--";\n'), {"text": "</script><b>"}, title="<R> & b")
    assert "<title>&lt;R&gt; &amp; b</title>" in html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    for element in ("script", "style"):
        for found in re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy[1]
    assert html.count("</script>") == 2
    assert "http://www.w3.org" not in re.sub(r'<link rel="icon"[^>]*>', "", html).replace(
        'createElementNS("http://www.w3.org/2000/svg"', ""
    )


def test_what_is_served_is_strict_and_cached() -> None:
    app = FastAPI()
    app.router.routes.extend(page_routes(small_page()))
    client = TestClient(app)
    answer = client.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-cache"
    assert client.get("/", headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    for path in re.findall(r'(?:href|src)="(static/[^"]*)"', answer.text):
        part = client.get(f"/{path}")
        assert part.status_code == 200 and "immutable" in part.headers["cache-control"]
        assert part.headers["content-security-policy"] == POLICY
    digest = re.search(r"static/([0-9a-f]{16})/", answer.text)
    assert digest is not None
    for path in ("static/dom.js", "static/0/dom.js", f"static/{digest[1]}/../page.py", f"static/{digest[1]}/page.html"):
        assert client.get(f"/{path}").status_code == 404
    assert client.post("/").status_code == 405


def test_a_file_that_a_package_lacks_is_said() -> None:
    with pytest.raises(GenesisError, match=r"static/gone\.js in the package genesis\.pages"):
        Asset("genesis.pages", "static/gone.js").read()


def test_no_browser_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt install chromium"):
        print_pdf(tmp_path / "page.html", tmp_path / "page.pdf")
