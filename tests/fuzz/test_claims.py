"""A file of somebody else says how much it holds; a process that reads it never takes memory for a claim.

many hostile files ─► one process that opens one after the other ─► by how much its peak grew, and each error
"""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.files import file_with_pickle
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
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
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
    """What came of one file.

    Attributes:
        name: Of the file.
        grown_bytes: By how much the peak of the process grew.
        said: The error.
    """

    name: str
    grown_bytes: int
    said: str


def opened(opener: str, paths: list[Path]) -> list[Opened]:
    """Open all in one process, by one of `tests.fuzz.openers`; the first is harmless."""
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
    """What grew, and what was not refused by an error of ours that names the file."""
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
