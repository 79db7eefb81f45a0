"""The demo as one picture: the losses of the uninterrupted run, of the killed one, and of the resumed one.

loss │ ▒▒▒ uninterrupted     the three lines coincide, because every loss has the same bits
     │ ─── until SIGKILL ┊
     │        ├ ─── resumed from the newest checkpoint
     └──────────────────────────────── step
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.demo.story import Outcome, Played

_WIDTH_INCHES, _HEIGHT_INCHES = 7.2, 2.9
# The picture has no background. A dark page takes the second colour of each pair: no grey is readable on both.
_TEXT, _UNINTERRUPTED, _KILLED, _RESUMED = "#57606a", "#afb8c1", "#1a7f37", "#cf222e"
_ON_DARK = {_TEXT: "#9da7b3", _UNINTERRUPTED: "#545d68", _KILLED: "#3fb950", _RESUMED: "#ff7b72"}


def draw(outcome: Outcome, path: Path) -> bool:
    """Write the picture as an SVG to `path`. Returns False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return False
    killed_after = outcome.killed.steps[-1].step
    resumed_from = outcome.resumed.steps[0].step
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    FigureCanvasSVG(figure)
    axes: Any = figure.add_subplot()
    _line(axes, outcome.reference, "never interrupted", color=_UNINTERRUPTED, lw=7, solid_capstyle="round")
    _line(axes, outcome.killed, "until the kill", color=_KILLED, lw=1.8)
    _line(
        axes,
        outcome.resumed,
        f"resumed from step {resumed_from - 1}",
        color=_RESUMED,
        lw=1.8,
        ls=(0, (3, 1.5)),
    )
    axes.axvline(killed_after, color=_TEXT, lw=1, ls=":")
    axes.annotate(
        f"SIGKILL to all {outcome.plan.ranks} training ranks\nafter step {killed_after}",
        (killed_after, axes.get_ylim()[1]),
        xytext=(6, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=_TEXT,
    )
    axes.set_xlabel("training step", color=_TEXT)
    axes.set_ylabel("loss", color=_TEXT)
    axes.tick_params(color=_TEXT, labelcolor=_TEXT)
    axes.set_xlim(0, outcome.plan.steps - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(_TEXT)
    axes.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.78), labelcolor=_TEXT)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": "make demo"})
    path.write_text(_follow_scheme(path.read_text(encoding="utf-8")), encoding="utf-8")
    return True


def _follow_scheme(svg: str) -> str:
    """Add the colours of a dark page. They override those of the elements, which any other viewer shows."""
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}: {dark} !important}}'
        for light, dark in _ON_DARK.items()
        for name in ("fill", "stroke")
    )
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)


def _line(axes: Any, played: Played, label: str, **style: Any) -> None:
    axes.plot(
        [step.step for step in played.steps], [step.loss for step in played.steps], label=label, **style
    )
