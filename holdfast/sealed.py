"""A JSON document whose last line has the CRC-32 of the rest: plain JSON for any reader, but bit flips are detected.

    {"attempt":7,"host":"kelp-1",…
    ,"claim_crc32":3735928559}
    └─── one more field ────┘  on its own line, so that no parsing is needed to find it

Manifests, claims and the checkpoint files beside the ring have this form. Readers check the CRC before they parse, so a
truncated or altered document is reported as damage.
"""

from __future__ import annotations

from holdfast.crc import crc32


def seal(body: bytes, field: str) -> bytes:
    """Append the CRC-32 of `body`, a JSON object that is not empty, as one more field named `field`."""
    open_body = body[:-1]
    return open_body + b',\n"%s":%d}\n' % (field.encode(), crc32(open_body))


def unseal(data: bytes, field: str) -> bytes | None:
    """Return the body that was sealed; None if there is no seal or the CRC does not match."""
    open_body, _, last = data.rpartition(b',\n"%s":' % field.encode())
    # Compare bytes, with the newline: int() would accept `+7`, `7_0` and a truncated last line.
    if last != b"%d}\n" % crc32(open_body):
        return None
    return open_body + b"}"
