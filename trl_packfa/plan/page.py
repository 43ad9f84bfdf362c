"""The plan as one self-contained HTML page with style, tables and plots."""

from __future__ import annotations

from html import escape

from .figures import figures
from .report import Plan
from .terminal import Row, heading, headline, is_chosen, notes, tables

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #555; --line: #ddd; --mark: #eef5f9; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a8a8a8; --line: #444; --mark: #20303a; --paper: #16181a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.headline { margin: 1rem 0; font-size: 1.1rem; } .headline b { font-size: 2.6rem; line-height: 1.1; display: block; }
.advice li { margin: .4rem 0; max-width: 60rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; border-bottom: 2px solid var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } tr.chosen { background: var(--mark); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(25rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figure text { fill: currentColor; }
figcaption, .notes { color: var(--soft); font-size: .9rem; }
"""


def render(plan: Plan) -> str:
    """Return the HTML of the page; raise [`MissingPackage`] if matplotlib is not installed."""
    first, second, *others = (
        f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in figures(plan)
    )
    rest = "\n".join(others)
    number, what = headline(plan)
    advice = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in plan.advice)
    shown = "\n".join(f"<h2>{escape(title)}</h2>\n{_table(rows)}" for title, rows in tables(plan))
    rests = "\n".join(f"<p>{escape(line)}</p>" for line in notes(plan))
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Packing plan of {escape(plan.source.name)}</title><style>{_STYLE}</style></head>
<body>
<h1>Packing plan of {escape(plan.source.name)}</h1>
<p>{escape(heading(plan))}</p>
<p class="headline"><b>{escape(number)}</b>{escape(what)}</p>
<div class="plots">
{first}
{second}
</div>
<ul class="advice">
{advice}
</ul>
{shown}
<div class="notes">
{rests}
</div>
<h2>more plots</h2>
<div class="plots">
{rest}
</div>
</body>
</html>
"""


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column, _ in rows[0])
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for _, value in row)
        lines.append(f'<tr class="chosen">{cells}</tr>' if is_chosen(row) else f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
