"""Traces: three formats with one meaning; every wrong line is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from operator_side.simulate.strategy import SECOND_US
from operator_side.simulate.trace_windows import cut_windows, poisson_windows
from operator_side.simulate.traces import Trace, read_trace

COUNTS = """,Time,GPUs
0,1652434464.406314,56
1,1652434527.406314,56
2,1652434590.406314,36
3,1652434653.406314,41
4,1652434716.406314,41
"""
DATED = """2021-12-11, 23:59:00, 55
2021-12-11, 23:59:30, 55
2021-12-12, 00:00:30, 50
2021-12-12, 00:01:00, 60
"""
NODES = """480000,add,node1
480000,add,node2
540000,add,node3
600000,remove,node1
600000,add,node4
660000,remove,node2
660000,remove,node3
"""


@pytest.fixture(name="read")
def _read(tmp_path: Path) -> object:
    def read(text: str | bytes) -> Trace:
        path = tmp_path / "trace.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(path)

    return read


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [
        (time / SECOND_US, count, lost)
        for time, count, lost in zip(
            trace.time_us.tolist(), trace.count.tolist(), trace.lost.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COUNTS, [(0, 56, 0), (126, 36, 20), (189, 41, 0), (252, 41, 0)]),
        (DATED, [(0, 55, 0), (90, 50, 5), (120, 60, 0)]),
        # A count would hide the loss at 120 s, since another machine comes in the same moment.
        (NODES, [(0, 2, 0), (60, 3, 0), (120, 3, 1), (180, 1, 2)]),
    ],
)
def test_every_form_becomes_what_is_held_and_what_was_lost(
    read: object, text: str, expected: list[tuple[float, int, int]]
) -> None:
    assert rows(read(text)) == expected  # type: ignore[operator]
    windows_line_ends = text.replace("\n", "\r\n") + "\r\n\r\n"
    assert rows(read(windows_line_ends)) == expected  # type: ignore[operator]


def test_losses_are_counted_by_the_hour(read: object) -> None:
    trace = read(NODES)  # type: ignore[operator]
    assert (trace.losses, trace.count_max) == (2, 3)
    assert trace.losses_per_hour == pytest.approx(2 / (180 / 3600))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "trace.csv: expected a trace, got an empty file"),
        ("\n\n", "got an empty file"),
        ("hello\n", "trace.csv:1: .*the format is not known, got 'hello'"),
        (COUNTS + "5,1652434779.4\n", "trace.csv:7: expected number,seconds,count"),
        (COUNTS + "5,1652434700.4,41\n", r"trace.csv:7: .*order of time.*16.0063 s earlier.*sort the file"),
        (COUNTS + "5,-1,41\n", "trace.csv:7: expected a time from 0"),
        (COUNTS + "5,soon,41\n", "trace.csv:7: expected a time, a number"),
        (COUNTS + "5,1e300,41\n", "trace.csv:7: expected a time from 0"),
        (COUNTS + "5,nan,41\n", "trace.csv:7: expected a time from 0"),
        (COUNTS + "5,1652434779,-3\n", "trace.csv:7: expected a number of machines"),
        (COUNTS + "5,1652434779,1.5\n", "trace.csv:7: expected a number of machines"),
        (COUNTS + "5,1652434779,99999999999\n", "trace.csv:7: expected a number of machines"),
        (",Time,GPUs\n", "trace.csv:1: expected at least two moments"),
        (",Time,GPUs\n0,5,3\n0,5,2\n", "trace.csv:3: expected a trace that lasts"),
        (DATED + "2021-12-12, 00:00:59, 60\n", "trace.csv:5: .*order of time"),
        (DATED + "2021-02-31, 00:00:59, 60\n", "trace.csv:5: expected a date and a time that exist"),
        (DATED + "480000,add,node1\n", "trace.csv:5: expected date, time, count"),
        (NODES + "660000,remove,node3\n", "trace.csv:8: expected a machine that is held"),
        (NODES + "660000,add,node4\n", "trace.csv:8: expected a machine that was not added before"),
        (NODES + "660000,moved,node4\n", "trace.csv:8: expected milliseconds,add or remove,node"),
        (NODES + "659999,remove,node4\n", "trace.csv:8: .*order of time"),
        (NODES + "-5,add,node9\n", "trace.csv:8: expected a time from 0"),
        (b"\xff\xfe\0", "trace.csv: cannot be read"),
    ],
)
def test_a_line_that_is_wrong_is_named(read: object, text: str | bytes, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        read(text)  # type: ignore[operator]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.csv"):
        with pytest.raises(ConfigError, match=f"{path}: cannot be read"):
            read_trace(path)


_WORDS = (
    "add",
    "remove",
    "node1",
    "2021-12-11",
    "11:11:30",
    "",
    "-1",
    "7",
    "1e300",
    "inf",
    "nan",
    "²",
    "\0",
    " 3 ",
    "\ud7ff",
)
_CELL = st.one_of(st.sampled_from(_WORDS), st.integers(0, 10**12).map(str))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["", ",Time,GPUs", "2021-12-11, 11:11:30, 55", "0,add,node1"]),
    st.lists(st.lists(_CELL, min_size=2, max_size=4), max_size=6),
)
@example(",Time,GPUs", [["0", "1e400", "1"], ["1", "2", "²"]])
@example("0,add,node1", [["9" * 400, "add", "node2"]])
def test_read_trace_gives_a_trace_or_a_config_error(
    tmp_path: Path, head: str, cells: list[list[str]]
) -> None:
    path = tmp_path / "any.csv"
    path.write_text("\n".join([head, *(",".join(row) for row in cells)]), encoding="utf-8")
    try:
        trace = read_trace(path)
    except ConfigError:
        return
    assert (np.diff(trace.time_us) >= 0).all()
    assert (trace.count >= 0).all()
    assert trace.end_us > 0


# -- windows ------------------------------------------------------------------------------------------------------


def test_a_window_is_a_piece_of_the_trace_and_invents_nothing(read: object) -> None:
    trace = read(NODES)  # type: ignore[operator]
    windows = cut_windows(trace, length_us=90 * SECOND_US, offsets=50, rng=np.random.default_rng(1))
    lost = windows.lost.sum(axis=0)
    assert set(lost.tolist()) == {0, 1}, "the moment at the very end is in the whole trace alone"
    assert (np.diff(windows.time_us, axis=0) >= 0).all()
    again = cut_windows(trace, length_us=90 * SECOND_US, offsets=50, rng=np.random.default_rng(1))
    assert (again.time_us == windows.time_us).all(), "the seed decides"
    whole = cut_windows(trace, length_us=trace.end_us, offsets=1, rng=np.random.default_rng(1))
    assert whole.node_microseconds(2).tolist() == [2 * 180 * SECOND_US]
    assert whole.node_microseconds(3).tolist() == [(2 * 60 + 3 * 120) * SECOND_US]


@pytest.mark.parametrize("length_us", [0, 180 * SECOND_US + 1])
def test_a_window_longer_than_the_trace_is_refused(read: object, length_us: int) -> None:
    with pytest.raises(ConfigError, match=r"at most 0\.05 h"):
        cut_windows(read(NODES), length_us=length_us, offsets=1, rng=np.random.default_rng(1))  # type: ignore[operator]


def test_losses_of_the_stager_come_between_the_others(read: object) -> None:
    trace = read(NODES)  # type: ignore[operator]
    windows = cut_windows(
        trace, length_us=trace.end_us, offsets=1, rng=np.random.default_rng(1), stager_mtbf_us=10 * SECOND_US
    )
    stager = windows.stager_lost[:, 0] > 0
    assert stager.sum() > 5
    assert windows.lost[stager, 0].sum() == 0
    assert windows.lost.sum() == 3
    for time, count in zip(windows.time_us[stager, 0], windows.count[stager, 0], strict=True):
        assert count == trace.count[np.searchsorted(trace.time_us, time, side="right") - 1]


def test_made_up_losses_come_as_often_as_was_asked_and_are_replaced() -> None:
    windows = poisson_windows(
        nodes=8, mtbf_us=1000, provision_us=50, length_us=100_000, samples=40, rng=np.random.default_rng(3)
    )
    assert windows.lost.sum() / 40 == pytest.approx(100, rel=0.05)
    assert windows.count.max() == 8
    ends = windows.time_us[-1] < windows.length_us - 50
    assert (windows.count[-1, ends] == 8).all()
    with pytest.raises(ConfigError, match="expected at most 1000000"):
        poisson_windows(
            nodes=8, mtbf_us=1, provision_us=0, length_us=10**9, samples=1, rng=np.random.default_rng(3)
        )
