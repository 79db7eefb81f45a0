"""Parsers of outside input: lines of mpirun, the event log, host files and Slurm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import ShareNumber
from holdfast.notices.messages import EventLine
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.notices.preemption import PreemptionCoordinator
from holdfast.supervised import MARK, SET_ASIDE_VARIABLE
from holdfast.telemetry.event_follower import Follower
from operator_side.supervise.hosts import Host, HostFile, Slurm, place_ranks
from operator_side.supervise.job_output import (
    Output,
    OutputLine,
    find_exception,
    parse_event,
    parse_line,
    parse_report,
)
from operator_side.supervise.job_processes import JobProcesses, RunFiles
from operator_side.supervise.supervisor_messages import (
    AllJoined,
    Launch,
    ProcessExited,
    ProcessStarted,
    RankNoticed,
    RankRestored,
    RankSilence,
    RankStepped,
    Report,
    StepDurable,
    StepStaged,
)


def test_tags_are_taken_off() -> None:
    assert parse_line("[1,12]<stderr>: text: [1,3]<stdout>: x") == OutputLine(
        12, "stderr", "text: [1,3]<stdout>: x"
    )
    assert parse_line("[1,0]<stdout>: ") == OutputLine(0, "stdout", "")
    assert parse_line("prterun noticed") == OutputLine(None, "stderr", "prterun noticed")


@given(st.text(max_size=200))
def test_no_line_is_too_strange(text: str) -> None:
    assert text.endswith(parse_line(text).text)
    assert text.startswith(MARK) or parse_report(text) is None
    report = parse_report(MARK + text)
    assert report is None or report.rank >= 0


@pytest.mark.parametrize(
    "said",
    [
        '{"ended": {"rank": -1, "status": 0}}',
        '{"ended": {"rank": 1}}',
        '{"stepped": {"rank": 1, "step": "0"}}',
        '{"restored": {"rank": 1, "step": 5, "attempt": "1"}}',
        '{"restored": {"rank": 1, "step": 5, "attempt": 1, "before": "newest"}}',
        '{"restored": {"rank": 1, "step": 5, "attempt": 1, "before": 3}}',
        '{"ended": 3}',
        "[]",
        '{"x": {"rank": 1}}',
    ],
)
def test_reports_that_are_none(said: str) -> None:
    assert parse_report(MARK + said) is None


def test_a_restored_checkpoint_is_named_with_the_one_before() -> None:
    said = '{"restored": {"rank": 1, "step": 5, "attempt": 2, "before": "3-a1"}}'
    assert parse_report(MARK + said) == RankRestored(1, 5, 2, CheckpointId(1, 3))
    assert parse_report(MARK + '{"restored": {"rank": 1, "step": 5, "attempt": 2}}') == RankRestored(1, 5, 2)
    assert parse_report(MARK + '{"restored": {"rank": 1, "step": 5}}') == RankRestored(1, 5)


def feed(tmp_path: Path, *lines: str, ranks: int = 2) -> tuple[Output, list[Report], list[tuple[str, str]]]:
    relayed: list[tuple[str, str]] = []
    output = Output(tmp_path / "attempt", ranks, lambda stream, text: relayed.append((stream, text)))
    found: list[Report] = []
    data = "".join(line + "\n" for line in lines).encode()
    for start in range(0, len(data), 7):  # in pieces, as from a pipe
        found += output.feed(data[start : start + 7])
    return output, found + output.feed(b""), relayed


def test_each_process_has_its_file_and_reports_are_not_shown(tmp_path: Path) -> None:
    output, found, relayed = feed(
        tmp_path,
        f"[1,0]<stderr>: {MARK}" + json.dumps({"began": {"rank": 0, "host": "h", "pid": 1}}),
        f"[1,0]<stderr>: {MARK}" + json.dumps({"restored": {"rank": 0, "step": -1}}),
        f"[1,0]<stderr>: {MARK}" + json.dumps({"stepped": {"rank": 0, "step": 0}}),
        "[1,0]<stdout>: step 1",
        "[1,2]<stderr>: staged",
        "no tag",
        f"[1,1]<stderr>: {MARK}"
        + json.dumps({"ended": {"rank": 0, "status": 0}}),  # claims to be another rank
        "[1,1]<stderr>: Traceback (most recent call last):",
        '[1,1]<stderr>:   File "x.py", line 3',
        "[1,1]<stderr>: torch.OutOfMemoryError: too much",
        f"[1,1]<stderr>: {MARK}" + json.dumps({"ended": {"rank": 1, "status": 1}}),
        f"[1,2]<stderr>: {MARK}" + json.dumps({"ended": {"rank": 2, "status": -9, "out_of_memory": True}}),
    )
    output.close()
    assert found == [
        ProcessStarted(0, "h"),
        RankRestored(0, -1),
        RankStepped(0, 0),
        ProcessExited(1, 1, "torch.OutOfMemoryError"),
        ProcessExited(2, -9, out_of_memory=True),
    ]
    assert ("stdout", "step 1") in relayed
    assert not any("ended" in text for _, text in relayed)
    files = {path.name: path.read_text() for path in (tmp_path / "attempt").iterdir()}
    assert files["rank-0.log"] == "step 1\n"
    assert files["stager.log"] == "staged\n"
    assert files["mpirun.log"] == "no tag\n"
    assert output.tail(1)[-1] == "torch.OutOfMemoryError: too much"


def test_each_of_several_stagers_has_its_file(tmp_path: Path) -> None:
    output = Output(tmp_path / "attempt", 2, lambda stream, text: None, stagers=2)
    output.feed(b"[1,2]<stderr>: first\n[1,3]<stderr>: second\n[1,4]<stderr>: nobody\n")
    output.close()
    files = {path.name: path.read_text() for path in (tmp_path / "attempt").iterdir()}
    assert files == {"stager-1.log": "first\n", "stager-2.log": "second\n", "mpirun.log": "nobody\n"}


def test_the_last_traceback_counts_also_with_torchs_prefix() -> None:
    first = ["Traceback (most recent call last):", "  x", "KeyError: 1"]
    second = ["[rank1]: Traceback (most recent call last):", "[rank1]:   x", "[rank1]: ValueError"]
    assert find_exception(first) == "KeyError"
    assert find_exception([*first, "text", *second]) == "ValueError"
    assert find_exception(["ValueError: only said"]) == ""


def test_the_event_log_is_followed_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{"event": "staged", "role": "stager", "step": 1}\n')
    follower = Follower(path)
    assert list(follower.read()) == []
    with path.open("a") as file:
        file.write('{"event": "staged", "ro')
    assert list(follower.read()) == []
    with path.open("a") as file:
        file.write(
            'le": "stager", "step": 2}\nnot json\n[]\n{"event": "durable", "role": "flusher", "step": 2}\n'
        )
    assert [parse_event(said) for said in follower.read()] == [StepStaged(2), StepDurable(2)]
    follower.close()


def _notice(kind: NoticeKind) -> dict[str, object]:
    """Return the line that the stager writes after rank 1's notice."""
    emergency = PreemptionCoordinator(2, tuple)
    said = emergency.on_notice(1, Notice(kind, None, "aws", "a test"), 60.0, "rank 1 on host spot-1", 0.0)[0]
    assert isinstance(said, EventLine)
    return {"event": said.event, "role": "stager", **said.fields}


@pytest.mark.parametrize(
    ("said", "event"),
    [
        ({"event": "staged", "role": "trainer", "step": 3}, None),
        ({"event": "flush_failed", "role": "flusher", "step": 3}, None),
        ({"event": "rank_silent", "role": "stager", "silent_rank": 2}, RankSilence(2)),
        ({"event": "rank_back", "role": "stager", "silent_rank": 2}, RankSilence(2, is_over=True)),
        ({"event": "rank_silent", "role": "stager", "silent_rank": "2"}, None),
        (_notice(NoticeKind.TERMINATE), RankNoticed(1)),
        (_notice(NoticeKind.REBALANCE), None),
        ({"event": "stager_ready", "role": "stager", "attempt": 1}, AllJoined()),
        ({"event": "staged", "role": "stager", "step": "3"}, None),
        ({"event": "staged", "role": "stager", "step": 3, "share": "2/3"}, StepStaged(3, ShareNumber(1, 3))),
        ({"event": "staged", "role": "stager", "step": 3, "share": "4/3"}, None),
        ({}, None),
    ],
)
def test_an_event_line_has_its_meaning(said: dict[str, object], event: object) -> None:
    assert parse_event(said) == event


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# comment\nlocalhost slots=2 max-slots=9\n\n127.0.0.1   # one\nlocalhost slots=1\n10.0.0.9 slots=0\n"
    )
    assert HostFile(path).list_hosts() == (Host("localhost", 3), Host("127.0.0.1", 1))
    path.write_text("localhost slots=2\n-oProxyCommand=x\n")
    with pytest.raises(ConfigError, match="line 2"):
        HostFile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        HostFile(tmp_path / "none")


def test_a_host_that_does_not_answer_is_not_there(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\necho "$@" >>"$0.log"\ntest "$1" = spot-1\n')
    agent.chmod(0o755)
    path = tmp_path / "hosts"
    path.write_text("spot-1 slots=2\nspot-2 slots=2\nlocalhost\n")
    assert HostFile(path, agent=[str(agent)]).list_hosts() == (Host("spot-1", 2), Host("localhost", 1))
    assert sorted((tmp_path / "agent.log").read_text().splitlines()) == ["spot-1 true", "spot-2 true"]


def test_a_slurm_fleet_follows_the_jobs_nodes() -> None:
    ours = "n[1-4]"

    def scontrol(arguments: Sequence[str]) -> str:
        what, which = arguments[1:3]
        names = {"n[1-3]": "n1 n2 n3", "n[1-4]": "n1 n2 n3 n4", "n[2-4]": "n2 n3 n4"}
        if what == "hostnames":
            return names[which].replace(" ", "\n")
        if what == "job":
            assert which == "7"
            return f"JobId=7 JobState=RUNNING ReqNodeList=n[1-9] ExcNodeList=(null) NodeList={ours} BatchHost=n1\n"
        states = {
            "n1": "ALLOCATED+CLOUD ThreadsPerCore=1",
            "n2": "DOWN+CLOUD+POWERED_DOWN",
            "n3": "ALLOCATED*",
            "n4": "MIXED",
        }
        return "".join(f"NodeName={name} Arch=x86_64 State={states[name]} x=1\n" for name in which.split(","))

    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "4(x2),1(x2)"}
    fleet = Slurm(environment, scontrol)
    assert fleet.list_hosts() == (Host("n1", 4), Host("n4", 1))
    ours = "n[2-4]"  # n1 failed, was removed from the job, and is up again
    assert fleet.list_hosts() == (Host("n4", 1),)
    ours = "(null)"
    assert fleet.list_hosts() == ()
    with pytest.raises(ConfigError, match="inside sbatch"):
        Slurm({"SLURM_JOB_ID": "7"}, scontrol)
    with pytest.raises(ConfigError, match="3 nodes"):
        Slurm({**environment, "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2)"}, scontrol)


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 12))
def test_ranks_are_placed_once_each(slots: list[int], wanted: int) -> None:
    given_hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
    placed = place_ranks(given_hosts, wanted)
    assert sum(host.slots for host in placed) == min(wanted, sum(slots))
    assert all(0 < host.slots <= slots[int(host.name[1:])] for host in placed)
    assert [host.name for host in placed] == sorted(host.name for host in placed)


@pytest.mark.parametrize(
    ("by_hand", "set_aside", "expected"),
    [
        (None, (), None),
        ("9-a1", (), "9-a1"),
        (None, (CheckpointId(1, 5), CheckpointId(4, 3)), "5-a1,3-a4"),
        ("9-a1", (CheckpointId(1, 5),), "9-a1,5-a1"),
        ("", (CheckpointId(1, 5),), "5-a1"),
    ],
)
def test_an_attempt_is_told_what_is_set_aside(
    tmp_path: Path, by_hand: str | None, set_aside: tuple[CheckpointId, ...], expected: str | None
) -> None:
    given = dict(os.environ) | ({} if by_hand is None else {SET_ASIDE_VARIABLE: by_hand})
    script = f"import os; print('told', os.environ.get({SET_ASIDE_VARIABLE!r}))"
    said, _ = _attempt(tmp_path, script, given, set_aside)
    assert said == [f"told {expected}"]


def test_an_mpirun_that_says_nothing_more_is_waited_for_without_looking_again_and_again(
    tmp_path: Path,
) -> None:
    script = "import os, time; print('last words', flush=True); os.closerange(1, 3); time.sleep(1)"
    said, waits = _attempt(tmp_path, script, os.environ)
    assert said == ["last words"]
    assert waits < 10  # its output, the end of that, its exit


def _attempt(
    folder: Path, script: str, environment: Mapping[str, str], set_aside: tuple[CheckpointId, ...] = ()
) -> tuple[list[str], int]:
    """Run a script in place of mpirun; return its output lines and the number of waits until its end."""
    said: list[str] = []
    files = RunFiles((folder / "runtime" / "ring",), folder / "logs", folder / "events")
    job = JobProcesses(
        lambda _: [sys.executable, "-c", script], environment, files, lambda _, text: said.append(text)
    )
    wakes = os.eventfd(0)
    try:
        job.launch(Launch(2, 1, (Host("here", 1),), set_aside))
        waits = 0
        while job.poll()[1] is None:
            job.wait(60.0, wakes)
            waits += 1
        job.close()
    finally:
        os.close(wakes)
    return said, waits


@pytest.mark.parametrize("set_aside", [(), (CheckpointId(1, 5),)])
def test_other_hosts_are_told_as_well(
    monkeypatch: pytest.MonkeyPatch, set_aside: tuple[CheckpointId, ...]
) -> None:
    from holdfast.config import StagerConfig
    from operator_side.commands.run import _mpirun

    monkeypatch.setattr("holdfast.mpirun.find_mpirun", lambda: "mpirun", raising=False)
    monkeypatch.delenv(SET_ASIDE_VARIABLE, raising=False)
    options = {
        "settings": (),
        "mpirun_options": "",
        "agent": None,
        "exported": (),
        "ulfm": True,
        "stager_host": "me",
        "stagers": 1,
    }
    launch = Launch(2, 1, (Host("there", 1),), set_aside)
    line = _mpirun(launch, ["train"], StagerConfig(store="/run"), Path("events"), options)
    passed_on = {line[at + 1] for at, word in enumerate(line) if word == "-x"}
    assert (SET_ASIDE_VARIABLE in passed_on) is bool(set_aside)
