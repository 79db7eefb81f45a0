"""Branches: the checkpoints on the line that training continues from, after any rewinds."""

from __future__ import annotations

import random

import pytest

from holdfast.checkpoints.branches import Branches, Rewind, Rewound, StepRange
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease, newest_attempt
from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from tests.support.checkpoints import add_small
from tests.support.memory_store import MemoryStore
from tests.support.seeds import each_seed


def rewind(attempt: int, to: tuple[int, int], *skips: tuple[int, int], newest: int = 99) -> Rewind:
    """`to`: step and attempt, as a label has them."""
    step, of_attempt = to
    return Rewind(
        attempt=attempt, write_id="w", to=(of_attempt, step), newest=(of_attempt, newest), skips=skips
    )


def current(branches: Branches, *labels: str) -> list[str]:
    return [label for label in labels if branches.is_current(CheckpointId.from_label(label))]


def put(store: MemoryStore, made: Rewind) -> None:
    store.objects[made.name] = made.to_bytes()


def test_branches_leave_out_what_is_newer_than_the_fork_and_older_than_the_rewind() -> None:
    branches = Branches([rewind(4, (200, 1))])
    labels = ("100-a1", "200-a1", "300-a1", "400-a2", "500-a4", "250-a5", "350-a6")
    assert current(branches, *labels) == ["100-a1", "200-a1", "250-a5", "350-a6"]
    assert [branches.number(attempt) for attempt in (1, 4, 5)] == [1, 1, 2]


def test_branches_that_went_back_to_the_older_branch_leave_out_the_newer_one() -> None:
    undone = Branches([rewind(2, (100, 1)), rewind(4, (300, 1))])
    assert current(undone, "100-a1", "200-a1", "300-a1", "400-a1", "120-a3", "310-a5") == [
        *("100-a1", "200-a1", "300-a1", "310-a5")
    ]
    redone = Branches([*undone.rewinds, rewind(6, (120, 3))])
    assert current(redone, "100-a1", "200-a1", "300-a1", "120-a3", "140-a3", "310-a5", "130-a7") == [
        *("100-a1", "120-a3", "130-a7")
    ]


@each_seed(50)
def test_branches_agree_with_the_line_that_training_has_gone_along(seed: int) -> None:
    chance = random.Random(seed)
    made: list[Rewind] = []
    line: list[CheckpointId] = []
    before: dict[CheckpointId, list[CheckpointId]] = {}  # each checkpoint with those that it comes from
    attempt = 0
    for _ in range(chance.randint(1, 12)):
        attempt += 1
        if before and chance.random() < 0.5:
            fork = chance.choice(list(before))
            made.append(rewind(attempt, (fork.step, fork.attempt)))
            line = before[fork]
            continue
        first = line[-1].step if line else 0
        for step in range(first + 1, first + chance.randint(1, 4)):
            line = [*line, CheckpointId(attempt, step)]
            before[line[-1]] = line
    branches = Branches(made)
    assert [order for order in sorted(before) if branches.is_current(order)] == line, (made, before)


def test_rewound_says_what_an_older_checkpoint_does_not_know() -> None:
    branches = Branches(
        [rewind(2, (100, 1), (150, 160)), rewind(4, (120, 3), (130, 131), (140, 140), newest=200)]
    )
    assert branches.rewind_since(CheckpointId(5, 125)) is None
    assert branches.rewind_since(CheckpointId(3, 120)) == Rewound(
        120, 200, (StepRange(140, 140), StepRange(130, 131))
    )
    # The fork is damaged, and the one before it lies before both rewinds.
    before = branches.rewind_since(CheckpointId(1, 155))
    assert before is not None
    assert before.skipped == (StepRange(156, 160),), "what is in the checkpoint already is not left out"


@pytest.mark.parametrize("change", [b"x", b""])
def test_a_damaged_record_is_refused_and_not_passed_over(change: bytes) -> None:
    store = MemoryStore()
    add_small(store, 1)
    add_small(store, 2)
    made = rewind(2, (1, 1))
    store.objects[made.name] = made.to_bytes().replace(b"99", change)
    with pytest.raises(
        DamageError, match=r"rewind-a002.json: the record of a rewind cannot be read .*CRC-32"
    ):
        Catalog(store).newest_good()
    store.objects["rewind-a003.json"] = made.to_bytes()
    del store.objects[made.name]
    with pytest.raises(DamageError, match=r"is the record of attempt 2: it was renamed or copied"):
        Catalog(store).get()


def test_a_record_of_a_newer_format_is_refused() -> None:
    made = rewind(2, (1, 1)).model_copy(update={"format": "holdfast-rewind/2"})
    with pytest.raises(DamageError, match="format: Input should be 'holdfast-rewind/1'"):
        Rewind.from_bytes(made.to_bytes(), source="here")


def test_the_catalog_takes_the_newest_of_the_current_line_and_finds_the_others_by_step() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        add_small(store, step)
    put(store, rewind(2, (1, 1)))
    catalog = Catalog(store)
    assert catalog.get().step == 1
    assert catalog.highest_good_step() == 1
    assert catalog.get(3).attempt == 1
    assert [item.step for item in catalog.list()] == [3, 2, 1]
    add_small(store, 2, attempt=3, file="step-000000002-a003.pt")
    assert (catalog.get().attempt, catalog.get(2).attempt) == (3, 3)
    del store.objects["step-000000001.json"], store.objects["step-000000002-a003.json"]
    with pytest.raises(DamageError, match="no checkpoint of its current line is left"):
        catalog.get()


def test_attempts_grow_beyond_a_rewind_although_the_claims_were_cleared_away() -> None:
    """Else the next job would write into the branch that was left."""
    store = MemoryStore()
    add_small(store, 1)
    put(store, rewind(7, (1, 1)))
    assert newest_attempt(store) == 7
    lease = Lease.acquire(store)
    assert lease.attempt == 8
    lease.release()
