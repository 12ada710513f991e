"""Our archives read by webdataset itself: UNISONO_WEBDATASET_PYTHON names an interpreter that has webdataset 1.0.2."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from unisono.data.convert import Table, write_table

PYTHON = os.environ.get("UNISONO_WEBDATASET_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not PYTHON,
        reason="set UNISONO_WEBDATASET_PYTHON to an interpreter with webdataset==1.0.2: nothing was compared",
    ),
]
SCRIPT = """
import json, sys, webdataset
rows = list(webdataset.WebDataset(sys.argv[1], shardshuffle=False).decode())
told = lambda value: value.hex() if isinstance(value, bytes) else value.tolist() if hasattr(value, "tolist") else value
print(json.dumps([{k: told(v) for k, v in row.items() if k not in ("__url__", "__local_path__")} for row in rows]))
"""


def test_webdataset_reads_our_archives(tmp_path: Path) -> None:
    rows = [
        {"__key__": key, "jpg": bytes([n] * 9), "cls": n - 1, "text": f"ü {n}", "score": n / 3, "ids": np.arange(n + 1)}
        for n, key in enumerate(["a", "folder/b", "c" * 200])
    ]
    write_table(tmp_path / "a.tar", Table(rows=rows))
    assert PYTHON is not None
    command = [PYTHON, "-c", SCRIPT, str(tmp_path / "a.tar")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [
        {
            "__key__": row["__key__"],
            "jpg": row["jpg"].hex(),
            "cls": row["cls"],
            "text.txt": row["text"],
            "score.npy": row["score"],
            "ids.npy": row["ids"].tolist(),
        }
        for row in rows
    ]
