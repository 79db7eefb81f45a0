"""The command line: errors become messages and exit codes, and a broken role does not break other commands."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.command import cli
from holdfast.command.output import format_age, format_seconds, format_size
from holdfast.errors import BusyError, ConfigError, DamageError, FencedError, HoldfastError, StoreError
from holdfast.image.manifest import State
from holdfast.image.split_record import SplitRecord
from holdfast.store.retrying import RetryBudget
from operator_side.commands.target import parse_target
from tests.support.checkpoints import CHUNK_BYTES, SMALL_TENSORS, add, add_small, manifest_of, small_image
from tests.support.memory_store import MemoryStore
from tests.support.signals import INTERRUPTIBLE


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("holdfast")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr("holdfast.store.open_store", lambda _: store)
    return store


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


# -- the group --------------------------------------------------------------------------------------------------


def with_command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """Let `holdfast try` raise this."""

    def callback() -> None:
        if error is not None:
            raise error

    command = click.Command("try", callback=callback)
    monkeypatch.setattr(
        cli, "_subcommands", lambda: {"try": EntryPoint("try", "there:command", "holdfast.commands")}
    )
    monkeypatch.setattr(EntryPoint, "load", lambda _: command)


@pytest.mark.parametrize("kind", [ConfigError, StoreError, DamageError, FencedError, BusyError])
def test_an_error_becomes_its_message_and_exit_code(
    kind: type[HoldfastError], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_command(monkeypatch, kind("what, where, and [what] to do"))
    said = f"holdfast: what, where, and [what] to do\nhelp: holdfast explain {kind.code} "
    code, out, err = run("try")
    assert (code, out) == (kind.exit_code, "")
    assert err.startswith(said)
    assert len(err.splitlines()) == 2


def test_ctrl_c_is_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, KeyboardInterrupt())
    code, out, err = run("try")
    assert (code, out) == (130, "")
    assert "interrupted" in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_a_command_that_returns_is_0(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, None)
    assert run("try") == (0, "", "")


def test_version_option_prints_the_version(run: Any) -> None:
    assert run("--version") == (0, f"holdfast {holdfast.__version__}\n", "")


def test_unknown_commands_and_options_are_usage_errors(run: Any) -> None:
    assert run("shake")[0] == 2
    assert run("ls", "--frobnicate")[0] == 2
    assert run("ls")[0] == 2


@pytest.mark.parametrize(
    ("typed", "meant"), [("inspct", "inspect"), ("statu", "status"), ("veirfy", "verify")]
)
def test_a_misspelt_command_is_told_the_nearest(run: Any, typed: str, meant: str) -> None:
    code, _, said = run(typed, "s3://bucket/run")
    assert code == 2
    assert f"No such command '{typed}'. (Did you mean {meant}" in said


def test_a_store_that_hangs_is_said_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the minutes for which later calls are tried."""
    let_go = threading.Event()
    store = MemoryStore()
    monkeypatch.setattr(store, "check", lambda *, write: let_go.wait(60 + write))
    monkeypatch.setattr("holdfast.store.open_store", lambda _: store)
    monkeypatch.setattr("operator_side.commands.target._ANSWER_SECONDS_MAX", 0.05)
    code, _, said = run("ls", "s3://bucket/run")
    let_go.set()
    assert code == StoreError.exit_code
    assert "no answer within 0.05 s" in said
    assert len(said.splitlines()) == 2, said


def test_an_endpoint_that_refuses_is_said_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-test")
        monkeypatch.setattr(
            "holdfast.store.retrying._CHECK_BUDGET", RetryBudget(3, 30.0, 0.01, log_warnings=False)
        )
        code, _, said = run("ls", "s3://bucket/run")
    assert code == StoreError.exit_code
    assert "given up after 3 attempts" in said
    assert len(said.splitlines()) == 2, said


def test_the_help_names_every_exit_code(run: Any) -> None:
    named = {int(code) for code in re.findall(r"(\d+)\s+[a-z]", run("--help")[1].partition("Exit codes:")[2])}
    kinds = [HoldfastError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert named >= {0, 130} | {kind.exit_code for kind in kinds}


def test_the_help_of_ls_explains_each_state_on_a_line_of_its_own(run: Any) -> None:
    said = run("ls", "--help")[1].partition("JSON:")[0]
    lines = [line.strip().removeprefix("State: ") for line in said.splitlines()]
    states = ("verified", "durable", "bad", "damaged")
    assert [line.split()[0] for line in lines if line.startswith(states)] == list(states)
    assert "\\b" not in said


def a_role(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """A role `kelp` whose module holds `code`."""
    (directory / "kelp_role.py").write_text(code)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "kelp_role", raising=False)
    monkeypatch.setitem(cli._EXTRA_OF_PACKAGE, "kelp_role", "stager")
    point = EntryPoint("kelp", "kelp_role:command", "holdfast.commands")
    monkeypatch.setattr(cli, "_subcommands", lambda: {"kelp": point})


def test_a_role_whose_dependency_is_missing_says_what_to_install(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_role(monkeypatch, tmp_path, "import no_such_mpi")
    code, out, _ = run("--help")
    assert code == 0
    assert re.search(r"kelp +\(needs holdfast\[stager\]\)", out)
    code, out, err = run("kelp", "--store", "s3://b/r", "-x")
    assert (code, out) == (2, "")
    assert "no_such_mpi is not installed; run: pip install 'mpi4py>=" in err


@pytest.mark.parametrize(
    "code", ["import kelp_role.inner", "command = 7", "", "raise ImportError('libmpi.so: not found')"]
)
def test_a_role_that_is_broken_breaks_nothing_else(
    code: str, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_role(monkeypatch, tmp_path, code)
    assert "(cannot be loaded)" in run("--help")[1]
    exit_code, _, err = run("kelp")
    assert exit_code == 2
    assert "kelp_role:command cannot be loaded" in err


def test_verbose_logs_to_stderr_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = click.Command("try", callback=lambda: logging.getLogger("holdfast.try").info("seen"))
    monkeypatch.setattr(
        cli, "_subcommands", lambda: {"try": EntryPoint("try", "there:command", "holdfast.commands")}
    )
    monkeypatch.setattr(EntryPoint, "load", lambda _: command)
    assert run("try") == (0, "", "")
    code, out, err = run("-v", "try")
    assert (code, out) == (0, "")
    assert "seen" in err


def test_ctrl_c_in_a_real_process_is_130(tmp_path: Path) -> None:
    fifo = tmp_path / "run"  # opening it for reading never ends, so the command is surely under way
    os.mkfifo(fifo)
    code = (
        "import sys, holdfast.command.cli as c, operator_side.commands.ls\n"
        "import holdfast.store as s\n"
        "s.open_store = lambda url: (print('there', flush=True), open(url))[1]\n"
        "c.main(['ls', sys.argv[1]])"
    )
    with subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-c", code, str(fifo)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.split() == [b"holdfast:", b"interrupted"]  # click ends the line of the ^C first


# -- URL@STEP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "step"),
    [
        ("s3://bucket/run", "s3://bucket/run", None),
        ("s3://bucket/run@123", "s3://bucket/run", 123),
        ("s3://bucket/run@latest", "s3://bucket/run", None),
        ("s3://user@host/run", "s3://user@host/run", None),
        ("sftp://user@host:22/run@7", "sftp://user@host:22/run", 7),
        ("/mnt/me@2024/run", "/mnt/me@2024/run", None),
        ("/mnt/run@000000007", "/mnt/run", 7),
        ("/mnt/run@5@latest", "/mnt/run@5", None),
        ("/mnt/run@v2", "/mnt/run@v2", None),
        ("/mnt/run@-1", "/mnt/run@-1", None),
        ("/mnt/run@", "/mnt/run@", None),
        ("@5", "@5", None),
    ],
)
def test_a_target_is_parsed_into_url_and_step(text: str, url: str, step: int | None) -> None:
    assert parse_target(text) == (url, step)


@given(st.text(min_size=1), st.integers(0, 10**17))
def test_a_step_put_on_comes_off(url: str, step: int) -> None:
    assert parse_target(f"{url}@{step}") == (url, step)
    assert parse_target(f"{url}@latest") == (url, None)


# -- the tools --------------------------------------------------------------------------------------------------


def test_ls_tells_what_is_wrong_below_the_table(store: MemoryStore, run: Any) -> None:
    add_small(store, 1)
    add_small(store, 2, state=State.BAD, note="chunk [3]")
    add(store, manifest_of(small_image(), step=3))
    store.objects["step-000000004.json"] = b"?"
    code, out, _ = run("ls", "memory://run")
    assert code == 0
    states = [
        line.split()[:1] + [word for word in line.split() if word in ("verified", "bad", "damaged")]
        for line in out.splitlines()[2:6]
    ]
    assert states == [["4", "damaged"], ["3", "damaged"], ["2", "bad"], ["1", "verified"]]
    assert "chunk [3]" in out
    assert "the file is missing" in out
    items = json.loads(run("ls", "memory://run", "--json")[1])["checkpoints"]
    assert (items[0]["step"], items[0]["state"], items[0]["file"]) == (4, "damaged", None)
    assert {frozenset(item) for item in items} == {
        frozenset(
            [
                "step",
                "attempt",
                "state",
                "doubt",
                "fault",
                "file",
                "file_bytes",
                "ranks",
                "created",
                "pgt1_seconds",
                "pgt2_seconds",
                "drift",
                "proof",
                "nonfinite",
                "metrics",
                "is_best",
                "branch",
                "current",
            ],
        )
    }


def test_ls_fits_80_columns_at_its_widest(store: MemoryStore, run: Any) -> None:
    image = small_image()
    wide: dict[str, Any] = {
        "ranks": 4096,
        "pgt2_seconds": 99.94,
        "attempt": 2,
        "file": "step-999999999-a002.pt",
    }
    add(store, manifest_of(image, step=999_999_999, **wide), image)
    assert max(len(line) for line in run("ls", "memory://run")[1].splitlines()) <= 80


def test_ls_of_a_run_without_checkpoints(store: MemoryStore, run: Any) -> None:
    assert run("ls", "memory://run")[0] == 5
    store.objects[".holdfast/writer-000001.json"] = b"x"
    assert run("ls", "memory://run") == (0, f"{store.url}: the run has no checkpoint yet\n", "")
    assert json.loads(run("ls", "memory://run", "--json")[1])["checkpoints"] == []


def test_inspect_shortens_long_tables_unless_told(store: MemoryStore, run: Any) -> None:
    tensors = {f"model/layer[{index}]": "data/0" for index in range(60)}
    image = small_image()
    add(store, manifest_of(image, step=1, tensors=tensors), image)
    out = run("inspect", "memory://run")[1]
    assert "model/layer[39]" in out
    assert "model/layer[40]" not in out
    assert "60 tensors, of which 20 are not shown (--all) in 1 storages, 9.8 KiB" in out
    assert "model/layer[59]" in run("inspect", "memory://run", "--all")[1]


def test_inspect_shows_how_tensors_were_split(store: MemoryStore, run: Any) -> None:
    add_small(store, 1)
    assert "PLACEMENT" not in run("inspect", "memory://run")[1]
    plain = manifest_of(small_image(), step=2, tensors=SMALL_TENSORS)
    tensors = tuple(
        tensor.model_copy(update={"split": 0 if tensor.path == "model/weight" else None})
        for tensor in plain.tensors
    )
    split = SplitRecord(parts=2, cuts=((1250, 2),), copies=2, copies_max=2, ranks=(0, 2, 2, 1, 2, 2))
    add(store, plain.model_copy(update={"tensors": tensors, "splits": (split,)}), small_image())
    code, out, err = run("inspect", "memory://run")
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "split in 2 along dim 0, replicated x 2" in lines["model/weight"]
    assert "split" not in lines["model/bias"]
    shown = json.loads(run("inspect", "memory://run", "--json")[1])["manifest"]
    assert [tensor["split"] for tensor in shown["tensors"]] == [0, None, None, None]
    assert shown["splits"] == [split.model_dump(mode="json")]


def test_verify_all_counts_what_cannot_be_read_as_damage(store: MemoryStore, run: Any) -> None:
    add_small(store, 1)
    store.objects["step-000000002.json"] = b"?"
    code, out, err = run("verify", "memory://run", "--all")
    assert code == 6
    assert out.splitlines()[0] == "step-000000002.json: damaged"
    assert "step-000000001.pt: good" in out
    assert "truncated or altered" in err
    code, out, err = run("verify", "memory://run", "--all", "--json")
    assert code == 6
    assert [c["ok"] for c in json.loads(out)["checkpoints"]] == [False, True]


def test_verify_without_a_step_takes_the_newest_even_if_an_older_one_is_good(
    store: MemoryStore, run: Any
) -> None:
    add_small(store, 1)
    add(store, manifest_of(small_image(), step=2))
    code, out, _ = run("verify", "memory://run")
    assert code == 6
    assert out.startswith("step-000000002.pt: damaged\n")
    assert out.endswith("got no file\n")


def test_pull_says_which_newer_one_it_does_not_use(store: MemoryStore, run: Any, tmp_path: Path) -> None:
    add_small(store, 1)
    add(store, manifest_of(small_image(), step=2))
    code, _, err = run("pull", "memory://run", tmp_path)
    assert code == 0
    assert "not used: step-000000002.pt: the file is missing" in " ".join(err.split())


def test_verify_of_nothing(store: MemoryStore, run: Any) -> None:
    assert run("verify", "memory://run", "--all")[0] == 5
    assert run("verify", "memory://run")[0] == 5


class Lying(MemoryStore):
    """Returns a wrong byte in each read beyond the first chunk."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        super().read_into(name, offset, buffer)
        if offset >= CHUNK_BYTES:
            buffer[0] ^= 1


def test_pull_names_the_chunk_and_leaves_what_was_there(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Lying()
    monkeypatch.setattr("holdfast.store.open_store", lambda _: store)
    add_small(store, 1)
    target = tmp_path / "mine.pt"
    target.write_text("precious")
    code, _, err = run("pull", "memory://run", target, "--force")
    assert code == 6
    assert f"chunk 1 (bytes {CHUNK_BYTES}-{2 * CHUNK_BYTES - 1})" in err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


class Breaking(MemoryStore):
    """Returns this many chunks of a file, then fails; records the offsets of reads."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.reads = reads
        self.offsets: list[int] = []

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if len(self.offsets) == self.reads:
            raise StoreError("the line is cut")
        super().read_into(name, offset, buffer)
        self.offsets.append(offset)


@pytest.fixture(name="cut")
def _cut(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Breaking:
    """Return a store that broke after two chunks of step 1, which are in the only file of `tmp_path`."""
    store = Breaking(2)
    monkeypatch.setattr("holdfast.store.open_store", lambda _: store)
    add_small(store, 1)
    code, _, err = run("pull", "memory://run", tmp_path / "x.pt")
    assert code == StoreError.exit_code
    assert "run the same command again to fetch the rest" in err
    store.offsets.clear()
    store.reads = -1
    return store


def test_pull_goes_on_behind_what_has_come(cut: Breaking, run: Any, tmp_path: Path) -> None:
    (part,) = tmp_path.iterdir()
    assert part.read_bytes() == small_image()[: 2 * CHUNK_BYTES]
    code, out, _ = run("pull", "memory://run", tmp_path / "x.pt")
    assert (code, cut.offsets[0]) == (0, 2 * CHUNK_BYTES)
    assert f"of which {2 * CHUNK_BYTES} had been fetched before" in out
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == small_image()


@pytest.mark.parametrize(("flipped", "kept"), [(0, 0), (CHUNK_BYTES, 1), (2 * CHUNK_BYTES + 7, 2)])
def test_pull_believes_nothing_of_what_has_come(
    cut: Breaking, run: Any, tmp_path: Path, flipped: int, kept: int
) -> None:
    (part,) = tmp_path.iterdir()
    content = bytearray(part.read_bytes() + bytes(100))  # and a piece that did not come whole
    content[flipped] ^= 1
    part.write_bytes(content)
    assert run("pull", "memory://run", tmp_path / "x.pt")[0] == 0
    assert cut.offsets[0] == kept * CHUNK_BYTES
    assert (tmp_path / "x.pt").read_bytes() == small_image()


def test_pull_of_another_checkpoint_begins_anew_and_clears_away(
    cut: Breaking, run: Any, tmp_path: Path
) -> None:
    add_small(cut, 2)
    assert run("pull", "memory://run", tmp_path / "x.pt")[0] == 0
    assert cut.offsets[0] == 0
    assert (tmp_path / "x.pt").read_bytes() == small_image(2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_two_pulls_to_one_place_do_not_mix(cut: Breaking, run: Any, tmp_path: Path) -> None:
    (part,) = tmp_path.iterdir()
    with part.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = run("pull", "memory://run", tmp_path / "x.pt")
        assert code == BusyError.exit_code
        assert "another process is fetching this file" in err
        assert cut.offsets == []


def test_pull_where_nothing_can_be_written(store: MemoryStore, run: Any, tmp_path: Path) -> None:
    add_small(store, 1)
    code, _, err = run("pull", "memory://run", f"{tmp_path}/{'x' * 300}")
    assert code == 2
    assert "File name too long" in err
    code, _, err = run("pull", "memory://run", "/proc/step.pt")
    assert code == 4
    assert "/proc/step.pt: cannot be written" in err


def test_pull_json(store: MemoryStore, run: Any, tmp_path: Path) -> None:
    manifest = add_small(store, 1)
    code, out, _ = run("pull", "memory://run@1", tmp_path, "--json")
    assert code == 0
    assert json.loads(out) == {
        "url": store.url,
        "step": 1,
        "file": manifest.file,
        "destination": str(tmp_path / manifest.file),
        "nbytes": manifest.image_bytes,
        "kept_bytes": 0,
        "crc32": manifest.image_crc32,
    }
    assert (tmp_path / manifest.file).read_bytes() == small_image(1)


# -- words ------------------------------------------------------------------------------------------------------


def test_sizes_and_times_are_short() -> None:
    assert [format_size(n) for n in (None, 0, 1023, 1024, 1536 * 1024**2, 5 * 1024**4)] == [
        "-",
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
    assert [format_seconds(s) for s in (0.284, 12.34, 300, 7200, 200_000)] == [
        "0.28 s",
        "12.3 s",
        "5 min",
        "2 h",
        "2 d",
    ]


@pytest.mark.parametrize(("created", "expected"), [("yesterday", "-"), ("2999-01-01T00:00:00", "0.00 s")])
def test_ages_that_make_no_sense(created: str, expected: str) -> None:
    assert format_age(manifest_of(small_image(), step=1, created=created)) == expected
