"""Reads what is in a report."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from typing import Any

import pytest


def words(page: str) -> str:
    """The text of the page's body without markup and scripts, spaces collapsed."""
    body = re.sub(r"<script.*?</script>", " ", page[page.index("<body>") :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def unpacked(page: str, name: str) -> str:
    """What the page has compressed under a name."""
    found = re.search(rf'<script type="application/octet-stream" id="{name}">(.*?)</script>', page)
    assert found is not None
    return gzip.decompress(base64.b64decode(found.group(1))).decode()


def charts(page: str) -> dict[str, Any]:
    """The charts of a page by name."""
    read = json.loads(unpacked(page, "charts"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return {chart["id"]: chart for chart in read}
