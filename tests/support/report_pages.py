"""What a report shows: its text, its charts, and the page that a headless browser makes of it."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def words(page: str) -> str:
    """The text of the page's body without markup and scripts, spaces collapsed."""
    body = re.sub(r"<script.*?</script>", " ", page[page.index("<body>") :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def unpacked(page: str, name: str) -> str:
    found = re.search(rf'<script type="application/octet-stream" id="{name}">(.*?)</script>', page)
    assert found is not None
    return gzip.decompress(base64.b64decode(found.group(1))).decode()


def charts(page: str) -> dict[str, Any]:
    read = json.loads(unpacked(page, "charts"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return {chart["id"]: chart for chart in read}


def in_browser(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its scripts ran, and what the browser complained about."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=8000"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
