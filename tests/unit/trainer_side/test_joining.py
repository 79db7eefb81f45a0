"""How a job without a stager finds its name, its attempt and its ranks' slices."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.checkpoints.lease import Lease, newest_attempt
from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import SaveRecord
from holdfast.store import open_store
from holdfast.wire.state_messages import Agreement, Proposal
from tests.support.restoring import Ranks, ThreadPeers
from tests.unit.trainer_side.tiers.ranks import Area, laid_out
from trainer_side.joining import _attempt_beside_stager, _attempt_without_stager, compare_settings
from trainer_side.link.no_stager import NoStager
from trainer_side.ranks.peers import LonePeers
from trainer_side.ranks.world import World
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_inventory import TierInventory, take_inventory
from trainer_side.tiers.tier_set import RankCouncil, TierSet


def _kept(tier: Tier, attempt: int, step: int, *, ranks: int = 1, rank: int = 0) -> None:
    layout = laid_out(ranks)
    tier.prepare(layout, rank)
    writer = tier.begin(attempt, step)
    assert writer is not None
    area = Area(layout, rank)
    for number, frame in enumerate(area.frames):
        writer.write(number, area.view(frame.offset, frame.padded_bytes), 0)
    assert writer.seal({})


class Together:
    """Peers in threads of this process, whose broadcasts meet at a barrier."""

    def __init__(self, rank: int, shared: SimpleNamespace) -> None:
        self.rank, self.ranks, self._shared = rank, shared.barrier.parties, shared

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        if self.rank == root:
            self._shared.said = data
        self._shared.barrier.wait(60)
        said: bytes = self._shared.said
        self._shared.barrier.wait(60)
        return said


@pytest.mark.parametrize(
    ("alone", "other", "words"),
    [
        (False, {"tiers": ()}, r"tiers: rank 1 has none, rank 0 has \['memory'\]; give all ranks the same"),
        (
            False,
            {"stager": "other:1"},
            "stager: rank 1 has other:1, rank 0 has none; give all ranks the same",
        ),
        (True, {"store": "/else"}, "store: rank 1 has /else, rank 0 has /run"),
        (True, {"chunk_bytes": 8192}, "chunk_bytes: rank 1 has 8192, rank 0 has 4096"),
        (True, {"on_divergence": "refuse"}, "on_divergence: rank 1 has refuse, rank 0 has warn"),
        (
            False,
            {"restore_set_aside": "5-a1,3-a1"},
            r"restore_set_aside: rank 1 has \['5-a1', '3-a1'\], rank 0 has none; give all ranks the same",
        ),
    ],
)
def test_a_rank_that_is_set_otherwise_is_refused_on_every_rank(
    alone: bool, other: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"tiers": ("memory",), "store": "/run", "chunk_bytes": 4096}

    def work(peers: ThreadPeers) -> bool:
        config = TrainerConfig(**(settings | other if peers.rank == 1 else settings))
        with pytest.raises(ConfigError, match=words):
            compare_settings(config, peers, without_stager=alone)
        return True

    assert all(Ranks(3).run(work))
    Ranks(2).run(lambda peers: compare_settings(TrainerConfig(**settings), peers, without_stager=alone))


def test_a_set_aside_on_one_rank_alone_is_refused_without_any_tiers() -> None:
    def work(peers: ThreadPeers) -> bool:
        config = TrainerConfig(restore_set_aside=(CheckpointId(1, 5),) if peers.rank == 1 else ())
        with pytest.raises(ConfigError, match="restore_set_aside: rank 1 has"):
            compare_settings(config, peers, without_stager=False)
        return True

    assert all(Ranks(2).run(work))


def _inventories(tiers: list[list[Tier]], errors: dict[int, ConfigError] | None = None) -> list[Any]:
    shared = SimpleNamespace(barrier=threading.Barrier(len(tiers)), said=b"")
    found: list[Any] = [None] * len(tiers)

    def take(rank: int) -> None:
        try:
            found[rank] = take_inventory(
                cast(Any, Together(rank, shared)), tiers[rank], (errors or {}).get(rank)
            )
        except ConfigError as error:
            found[rank] = error

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(len(tiers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_rank_sees_which_steps_all_of_them_hold(tmp_path: Path) -> None:
    tiers = [[open_tier(f"file:{tmp_path / str(rank)}", "/run", slots=3)] for rank in range(2)]
    for rank, steps in enumerate([(3, 5), (3,)]):
        for step in steps:
            _kept(tiers[rank][0], 4, step, ranks=2, rank=rank)
    names = [tier[0].name for tier in tiers]
    for tier, name in zip(tiers, names, strict=True):
        cast(Any, tier[0]).name = "file:/here"
        assert name != "file:/here"
    wanted = TierInventory(4, (((4, 3),),), (((4, 5),),))
    assert _inventories(tiers) == [wanted, wanted]


def test_ranks_with_other_tiers_are_named(tmp_path: Path) -> None:
    tiers = [[open_tier(f"file:{tmp_path / str(rank)}", "/run")] for rank in range(2)]
    found = _inventories(tiers)
    assert all(isinstance(error, ConfigError) for error in found)
    assert "trainer setting tiers: rank 1 has ['file:" in str(found[0])
    assert str(found[0]) == str(found[1])


def test_a_tier_that_one_rank_cannot_open_ends_all() -> None:
    found = _inventories([[], []], {1: ConfigError("tier 'tape': no such kind")})
    assert [str(error) for error in found] == [
        "rank 1: tier 'tape': no such kind",
        "tier 'tape': no such kind",
    ]


def test_without_a_stager_the_attempt_is_above_tiers_and_store_and_the_store_is_told(tmp_path: Path) -> None:
    tier = open_tier(f"file:{tmp_path / 'disk'}", "/run", slots=2)
    _kept(tier, 7, 1)
    found = take_inventory(LonePeers(), [tier])
    store_url = str(tmp_path / "store")
    config = TrainerConfig(tiers=["memory"], store=store_url)
    assert _attempt_without_stager(config, store_url, found, LonePeers()) == 8
    assert _attempt_without_stager(config, store_url, found, LonePeers()) == 9
    store = open_store(store_url)
    assert newest_attempt(store) == 9
    assert Lease.acquire(store).attempt == 10, "and a stager is not held up by it"


def test_a_store_that_does_not_answer_is_passed_over_only_when_told_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    store_url = str(tmp_path / "store")
    tier = open_tier(f"file:{tmp_path / 'disk'}", "/run", slots=2)
    _kept(tier, 7, 1)
    found = take_inventory(LonePeers(), [tier])
    config = TrainerConfig(tiers=["memory"], store=store_url)
    with pytest.raises(StoreError):
        _attempt_without_stager(config, store_url, found, LonePeers())
    without = TrainerConfig(tiers=["memory"], store=store_url, restore_without_store=True)
    assert _attempt_without_stager(without, store_url, found, LonePeers()) == 8


@pytest.mark.parametrize(("found", "attempt"), [(0, 5), (4, 5), (5, 6), (9, 10)])
def test_beside_a_stager_the_attempt_is_its_own_unless_the_tiers_are_ahead(found: int, attempt: int) -> None:
    assert _attempt_beside_stager(5, TierInventory(found, ((),), ((),)), rank=0) == attempt


def test_tiers_alone_need_a_name_for_the_run() -> None:
    world = cast(World, SimpleNamespace(rank=0, ranks=2, stager_advice="start one"))
    with pytest.raises(
        ConfigError, match=r"no stager .* 2 trainers, and tiers without store: the run has no name"
    ):
        NoStager(TrainerConfig(tiers=["memory"]), world)


def test_without_a_stager_nobody_compares_tensors_but_the_council_of_the_tiers() -> None:
    world = cast(World, SimpleNamespace(rank=1, ranks=2, peers=LonePeers, stager_advice="start one"))
    link = NoStager(TrainerConfig(tiers=["memory"], store="/run"), world)
    with pytest.raises(ConfigError, match=r"rank 1: no stager in this job, and no local tiers"):
        link.agree(Proposal("", [], 0, {}))


def test_without_tiers_hurry_shortens_the_wait_for_the_other_ranks() -> None:
    waits: list[float | None] = []

    def agree(_: Proposal, *, seconds_max: float | None) -> Agreement:
        waits.append(seconds_max)
        return Agreement(4096, {})

    tiers = TierSet(RankCouncil(agree))
    tiers.council.agree(Proposal("", [], 0, {}))
    tiers.council.limit_wait(3.0)
    tiers.council.agree(Proposal("", [], 0, {}))
    assert waits == [None, 3.0]


def test_without_tiers_the_ranks_agree_through_the_stager_and_no_step_is_kept() -> None:
    agreement = Agreement(4096, {})
    tiers = TierSet(RankCouncil(lambda *_, **__: agreement))
    assert tiers.council.agree(Proposal("", [], 0, {})) is agreement
    tiers.council.confirm_ready(None)
    with pytest.raises(ConfigError, match="of the test"):
        tiers.council.confirm_ready(ConfigError("of the test"))
    assert tiers.begin(1, SaveRecord()) is None
    assert (tiers.accepts_steps, tiers.is_prepared, tiers.is_idle, tiers.complete_step) == (
        False,
        True,
        True,
        -1,
    )
