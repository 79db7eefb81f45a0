"""One small job watched in every way: `/metrics`, traces, `holdfast status` in a terminal, as JSON and as a page.

train ─► two checkpoints verified, ranks pause: scrape, query ─► kill the ranks ─► all processes end: query again
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast.telemetry.spans import root_ids
from tests.integration.jobs import train
from tests.integration.test_metrics import two_free_ports
from tests.integration.test_status import document
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.collector import Collector, collecting
from tests.support.events import read_events
from tests.support.job import HOLDFAST, environment
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED
from tests.unit.operator_side.page.reading import Page, loads_nothing, tiles_of

pytestmark = [pytest.mark.mpi]
RANKS, SAVES = 2, 2
SECONDS_MAX = 120
PHASES = {"checkpoint", "save", "copy", "stage", "flush", "read_back"}
OUTCOMES = {
    *(
        "share_sealed",
        "staged",
        "declined",
        "failed",
        "durable",
        "verified",
        "doubtful",
        "drifted",
        "bad",
        "verify_failed",
        "flush_failed",
    )
}


COLUMNS, LINES = 80, 50


def scrape(port: int) -> dict[str, Metric]:
    # Ignore proxies in the environment: requests go to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


class Terminal:
    """A real terminal of 80 columns that runs a command, and keeps its last screen and exit code."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # Python's readline in the test process sets LINES and COLUMNS for its children.
        ours = {name: value for name, value in env.items() if name not in ("LINES", "COLUMNS")}
        self._env = {**ours, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self._server = ("tmux", "-L", f"holdfast-{os.getpid()}", "-f", "/dev/null")
        shell = f"trap : INT; {shlex.join(command)}; echo ended with $?; exec cat"
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), shell)

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run(
            [*self._server, *arguments], env=self._env, capture_output=True, text=True, check=True
        ).stdout

    def screen(self) -> str:
        """Return the visible text."""
        return self._tmux("capture-pane", "-p")

    def wait_for(self, pattern: str) -> None:
        """Wait until the pattern is visible."""
        deadline = time.monotonic() + SECONDS_MAX
        while not re.search(pattern, self.screen()):
            assert time.monotonic() < deadline, f"{pattern} is not to be seen:\n{self.screen()}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._tmux("send-keys", "C-c")

    def close(self) -> None:
        self._tmux("kill-server")


class NoTerminal:
    """Replaces `Terminal` without tmux: shows nothing, waits for nothing."""

    def screen(self) -> str:
        return ""

    def wait_for(self, pattern: str) -> None:
        pass

    def interrupt(self) -> None:
        pass


class Browser:
    """`holdfast status --web`, and an HTTP client."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        command = [HOLDFAST, "status", "--web", "--port", "0", *arguments]
        self._server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._url = self._server.stdout.readline().strip()
        self.ssh = self._server.stdout.readline()

    def get(self, name: str = "") -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._url + name, timeout=30) as answer:
            return str(answer.read().decode())

    def close(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self._server.send_signal(signal.SIGINT)
        try:
            self._server.communicate(timeout=SECONDS_MAX)
        finally:
            self._server.kill()
        return self._server.returncode


def browse(env: dict[str, str], *arguments: str) -> list[str]:
    """Return the ssh line, the page, its JSON document, its main part, and the exit code after Ctrl-C."""
    browser = Browser(env, *arguments)
    try:
        seen = [browser.ssh, *(browser.get(name) for name in ("", "status.json", "main"))]
    finally:
        code = browser.close()
    return [*seen, str(code)]


@dataclass
class Watched:
    """Observations of the job: while its ranks paused, and after all processes had ended."""

    store: str
    lines: list[dict[str, Any]]
    stager: dict[str, Metric]
    flusher: dict[str, Metric]
    run: dict[str, Any]
    pids: list[int]
    niceness: dict[str, int]
    screen: str
    browsed: list[str]
    run_after: dict[str, Any]
    lines_after: list[dict[str, Any]]
    collector: Collector
    port: int


@contextlib.contextmanager
def watching(env: dict[str, str]) -> Iterator[Terminal | NoTerminal]:
    """Run `holdfast status` in a terminal, if tmux is installed."""
    if shutil.which("tmux") is None:
        yield NoTerminal()
        return
    live = Terminal([HOLDFAST, "status", "--interval-seconds", "0.1"], env)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    port, log, store = two_free_ports(), directory / "events.jsonl", str(directory / "store")
    stager = (*SMALL, "--events", str(log), "--metrics-port", str(port), "--niceness", "10")
    with collecting() as collector:
        cluster = Cluster(directory, store, collector.environment, script=train.__file__, stager=stager)
        with cluster.start(RANKS, *RUN, str(PAUSE_AT)) as job:
            runtime, out = cluster.runtime, cluster.out(1)
            wait_until(
                lambda: (
                    all((out / f"paused-{rank}").exists() for rank in range(RANKS))
                    and sum(line["event"] == "verified" for line in read_events(log)) == SAVES
                ),
                SECONDS_MAX,
                f"two checkpoints are not verified, or the ranks do not stand still:\n{job.output()}",
            )
            with watching(environment(runtime)) as live:
                live.wait_for(rf"newest verified +{SAVED} ")
                live.wait_for("2 ranks: 2 here")
                run = document(runtime, store, "--dollars-per-hour", "3600")
                browsed = browse(
                    environment(runtime), store, "--events", str(log), "--dollars-per-hour", "3600"
                )
                pids = [int((out / f"pid-{rank}").read_text()) for rank in range(RANKS)]
                of = {role: int(run[role]["pid"]) for role in ("stager", "flusher")}
                niceness = {
                    str(name): psutil.Process(pid).nice() for name, pid in [*of.items(), *enumerate(pids)]
                }
                flusher_said, stager_said, lines = scrape(port + 1), scrape(port), read_events(log)
                os.kill(pids[1], signal.SIGKILL)
                live.wait_for("2 ranks: 1 here, 1 lost")
                live.wait_for("rank_lost: rank 1")
                os.kill(pids[0], signal.SIGKILL)
                live.wait_for("no stager; no flusher")  # all checkpoints were durable, so both had ended
                live.wait_for("no training job")
                live.wait_for(rf"newest verified +{SAVED} ")
                live.interrupt()
                live.wait_for("ended with 0")
                live.wait_for(rf"newest verified +{SAVED} ")  # the last screen stays
                screen = live.screen()
        cluster.wait_for_flusher()
        run_after = document(runtime, store)
        yield Watched(
            store,
            lines,
            stager_said,
            flusher_said,
            run,
            pids,
            niceness,
            screen,
            browsed,
            run_after,
            read_events(log),
            collector,
            port,
        )


def test_scraped_counts_are_those_of_the_event_log(watched: Watched) -> None:
    stager, flusher, lines = watched.stager, watched.flusher, watched.lines
    counts = Counter((line["role"], line["event"]) for line in lines)
    seen = {
        (role, sample.labels["outcome"]): sample.value
        for role, families in (("stager", stager), ("flusher", flusher))
        for sample in families["holdfast_checkpoints"].samples
    }
    assert {outcome for _, outcome in seen} == OUTCOMES
    assert seen == {key: counts[key] for key in seen}
    assert counts["flusher", "durable"] == SAVES
    durable = [line for line in lines if line["event"] == "durable"]
    durable_bytes = sum(line["image_bytes"] for line in durable)
    assert durable_bytes > 0
    assert value(flusher, "holdfast_checkpoint_bytes_total", outcome="durable") == durable_bytes
    assert value(stager, "holdfast_checkpoint_bytes_total", outcome="staged") == durable_bytes
    assert value(flusher, "holdfast_newest_step", level="durable") == SAVED
    assert value(flusher, "holdfast_newest_step", level="verified") == SAVED
    durable_at = max(float(line["time"]) for line in durable)
    newest_at = value(flusher, "holdfast_newest_timestamp_seconds", level="durable")
    assert abs(newest_at - durable_at) < 5  # two readings of the clock around one write
    saved_at = value(flusher, "holdfast_newest_saved_timestamp_seconds", level="durable")
    assert durable_at - 60 < saved_at < durable_at
    assert value(flusher, "holdfast_stall_seconds_count") == SAVES
    assert value(flusher, "holdfast_stall_seconds_sum") > 0
    pgt2_seconds = sum(line["pgt2_seconds"] for line in durable)
    assert value(flusher, "holdfast_stage_seconds_sum", stage="to_durable") == pytest.approx(pgt2_seconds)
    chunks = {s.labels["state"]: s.value for s in flusher["holdfast_ring_chunks"].samples}
    assert chunks == {"free": 64, "filling": 0, "full": 0}  # 4 MiB in chunks of 64 KiB
    assert value(flusher, "holdfast_stager_attached") == 1


def test_metrics_ports_are_closed_when_the_job_has_ended(watched: Watched) -> None:
    for port in (watched.port, watched.port + 1):
        with pytest.raises(urllib.error.URLError):
            scrape(port)


def test_each_process_tells_its_part_of_each_checkpoint_under_ids_that_nobody_handed_over(
    watched: Watched,
) -> None:
    durable = [
        line for line in watched.lines_after if (line["role"], line["event"]) == ("flusher", "durable")
    ]
    expected = {root_ids(watched.store, line["attempt"], line["step"])[0]: PHASES for line in durable}
    assert len(expected) == SAVES
    wait_until(
        lambda: {trace: spans.keys() for trace, spans in watched.collector.traces.items()} == expected,
        SECONDS_MAX,
        "traces are missing",
    )
    assert watched.collector.services == {"holdfast-stager", "holdfast-flusher"}


def test_status_says_what_the_job_does(watched: Watched) -> None:
    run = watched.run
    ranks = sorted((rank["rank"], rank["pid"], rank["state"], rank["step"]) for rank in run["ranks"])
    assert ranks == [(rank, watched.pids[rank], "here", SAVED) for rank in range(RANKS)]
    assert all(rank["stall_seconds"] > 0 for rank in run["ranks"])
    assert run["is_running"]
    assert run["loss_trainers"]["since_step"] == run["loss_node"]["since_step"] == SAVED
    assert run["loss_trainers"]["dollars"] == pytest.approx(run["loss_trainers"]["seconds"])
    assert run["interval"]["steps"] == EVERY
    assert len(run["pgt1_seconds"]["history"]) == len(run["pgt2_seconds"]["history"]) == SAVES
    assert len(run["stall_seconds"]["history"]) == SAVES
    assert sum(run["ring"]["chunks"].values()) == run["ring"]["ring_chunks"] == 64


def test_stager_and_flusher_yield_and_training_yields_to_none(watched: Watched) -> None:
    ours = psutil.Process().nice()
    assert watched.niceness == {"stager": 10, "flusher": 10, **{str(rank): ours for rank in range(RANKS)}}


def test_the_terminal_keeps_its_last_picture(watched: Watched) -> None:
    """The fixture has waited for the screens before this one, while the ranks were killed."""
    if not watched.screen:
        pytest.skip("no tmux here")
    assert re.search(rf"newest verified +{SAVED} ", watched.screen)
    assert "ended with 0" in watched.screen


def test_the_page_shows_the_job_while_it_runs(watched: Watched) -> None:
    ssh, page, document, main, code = watched.browsed
    loads_nothing(page, ("#", "data:", "status.json"))
    tiles = tiles_of(page)
    assert tiles["last good step"] == tiles["newest staged step"] == str(SAVED)
    assert tiles["interruptions"] == "0"
    assert "2 ranks: 2 here" in Page(page).text
    assert f"resumes from step {SAVED}" in Page(main).text
    (run,) = json.loads(document)["runs"]
    assert [row["step"] for row in run["checkpoints"]][-1] == run["levels"]["verified"]["step"] == SAVED
    assert {"progress", "durations", "timeline", "ranks"} <= {one["id"] for one in Page(page).of("section")}
    assert re.search(r"ssh -N -L (\d+):127\.0\.0\.1:\1 \S+", ssh)
    assert code == "0"


def test_status_says_what_has_been_when_all_has_ended(watched: Watched) -> None:
    run = watched.run_after
    assert (run["flusher"]["state"], run["stager"]["state"], run["is_running"]) == ("gone", "gone", False)
    assert run["levels"]["verified"]["step"] == SAVED
    assert run["loss_node"]["seconds"] == 0
