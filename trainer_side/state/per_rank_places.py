"""The places of `PerRank` values in the image: one tensor for each value and rank, of the size that was agreed on.

    state["rng"] = PerRank(…)  ─►  expanded["rng"] = [rank 0's blob, rank 1's blob, …]

While a layout is made these are stand-ins, memory that is never touched. Each rank fills its own at every save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import Ownership


@dataclass(frozen=True)
class Blobs:
    """Stand-ins for every rank's blob.

    Attributes:
        by_name: Name in the state → one tensor for each rank.
    """

    by_name: Mapping[str, list[torch.Tensor]]

    @classmethod
    def of(cls, ranks: int, reserves: Mapping[str, int]) -> Blobs:
        return cls(
            {
                name: [torch.empty(reserve, dtype=torch.uint8, device="cpu") for _ in range(ranks)]
                for name, reserve in reserves.items()
            }
        )

    @property
    def paths(self) -> set[str]:
        return {f"{name}/{rank}" for name, tensors in self.by_name.items() for rank in range(len(tensors))}

    def expand(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The tree with blobs in place of its `PerRank` values, which have these names."""
        return {
            name: self.by_name[name] if isinstance(value, PerRank) else value for name, value in tree.items()
        }

    def own(self, classes: Mapping[int, Ownership]) -> dict[int, Ownership]:
        """By address of a storage, as `classes`: each blob is its rank's, and copied at once."""
        owned = dict(classes)
        for tensors in self.by_name.values():
            for rank, tensor in enumerate(tensors):
                owned[tensor.untyped_storage()._cdata] = Ownership(rank, gated=False)
        return owned

    def entries(self, numbers: Mapping[int, int], storage_entries: tuple[int, ...]) -> dict[str, list[int]]:
        """Name → the layout's entry of each rank.

        Args:
            numbers: Address of a storage → its number, as the survey gave it.
            storage_entries: Storage number → entry.
        """
        return {
            name: [storage_entries[numbers[tensor.untyped_storage()._cdata]] for tensor in tensors]
            for name, tensors in self.by_name.items()
        }
