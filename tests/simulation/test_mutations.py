"""Deliberate bugs in the product: the simulation sees each of them within so many seeds, or it has a hole."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.tier_mutations import TIER_MUTATIONS

SECONDS_MAX = 1200
_TIER_SEEDS_MAX = 3000
# One seed in hundreds shows it, which takes minutes.
_RARE = {
    "welcome_without_whole",
    "removed_comes_back",
    "remains_under_another_name",
}
# Of the tiers' bugs each costs an import of torch; the other ones are looked for by `make soak`.
_TIER_ALWAYS = {"same_sector_twice", "torn_sector_believed", "committed_before_flushed"}
_CASES = [
    *(
        pytest.param(
            "tests.simulation --json",
            bug,
            bug.seeds_max,
            id=bug.name,
            marks=[pytest.mark.soak] if bug.name in _RARE else [],
        )
        for bug in MUTATIONS.values()
    ),
    *(
        pytest.param(
            "tests.simulation.tiers",
            bug,
            _TIER_SEEDS_MAX,
            id=f"tier_{bug.name}",
            marks=[pytest.mark.soak] if bug.name not in _TIER_ALWAYS else [],
        )
        for bug in TIER_MUTATIONS.values()
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize(("program", "mutation", "seeds_max"), _CASES)
def test_the_bug_is_seen(program: str, mutation: Mutation, seeds_max: int) -> None:
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


@pytest.mark.parametrize(
    "mutation", [*MUTATIONS.values(), *TIER_MUTATIONS.values()], ids=lambda mutation: mutation.name
)
def test_it_fits_the_source(mutation: Mutation) -> None:
    for module, old, _ in mutation.edits:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).read_text().count(old) == 1, f"{module}: {old!r}"


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 10
    assert len(TIER_MUTATIONS) >= 6
