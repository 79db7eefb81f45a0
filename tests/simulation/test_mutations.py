"""Deliberate bugs in the product: the simulation must detect each of them within its number of seeds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.share_mutations import SHARE_MUTATIONS
from tests.simulation.tcp_mutations import TCP_MUTATIONS
from tests.simulation.tier_mutations import TIER_MUTATIONS

ALL = {**MUTATIONS, **TCP_MUTATIONS, **TIER_MUTATIONS, **SHARE_MUTATIONS}
SECONDS_MAX = 1200
TIER_SEEDS_MAX = 3000
# One for each promise: a staged step is whole and of one instant, a listed step is whole, slots are not shared, one
# writer, power cuts, shards in their places, a reader that checks again, a growing ring; over TCP no message is lost
# with a connection, and no replaced start returns; several flushers each write their own share. tests/soak has all.
ALWAYS = {
    "torn_is_staged",
    "newest_makes_room",
    "staged_before_last_chunk",
    "manifest_before_file",
    "credit_twice",
    "claim_unchecked",
    "run_and_stride_swapped",
    "read_without_second_look",
    "slots_before_word",
    "torn_sector_believed",
    "committed_before_flushed",
    "under_way_lost",
    "late_admitted",
    "seal_of_another_write",
    "part_outside_the_share",
    "one_seal_missing",
    "lost_share_voided",
}


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_the_bug_is_seen(name: str) -> None:
    look_for(name)


def look_for(name: str) -> None:
    """Play seeds with the bug applied, until one fails."""
    if name in MUTATIONS | TCP_MUTATIONS:
        mutation = (MUTATIONS | TCP_MUTATIONS)[name]
        program, seeds_max = "tests.simulation --json", mutation.seeds_max
        if name in TCP_MUTATIONS:
            program += " --tcp"
    elif name in SHARE_MUTATIONS:
        mutation = SHARE_MUTATIONS[name]
        program, seeds_max = "tests.simulation.shares --json", mutation.seeds_max
    else:
        program, mutation, seeds_max = "tests.simulation.tiers", TIER_MUTATIONS[name], TIER_SEEDS_MAX
    done = subprocess.run(
        [
            *(sys.executable, "-m", *program.split(), "--mutation", mutation.name),
            *("--first", str(mutation.first_seed), "--count", str(seeds_max), "--stop-at", "1"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"], (
        f"{mutation.name} ({mutation.bug}) survives {result['schedules']} seeds: the simulation has a hole"
    )
    seed, failure = result["failures"][0]
    assert "expected once" not in failure, "the mutation no longer fits the source"
    print(f"{mutation.name}: seen after {result['schedules']} seeds, seed {seed}: {failure}")


def test_mutations_fit_the_source() -> None:
    wrong = [
        f"{mutation.name}: {module}: {old!r}"
        for mutation in ALL.values()
        for module, old, _ in mutation.edits
        if _source(module).count(old) != 1
    ]
    assert not wrong, "\n".join(wrong)


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def test_mutations_are_many_enough_and_have_unique_names() -> None:
    assert len(MUTATIONS) >= 10
    assert len(TCP_MUTATIONS) >= 10
    assert len(TIER_MUTATIONS) >= 6
    names = [*MUTATIONS, *TCP_MUTATIONS, *TIER_MUTATIONS, *SHARE_MUTATIONS]
    assert len(set(names)) == len(names)
