"""A JSON document whose last line is the CRC-32 of all the rest: still JSON for everybody, and no bit flips unseen.

    {"attempt":7,"host":"kelp-1",…
    ,"claim_crc32":3735928559}
    └── field of its own ───┘  on a line of its own, so that it is found without parsing anything

Manifest, claims and the checkpoint files beside the ring are written like this. Checking it comes before parsing: a
truncated or altered document is damage, and not a guess.
"""

from __future__ import annotations

from holdfast.crc import crc32


def seal(body: bytes, field: str) -> bytes:
    """`body`, a JSON object that is not empty, with its CRC-32 as one more field named `field`."""
    open_body = body[:-1]
    return open_body + b',\n"%s":%d}\n' % (field.encode(), crc32(open_body))


def unseal(data: bytes, field: str) -> bytes | None:
    """The body that was sealed; None without one, or when the CRC does not hold."""
    open_body, _, last = data.rpartition(b',\n"%s":' % field.encode())
    # To the byte, end of line and all: an int() would take `+7`, `7_0` and a last line that was cut short.
    if last != b"%d}\n" % crc32(open_body):
        return None
    return open_body + b"}"
