"""Pictures of a study, as SVG: equal figures give equal bytes. Only this module imports matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from operator_side.simulate.study import Spread, StrategyGoodput, Total

_SIZE_INCHES = (7.0, 4.0)


def draw_goodput(rows: Sequence[StrategyGoodput], name: str, folder: Path) -> Path:
    """Draw goodput by interval, a line per strategy with the windows' least and greatest. Raises `ConfigError`."""
    series: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        series.setdefault(row.strategy.name, []).append((row.every, row.share))
    plain_name = re.sub(r"[^\w.-]", "-", name)
    path = folder / f"goodput-{plain_name}.svg"
    return _draw(series, path, x="iterations between two checkpoints", y="goodput, share of the ideal")


def draw_totals(rows: Sequence[Total], folder: Path) -> Path:
    """Draw total training time by MTBF, each strategy at its own best interval. Raises as `draw_goodput`."""
    series: dict[str, list[tuple[float, Spread]]] = {}
    for row in rows:
        points = series.setdefault(row.strategy.name, [])
        if row.hours is not None:
            points.append((row.mtbf_hours, row.hours))
    return _draw(
        series, folder / "total-time.svg", x="hours between two losses (MTBF)", y="total training time, hours"
    )


def _draw(series: dict[str, list[tuple[float, Spread]]], path: Path, *, x: str, y: str) -> Path:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--figures: matplotlib is not installed; run: pip install matplotlib") from error
    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "holdfast", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=_SIZE_INCHES, layout="constrained")
        try:
            for name, points in series.items():
                _line(axes, name, points)
            axes.set_xscale("log")
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None, "Title": f"holdfast simulate: {path.stem}"})
        except OSError as error:
            raise ConfigError(
                f"--figures {path.parent}: cannot be written: {error}; name another folder"
            ) from error
        finally:
            plt.close(figure)
    return path


def _line(axes: Any, name: str, points: list[tuple[float, Spread]]) -> None:
    if not points:
        return
    places, medians = [place for place, _ in points], [spread.median for _, spread in points]
    below = [spread.median - spread.least for _, spread in points]
    above = [spread.greatest - spread.median for _, spread in points]
    if name == "ideal" and len(points) == 1:
        axes.axhline(medians[0], color="black", lw=0.8, ls="--", label=name)
        return
    axes.errorbar(places, medians, yerr=[below, above], fmt="o-", ms=3, lw=1, capsize=2, label=name)
