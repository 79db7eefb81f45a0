"""The records of the zip that torch has written, as entries of the layout.

data.pkl            entry, rank 0's        a storage                entry, by its ownership
serialization id    entry, rank 0's        byteorder, version, …    literals: their CRCs never change
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.crc import crc32
from holdfast.image.entries import Entry, TensorInfo
from trainer_side.state.sparse_file import SparseFile
from trainer_side.state.survey import Survey
from trainer_side.state.tree import Ownership

_PICKLE = "archive/data.pkl"
_SERIALIZATION_ID = "archive/.data/serialization_id"
_STORAGE_PREFIX = "archive/data/"


@dataclass(frozen=True)
class ZipParts:
    """The records of the zip and their places.

    Attributes:
        entries: Those of the layout.
        gated: Per entry, whether it is copied behind the gate.
        pickle_entry: Index of data.pkl.
        serialization_id_entry: Index of the id with which torch tells files apart.
        serialization_id: What torch wrote there when the plan was made.
        storage_entries: Storage number to entry index.
        constant_crcs: CRC fields of records that never change.
    """

    entries: tuple[Entry, ...]
    gated: tuple[bool, ...]
    pickle_entry: int
    serialization_id_entry: int
    serialization_id: bytes
    storage_entries: tuple[int, ...]
    constant_crcs: Mapping[int, int]

    @classmethod
    def of(cls, image: SparseFile, found: Survey, owned: Mapping[int, Ownership]) -> ZipParts:
        """Read the zip.

        Args:
            image: As torch wrote it, with holes.
            found: The tensors in it.
            owned: Whose each storage is, by its address.
        """
        ownership = {number: owned[key] for key, number in found.numbers.items()}
        entries: list[Entry] = []
        gated: list[bool] = []
        by_name: dict[str, int] = {}
        constant_crcs: dict[int, int] = {}
        for record in image.records():
            role = Ownership(0, gated=False)
            if record.name.startswith(_STORAGE_PREFIX):
                number = int(record.name.removeprefix(_STORAGE_PREFIX))
                assert record.nbytes == found.parts[number].nbytes, (
                    "torch.save numbers storages as the survey does"
                )
                role = ownership[number]
            elif record.name not in (_PICKLE, _SERIALIZATION_ID):
                crc = crc32(image.read_at(record.offset, record.nbytes))
                constant_crcs.update(dict.fromkeys(record.crc_fields, crc))
                continue
            by_name[record.name] = len(entries)
            entries.append(Entry(record.name, record.offset, record.nbytes, role.owner, record.crc_fields))
            gated.append(role.gated)
        identity = by_name[_SERIALIZATION_ID]
        return cls(
            entries=tuple(entries),
            gated=tuple(gated),
            pickle_entry=by_name[_PICKLE],
            serialization_id_entry=identity,
            serialization_id=image.read_at(entries[identity].offset, entries[identity].nbytes),
            storage_entries=tuple(
                by_name[f"{_STORAGE_PREFIX}{number}"] for number in range(len(found.parts))
            ),
            constant_crcs=constant_crcs,
        )

    def tensors(self, found: Survey) -> tuple[TensorInfo, ...]:
        """The tensors, with the entry in which each lies."""
        return tuple(
            TensorInfo(slot.path, slot.dtype, slot.shape, self.storage_entries[slot.storage])
            for slot in found.slots
        )
