"""infra/systemd: accepted by systemd, and consistent with the stager's shutdown and exit codes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from holdfast.config import StagerConfig
from holdfast.errors import ConfigError, StateError
from holdfast.net.address import parse_address
from stager import service, standing
from tests.infra.toolbox import INFRA

UNIT = INFRA / "systemd" / "holdfast-stager.service"
PAGE = INFRA.parent / "docs" / "exit-codes.md"


@pytest.fixture
def unit() -> dict[str, list[str]]:
    """The values of each setting, in order."""
    found = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            word, _, value = line.partition("=")
            found[word].append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_knows_every_word_of_it(tmp_path: Path) -> None:
    text = re.sub("^ExecStart=.*$", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE)
    path = tmp_path / UNIT.name

    def said_of(content: str) -> list[str]:
        path.write_text(content)
        done = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
        )
        return [line for line in done.stderr.splitlines() if UNIT.name in line]

    assert said_of(text) == []
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            assert said_of(text.replace(f"\n{line}\n", f"\nX{line}\n")) != [], line


def test_the_unit_has_time_to_write_staged_checkpoints(unit: dict[str, list[str]]) -> None:
    config = StagerConfig.from_sources(store="s3://bucket/run")
    # Payloads under way may still arrive, then all is written, then the ranks are told.
    takes = max(config.offer_seconds_max, config.chunk_seconds_max)
    takes += service._DRAIN_SECONDS_MAX + standing._GOODBYE_SECONDS_MAX
    (given,) = unit["TimeoutStopSec"]
    found = re.fullmatch(r"(\d+)min", given)
    assert found
    assert takes < 60 * int(found[1])
    assert unit["KillSignal"] == ["SIGTERM"]
    # If systemd sent SIGTERM to the flusher too, it would end while steps still arrive.
    assert unit["KillMode"] == ["mixed"]
    assert "SendSIGHUP" not in unit


def test_the_unit_restarts_unless_a_person_must_change_something(unit: dict[str, list[str]]) -> None:
    assert unit["Restart"] == ["on-failure"]
    (given,) = unit["RestartPreventExitStatus"]
    assert [int(code) for code in given.split()] == [ConfigError.exit_code, StateError.exit_code]
    (row,) = (line for line in PAGE.read_text().splitlines() if "a person must change something" in line)
    assert row.startswith("| 2, 3 |")
    assert "(`ConfigError`, `StateError`)" in row


def test_the_unit_opens_nothing_to_the_network_or_to_other_users(unit: dict[str, list[str]]) -> None:
    given = dict(one.split("=", 1) for one in unit["Environment"])
    config = StagerConfig.from_sources(store="s3://bucket/run", listen=given["HOLDFAST_LISTEN"])
    assert parse_address(config.listen or "").is_loopback
    assert config.metrics_port is None
    assert unit["ExecStart"] == ["/opt/holdfast/venv/bin/holdfast stager"]
    assert given["HOLDFAST_RUNTIME_DIR"] == f"/run/{unit['RuntimeDirectory'][0]}"
    assert unit["RuntimeDirectoryMode"] == unit["StateDirectoryMode"] == ["0700"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]  # the ring outlives a restart
    assert unit["User"] == ["holdfast"]
    assert unit["LimitMEMLOCK"] == ["infinity"]
