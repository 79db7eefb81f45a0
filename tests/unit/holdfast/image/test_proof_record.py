"""A proof in the store is read back completely, and a damaged one is refused."""

from __future__ import annotations

import pytest

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import is_manifest_name
from holdfast.image.proof_record import ProofRecord, proof_name
from holdfast.sealed import seal

RECORD = ProofRecord(CheckpointId(2, 41), ({"step": 42, "loss": 0.5}, {"step": 42, "loss": "nan"}))


def test_a_record_is_read_back() -> None:
    assert ProofRecord.from_bytes(RECORD.to_bytes()) == RECORD


def test_each_flipped_byte_is_seen() -> None:
    whole = RECORD.to_bytes()
    for at in range(len(whole)):
        with pytest.raises(ValueError, match="CRC"):
            ProofRecord.from_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ValueError, match="CRC"):
        ProofRecord.from_bytes(whole[:-1])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"format":"holdfast-proof-2"}', "expected the format holdfast-proof-1"),
        (
            b'{"format":"holdfast-proof-1","attempt":1,"step":-1,"digests":[{}]}',
            "expected an attempt and a step",
        ),
        (b'{"format":"holdfast-proof-1","attempt":1,"step":1,"digests":[]}', "expected a list of digests"),
        (b'{"format":"holdfast-proof-1","attempt":1,"step":1,"digests":[3]}', "expected a list of digests"),
    ],
)
def test_other_contents_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ProofRecord.from_bytes(seal(body, "proof_crc32"))


@pytest.mark.parametrize("file", ["step-000000041.pt", "step-000000041-a002.pt"])
def test_the_name_of_a_proof_is_beside_its_file_and_is_no_manifest(file: str) -> None:
    name = proof_name(file)
    assert name == file.replace(".pt", ".proof.json")
    assert not is_manifest_name(name)
