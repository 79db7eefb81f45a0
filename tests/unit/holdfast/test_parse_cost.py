"""Hostile input costs a bounded amount of memory: each parser is measured in a separate process."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.parse_cost import COMPRESSED_FACTOR, PLAIN_FACTOR, json_cost
from holdfast.sealed import seal
from tests.support.checkpoints import manifest_of, small_image

_MIB = 1 << 20
_MORE_BYTES_MAX = 256 * _MIB

# Peak of the process, less what it had when the input was in memory and all was imported.
_CHILD = """
import resource, sys
from pathlib import Path
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.state_messages import Proposal
data = Path(sys.argv[2]).read_bytes()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
try:
    match sys.argv[1]:
        case "layout": Layout.from_bytes(data)
        case "table": Proposal.from_frame(Frame(Kind.PROPOSE, body=data))
        case "manifest": Manifest.from_bytes(data, source="there")
except Exception as error:
    print(peak() - before, type(error).__name__)
"""


def _layout(entries: bytes) -> bytes:
    head = b'{"format":1,"image_bytes":4096,"chunk_bytes":4096,"ranks":1,"entries":['
    return zlib.compress(head + entries + b'],"tensors":[]}', 9)


def _table(rows: bytes) -> bytes:
    shared = zlib.compress(b'{"table_digest":"","table":[' + rows + b"]}", 9)
    own = zlib.compress(b'{"pickle_bytes":0,"per_rank_bytes":{}}')
    return struct.pack("<II", len(shared), len(own)) + shared + own


def _manifest(field: bytes, item: bytes) -> bytes:
    items = b",".join([item] * (8 * _MIB // (len(item) + 1)))
    return seal(b'{"%s":[%s]}' % (field, items), "manifest_crc32")


def _split_manifest(record: bytes, count: int) -> bytes:
    """A manifest that is whole but for its splits."""
    document = json.loads(manifest_of(small_image(), step=1).to_bytes())
    del document["manifest_crc32"]
    records = b",".join([record] * count)
    return seal(json.dumps(document).encode()[:-1] + b',"splits":[%s]}' % records, "manifest_crc32")


HOSTILE = {
    "layout": [
        lambda: _layout(b",".join([b"[]"] * (10 << 20))),
        lambda: _layout(b",".join([b'["a",0,0,-1,[]]'] * (2 << 20))),
    ],
    "table": [lambda: _table(b",".join([b'["",1,[],0]'] * (4 << 20)))],
    "manifest": [
        lambda: _manifest(b"entries", b"{}"),
        lambda: _manifest(b"record", b"[]"),
        lambda: _manifest(b"chunk_crc32s", b"9"),
        lambda: _split_manifest(b'{"parts":1,"copies":1,"copies_max":1}', 200_000),
        lambda: _split_manifest(b'{"parts":1,"cuts":[[%s1]],"copies":1,"copies_max":1}' % (b"1," * _MIB), 4),
    ],
}


@pytest.mark.parametrize(
    ("parser", "number"), [(name, n) for name, several in HOSTILE.items() for n in range(len(several))]
)
def test_hostile_input_is_refused_before_it_costs(parser: str, number: int, tmp_path: Path) -> None:
    given = tmp_path / "input"
    given.write_bytes(HOSTILE[parser][number]())
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, parser, str(given)], capture_output=True, text=True, check=True
    )
    more_bytes, error = run.stdout.split()
    assert int(more_bytes) < _MORE_BYTES_MAX
    assert error in {"ProtocolError", "DamageError"}


def _names(tensors: int) -> list[str]:
    return [f"model/blocks.{index // 12}.attention.{index % 12}.weight" for index in range(tensors)]


def test_a_real_layout_of_many_tensors_is_far_below_the_limit() -> None:
    names, size = _names(100_000), 8192
    document = {
        "entries": [
            [f"archive/data/{n}", 4096 + n * size, 4096, -1, [8192 + n * size, 10**9 + n * 80]]
            for n in range(len(names))
        ],
        "tensors": [[name, "bfloat16", [64, 32], n] for n, name in enumerate(names)],
    }
    raw = json.dumps(document, separators=(",", ":")).encode()
    assert json_cost(raw) < COMPRESSED_FACTOR * len(zlib.compress(raw, 1)) / 3


def test_a_real_manifest_is_far_below_the_limit() -> None:
    body = manifest_of(small_image(), step=1, tensors=dict.fromkeys(_names(2000), "data/0")).to_bytes()
    assert json_cost(body) < PLAIN_FACTOR * len(body) / 2
    Manifest.from_bytes(body, source="here")


def test_a_refused_input_is_named_with_both_sizes() -> None:
    data = _layout(b",".join([b"[]"] * (4 << 20)))
    with pytest.raises(Exception, match=rf"{len(data)} bytes received would take \d+ bytes or more"):
        Layout.from_bytes(data)
