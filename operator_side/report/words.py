"""Times, sizes and shares as the report writes them: the same in its sentences, tables and pictures."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.command.output import plain, seconds, size

__all__ = ["brief", "clock", "dollars", "moment", "plain", "plural", "rate", "share", "size"]


def moment(at_unix: float | None) -> str:
    """`2026-11-22 03:02:11 UTC`; `-` where it is not known."""
    return "-" if at_unix is None else datetime.fromtimestamp(at_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at_unix: float, *, day: bool = False) -> str:
    """`03:02:11`, or with its day `11-22 03:02`."""
    return datetime.fromtimestamp(at_unix, UTC).strftime("%m-%d %H:%M" if day else "%H:%M:%S")


def brief(value: float | None) -> str:
    """Seconds in the unit that fits: `36.0 ms`, `3.40 s`, `4 min`; `-` where they are not known."""
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if 0 < value < 0.1 else seconds(value)


def share(part: float, whole: float) -> str:
    """`86 %`, `0.3 %`."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def dollars(value: float | None) -> str:
    """`$12.40`; `-` without a price."""
    return "-" if value is None else f"${value:,.2f}"


def rate(nbytes: float | None) -> str:
    """Bytes in a second: `1.4 GiB/s`."""
    return "-" if nbytes is None else f"{size(int(nbytes))}/s"


def plural(count: int, one: str, many: str = "") -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"
