"""Who takes what of each entry: all ranks all of it, or each rank its own parts. Agreed among the ranks.

shared   taken whole by every rank        read once, 1/R each, and given to the others
own      split on some rank               each rank its regions; one that takes it whole has one region, the whole
         small, beside those that are     the same: steps of an optimizer lie between its moments in the file, and the
                                          chunks would be read a second time for them
neither  nobody takes a byte of it        not read
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_side.ranks.peers import Peers, gather
from trainer_side.restore.device_sections import DeviceTarget
from trainer_side.restore.region_targets import ScatterTarget, settle, whole_entry
from trainer_side.restore.split_parts import Placed
from trainer_side.restore.structure import Structure
from trainer_side.restore.targets import EntryTaker, EntryTarget

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Deal:
    """The targets of this rank. On every rank the same entries are shared, and the same ones are own.

    Attributes:
        unshared: Entries that are own, or that nobody takes.
        device: Entries that are shared, and go to a device: on every rank the same ones.
        mixed: Entries that are shared, of which this rank also takes parts: from the shared memory.
    """

    shared: dict[int, EntryTarget] = field(default_factory=dict)
    own: dict[int, ScatterTarget] = field(default_factory=dict)
    unshared: frozenset[int] = frozenset()
    device: dict[int, DeviceTarget] = field(default_factory=dict)
    mixed: dict[int, ScatterTarget] = field(default_factory=dict)

    @property
    def targets(self) -> Mapping[int, EntryTaker]:
        """Of all entries of which anybody takes something."""
        return {**self.whole, **self.own}

    @property
    def whole(self) -> Mapping[int, EntryTaker]:
        """Of all entries that are shared."""
        return {**self.shared, **self.device}

    def settle(self) -> None:
        """Put what could not be read into its place there. Training thread, when every rank has all its bytes."""
        for index, target in self.mixed.items():
            target.put(0, self.shared[index].address, self.shared[index].memory)
        settle([*self.own.values(), *self.mixed.values()])


def deal(structure: Structure, placed: Placed, peers: Peers) -> Deal:
    """Agree on who takes what. Collective.

    Args:
        structure: After `take_to_device`: the memory of what is taken whole.
        placed: What this rank takes in parts.
        peers: The ranks.
    """
    free: list[set[int]] = []
    wanted: set[int] = set()
    if not peers.all_agree(not placed.free and not placed.regions):
        mine = json.dumps([sorted(placed.free), sorted(placed.regions)]).encode()
        for said in gather(peers, mine):
            free_there, regions_there = json.loads(said)
            free.append(set(free_there))
            wanted.update(regions_there)
    unshared = frozenset[int]().union(*free)
    wanted.update(index for index in unshared if any(index not in there for there in free))
    shared = {
        index: EntryTarget.of(storage)
        for index, storage in structure.storages.items()
        if index not in unshared and storage.device.type == "cpu"
    }
    device = {
        index: DeviceTarget.of(storage)
        for index, storage in structure.storages.items()
        if storage.device.type != "cpu"
    }
    own = {index: placed.regions.get(index, ScatterTarget()) for index in sorted(unshared & wanted)}
    for index, target in own.items():
        if index not in placed.free:
            storage = structure.storages[index]
            target.regions.append(whole_entry(index, storage.nbytes(), storage))
    if own:
        between = [
            index
            for index in [*shared, *device]
            if structure.storages[index].nbytes() <= _SMALL_BYTES and index not in wanted
        ]
        for index in between:
            storage = structure.storages[index]
            own[index] = ScatterTarget([whole_entry(index, storage.nbytes(), storage)])
            shared.pop(index, None)
            device.pop(index, None)
        unshared |= frozenset(between)
    mixed = {index: target for index, target in placed.regions.items() if index in shared}
    return Deal(shared, own, unshared, device, mixed)
