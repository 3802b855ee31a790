"""A page looked at by a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser on the PATH")
PROBE = (
    "<script>addEventListener('load', () => document.documentElement.dataset.probe = JSON.stringify({"
    "wide: document.documentElement.scrollWidth > innerWidth,"
    "figures: document.querySelectorAll('figure').length,"
    "curves: [...document.querySelectorAll('figure svg')].filter("
    "s => s.querySelectorAll('path').length > 5 && s.getBoundingClientRect().width > 200).length"
    "}))</script>"
)


def look_at(page: str | Path, folder: Path, width: int) -> tuple[dict[str, Any], str]:
    """Whether a page is wider than its window, its figures and drawn curves; and what the browser logged."""
    probed = folder / "probed.html"
    probed.write_text(Path(page).read_text().replace("</head>", PROBE + "</head>"))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000",
         "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr
    return json.loads(html.unescape(found[1])), done.stderr
