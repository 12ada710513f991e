"""What a report shows: its text, its charts, and the page that a headless browser makes of it.

    python tests/support/report_pages.py RUN_DIR docs/pictures

takes the pictures of the documentation of the report of a run.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
    """The charts by their ids; none has a text that plotly reads as markup."""
    read = json.loads(unpacked(page, "charts"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert not [text for text in _texts(read) if "<" in text]
    return {chart["id"]: chart for chart in read}


def _texts(value: Any) -> Iterator[str]:
    """All texts of charts but templates, which the pages write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield from () if key == "hovertemplate" else _texts(each)


FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
PHONE_PX = 390


def in_browser(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its scripts ran, and what the browser complained about."""
    done = _chromium(profile, "--enable-logging=stderr", "--dump-dom", path.as_uri())
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def picture(path: Path, target: Path, folder: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Write a picture of the top of a page to ``target``. ``folder``: for files of the browser."""
    frame = folder / "frame.html"  # no window is narrower than 500 pixels
    style = f"width:{width}px;height:{height}px;border:0"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{path.absolute().as_uri()}" style="{style}"></iframe></body>'
    )
    colours = ["--force-dark-mode"] if dark else []
    size = f"--window-size={max(500, width)},{height}"
    _chromium(folder / "browser", *colours, size, f"--screenshot={target}", frame.as_uri())


def page_width(path: Path, folder: Path, *, width: int) -> int:
    """Pixels that a page takes from side to side in a window of ``width``: more than that where it has to be scrolled."""
    found = evaluated(path, folder, "document.documentElement.scrollWidth", width=width)
    assert isinstance(found, int)
    return found


_BOXES = """
[...document.querySelectorAll(".js-plotly-plot")].map(chart => {
  const box = name => {
    const found = chart.querySelector(name), place = found && found.getBoundingClientRect();
    return place && place.width && place.height ? [place.left, place.top, place.right, place.bottom] : null;
  };
  return [chart.id, {legend: box(".legend"), bar: box(".modebar"), title: box(".gtitle")}];
})
"""


def boxes_of_charts(path: Path, folder: Path, *, width: int) -> dict[str, dict[str, list[float] | None]]:
    """Boxes (left, top, right, bottom) of ``legend``, ``bar`` (of tools) and ``title`` of each chart, in a window of ``width``
    pixels."""
    return dict(evaluated(path, folder, _BOXES, width=width))


def overlap(one: list[float] | None, other: list[float] | None) -> bool:
    """Whether two boxes share some area."""
    if one is None or other is None:
        return False
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def evaluated(path: Path, folder: Path, expression: str, *, width: int) -> Any:
    """The value, as JSON, of a JavaScript expression in a page whose charts are drawn, in a window of ``width`` pixels.
    ``folder``: for files of the browser."""
    told = (
        "<script>const timer = setInterval(() => { if (document.documentElement.dataset.drawn === undefined) return;"
        f"clearInterval(timer); setTimeout(() => parent.postMessage(JSON.stringify({expression.strip()}), '*'), 500); }}, 100)"
        "</script>"
    )
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", path.read_text(), count=1, flags=re.DOTALL)
    (folder / "page.html").write_text(page + told)
    (folder / "frame.html").write_text(
        f"<body><iframe src='page.html' style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>addEventListener('message', told => document.body.dataset.found = told.data)</script></body>"
    )
    dom = _chromium(folder / "browser", "--dump-dom", (folder / "frame.html").as_uri()).stdout
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None
    return json.loads(html.unescape(found[1]))


def _main(run_dir: str, target: str) -> None:
    from PIL import Image

    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, height in (("light", 1100, 3400), ("dark", 1100, 3400), ("phone", PHONE_PX, 1700)):
        with tempfile.TemporaryDirectory() as own:
            whole = Path(own, "whole.png")
            picture(Path(run_dir, "report.html"), whole, Path(own), width=width, height=height, dark=name == "dark")
            image = Image.open(whole).convert("RGB").crop((0, 0, width, height))
            image.quantize(48).save(folder / f"report-{name}.png", optimize=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
