"""How the report looks: one style sheet, light and dark, for any width. Its hash is in the page's policy.

Colours of text have a contrast of at least 4.5 to 1 with what is behind them, those of pictures of 3 to 1.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f4f5f7",
    "ink": "#1b1f24",
    "faint": "#57606a",
    "line": "#d0d7de",
    "link": "#0550ae",
    "work": "#1a7f37",
    "again": "#bc4c00",
    "stall": "#8250df",
    "back": "#cf222e",
    "start": "#0969da",
    "idle": "#6e7781",
}
DARK = {
    "paper": "#0d1117",
    "panel": "#161b22",
    "ink": "#e6edf3",
    "faint": "#9da7b3",
    "line": "#30363d",
    "link": "#79c0ff",
    "work": "#3fb950",
    "again": "#f0883e",
    "stall": "#bc8cff",
    "back": "#ff7b72",
    "start": "#58a6ff",
    "idle": "#8b949e",
}
_PICTURE = ("work", "again", "stall", "back", "start", "idle")


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_CLASSES = "".join(
    f".{name}{{fill:var(--{name})}}.key.{name}{{background:var(--{name})}}" for name in _PICTURE
)
STYLE = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin-top:2.5rem}h3{font-size:1rem}
a{color:var(--link)}.faint{color:var(--faint)}
.summary,.look{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:.75rem 1rem;
margin:1rem 0}
.summary p{margin:.3rem 0}.look h2{margin-top:.25rem}
.wide{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--faint);padding:.25rem 0}
th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.number,th.number{text-align:right;white-space:nowrap}
svg{display:block;width:100%;min-width:40rem;height:auto}
th,td{overflow-wrap:break-word}table.many{min-width:48rem}
svg text{fill:var(--ink);font-size:13px;font-family:system-ui,sans-serif}
svg .name{text-anchor:end}svg .axis text{fill:var(--faint)}svg .grid{stroke:var(--line);stroke-width:1}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.3em}
.keys span{margin-right:1.2em;white-space:nowrap}
details{margin:.5rem 0}summary{cursor:pointer}
nav ul{padding-left:0;list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1rem}
@media print{details{display:block}.wide{overflow:visible}svg{min-width:0}}
""" + _CLASSES
)
