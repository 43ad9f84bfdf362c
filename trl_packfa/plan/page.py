"""The plan as one self-contained HTML page with style, tables and plots."""

from __future__ import annotations

from html import escape

from .figures import figures
from .report import Plan
from .terminal import Row, heading, is_chosen, notes, tables

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.advice li { margin: .4rem 0; max-width: 60rem; } .advice li:first-child { font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { font-weight: 600; border-bottom: 2px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } tr.chosen { background: #eef5f9; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(25rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption, .notes { color: #555; font-size: .9rem; }
"""


def render(plan: Plan) -> str:
    """Return the HTML of the page; raise [`MissingPackage`] if matplotlib is not installed."""
    plots = "\n".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in figures(plan)
    )
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
<ul class="advice">
{advice}
</ul>
{shown}
<div class="notes">
{rests}
</div>
<h2>plots</h2>
<div class="plots">
{plots}
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
