"""Secrets stay where the user put them: not in logs, events, manifests, claims, the ring's files, or process lists."""

from __future__ import annotations

import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.errors import ConfigError
from holdfast.store import normalise_url, open_store
from tests.integration.jobs import train
from tests.support.cluster import SMALL, Cluster
from tests.support.job import HOLDFAST, environment
from tests.support.s3_place import fresh_bucket, plain_client, s3_environment

SECRET = f"hush-{secrets.token_hex(12)}"

HIDING = [
    f"elsewhere://user:{SECRET}@host/run",
    f"s3://AKIA:{SECRET}@bucket/run",
    f"s3://{SECRET}@bucket/run",
    f"elsewhere://host/run?token={SECRET}",
    f"elsewhere://host/run#token={SECRET}",
    f"s3://bucket/run?X-Amz-Signature={SECRET}",
    f"simplecache::s3://AKIA:{SECRET}@bucket/run",
    f"file://user:{SECRET}@localhost/run",
    f"https://user:{SECRET}@[host/run",
]


@pytest.mark.parametrize("url", HIDING, ids=range(len(HIDING)))
def test_a_url_that_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    for act in (normalise_url, open_store):
        with pytest.raises(ConfigError) as caught:
            act(url)
        assert SECRET not in str(caught.value)
        assert "URL" in str(caught.value)


def test_runs_that_differ_behind_a_hash_are_not_taken_for_one() -> None:
    with pytest.raises(ConfigError, match="fragment"):
        normalise_url("s3://bucket/run#2")


class _Watch:
    """Polls the process list, as any user of the machine may."""

    def __init__(self) -> None:
        self.looks = 0
        self.lines: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for process in psutil.process_iter():
                try:
                    self.lines.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue
            self.looks += 1

    @contextmanager
    def watching(self) -> Iterator[_Watch]:
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join(60)


def _told(directory: Path) -> dict[str, bytes]:
    """All files below a directory: logs, events, rings, the ranks' output."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.mpi
def test_no_secret_leaves_the_environment_of_a_real_job(
    moto_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and a session token in the environment, a run on S3, one that fails midway, and the tools."""
    env = s3_environment(moto_endpoint, "AKIAEXAMPLE", SECRET)
    env |= {"AWS_SESSION_TOKEN": f"{SECRET}-token", "HOLDFAST_EVENTS": str(tmp_path / "events.jsonl")}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    bucket = fresh_bucket()
    said: dict[str, bytes] = {}
    with _Watch().watching() as watch:
        cluster = Cluster(tmp_path, f"s3://{bucket}/team/run", env, script=train.__file__, stager=SMALL)
        with cluster.start(1, "4", "2") as job:
            job.succeed(250)
            said["the job"] = job.output().encode()
        cluster.wait_for_flusher(120)
        good, missing = f"s3://{bucket}/team/run", f"s3://no-such-{bucket}/run"
        for command, where in ((["verify"], good), (["ls"], missing), (["flusher", "--store"], missing)):
            done = subprocess.run(
                [HOLDFAST, "-vv", *command, where],
                env=environment(tmp_path / "tools", **env),
                capture_output=True,
                check=False,
                timeout=200,
            )
            said[" ".join([*command, where])] = done.stdout + done.stderr
            assert (done.returncode == 0) == (where == good), done.stderr
    client = plain_client()
    keys = [found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]]
    for key in keys:
        answer = client.get_object(Bucket=bucket, Key=key)
        said[f"object {key}"] = answer["Body"].read() + repr(answer["Metadata"]).encode()
    client.close()
    said |= _told(tmp_path)
    assert any(key.endswith(".json") and "step-" in key for key in keys)
    assert any("writer-" in key for key in keys)
    assert any(path.endswith(".log") for path in said)
    assert any(path.endswith("events.jsonl") for path in said)
    assert [where for where, data in said.items() if SECRET.encode() in data] == []
    assert watch.looks > 2
    assert any("-m flusher" in line for line in watch.lines), "the flusher was never seen"
    assert [line for line in watch.lines if SECRET in line] == []


@pytest.mark.mpi
def test_a_secret_in_a_url_ends_the_job_and_is_handed_on_to_nobody(tmp_path: Path) -> None:
    """A user who types it shows it in the process list; holdfast exposes it nowhere else."""
    cluster = Cluster(tmp_path, HIDING[0], {}, script=train.__file__, stager=SMALL)
    with _Watch().watching() as watch:
        with cluster.start(1, "4", "2") as job:
            assert job.wait(250) != 0
        for arguments in (["-vv", "verify"],):
            done = subprocess.run(
                [HOLDFAST, *arguments, HIDING[1]],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == ConfigError.exit_code
            assert SECRET not in done.stdout + done.stderr
            assert "credentials" in done.stdout + done.stderr
    assert "holds credentials" in job.output()
    assert SECRET not in job.output()
    assert [path for path, data in _told(tmp_path).items() if SECRET.encode() in data] == []
    assert [line for line in watch.lines if "-m flusher" in line and SECRET in line] == []
