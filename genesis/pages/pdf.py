"""A page on paper: the one-file form printed to PDF by a browser of this machine, without its network.

The browser has its own empty profile, runs the page (which may ask for nothing) and ends; it is given two minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from genesis.errors import UsageError

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_DEADLINE_S: Final = 120.0


def find_browser() -> str:
    """The path of a browser that can print.

    Raises:
        UsageError: there is none.
    """
    given = os.environ.get("GENESIS_BROWSER")
    for name in [given] if given else BROWSERS:
        if found := shutil.which(name):
            return found
    expected = f"the browser {given} (GENESIS_BROWSER)" if given else "chromium or chrome for --pdf"
    raise UsageError(
        f"expected {expected}, found none; install one (Debian: apt install chromium), "
        "or open the HTML file and print it"
    )


def print_pdf(html_path: Path, pdf_path: Path) -> None:
    """Prints a one-file page.

    Raises:
        UsageError: there is no browser, or it failed.
    """
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="genesis-pdf-") as profile:
        made = Path(profile, "page.pdf")
        command = [
            browser,
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-pdf-header-footer",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            f"--print-to-pdf={made}",
            # Chromium refuses to run as root inside its sandbox; the page is our own and asks for nothing.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            html_path.absolute().as_uri(),
        ]
        try:
            subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=True)
            body = made.read_bytes()
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"--pdf: {browser} did not end within {_DEADLINE_S:.0f} s; print the HTML file by hand"
            ) from None
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()
            raise UsageError(f"--pdf: {browser} failed: {said[-1] if said else error.returncode}") from None
        except FileNotFoundError:
            raise UsageError(f"--pdf: {browser} made no PDF; print the HTML file by hand") from None
    try:
        pdf_path.write_bytes(body)
    except OSError as error:
        raise UsageError(f"--pdf {pdf_path}: {error.strerror}") from None
