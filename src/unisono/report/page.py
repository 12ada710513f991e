"""HTML template of the report: markup, style and the script that unpacks plotly and passes it the charts.

The template engine escapes every value. The content security policy runs only scripts with the listed hashes, plotly's text
among them, and forbids all requests.
"""

from __future__ import annotations

from typing import Final

DRAW_SCRIPT: Final = """
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), character => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
function coloured(layout) {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const copy = {...layout, paper_bgcolor: of("--paper"), plot_bgcolor: of("--paper"), font: {...layout.font, color: of("--ink")}};
  for (const axis of ["xaxis", "yaxis"]) copy[axis] = {...layout[axis], gridcolor: of("--line")};
  return {...copy, legend: {...layout.legend, maxheight: 400}, hoverlabel: {bgcolor: of("--paper"), font: {color: of("--ink")}}};
}
// how many lines a legend has is known when it is drawn; title and tool bar have the room above it
async function drawn(chart, narrow) {
  const layout = coloured(chart.layout), hasBar = !narrow && !chart.bare;
  const options = {responsive: true, displaylogo: false, displayModeBar: hasBar ? "hover" : false};
  const element = await Plotly.react(chart.id, chart.data, layout, options), legend = element.querySelector(".legend");
  const above = hasBar || layout.title?.text ? 36 : 8;
  const more = legend ? Math.ceil(legend.getBoundingClientRect().height) + above - layout.margin.t : 0;
  if (more <= 0) return;
  const roomy = {...layout, height: layout.height + more, margin: {...layout.margin, t: layout.margin.t + more}};
  await Plotly.react(chart.id, chart.data, roomy, options);
}
async function draw() {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  const charts = JSON.parse(await unpacked("charts"));
  // a narrow screen has no room for tool bars
  const narrow = matchMedia("(max-width: 40rem)").matches;
  const drawAll = () => charts.map(chart => drawn(chart, narrow));
  await Promise.all(drawAll());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.documentElement.dataset.drawn = charts.length;
}
draw().catch(error => {
  document.getElementById("no-charts").textContent = `The charts cannot be drawn in this browser: ${error}`;
});
"""

HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:;
 script-src {{ script_sources }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1d2733; --soft: #5c6b7a; --line: #dde3e9; --accent: #1f6feb; --warn: #b35900; --bad: #cf222e; --paper: #fff;
  --box: #f6f8fa; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3e9; --soft: #9aa7b4; --line: #30363d; --accent: #6cb6ff;
  --warn: #e3b341; --bad: #ff7b72; --paper: #0d1117; --box: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 2rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
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
pre { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .86rem; }
details > summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; }
.finding { border-left: 4px solid var(--warn); background: var(--box); border-radius: 0 8px 8px 0;
  padding: .6rem .9rem; margin: .6rem 0; }
.finding.critical { border-color: var(--bad); }
.finding p { margin: .2rem 0; font-size: .9rem; }
.finding .cost { color: var(--soft); }
.charts > div { min-width: 0; }
.cells { margin-bottom: 1rem; }
.cells td { overflow-wrap: break-word; }
@media (max-width: 40rem) { .cells { min-width: 38rem; } }
@media (max-width: 30rem) { body { padding: 1rem .75rem 3rem; } .verdict { font-size: 1.1rem; }
  table:not(.cells) td.key { white-space: normal; } }
</style>
</head>
<body>
{% macro part(section) %}<h2>{{ section.title }}</h2>
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
{% if section.in_grid %}<div class="charts">
{% endif %}{% for chart in section.charts %}<div id="{{ chart.id }}"></div>
{% endfor %}{% if section.in_grid %}</div>
{% endif %}{% for picture in section.pictures %}<p><img src="{{ picture }}" alt="{{ section.title }}"></p>
{% endfor %}{% for table in section.tables %}
<div class="scroll"><table class="cells">
<thead><tr>{% for cell in table.head %}<th>{{ cell }}</th>
{%- endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for cell in row %}<td{% if loop.first %} class="key"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if table.left_out %}<p class="note">{{ table.left_out }} more rows are left out.</p>{% endif %}{% endfor %}{% endmacro %}
"""

RUN: Final = """<h1>{{ title }}</h1>
<p class="verdict">{{ verdict }}.</p>
{% if findings %}<h2>What to change</h2>
{% for finding in findings %}<div class="finding{% if finding.is_critical %} critical{% endif %}">
<p><b>{{ finding.title }}</b> <span class="cost">{{ finding.cost }}</span></p>
{% for line in finding.evidence %}<p class="cost">{{ line }}</p>
{% endfor %}<p>{{ finding.advice }}</p>
{% if finding.settings or finding.gain %}<p>{% if finding.settings %}<code>{{ finding.settings }}</code> {% endif %}
<span class="cost">{{ finding.gain }}</span></p>{% endif %}</div>
{% endfor %}<h2>Figures</h2>{% endif %}
<div class="figures">
{% for figure in figures %}<div class="figure"><b>{{ figure.value }}</b><span>{{ figure.label }}</span></div>
{% endfor %}</div>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
<p class="note" id="no-charts"></p>
{% if time_chart %}<h2>Where the time of a step goes</h2>
<div id="{{ time_chart }}"></div>{% endif %}
{% if goodput %}{{ part(goodput) }}{% endif %}
<h2>Curves</h2>
{% if curves %}<div class="charts">
{% for id in curves %}<div id="{{ id }}"{% if loop.first %} class="wide"{% endif %}></div>
{% endfor %}</div>{% else %}<p class="note">No step was logged.</p>{% endif %}
{% if sample %}<h2>Text sample</h2>
{% if sample_caption %}<p class="note">{{ sample_caption }}</p>{% endif %}
<pre>{{ sample }}</pre>{% endif %}
{% if event_rows %}<h2>Events</h2>
{% if events_left_out %}<p class="note">The first {{ events_left_out }} are left out.</p>{% endif %}
<div class="scroll"><table class="cells">
<thead><tr><th>time (UTC)</th><th>attempt</th><th>rank</th><th>event</th><th>what</th></tr></thead>
<tbody>{% for row in event_rows %}
<tr{% if row.warning %} class="warning"{% endif %}><td class="key">{{ row.time }}</td><td>{{ row.attempt }}</td>
<td>{{ row.rank }}</td><td class="key">{{ row.kind }}</td><td>{{ row.text }}</td></tr>{% endfor %}
</tbody></table></div>{% endif %}
{% if ranks or rank_map %}<h2>Ranks</h2>{% endif %}
{% if rank_map %}<div id="{{ rank_map }}"></div>{% endif %}
{% if ranks %}
<div class="scroll"><table class="cells"><thead><tr><th>rank</th><th>steps logged</th><th>median step</th><th>data wait</th>
<th>exposed communication</th><th>peak memory</th></tr></thead>
<tbody>{% for row in ranks %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% if ranks_left_out %}<p class="note">{{ ranks_left_out }} more ranks are left out.</p>{% endif %}{% endif %}
{% for section in rank_sections %}{{ part(section) }}
{% endfor %}{% if parent %}{{ part(parent) }}{% endif %}
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
"""

TAIL: Final = """<script type="application/octet-stream" id="charts">{{ charts }}</script>
<script type="application/octet-stream" id="plotly">{{ plotly }}</script>
{% for script in scripts %}<script>{{ script }}</script>
{% endfor %}</body>
</html>
"""

SUMMARY: Final = """<h1>{{ title }}</h1>
<p class="verdict">{{ verdict }}</p>
<div class="figures">
{% for figure in figures %}<div class="figure"><b>{{ figure.value }}</b><span>{{ figure.label }}</span></div>
{% endfor %}</div>
<p class="note" id="no-charts"></p>
{% for section in sections %}{{ part(section) }}
{% endfor %}
"""
