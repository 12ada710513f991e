"""Self-contained HTML pages: a template with charts, which plotly draws; it is embedded, compressed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, cast

import jinja2
from markupsafe import Markup

from unisono.report.page import DRAW_SCRIPT, HEAD, TAIL

# plotly.js-cartesian-dist-min from npm, MIT licence (plotly-LICENSE): the bundle with lines, bars and heat maps
_PLOTLY: Final = "plotly-cartesian-4.1.1.min.js.gz"


def render_page(
    body: str, charts: Sequence[Mapping[str, Any]], *, title: str, scripts: Sequence[str] = (), **values: Any
) -> str:
    """The page of a template.

    Args:
        body: What stands between head and scripts, as a jinja2 template.
        charts: As plotly describes them, each with the ``id`` of its place on the page. Their texts are escaped: plotly reads
            markup in texts, such as links. Templates (``hovertemplate``) stay, as the pages write them.
        title: Of the page.
        scripts: The page's own scripts, without anything that comes from data; they run after its body is there.
        values: What the template uses. All are escaped.
    """
    plotly = files("unisono.report").joinpath(_PLOTLY).read_bytes()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    drawn = json.dumps(_drawable(charts), allow_nan=False).encode()
    return environment.from_string(HEAD + body + TAIL).render(
        title=title,
        **values,
        # Markup: with that of json_in_script the only values that are not escaped
        plotly=Markup(base64.b64encode(plotly).decode()),
        charts=Markup(base64.b64encode(gzip.compress(drawn, mtime=0)).decode()),
        scripts=[Markup(script) for script in (DRAW_SCRIPT, *scripts)],
        script_sources=Markup(" ".join(map(_script_hash, (gzip.decompress(plotly).decode(), DRAW_SCRIPT, *scripts)))),
    )


def json_in_script(value: Any) -> Markup:
    """A value as JSON between the tags of ``<script type="application/json">``, which no text in it can end."""
    return Markup(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


def escaped(text: str) -> str:
    """The text as plotly shows it, for templates: without the markup that plotly reads in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _drawable(value: Any) -> Any:
    """The value with escaped texts, and with None for numbers that JSON does not have: charts show them as gaps."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: each if key == "hovertemplate" else _drawable(each) for key, each in items}
    if isinstance(value, (list, tuple)):
        return [_drawable(each) for each in cast("Sequence[Any]", value)]
    return value


def _script_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
