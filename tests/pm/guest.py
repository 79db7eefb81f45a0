"""Runs in the guest: writes slices into a tier on a DAX file system, step after step, and announces each on the
console.

    GUEST how libpmem, MAP_SYNC … ─► kept 0 ─► complete 1 1 ─► complete 1 2 ─► …        until the power is cut
    GUEST how … ─► kept 2 ─► complete 2 1 …                                             after it: attempt 2

The guest says `kept n` when it has found n slices with every byte right. It has no torch, and tiers need none.
"""

from __future__ import annotations

import sys

from tests.support.tiers import RUN, image, read, save, slice_of
from trainer_side.tiers.open_tiers import open_tier


def main(directory: str, attempt: int, count: int) -> None:
    made = image()
    tier = open_tier(f"pm:{directory}", RUN)
    tier.prepare(made.layout, 0)
    print(f"GUEST how {tier.write_mode}")
    kept = tier.kept_slices()
    for one in kept:
        assert read(tier, one) == slice_of(made, 0, one.seal.attempt * 1000 + one.seal.step)
    orders = " ".join(f"{one.seal.attempt}.{one.seal.step}" for one in kept)
    print(f"GUEST kept {len(kept)} {orders}")
    for step in range(1, count + 1):
        save(tier, made, 0, attempt, step)
        print(f"GUEST complete {attempt}.{step}")
    tier.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
