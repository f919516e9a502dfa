"""The template of the HTML report. It refers to nothing outside itself."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; background: #f4f6f8; margin: 0; }
 main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
 h1 { font-size: 26px; margin: 0 0 4px; }
 h2 { font-size: 18px; margin: 34px 0 10px; }
 .sub { color: #5f6770; margin: 0 0 18px; }
 dt { font-weight: 600; }
 dd { margin: 0 0 6px; }
 .cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 8px 0 14px; }
 .card { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; }
 .card { padding: 10px 16px; min-width: 120px; }
 .card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
 .card span { color: #5f6770; font-size: 13px; }
 .run { border-left: 5px solid; padding-left: 12px; margin: 14px 0; }
 .panel { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 14px; overflow-x: auto; }
 .panel img { width: 100%; display: block; }
 table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
 th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #edf0f3; white-space: pre; }
 th:first-child, td:first-child { text-align: left; }
 .errors { color: #b00020; }
 pre { overflow-x: auto; font-size: 12.5px; background: #fff; border: 1px solid #dfe3e8; padding: 12px; }
 summary { cursor: pointer; margin-top: 10px; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% for note in notes %}
<p>{{ note }}</p>
{% endfor %}
<dl>
{% for run in runs %}
<dt style="color: {{ colors[loop.index0] }}">{{ run.label }}</dt><dd>{{ abouts[loop.index0] }}</dd>
{% endfor %}
</dl>
<p class="sub">{{ terms }}</p>
{% for run in runs %}
<section class="run" style="border-color: {{ colors[loop.index0] }}">
<strong>{{ run.label }}</strong>
<span class="sub">{{ run.kind }}, {{ run.date }}, {{ run.completed }} requests,
{{ run.num_adapters }} adapters, {{ "%.0f"|format(run.duration) }} s
{%- if run.stopped_early %}, stopped by the user{% endif %}</span>
<div class="cards">
{% for name, value in cards[loop.index0] if value != "–" %}
<div class="card"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}
</div>
{% if run.error_counts %}
<ul class="errors">
{% for message, count in run.error_counts.items() %}
<li>{{ count }} failed: {{ message }}</li>
{% endfor %}
</ul>
{% endif %}
</section>
{% endfor %}
{% for heading, image in figures %}
<h2>{{ heading }}</h2>
<div class="panel"><img alt="{{ heading }}" src="data:image/png;base64,{{ image }}"></div>
{% endfor %}
<h2>All numbers</h2>
<div class="panel">
<table>
<tr><th></th>{% for run in runs %}<th>{{ run.label }}</th>{% endfor %}</tr>
{% for heading, texts in rows %}
<tr><td>{{ heading }}</td>{% for text in texts %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</table>
</div>
<h2>How it was measured</h2>
{% for run in runs %}
<details><summary>{{ run.label }}: configuration and environment</summary>
<pre>{{ details[loop.index0].config }}</pre>
<pre>{{ details[loop.index0].env }}</pre>
</details>
{% endfor %}
</main>
</body>
</html>
"""
