"""A tier on a device that loses power: seeded lives of one rank, each ended by a kill or a power cut, then checked.

    python -m tests.simulation.tiers --first 0 --count 5000            # a failing one is printed with its seed
    python -m tests.simulation.tiers --seed 4711                       # replay exactly that one
    python -m tests.simulation.tiers --mutation same_sector_twice --count 400 --stop-at 1

Begin, write, seal, complete, void, abandon come in any order that a keeper may give, with several slices in flight.
After each end of a life, from the bytes left in the file:

1. Every listed slice reads back, every byte as it was given for that step: never a mix.
2. The newest step reported as complete is there, and so are sealed steps of this life that may yet be complete.
   If its slice is damaged, and restore says so, the newest complete one before it takes its place.
3. The next life can begin a step, and in the end complete one.
4. A slice has its own proof or none.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a mutation is applied before anything of the product is loaded
    from tests.simulation.device import Device
    from trainer_side.tiers.slot_tier import SlotTier
    from trainer_side.tiers.slot_writer import SlotWriter

__all__ = ["World", "play"]

_RUN = "/mnt/store/kelp"
_LIVES_MAX, _ACTIONS_MAX = 5, 40
_ACTIONS = ["begin", "write", "write", "write", "write", "seal", "seal", "complete"] * 3 + ["void", "abandon"]


def play(seed: int, directory: Path) -> int:
    """Play one schedule; return the number of device calls. Raises AssertionError where a rule above is broken."""
    from tests.simulation.device import Device

    chance = random.Random(seed)
    device = Device(chance.choice(["blocks", "blocks", "mapped", "pm"]), chance)
    device.failing = chance.choice([0.0, 0.0, 0.1, 0.3])
    world = World(chance, device, directory, slots=chance.choice([2, 2, 3, 4]))
    for attempt in range(1, chance.randrange(2, _LIVES_MAX + 1)):
        world.live(attempt)
    device.failing = 0.0
    world.last(attempt + 1)
    return device.calls


class World:
    def __init__(self, chance: random.Random, device: Device, directory: Path, *, slots: int) -> None:
        from holdfast.image.slices import frames_of
        from tests.support.images import made_up

        self.chance, self.device, self.directory, self.slots = chance, device, directory, slots
        self.layout = made_up(7, entries=4, chunk_bytes=4096, ranks=1, entry_bytes_max=3000).layout
        self.frames = frames_of(self.layout, 0)
        self.complete = (0, 0)  # the newest step reported as complete, and recorded
        self.said: set[tuple[int, int]] = set()  # all steps reported as complete
        self.pending: set[tuple[int, int]] = set()  # sealed in this life, and not void
        self.damaged: set[tuple[int, int]] = set()  # a byte of their slices has changed

    def open(self) -> SlotTier:
        from trainer_side.tiers.slot_tier import SlotTier
        from trainer_side.tiers.tier import Nearness
        from trainer_side.tiers.tier_directory import TierDirectory

        place = TierDirectory(self.directory, _RUN)
        return SlotTier("sim", Nearness.FILE, place, self.device.medium, slots=self.slots, writers=1)

    def data(self, order: tuple[int, int], frame: int) -> bytes:
        return random.Random(f"{tuple(order)} {frame}").randbytes(self.frames[frame].nbytes)

    # -- one life ------------------------------------------------------------------------------------------------

    def live(self, attempt: int) -> None:
        from tests.simulation.device import PowerCut

        self.device.cut_in = self.chance.choice([-1, self.chance.randrange(4), self.chance.randrange(60)])
        tier = self.open()
        cut = False
        try:
            if self.prepared(tier):
                self.rot(tier)
                self.restored(tier, attempt)
                self.act(tier, attempt)
        except PowerCut:
            cut = True
        tier.close()
        if cut or self.chance.random() < 0.5:
            self.device.power_cut()
        self.device.cut_in = -1
        self.look()
        self.pending.clear()

    def prepared(self, tier: SlotTier) -> bool:
        from holdfast.errors import StoreError

        for _ in range(3):
            try:
                tier.prepare(self.layout, 0)
            except StoreError:
                continue
            return True
        return False

    def rot(self, tier: SlotTier) -> None:
        """Damage the newest complete slice while there is an older one, which is then the newest good one."""
        kept = {one.seal.order: one for one in tier.kept_slices() if one.seal.order not in self.damaged}
        whole = sorted(kept.keys() & self.said)
        if len(whole) < 2 or whole[-1] < self.complete or self.chance.random() < 0.5:
            return
        path = Path(kept[whole[-1]].place)
        begin = tier._superblocks[str(path)].slot_offset(kept[whole[-1]].slot)
        self.device.rot(path, begin + self.chance.randrange(self.frames[0].nbytes))
        self.damaged.add(whole[-1])
        self.said.discard(whole[-1])
        self.complete = whole[-2]

    def restored(self, tier: SlotTier, attempt: int) -> None:
        """Restore as a keeper does; or report nothing, unless the restore has met damage."""
        from holdfast.errors import StoreError

        kept = [one.seal.order for one in tier.kept_slices()]
        if not self.damaged.intersection(kept) and self.chance.random() < 0.4:
            return
        agreed = [order for order in kept if order >= self.complete and order not in self.damaged]
        if agreed:
            chosen = self.chance.choice(agreed)
            self.say_complete(tier, chosen)
            for order in kept:
                if order > chosen:
                    tier.void(*order)
                    self.said.discard(order)
        try:
            writer = tier.begin(attempt, 0)
        except StoreError:
            return
        assert writer is not None, f"nothing is on its way, and no slot is free: {kept}"
        writer.abandon()

    def say_complete(self, tier: SlotTier, order: tuple[int, int]) -> None:
        failed = self.device.failed
        self.said.add(order)
        tier.complete(*order)
        if self.device.failed == failed:  # else the next record stores it, before overwriting older slices
            self.complete = max(self.complete, order)

    def act(self, tier: SlotTier, attempt: int) -> None:
        from holdfast.errors import StoreError

        step = 0
        writers: dict[tuple[int, int], tuple[SlotWriter, list[int]]] = {}
        for _ in range(self.chance.randrange(_ACTIONS_MAX)):
            try:
                match self.chance.choice(_ACTIONS):
                    case "begin":
                        step += self.chance.randrange(1, 3)
                        writer = tier.begin(attempt, step)
                        if writer is not None:
                            left = list(range(len(self.frames)))
                            self.chance.shuffle(left)
                            writers[attempt, step] = (writer, left)
                    case "write" if writers:
                        writer, left = writers[self.chance.choice(sorted(writers))]
                        if left:
                            self.write(writer, left)
                    case "seal" if writers:
                        order = self.chance.choice(sorted(writers))
                        self.seal(writers.pop(order))
                        self.prove(tier, order)
                    case "complete" if self.pending:
                        order = self.chance.choice(sorted(self.pending))
                        self.say_complete(tier, order)
                        self.pending = {one for one in self.pending if one >= order}
                    case "void" if self.pending:
                        order = self.chance.choice(sorted(self.pending))
                        tier.void(*order)
                        self.pending.discard(order)
                    case "abandon" if writers:
                        writers.pop(self.chance.choice(sorted(writers)))[0].abandon()
            except StoreError:
                continue

    def seal(self, begun: tuple[SlotWriter, list[int]]) -> None:
        writer, left = begun
        while left:
            self.write(writer, left)
        if writer.seal({}):
            self.pending.add(writer.order)

    def prove(self, tier: SlotTier, order: tuple[int, int]) -> None:
        """The rank does the next step, or is killed before. Has its own dice, so that other choices stay the same."""
        if random.Random(f"prove {order}").random() < 0.7:
            tier.keep_proof(*order, {"of": list(order)})

    def write(self, writer: SlotWriter, left: list[int]) -> None:
        from holdfast.crc import crc32

        number = left[-1]
        frame = self.frames[number]
        data = self.data(writer.order, number)
        if writer.memory is not None:
            writer.memory[frame.offset : frame.offset + frame.nbytes] = data
            buffer = writer.memory[frame.offset : frame.offset + frame.padded_bytes]
        else:
            memory = mmap.mmap(-1, frame.padded_bytes)
            memory[: len(data)] = data
            buffer = memoryview(memory)
        writer.write(number, buffer, crc32(data))
        left.pop()

    # -- invariants ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        from holdfast.crc import crc32

        tier = self.open()
        kept = tier.kept_slices()
        orders = [one.seal.order for one in kept]
        assert len(orders) == len(set(orders)) <= self.slots, f"listed: {orders}"
        for one in kept:
            proof = tier.proof(one)
            assert proof in (None, {"of": list(one.seal.order)}), f"{one.seal.order}: has the proof {proof}"
            if one.seal.order in self.damaged:
                continue
            for number, frame in enumerate(self.frames):
                view = memoryview(bytearray(frame.nbytes))
                tier.read_into(one, frame.offset, view)
                assert crc32(view) == one.seal.frame_crc32s[number], f"{one.seal.order} frame {number}: CRC"
                assert bytes(view) == self.data(one.seal.order, number), f"{one.seal.order}: not its bytes"
        tier.close()
        if self.complete > (0, 0):
            whole = {order for order in self.said if order >= self.complete}
            assert whole & set(orders), f"{sorted(whole)} were complete, listed are {orders}"
        lost = self.pending - set(orders)
        assert not lost, f"sealed, and not given up: {sorted(lost)}; listed are {orders}"

    def save(self, tier: SlotTier, order: tuple[int, int]) -> None:
        """Write one step from begin to end."""
        writer = tier.begin(*order)
        assert writer is not None, f"{order} finds no slot: {[one.seal.order for one in tier.kept_slices()]}"
        self.seal((writer, list(range(len(self.frames)))))
        assert order in self.pending, "it was not sealed"
        self.say_complete(tier, order)
        self.pending.clear()

    def last(self, attempt: int) -> None:
        """A life without faults, in which the restore is not reported."""
        tier = self.open()
        assert self.prepared(tier)
        for step in (1, 2, 3):
            self.save(tier, (attempt, step))
        tier.close()
        self.device.power_cut()
        self.look()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.tiers")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop-at", type=int, default=10)
    parser.add_argument("--mutation")
    given = parser.parse_args(arguments)
    if given.mutation:
        from tests.simulation.mutations import install
        from tests.simulation.tier_mutations import TIER_MUTATIONS

        install(TIER_MUTATIONS[given.mutation])
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # hide reports of damage and failures
    failures: list[tuple[int, str]] = []
    schedules = calls = 0
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.count)
    for seed in seeds:
        directory = Path(tempfile.mkdtemp(prefix="holdfast-device-", dir="/dev/shm"))
        try:
            calls += play(seed, directory)
        except AssertionError as error:
            if given.seed is not None:
                raise
            failures.append((seed, str(error).splitlines()[0]))
        finally:
            shutil.rmtree(directory)
        schedules += 1
        if len(failures) >= given.stop_at:
            break
    print(json.dumps({"schedules": schedules, "calls": calls, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
