"""HTML template of the report: markup, style and the script that passes the charts to plotly.

The template engine escapes every value. The content security policy runs only scripts with the listed hashes and forbids
all requests.
"""

from __future__ import annotations

from typing import Final

DRAW_SCRIPT: Final = """
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const chart of charts) {
  Plotly.newPlot(chart.id, chart.data, chart.layout, {responsive: true, displaylogo: false, displayModeBar: "hover"});
}
document.documentElement.dataset.drawn = charts.length;
"""

PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:;
 script-src {{ script_sources }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1d2733; --soft: #5c6b7a; --line: #dde3e9; --accent: #1f6feb; --warn: #b35900; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1rem; font-weight: 500; color: var(--soft); margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
.verdict { font-size: 1.3rem; line-height: 1.35; font-weight: 600; margin: 0 0 1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .75rem; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.figure b { display: block; font-size: 1.15rem; }
.figure span, .note { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td.key { white-space: nowrap; overflow-wrap: normal; width: 1%; padding-right: 1.5rem; }
td { white-space: pre-wrap; }
tr.warning td { color: var(--warn); }
tr.changed td { font-weight: 600; }
pre { background: #f6f8fa; border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .86rem; }
details > summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="verdict">{{ verdict }}.</p>
<div class="figures">
{% for figure in figures %}<div class="figure"><b>{{ figure.value }}</b><span>{{ figure.label }}</span></div>
{% endfor %}</div>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
{% if time_chart %}<h2>Where the time of a step goes</h2>
<div id="{{ time_chart }}"></div>{% endif %}
<h2>Curves</h2>
{% if curves %}<div class="charts">
{% for id in curves %}<div id="{{ id }}"{% if loop.first %} class="wide"{% endif %}></div>
{% endfor %}</div>{% else %}<p class="note">No step was logged.</p>{% endif %}
{% if sample %}<h2>Text sample</h2>
{% if sample_caption %}<p class="note">{{ sample_caption }}</p>{% endif %}
<pre>{{ sample }}</pre>{% endif %}
{% if happenings %}<h2>Events</h2>
{% if happenings_left_out %}<p class="note">The first {{ happenings_left_out }} are left out.</p>{% endif %}
<div class="scroll"><table><thead><tr><th>time (UTC)</th><th>attempt</th><th>rank</th><th>event</th><th>what</th></tr></thead>
<tbody>{% for row in happenings %}
<tr{% if row.warning %} class="warning"{% endif %}><td class="key">{{ row.time }}</td><td>{{ row.attempt }}</td>
<td>{{ row.rank }}</td><td class="key">{{ row.kind }}</td><td>{{ row.text }}</td></tr>{% endfor %}
</tbody></table></div>{% endif %}
{% if ranks %}<h2>Ranks</h2>
<div class="scroll"><table><thead><tr><th>rank</th><th>steps logged</th><th>median step</th><th>data wait</th>
<th>exposed communication</th><th>peak memory</th></tr></thead>
<tbody>{% for row in ranks %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>{% endif %}
{% for section in sections %}<h2>{{ section.title }}</h2>
<div class="scroll"><table><tbody>{% for name, value in section.rows %}
<tr><td class="key">{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}
</tbody></table></div>
{% endfor %}
{% if settings %}<h2>Configuration</h2>
<p class="note">In bold: values that are not defaults.</p>
<details{% if settings|length <= 40 %} open{% endif %}><summary>{{ settings|length }} values</summary>
<div class="scroll"><table><thead><tr><th>key</th><th>value</th><th>from</th></tr></thead>
<tbody>{% for row in settings %}
<tr{% if row.changed %} class="changed"{% endif %}><td class="key">{{ row.key }}</td><td>{{ row.value }}</td>
<td>{{ row.origin }}</td></tr>{% endfor %}
</tbody></table></div></details>{% endif %}
<h2>How the numbers are made</h2>
<p class="note">Steps repeated after a restart count once, with their later record. Rates and step time are medians over the
logged steps, each a rolling mean that leaves out first steps, compilation, evaluation and
checkpoints. Time shares are of the wall
time of the logged steps on rank 0. Memory is in GiB (2^30 bytes). {{ conventions }}</p>
<script type="application/json" id="charts">{{ charts|tojson }}</script>
<script>{{ plotly_script }}</script>
<script>{{ draw_script }}</script>
</body>
</html>
"""
