"""The page around the pictures: Jinja template and style sheet of the HTML report. No logic, nothing from outside.

Everything inserted is escaped (autoescape), except the SVG that style.py made. The page needs no network, no script and
no second file, and follows the reader's light or dark preference.
"""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa; --line: #d8dee4;
        --good: #1a7f37; --bad: #b3261e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --card: #161b22; --line: #30363d;
          --good: #3fb950; --bad: #ff7b72; --warn: #d29922; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 1240px; color: var(--ink); background: var(--paper);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
.soft { color: var(--soft); }
.finished { color: var(--good); } .failed { color: var(--bad); } .stopped, .running { color: var(--warn); }
.outcome { font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: .82rem; }
figure { margin: 1rem 0; }
svg { width: 100%; height: auto; display: block; color: var(--ink); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--line); }
th { background: var(--card); font-weight: 600; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.number { text-align: right; white-space: nowrap; }
td.yes { color: var(--good); font-weight: 600; } td.no { color: var(--warn); font-weight: 600; }
details { margin: .75rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem; overflow-x: auto;
      font-size: .82rem; }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<div><span class="outcome {{ outcome_class }}">{{ outcome }}</span>{% if reason %}: {{ reason }}{% endif %}</div>
<div class="soft">began {{ began }} &middot; {{ wall_clock }} of wall clock
  {%- if attempts > 1 %} over {{ attempts }} starts{% endif %} &middot; run id {{ run_id }}</div>
{% if emulated %}<div class="outcome stopped">Emulated: generation and training only took time; no model learned
anything here.</div>{% endif %}
</header>
<main>
<section class="cards" aria-label="Key figures">
{% for name, value, remark in cards %}<div class="card"><span>{{ name }}</span><b>{{ value }}</b>
<span>{{ remark }}</span></div>
{% endfor %}</section>
{% for heading, figures in sections %}<h2>{{ heading }}</h2>
{% for svg in figures %}<figure>{{ svg }}</figure>
{% endfor %}{% endfor %}
<h2>Decisions</h2>
{% if decisions %}<div class="scroll"><table>
<thead><tr><th>time, s</th><th>version</th><th>question</th><th>answer</th><th>reason</th><th>queue</th>
<th>in flight</th><th>room</th><th>ratio</th></tr></thead>
<tbody>{% for row in decisions %}<tr><td class="number">{{ row.time }}</td><td class="number">{{ row.version }}</td>
<td>{{ row.question }}</td><td class="{{ row.answer }}">{{ row.answer }}</td><td>{{ row.reason }}</td>
<td class="number">{{ row.queue }}</td><td class="number">{{ row.in_flight }}</td>
<td class="number">{{ row.window_room }}</td><td class="number">{{ row.ratio }}</td></tr>
{% endfor %}</tbody></table></div>
{% else %}<p class="soft">The policy has not been asked yet.</p>{% endif %}
{% if decisions_left_out %}<p class="soft">The first {{ decisions_left_out }} are left out here:
<code>hybridsched explain RUN decisions</code> tells them all.</p>{% endif %}
<h2>Faults</h2>
{% if faults %}<div class="scroll"><table>
<thead><tr><th>time, s</th><th>who</th><th>what</th><th>reason</th></tr></thead>
<tbody>{% for row in faults %}<tr><td class="number">{{ row.time }}</td><td>{{ row.entity }}</td><td>{{ row.new }}</td>
<td>{{ row.reason }}</td></tr>
{% endfor %}</tbody></table></div>
{% else %}<p class="soft">None.</p>{% endif %}
{% if faults_left_out %}<p class="soft">The first {{ faults_left_out }} are left out here:
<code>hybridsched explain RUN faults</code> tells them all.</p>{% endif %}
<h2>More</h2>
<details><summary>All figures</summary><div class="scroll"><table>
{% for name, value in figures_table %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table></div></details>
<details><summary>Configuration</summary>
{% if config %}<pre>{{ config }}</pre>{% else %}<p class="soft">Not kept with this run.</p>{% endif %}
</details>
</main>
<footer class="soft">hybridsched {{ hybridsched }}</footer>
</body>
</html>
"""
