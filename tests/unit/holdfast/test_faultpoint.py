"""Fault points: inert unless armed, and otherwise exactly the armed fault."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.faultpoint import FIRED_VARIABLE, VARIABLE, Fault, Point, parse_faults

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import sys
from holdfast.faultpoint import Point, identify, reach
identify(sys.argv[1])
for number in range(int(sys.argv[2])):
    reach(Point.FRAME_SENT)
    print(number, flush=True)
"""


def run(who: str, times: int, armed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, who, str(times)],
        env={**os.environ, VARIABLE: armed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("who", "armed", "lives"),
    [
        ("rank:1", "rank:1@frame_sent#3=kill", 2),
        ("rank:1", "rank@frame_sent=kill", 0),
        ("rank:1", "rank:0@frame_sent=kill", 5),
        ("rank:11", "rank:1@frame_sent=kill", 5),
        ("stager", "flusher@frame_sent=kill, stager@frame_sent#5=kill", 4),
        ("rank:1", "rank:1@frame_sent#6=kill", 5),
        ("rank:1", "rank:1@slice_sent=kill", 5),
        ("rank:1", "", 5),
    ],
)
def test_the_process_dies_exactly_there(who: str, armed: str, lives: int) -> None:
    done = run(who, 5, armed)
    assert done.stdout.split() == [str(number) for number in range(lives)], done.stderr
    assert done.returncode == (0 if lives == 5 else -signal.SIGKILL)


def test_stop_stands_still_until_it_is_told_to_go_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "stager", "2"],
        env={**os.environ, VARIABLE: "stager@frame_sent#2=stop", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
        assert out.split() == ["0", "1"]
    finally:
        process.kill()
        process.wait()


def test_a_fault_with_a_directory_strikes_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIRED_VARIABLE, str(tmp_path))
    assert run("flusher", 3, "flusher@frame_sent#2=kill").returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["flusher@frame_sent#2"]
    assert run("flusher", 3, "flusher@frame_sent#2=kill").returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "frame_sent",
        "rank:1@nowhere=kill",
        "rank:1@frame_sent=hug",
        "rank:1@frame_sent#0=kill",
        "x@staged=kill",
    ],
)
def test_an_unreadable_fault_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE) as caught:
        parse_faults(text)
    assert repr(text) in str(caught.value)


def test_several_are_read() -> None:
    assert parse_faults("rank:1@staged#2=stop,, flusher@part_begun=kill") == [
        Fault("rank:1", Point.STAGED, 2, "stop"),
        Fault("flusher", Point.PART_BEGUN, 1, "kill"),
    ]


def test_every_point_is_reached_somewhere_in_the_product() -> None:
    reached = set()
    for package in ("holdfast", "trainer_side", "stager", "flusher"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reach":
                    reached.add(ast.unparse(node.args[0]).removeprefix("Point."))
    assert reached | {"PART_RECORDED"} == {point.name for point in Point}
