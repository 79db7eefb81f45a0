"""Portable files from an attacker, restored: no code runs, no size is believed, and errors are ours.

Each manifest says that the bytes are as they were written: CRCs stop accidents, not attackers.
"""

from __future__ import annotations

import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import DamageError, HoldfastError, StateError
from tests.fuzz.files import SEED, file_with_pickle, live_state, restore_bytes, torch_pickle
from tests.support.job import REPOSITORY
from trainer_side.state.per_rank_blob import decode, encode
from trainer_side.state.tree import tensor_paths


def test_the_seed_itself_is_restored() -> None:
    state = live_state()
    restored = restore_bytes(SEED, state)
    assert restored is not None
    assert restored.values == {"step": 3}
    assert torch.equal(state["weight"], torch.arange(300.0))


# -- code ------------------------------------------------------------------------------------------------------------


class _Runs:
    """Would run `call(*arguments)` in the process that unpickles it."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call, self._arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call, self._arguments


def _globals() -> list[str]:
    return [
        *("os system", "posix system", "builtins eval", "builtins exec", "builtins getattr", "builtins open"),
        *("subprocess Popen", "shutil rmtree", "importlib import_module", "torch.hub load", "torch load"),
        *(
            "holdfast.store.posix PosixStore",
            "trainer_side.restore.restore restore",
            "pathlib Path",
            "functools partial",
        ),
        *("torch.serialization load", "torch._utils _import_dotted_name", "codecs open", "runpy run_path"),
    ]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_would_run_code_runs_none(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for runs in (
        _Runs(Path.touch, canary),
        _Runs(eval, f"open({str(canary)!r}, 'w')"),
        _Runs(subprocess.call, ["touch", str(canary)]),
        _Runs(exec, f"import pathlib; pathlib.Path({str(canary)!r}).touch()"),
    ):
        for protocol in (0, 1, 2, 4):
            image = file_with_pickle(pickle.dumps({"weight": runs}, protocol=protocol))
            with pytest.raises(HoldfastError):
                restore_bytes(image)
            blob = struct.pack("<q", len(image)) + image
            with pytest.raises(DamageError):
                decode(blob)
            assert not canary.exists(), "the checkpoint ran code"
    # The canary works: the refused code does run where pickle is trusted.
    pickle.loads(pickle.dumps(_Runs(Path.touch, canary)))
    assert canary.exists()


@pytest.mark.parametrize("name", _globals())
def test_no_global_outside_the_allowed_ones_is_called(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.partition(" ")
    argument = str(tmp_path / "made").encode()
    for body in (
        b"\x80\x02}(X\x06\0\0\0weightc%s\n%s\nX%s%s\x85Rsu.",
        b"\x80\x02c%s\n%s\nX%s%s\x85R.",
        b"\x80\x02c%s\n%s\nX%s%s\x85\x81.",
    ):
        pickled = body % (module.encode(), attribute.encode(), struct.pack("<I", len(argument)), argument)
        with pytest.raises(StateError, match="weights_only=True"):
            restore_bytes(file_with_pickle(pickled))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_zip_is_not_tried_as_an_older_format(tmp_path: Path) -> None:
    """torch.load falls back to a tar reader and a bare pickle when a file is not a zip file."""
    canary = tmp_path / "canary"
    with pytest.raises(DamageError, match="not a zip file"):
        restore_bytes(pickle.dumps(_Runs(Path.touch, canary)) + SEED)
    assert not canary.exists()


# -- sizes -----------------------------------------------------------------------------------------------------------


def _tensor_of(elements: int, *, size: str = "300", key: bytes = b"0") -> bytes:
    """The pickle of `{"weight": tensor}` whose storage claims this many elements."""
    return (
        b"\x80\x02}X\x06\0\0\0weightctorch._utils\n_rebuild_tensor_v2\n"
        b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
        + key
        + b"X\x03\0\0\0cpu"
        + pickle.dumps(elements, protocol=2)[2:-1]
        + b"tQK\0"
        + pickle.dumps(int(size), protocol=2)[2:-1]
        + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
    )


_SIZES = [2**31, 2**40, 2**50, 2**62, 2**63 - 1, 2**64, -1, -(2**62)]

_LIMITED = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import tests.fuzz.files as files
from holdfast.errors import HoldfastError
files.restore_bytes(files.SEED)
limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    state = files.live_state()
    try:
        files.restore_bytes(open(path, "rb").read(), state)
    except HoldfastError as error:
        print(type(error).__name__, str(error)[:200].replace(chr(10), " "))
    else:
        assert (state["weight"].tolist(), state["tied"].tolist()) == ([float(n) for n in range(300)], [1.0] * 3)
        print("restored")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 256 * 1024, f"{grown} KiB of memory were taken"
"""


def _restore_in_limited_memory(tmp_path: Path, images: list[bytes]) -> list[str]:
    """Restore each in a process limited to one more GiB; return its output, line by line."""
    paths = []
    for number, image in enumerate(images):
        paths.append(tmp_path / f"{number}.pt")
        paths[-1].write_bytes(image)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *map(str, paths)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == len(images)
    return lines


def test_no_size_in_a_file_is_believed(tmp_path: Path) -> None:
    """Storages, views, buffers and zip records of up to 2^64 bytes, in a process with little memory."""
    images = [file_with_pickle(_tensor_of(size), {"0": bytes(1200)}) for size in _SIZES]
    images += [file_with_pickle(_tensor_of(300, size=str(size)), {"0": bytes(1200)}) for size in _SIZES]
    for size in _SIZES:
        number = pickle.dumps(size, protocol=2)[2:-1]
        images.append(file_with_pickle(b"\x80\x02c__builtin__\nbytearray\n" + number + b"\x85R."))
        images.append(file_with_pickle(b"\x80\x02X" + struct.pack("<I", size % 2**32) + b"abc."))
    directory = SEED.rindex(b"PK\x01\x02")
    for size in (2**31 - 1, 2**32 - 2):
        for at in (20, 24, 42):  # packed size, size, offset of the header
            images.append(SEED[: directory + at] + struct.pack("<I", size) + SEED[directory + at + 4 :])
    end = SEED.rindex(b"PK\x05\x06")
    for size in (2**31 - 1, 2**32 - 2):
        for at in (12, 16):  # size and offset of the directory
            images.append(SEED[: end + at] + struct.pack("<I", size) + SEED[end + at + 4 :])
    lines = _restore_in_limited_memory(tmp_path, images)
    # A zip has some fields twice, and the reader takes the right ones; then all of the state is right, too.
    assert lines.count("restored") <= 5
    assert all(line.startswith(("StateError", "DamageError", "restored")) for line in lines)


# -- shape -----------------------------------------------------------------------------------------------------------


def test_nesting_without_end_is_refused_and_soon(tmp_path: Path) -> None:
    depth = 50_000
    lists = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    under_a_name = b"\x80\x02}X\x06\0\0\0weight" + b"]" * depth + b"a" * (depth - 1) + b"s."
    dicts = b"\x80\x02" + b"}K\0" * depth + b"N" + b"s" * depth + b"."
    doubled = b"\x80\x02]q\0" + b"".join(
        b"](h%sh%se" % (bytes([n]), bytes([n])) + b"q" + bytes([n + 1]) for n in range(200)
    )
    # Deep enough to exhaust the stack of a process that hashes it.
    key = b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."
    argument = b"\x80\x02ccollections\nCounter\n)" + b"\x85" * 1_000_000 + b"\x85R."
    storage = (
        b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n)"
        + b"\x85" * 1_000_000
        + b"X\x03\0\0\0cpuK\x01tQ."
    )
    itself = b"\x80\x02}q\0X\x06\0\0\0weighth\0s."
    pickles = (lists, under_a_name, dicts, doubled + b".", key, argument, storage, itself)
    for line in _restore_in_limited_memory(tmp_path, [file_with_pickle(pickled) for pickled in pickles]):
        assert line.startswith(("StateError", "DamageError"))
    for blob in (key, argument, storage):
        image = file_with_pickle(blob)
        with pytest.raises(DamageError, match="nested deeper than 1000"):
            decode(struct.pack("<q", len(image)) + image)


def test_a_state_deeper_than_pickle_can_go_is_refused_by_name() -> None:
    tree: Any = torch.zeros(1)
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(StateError, match="nested deeper than 1000"):
        tensor_paths(tree)


# -- real files, changed ---------------------------------------------------------------------------------------------


def _changed(chance: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(raw))
        match chance.randrange(4):
            case 0:
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at] = chance.randrange(256)
            case 2:
                raw[at : at + 4] = struct.pack("<I", chance.choice((0, 1, 2**31 - 1, 2**32 - 1)))
            case 3:
                del raw[at : at + chance.randrange(1, 8)]
    return bytes(raw)


def _try(image: bytes) -> bool:
    try:
        restore_bytes(image)
    except HoldfastError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_changed_files_with_true_crcs_give_errors_of_ours() -> None:
    chance = random.Random(7)
    pickled = torch_pickle({"weight": torch.arange(300.0), "tied": torch.ones(3), "step": 3})
    storages = {"0": torch.arange(300.0).numpy().tobytes(), "1": torch.ones(3).numpy().tobytes()}
    assert _try(file_with_pickle(pickled, storages))
    taken = 0
    for _ in range(700):
        taken += _try(file_with_pickle(_changed(chance, pickled), storages))
    for _ in range(700):
        taken += _try(_changed(chance, SEED))
    assert 0 < taken < 1200


@pytest.mark.filterwarnings("ignore")
def test_changed_per_rank_blobs_are_damage() -> None:
    chance = random.Random(8)
    blob = encode({"cpu": torch.arange(9), "draws": [1, 2.5, "x"]}, name="rng")
    refused = 0
    for _ in range(500):
        try:
            decode(_changed(chance, blob))
        except DamageError:
            refused += 1
    assert refused > 100
