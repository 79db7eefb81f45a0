"""Sealed documents: still JSON, and any change is detected."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from holdfast.sealed import seal, unseal

BODY = b'{"attempt":7,"host":"kelp-1"}'


def test_a_sealed_document_is_json_and_comes_back() -> None:
    data = seal(BODY, "crc32")
    document = json.loads(data)
    assert isinstance(document.pop("crc32"), int)
    assert document == json.loads(BODY)
    assert unseal(data, "crc32") == BODY
    assert data.endswith(b"}\n")


def test_another_field_is_no_seal() -> None:
    assert unseal(seal(BODY, "one_crc32"), "other_crc32") is None
    assert unseal(BODY, "crc32") is None
    assert unseal(b"", "crc32") is None


@given(st.data())
def test_every_cut_and_every_flip_is_seen(data: st.DataObject) -> None:
    sealed = seal(BODY, "crc32")
    at = data.draw(st.integers(0, len(sealed) - 1))
    mask = data.draw(st.integers(1, 255))
    assert unseal(sealed[:at], "crc32") is None
    assert unseal(sealed[:at] + bytes([sealed[at] ^ mask]) + sealed[at + 1 :], "crc32") is None
