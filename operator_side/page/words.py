"""Times, shares, money and rates, formatted for the pages."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.command.output import format_seconds, format_size


def moment(at_unix: float | None) -> str:
    """`2026-11-22 03:02:11 UTC`; `-` if unknown."""
    return "-" if at_unix is None else datetime.fromtimestamp(at_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at_unix: float | None) -> str:
    """`03:02:11 UTC`; `-` if unknown."""
    return "-" if at_unix is None else datetime.fromtimestamp(at_unix, UTC).strftime("%H:%M:%S UTC")


def brief(value: float | None) -> str:
    """Seconds in the unit that fits: `36.0 ms`, `3.40 s`, `4 min`; `-` if unknown."""
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if 0 < value < 0.1 else format_seconds(value)


def share(part: float, whole: float) -> str:
    """`86 %`, `0.3 %`."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def dollars(value: float | None) -> str:
    """`$12.40`; `-` without a price."""
    return "-" if value is None else f"${value:,.2f}"


def rate(bytes_per_second: float | None) -> str:
    """`1.4 GiB/s`."""
    return "-" if bytes_per_second is None else f"{format_size(int(bytes_per_second))}/s"


def plural(count: int, one: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
