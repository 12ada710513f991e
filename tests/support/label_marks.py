"""Marks of labels, as the page of ``unisono data labels`` has and saves them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def marked_data(page: str) -> dict[str, Any]:
    """What the page knows of the data set and its cards."""
    found = re.search(r'<script type="application/json" id="marked-data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def mark(file: str, row: int, label: Any, action: str, **to: str) -> dict[str, Any]:
    """A mark of one document."""
    return {"file": file, "row": row, "label": str(label), "action": action, **to}


def save_marks(path: Path, out: Path, *marks: dict[str, Any], **changes: Any) -> Path:
    """Write marks as the page in ``out`` saves them, with other facts of the data set."""
    about = marked_data((out / "report.html").read_text())["about"]
    path.write_text(json.dumps({**about, "marks": marks, **changes}))
    return path
