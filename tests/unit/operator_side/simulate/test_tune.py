"""`holdfast tune`: a file that our own settings accept, with reasons; and errors that name the cause."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.lease import Lease
from holdfast.command import cli
from holdfast.config import FlusherConfig, StagerConfig, TrainerConfig
from holdfast.policy.advice import advise
from holdfast.policy.cost import Cost
from holdfast.policy.hazard import Hazard
from holdfast.store import open_store
from tests.unit.operator_side.simulate.test_traces import COUNTS

_MEASURED = {
    "stall_seconds": 0.05,
    "staged_seconds": 4.0,
    "durable_seconds": 11.0,
    "restore_seconds": 20.0,
    "stager": True,
    "notice": True,
}
_PROFILE = {
    "source": "our job",
    "iteration_seconds": 1.8,
    "restart_seconds": 140,
    "strategies": {"holdfast": _MEASURED},
}


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["tune", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.fixture(name="trace")
def _trace(tmp_path: Path) -> Path:
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    return path


def _profile(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**_PROFILE, **changes}))
    return path


def _said(text: str) -> str:
    """Comments as one line: where they are folded is not what is asked."""
    return " ".join(line.removeprefix("#").strip() for line in text.splitlines())


_FULL = ("--spot-price", "12", "--lead-seconds", "30", "--ranks", "64", "--image-size", "84GB")


def test_tuned_settings_are_read_by_every_role(
    run: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {
        "holdfast": _MEASURED,
        "holdfast, 2 at once": {**_MEASURED, "durable_seconds": 15, "in_flight_max": 2},
    }
    file = tmp_path / "holdfast.toml"
    asked = (trace, "--profile", _profile(tmp_path, strategies=several), *_FULL, "--store", "s3://bucket/run")
    assert run(*asked, "--stager-memory", "64GiB", "--output", file) == (0, "", "")
    text = file.read_text()
    assert run(*asked, "--stager-memory", "64GiB") == (0, text, ""), "the same question, the same bytes"
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    trainer, stager, flusher = (of.from_sources() for of in (TrainerConfig, StagerConfig, FlusherConfig))
    assert isinstance(trainer, TrainerConfig)
    assert isinstance(stager, StagerConfig)
    assert isinstance(flusher, FlusherConfig)
    assert (trainer.in_flight_max, trainer.watch, trainer.store) == (2, ("auto",), "s3://bucket/run")
    assert flusher.store == stager.store == "s3://bucket/run"
    assert stager.ring_bytes is not None
    assert stager.ring_bytes < 64 << 30
    document = tomllib.loads(text)
    assert document["trainer"]["in_flight_max"] == 2
    assert all(isinstance(document[table], dict) for table in ("trainer", "stager"))
    assert "11 s with 1, 15 s with 2" in _said(text)
    assert "which fits into the 30 s of a notice" in _said(text)


def test_the_interval_is_the_one_that_the_policy_advises(run: Any, tmp_path: Path) -> None:
    code, out, _ = run(
        "--mtbf-hours", "2", "--profile", _profile(tmp_path), "--spot-price", "3", "--nodes", "4"
    )
    advice = advise(Cost(1.8, 0.05, 4.0, 11.0), Hazard.from_mtbf(2, 12.0))
    assert code == 0
    assert f"Checkpointer(state, every={advice.every})" in out
    assert advice.describe() in _said(out)
    assert "failures: one in 2 h, as set (mtbf_hours)" in _said(out)
    assert "Replayed" not in out, "there is no trace"


def test_a_trace_is_replayed_at_that_interval(run: Any, trace: Path, tmp_path: Path) -> None:
    code, out, _ = run(trace, "--profile", _profile(tmp_path))
    assert code == 0
    assert "1 in counts.csv" in _said(out)
    assert "Replayed over 20 windows" in _said(out)
    assert "ring_bytes is not set: give --image-size" in _said(out)


def test_a_document_of_simulate_is_a_profile(run: Any, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(json.dumps({"profile": _PROFILE, "traces": [], "seed": 0}))
    assert run(trace, "--profile", tmp_path / "whole.json") == run(trace, "--profile", _profile(tmp_path))


def test_a_file_that_is_there_is_overwritten_only_when_told_to(run: Any, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text("mine")
    code, out, err = run(trace, "--output", file)
    assert (code, out, file.read_text()) == (2, "", "mine")
    assert "exists already" in err
    assert "--force" in err
    assert run(trace, "--output", file, "--force")[0] == 0
    assert "in_flight_max" in file.read_text()
    assert "cannot be written" in run(trace, "--output", tmp_path / "none" / "file")[2]


def test_no_text_of_a_profile_becomes_a_setting(run: Any, tmp_path: Path) -> None:
    evil = 'x\nstore = "s3://theirs/run"\r[stager]\u2028ring_bytes = 1\x85\x1b[31m'
    strategies = {f"holdfast {evil}": _MEASURED}
    code, out, _ = run(
        "--mtbf-hours", "2", "--profile", _profile(tmp_path, source=evil, strategies=strategies)
    )
    assert code == 0
    assert tomllib.loads(out) == {"trainer": {"in_flight_max": 1}}
    assert "\x1b" not in out


@pytest.mark.parametrize("store", ['s3://bucket/a"b', "/mnt/a\x7fb/r\u00fcn"])
def test_any_store_comes_back_as_it_went_in(run: Any, tmp_path: Path, store: str) -> None:
    out = run("--mtbf-hours", "2", "--profile", _profile(tmp_path), "--store", store)[1]
    assert tomllib.loads(out)["store"] == store


def test_a_store_that_no_toml_can_name_is_refused(run: Any) -> None:
    code, out, err = run("--mtbf-hours", "2", "--store", "/mnt/\udcff")
    assert (code, out) == (2, "")
    assert "expected a URL in UTF-8" in err


def test_a_checkpoint_that_outlasts_its_interval_is_waited_for(run: Any, tmp_path: Path) -> None:
    asked = ("--mtbf-hours", "0.01", "--profile", _profile(tmp_path), "--overhead-max", "5")
    out = run(*asked)[1]
    assert tomllib.loads(out)["trainer"]["on_full"] == "wait"
    assert "on_full" not in run("--mtbf-hours", "8", *asked[2:])[1]


def test_a_notice_that_is_too_short_is_said(run: Any, tmp_path: Path) -> None:
    out = run("--mtbf-hours", "2", "--profile", _profile(tmp_path), "--lead-seconds", "2")[1]
    assert "which does not fit into the 2 s of a notice" in _said(out)


def test_the_stagers_machine_is_named_or_judged(run: Any, tmp_path: Path) -> None:
    asked = ("--mtbf-hours", "2", "--profile", _profile(tmp_path), "--image-size", "20GB")
    code, out, _ = run(*asked)
    assert code == 0
    assert "Stager: c7gn.4xlarge (50 Gbit/s, 32 GiB) is the smallest" in _said(out)
    assert "room for one checkpoint" in _said(out)
    assert (
        tomllib.loads(run(*asked, "--stager-type", "c7gn.8xlarge")[1])["stager"]["ring_bytes"] == "38176MiB"
    )
    slow = run(*asked, "--stager-type", "c7gn.4xlarge", "--store-gbps", "1")
    assert slow[0] == 2
    assert "One checkpoint every 160 s" in slow[2]
    none = run(*asked, "--store-gbps", "1")
    assert none[0] == 0
    assert "No known instance type can take 20 GB" in _said(none[1])
    assert "give the memory of the stager's machine" in _said(none[1])
    assert "ring of 8 chunks" in run(*asked, "--stager-memory", "1GiB")[2]
    assert "expected one of c7gn.4xlarge" in run(*asked, "--stager-type", "t3.nano")[2]


def test_the_size_of_chunks_is_said(run: Any, tmp_path: Path) -> None:
    asked = ("--mtbf-hours", "2", "--profile", _profile(tmp_path), "--stager-memory", "512GiB")
    for size, chunk, said in (
        ("50MB", "16MiB", "3"),
        ("20GB", "16MiB", "1,193"),
        ("120GB", "64MiB", "1,789"),
    ):
        code, out, _ = run(*asked, "--image-size", size)
        assert code == 0
        assert tomllib.loads(out)["stager"]["chunk_bytes"] == chunk
        assert f"is {said} chunks" in _said(out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iteration_seconds": 0}, "iteration_seconds: expected"),
        ({"iteration_seconds": -1}, "iteration_seconds: expected"),
        ({"restart_seconds": -1}, "restart_seconds: expected"),
        (
            {"strategies": {"holdfast": {**_MEASURED, "stall_seconds": -0.1}}},
            "holdfast.stall_seconds: expected",
        ),
        ({"strategies": {}}, "strategies: expected"),
        (
            {"strategies": {"torch.save": _MEASURED}},
            "--strategy holdfast: expected the beginning of a name in the profile: torch.save",
        ),
        (
            {"strategies": {"holdfast": _MEASURED, "holdfast 2": _MEASURED}},
            "both were measured with in_flight_max 1; name one",
        ),
        (
            {"strategies": {"holdfast": {**_MEASURED, "in_flight_max": 9}}},
            "expected a time measured for 1 to 8 at once",
        ),
    ],
)
def test_a_profile_that_says_nothing_is_named(
    run: Any, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    code, out, err = run("--mtbf-hours", "2", "--profile", _profile(tmp_path, **changes))
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("nonsense\n", "the format is not known"),
        ("", "got an empty file"),
        (",Time,GPUs\n0,100,4\n1,50,3\n", "rows in the order of time"),
        (",Time,GPUs\n0,-100,4\n1,50,3\n", "a time from 0"),
    ],
)
def test_a_trace_that_cannot_be_is_named(run: Any, tmp_path: Path, trace: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(trace)
    code, out, err = run(path, "--profile", _profile(tmp_path))
    assert (code, out) == (2, "")
    assert said in err


def test_a_bound_that_cannot_be_kept_says_what_can(run: Any, tmp_path: Path) -> None:
    code, out, err = run("--mtbf-hours", "2", "--profile", _profile(tmp_path), "--overhead-max", "1e-9")
    assert (code, out) == (2, "")
    assert "Possible: " in err


@pytest.mark.parametrize(
    "asked", [(), ("trace.csv", "--mtbf-hours", "2"), ("--run", "/mnt/run", "--mtbf-hours", "2")]
)
def test_tune_takes_one_of_trace_mtbf_and_run(run: Any, asked: tuple[str, ...]) -> None:
    code, _, err = run(*asked)
    assert code == 2
    assert "expected one of TRACE, --mtbf-hours and --run" in err


def test_the_price_is_that_of_the_cluster_or_as_given_and_says_which(run: Any, tmp_path: Path) -> None:
    asked = ("--mtbf-hours", "2", "--profile", _profile(tmp_path))
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"per_hour": 12.4, "nodes": [], "taken": []}))
    code, out, _ = run(*asked, "--cluster", cluster)
    assert code == 0
    assert "Price of all machines: $12.40 an hour, by `holdfast cluster status`." in _said(out)
    given = run(*asked, "--spot-price", "3", "--nodes", "4")[1]
    assert "Price of all machines: $12.00 an hour, as given." in _said(given)
    assert "Price" not in run(*asked)[1]
    assert "got both" in run(*asked, "--cluster", cluster, "--spot-price", "3")[2]
    for wrong in ("{}", "[]", "no JSON", '{"per_hour": null}', '{"per_hour": -1}'):
        cluster.write_text(wrong)
        code, _, err = run(*asked, "--cluster", cluster)
        assert code == 2
        assert f"--cluster {cluster}: expected" in err


def test_the_failures_of_a_run_are_taken_from_its_claims(run: Any, tmp_path: Path) -> None:
    asked = ("--profile", _profile(tmp_path), "--run", tmp_path / "run")
    code, _, err = run(*asked)
    assert code == 5
    assert "there is nothing at this URL" in err
    clock = [0.0]
    for _ in range(3):
        lease = Lease.acquire(open_store(str(tmp_path / "run")), takeover=True, clock=lambda: clock[0])
        lease.begin_work()
        clock[0] += 3600
        lease.end_work(lost=True)
        lease.release()
    code, out, _ = run(*asked)
    assert code == 0
    assert "failures: 3 in 3 h observed, prior 1 in 3 h → one in 1.5 h" in _said(out)


@pytest.mark.parametrize("size", ["many", "0", "-1GB", "0.3B", "99999999999TB"])
def test_a_size_that_is_none_is_named(run: Any, size: str) -> None:
    code, _, err = run("--mtbf-hours", "2", "--image-size", size)
    assert code == 2
    assert f"--image-size {size}: expected" in err
