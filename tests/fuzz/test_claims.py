"""A foreign file claims sizes; a process that reads it never allocates memory for a claim.

many hostile files ─► one process that opens one after the other ─► growth of its peak memory per file, and each error
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.fuzz.files import file_with_pickle
from tests.fuzz.openers import SMALL
from tests.support.job import REPOSITORY

_GROWN_BYTES_MAX = 96 << 20
_CHILD = """
import gc, json, logging, resource, sys, warnings
from pathlib import Path
from tests.fuzz.openers import OPENERS
warnings.simplefilter("ignore"), logging.disable()
open_one = OPENERS[sys.argv[1]]
def memory(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024
def run(path):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = memory("VmRSS")
    try:
        said = open_one(path)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    return path.name, memory("VmHWM") - before, said
run(Path(sys.argv[2]))  # something harmless: what is imported and made once is not counted
most = memory("VmSize") + (4 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for path in map(Path, sys.argv[3:]):
    print(json.dumps(run(path)), flush=True)
"""


class Opened(NamedTuple):
    """The result of one file.

    Attributes:
        name: The file's.
        grown_bytes: Growth of the process's peak memory.
        said: The error.
    """

    name: str
    grown_bytes: int
    said: str


def opened(opener: str, paths: list[Path]) -> list[Opened]:
    """Open all files in one process, by one of `tests.fuzz.openers`; the first is harmless."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, opener, *map(str, paths)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return [Opened(*json.loads(line)) for line in done.stdout.splitlines()]


def complaints(found: list[Opened], *, expected: tuple[str, ...]) -> list[str]:
    """Describe files that made the process grow, or were not refused by an error of ours that names the file."""
    return [
        f"{one.name}: grew by {one.grown_bytes >> 20} MiB: {one.said[:300]}"
        for one in found
        if one.grown_bytes > _GROWN_BYTES_MAX or not one.said.startswith(expected) or one.name not in one.said
    ]


# -- pickles ---------------------------------------------------------------------------------------------------------


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _whole(number: int) -> bytes:
    return pickle.dumps(number, protocol=2)[2:-1]


_HEX = _text(b"hex") + b"q\1"
_NUMBERS = b"".join(b"M" + struct.pack("<H", number) for number in range(20_000))
_LONG = b"](" + _text(b"a" * (1 << 20)) + b"q\3e"
_ENCODE = b"c_codecs\nencode\nq\0"
_DOUBLED_LIST = b"](K\0K\0eq\2" + b"".join(
    b"](h%sh%seq%s" % (bytes([n]), bytes([n]), bytes([n + 1])) for n in range(2, 28)
)
_SMALL_TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0"
    + _whole(1 << 28)
    + b"\x85K\0\x85\x89ccollections\nOrderedDict\n)RtR"
)

PICKLES: dict[str, bytes] = {
    # Claims.
    "bytearray": b"c__builtin__\nbytearray\n" + _whole(3 << 29) + b"\x85R.",
    "bytearray through a list": b"c__builtin__\nbytearray\n](" + _whole(3 << 29) + b"eR.",
    "bytearray through another": b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nN"
    + _whole(3 << 29)
    + b"\x85NtR.",
    "a text": b"X" + struct.pack("<I", 2**32 - 1) + b"abc.",
    # Copies.
    "copied lists": b"](" + _NUMBERS + b"eq\3ccollections\nCounter\nq\2](" + b"h\2h\3\x85R" * 2000 + b"e.",
    "copied text": _LONG + _ENCODE + b"h\0" + _text(b"latin1") + b"q\4](" + b"h\0h\3h\4\x86R" * 2000 + b"e.",
    "doubled text": b"]("
    + _ENCODE
    + b"h\0"
    + _text(b"a" * 64)
    + _text(b"latin1")
    + b"\x86Rq\3"
    + _HEX
    + b"h\0h\3h\1\x86Rq\3" * 25
    + b"e.",
    "a list in a list as a tensor": b"](" + _DOUBLED_LIST + b"ctorch\nFloatTensor\nh\x1c\x85Re.",
    "a tensor that is repeated": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
    + _SMALL_TENSOR
    + b"ctorch\nfloat64\nX\x03\0\0\0cpu\x89tR.",
}


def test_no_pickle_of_somebody_else_costs_more_than_it_is_worth(tmp_path: Path) -> None:
    paths = [tmp_path / "harmless.pt"]
    paths[0].write_bytes(file_with_pickle(b"\x80\x02}" + _text(b"step") + b"K\x03s."))
    for name, pickled in PICKLES.items():
        paths.append(tmp_path / f"{name}.pt")
        data = file_with_pickle(b"\x80\x02}" + _text(b"step") + pickled[:-1] + b"s.", {"0": bytes(4)})
        paths[-1].write_bytes(data)
    paths.append(_bomb(tmp_path / "packed.pt"))
    assert complaints(opened("import", paths), expected=("DamageError",)) == []


def _bomb(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w") as entry:
            for _ in range(512):
                entry.write(bytes(1 << 20))
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    assert path.stat().st_size < 4 << 20
    return path


# -- safetensors -----------------------------------------------------------------------------------------------------


def _safetensors(header: bytes, data: bytes = b"", *, said_bytes: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if said_bytes is None else said_bytes) + header + data


def _many(tensors: int, entry: str) -> bytes:
    header = ("{" + ",".join(f'"{number}":{entry}' for number in range(tensors)) + "}").encode()
    return header + b" " * (len(header) % 2)  # so that an odd offset is not aligned


_HARMLESS = _safetensors(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd")
SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "a header of 2^63 bytes": lambda: _safetensors(b"{}", said_bytes=1 << 63),
    "a header that makes much": lambda: _safetensors(b'{"a":[' + b"[]," * (4 << 20) + b"[]]}"),
    "values that make much": lambda: _safetensors(
        b'{"__metadata__":{"holdfast":"[' + b"[]," * (4 << 20) + b'[]]"}}'
    ),
    "a shape of a huge product": lambda: _safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"9223372036854775807," * 100_000 + b'1],"data_offsets":[0,4]}}',
        b"abcd",
    ),
    "a shape of huge numbers": lambda: _safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,4]}}', b"abcd"
    ),
    "bytes outside": lambda: _safetensors(
        b'{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}'
    ),
    # Not aligned, so each tensor is copied.
    "the same bytes many times": lambda: _safetensors(
        _many(2000, '{"dtype":"I16","shape":[1048576],"data_offsets":[1,2097153]}'), bytes((2 << 20) + 2)
    ),
}


def test_no_safetensors_file_of_somebody_else_costs_more_than_it_is_worth(tmp_path: Path) -> None:
    paths = [tmp_path / "harmless.safetensors"]
    paths[0].write_bytes(_HARMLESS)
    for name, make in SAFETENSORS.items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(make())
    assert complaints(opened("import", paths), expected=("DamageError",)) == []


# -- folders of DCP --------------------------------------------------------------------------------------------------

_HUGE = struct.pack("<Q", 1 << 40)
METADATA: dict[str, bytes] = {
    "a place far out in the memo": b"\x80\x02Nr" + struct.pack("<I", 1 << 28) + b".",
    "an array of a terabyte": b"\x80\x05\x96" + _HUGE + b".",
    "bytes of a terabyte": b"\x80\x04\x8e" + _HUGE + b".",
    "a frame of a terabyte": b"\x80\x04\x95" + _HUGE + b"N.",
    "a number of two gigabytes": b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b".",
    "a key of deep tuples": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "copied sizes": b"\x80\x02](("
    + b"K\x01" * 100_000
    + b"tq\0ctorch\nSize\nq\1"
    + b"h\1h\0\x85R" * 2000
    + b"e.",
}


def test_no_pickle_that_the_drill_compares_costs_more_than_it_is_worth(tmp_path: Path) -> None:
    hostile = METADATA | {
        "a list in a list": b"\x80\x02](" + _DOUBLED_LIST + b"e.",
    }
    paths = [tmp_path / "harmless"]
    paths[0].write_bytes(b"\x80\x02N.")
    for name, pickled in hostile.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(pickled)
    assert complaints(opened("drill", paths), expected=("DamageError",)) == []


def _changed(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _claims_a_tensor(metadata: Any) -> None:
    """A tensor of 2 GiB, expanded from four bytes."""
    record = metadata.state_dict_metadata["model.weight"]
    record.size = torch.Size([1 << 29])
    record.chunks[0].sizes = record.size


def _claims_a_long_list(metadata: Any) -> None:
    metadata.planner_data["step"] = ("step", 1 << 28)


def _claims_bytes_outside(metadata: Any) -> None:
    for index, info in list(metadata.storage_data.items()):
        metadata.storage_data[index] = dataclasses.replace(info, length=1 << 40)


def _claims_the_same_bytes(metadata: Any) -> None:
    (record, (place, info)) = (
        metadata.state_dict_metadata["model.weight"],
        next(pair for pair in metadata.storage_data.items() if pair[0].fqn == "model.weight"),
    )
    for number in range(2000):
        metadata.state_dict_metadata[f"copy{number}"] = record
        metadata.storage_data[dataclasses.replace(place, fqn=f"copy{number}")] = info


CHANGES: dict[str, Callable[[Any], None]] = {
    "a tensor that is not there": _claims_a_tensor,
    "a long list": _claims_a_long_list,
    "bytes behind the end": _claims_bytes_outside,
    "the same bytes many times": _claims_the_same_bytes,
}


ACTS: dict[str, Callable[[Path], Any]] = {
    "a file that is missing": Path.unlink,
    "a file that is short": lambda path: os.truncate(path, 100),
    "a packed part": _bomb,
}


@pytest.mark.filterwarnings("ignore")
def test_no_folder_of_dcp_costs_more_than_it_is_worth(tmp_path: Path) -> None:
    whole = tmp_path / "harmless"
    save({"model": {"weight": torch.zeros(1 << 18)}, "step": 7}, checkpoint_id=whole, no_dist=True)
    folders = [whole]
    for name, pickled in METADATA.items():
        folders.append(tmp_path / name)
        shutil.copytree(whole, folders[-1])
        (folders[-1] / ".metadata").write_bytes(pickled)
    for name, change in CHANGES.items():
        folders.append(tmp_path / name)
        shutil.copytree(whole, folders[-1])
        _changed(folders[-1], change)
    for name, act in ACTS.items():
        folders.append(tmp_path / name)
        shutil.copytree(whole, folders[-1])
        (data,) = folders[-1].glob("*.distcp")
        act(data)
    _changed(folders[-1], functools.partial(_put_all_in_one, nbytes=data.stat().st_size))
    folders.append(tmp_path / "huge metadata")
    shutil.copytree(whole, folders[-1])
    os.truncate(folders[-1] / ".metadata", 8 << 30)
    assert complaints(opened("import", folders), expected=("DamageError",)) == []


def _put_all_in_one(metadata: Any, nbytes: int) -> None:
    (index, info) = next(iter(metadata.storage_data.items()))
    metadata.storage_data = {index: dataclasses.replace(info, offset=0, length=nbytes)}


# -- small objects of a run ------------------------------------------------------------------------------------------


def test_no_small_object_of_a_run_is_read_whole_because_it_is_there(tmp_path: Path) -> None:
    runs = [tmp_path / "harmless"]
    runs[0].mkdir()
    for kind, name in SMALL.items():
        runs.append(tmp_path / kind)
        (runs[-1] / name).parent.mkdir(parents=True)
        with (runs[-1] / name).open("wb") as file:
            file.truncate(1 << 30)
    found = opened("store", runs)
    assert complaints(found, expected=("bounded",)) == []
