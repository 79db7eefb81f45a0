"""The command line and the settings, given anything: usage errors and errors of ours, and never a traceback."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoints.lease import Lease
from holdfast.command import cli
from holdfast.config import FlusherConfig, StagerConfig, TrainerConfig
from holdfast.errors import ConfigError, StoreError
from holdfast.image.manifest import Manifest
from holdfast.sealed import seal
from holdfast.store.names import check_name, temporary_name
from holdfast.store.posix import PosixStore
from operator_side.commands.target import parse_target
from tests.support.checkpoints import manifest_of, small_image
from tests.support.job import HOLDFAST

_KNOWN_EXIT_CODES = {0, 2, 3, 4, 5, 6, 7, 8, 9, 10}
_ODD = [
    *(
        "",
        " ",
        ".",
        "..",
        "/",
        "//",
        "../../etc/passwd",
        "@",
        "@@",
        "@1",
        "run@",
        "run@latest",
        "run@-1",
        "run@1e9",
    ),
    *(
        "run@99999999999999999999",
        "run@999999999999999999",
        "a\0b",
        "\x1b[2J",
        "x" * 10_000,
        "x/" * 3000,
    ),
    *(
        "s3://",
        "s3:///run",
        "s3://UPPER/run",
        "s3://b/../x",
        "s3://bucket",
        "file://host/run",
        "file:",
        "nosuch://x/y",
    ),
    *(
        "http://[::1",
        "[bold]x[/]",
        "memory://",
        "-",
        "--",
        "-x",
        "--nosuch",
        "--json",
        "--threads=0",
        "--threads=x",
    ),
    *("--all", "--force", "/dev/null", "/proc/self/mem", "/dev/full", "%s%n", "~", "*", "\n", "ü" * 300, "1"),
]
_COMMANDS = ["ls", "inspect", "verify", "pull", "nosuch"]


def _run(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert ended.value.code in _KNOWN_EXIT_CODES, (arguments, err)
    assert ended.value.code == 0 or err or out
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_tools_with_odd_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    chance = random.Random(5)
    codes = set()
    for command in _COMMANDS:
        for odd in _ODD:
            codes.add(_run(capsys, [command, odd]))
        for _ in range(60):
            codes.add(_run(capsys, [command, *chance.choices(_ODD, k=chance.randrange(1, 4))]))
    assert {2, 5} <= codes
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside"], "a tool that reads has written"


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_targets_are_a_url_and_perhaps_a_step(text: str) -> None:
    target = parse_target(text)
    assert text.startswith(target.url)
    assert target.step is None or target.step >= 0


# -- settings --------------------------------------------------------------------------------------------------------

_VALUES: list[Any] = [
    *(
        "",
        "x",
        "-1",
        "0",
        "1e400",
        "nan",
        "inf",
        "9" * 5000,
        "1GiB",
        "16 MB",
        "1.5",
        "0.1B",
        "../x",
        "a\0b",
        "\ud800",
    ),
    *(None, True, -1, 0, 10**400, float("nan"), float("inf"), [], {}, [1], b"x", 2**63),
]


def test_settings_of_any_value_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = tried = 0
    for config in (TrainerConfig, StagerConfig, FlusherConfig):
        for name in config.model_fields:
            for value in _VALUES:
                tried += 1
                given_ = {"store": "/tmp/run"} if "store" in config.model_fields else {}
                try:
                    config.from_sources(**{**given_, name: value})
                except ConfigError as error:
                    refused += name in str(error)
    assert refused > tried // 3


_TOML = [
    "store = ",
    "[stager",
    "[[stager]]",
    "stager = 3",
    "[stager]\nstore = {}",
    "ring_bytes = -1",
    "x = 1",
    "a.b.c = 1",
    "store = '" + "x" * 100_000 + "'",
    "ring_bytes = " + "9" * 5000,
    "a = " + "[" * 5000 + "]" * 5000,
    "\0",
    "\ufeff",
    "keep_last = 9999999999999999999999",
    "verify = nan",
    "events = '\\u0000'",
    "store = '../../x'\nstore = 'y'",
    "heartbeat_seconds = inf",
    "[flusher]\nwriters = 1e9",
    "'' = 1",
    '"\\uD800" = 1',
]


@pytest.mark.parametrize("number", range(len(_TOML)))
def test_a_file_of_settings_is_read_or_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text(_TOML[number], encoding="utf-8")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(path))
    for config in (TrainerConfig, StagerConfig, FlusherConfig):
        try:
            config.from_sources(**({"store": "/tmp/run"} if config is not TrainerConfig else {}))
        except ConfigError as error:
            said = str(error)
        else:
            continue
        assert said
        assert len(said) < 300_000


@given(noise=st.binary(max_size=400))
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_noise_as_a_file_of_settings(noise: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_bytes(noise)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(path))
    said = str(path)
    try:
        TrainerConfig.from_sources()
    except ConfigError as error:
        said = str(error)
    monkeypatch.undo()
    assert str(path) in said, "what is wrong with a file names the file"


@pytest.mark.parametrize("name", ["EVENTS", "STORE", "RING_BYTES", "VERIFY", "RUNTIME_DIR", "KEEP_LAST"])
def test_environment_of_any_value(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("x", "-1", "nan", "9" * 5000, "../..", "\udc80", "[1", '{"a":'):
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
        said = name
        try:
            StagerConfig.from_sources(**({} if name == "STORE" else {"store": "/tmp/run"}))
        except ConfigError as error:
            said = str(error)
        assert name.lower() in said.lower(), "what is wrong with a setting names the setting"


# -- runs whose names lead elsewhere ---------------------------------------------------------------------------------

_LEADING_OUT = [
    "../outside.pt",
    "/etc/passwd",
    "a/../../outside.pt",
    "..",
    ".holdfast/tmp/x",
    "a\\..\\b",
    "x\0.pt",
    "",
]


@pytest.mark.parametrize("file", _LEADING_OUT)
def test_a_manifest_that_names_a_file_elsewhere_opens_nothing(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Even with true CRCs, and a matching file there."""
    image = small_image(1)
    root = tmp_path / "deep" / "run"
    root.mkdir(parents=True)
    for place in (tmp_path / "outside.pt", tmp_path / "deep" / "outside.pt"):
        place.write_bytes(image)
    made = manifest_of(image, step=1)
    body = made.model_dump_json().replace('"step-000000001.pt"', _json(file)).encode()
    (root / "step-000000001.json").write_bytes(seal(body, "manifest_crc32"))
    out = tmp_path / "out"
    out.mkdir()
    for arguments in (["ls"], ["inspect"], ["verify"], ["pull"]):
        more = [str(out)] if arguments == ["pull"] else []
        code = _run(capsys, [*arguments, str(root), *more])
        assert code in ({0} if arguments == ["ls"] else {5, 6})
    assert list(out.iterdir()) == []


def _json(text: str) -> str:
    return json.dumps(text)


@pytest.mark.parametrize("name", [*_LEADING_OUT, "a//b", "a/./b", "x" * 600, "\x7f", "a/\n"])
def test_no_store_takes_a_name_that_leads_out(name: str, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    store.check(write=True)
    for act in (
        lambda: store.write(name, b"x"),
        lambda: store.create(name, b"x"),
        lambda: store.read(name),
        lambda: store.size(name),
        lambda: store.delete(name),
        lambda: store.read_into(name, 0, memoryview(bytearray(1))),
        lambda: store.begin(name, nbytes=1, chunk_bytes=4096, write_id="w"),
        lambda: check_name(name),
    ):
        with pytest.raises(StoreError, match="refused"):
            act()
    for write_id in ("../x", "/x", "", "a/b", "x" * 200, "a\0"):
        with pytest.raises(StoreError, match="write-id"):
            temporary_name(write_id, "step.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_argument_that_is_no_utf8_is_an_error_of_ours(more: list[str], tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/run-\xff"
    for command in ("ls", "verify"):
        done = subprocess.run([HOLDFAST, command, name, *more], capture_output=True, check=False, timeout=120)
        assert done.returncode == 5, done.stderr
        assert b"Traceback" not in done.stderr
        if more:
            assert json.loads(done.stdout)["error"]["code"]


def test_tools_on_manifests_with_odd_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whole manifests with strange values: control sequences, markup, impossible times, deep records."""
    image = small_image(1)
    root = tmp_path / "run"
    root.mkdir()
    (root / "step-000000001.pt").write_bytes(image)
    deep: Any = 1
    for _ in range(150):
        deep = {"a": [deep]}
    for changes in (
        {"created": "9999-12-31T23:59:59+00:00"},
        {"created": "0001-01-01T00:00:00+23:59"},
        {"created": "\x1b[2J[red]"},
        {"note": "[/][bold]\x1b]0;x\x07", "state": "bad"},
        {"record": {"a_seconds": 1e308, "b_bytes": -(2**62)}},
        {"record": deep},
        {"record": {"[red]": {"x_bytes": 10**400}}},
        {"pgt1_seconds": 1e308},
        {"run": "\u202e" * 4000},
        {"attempt": 2**62 - 1},
        {"write_id": "../../x"},
        {"ranks": 2**31 - 1},
        {"layout_digest": "[" * 4000},
    ):
        made = manifest_of(image, step=1).model_dump(mode="json") | changes
        try:
            body = Manifest.model_validate_json(_json_of(made)).to_bytes()
        except ValueError:
            body = seal(_json_of(made), "manifest_crc32")
        (root / "step-000000001.json").write_bytes(body)
        for command in ("ls", "inspect", "verify"):
            for more in ([], ["--json"]):
                _run(capsys, [command, str(root), *more])
        _run(capsys, ["inspect", "--all", str(root)])


def test_a_manifest_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = small_image(1)
    made = manifest_of(
        image, step=1, note="\x1b]0;owned\x07\x1b[2J", state="bad", record={"\x1b[31m": "\x1b[2J"}
    )
    (tmp_path / made.file).write_bytes(image)
    (tmp_path / "step-000000001.json").write_bytes(made.to_bytes())
    for arguments in (["ls", str(tmp_path)], ["inspect", f"{tmp_path}@1"], ["inspect", str(tmp_path)]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err, arguments


def _json_of(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_a_run_full_of_other_peoples_files_is_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    (root / ".holdfast").mkdir(parents=True)
    (root / "step-000000001.json").symlink_to("/etc/passwd")
    (root / "step-000000002.json").mkdir()
    (root / ".holdfast" / "writer-999999999999999999.json").write_text("{}")
    os.mkfifo(root / "step-000000003.json")
    (root / os.fsdecode(b"step-\xff.json")).write_text("x")
    assert _run(capsys, ["ls", str(root)]) in {0, 4, 6}
    claim = Lease.acquire(PosixStore(root), sleep=lambda _: None)  # the absurd number does no harm
    assert claim.attempt == 1
