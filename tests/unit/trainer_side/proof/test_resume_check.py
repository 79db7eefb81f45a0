"""The step after a checkpoint is recorded once; after a resume all ranks compare their first step with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import PeerLost, ResumeDiffers
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest, ProofRecord, proof_name
from holdfast.ring.remains import FetchKind
from holdfast.telemetry.events import EventLog
from holdfast.wire import frames as wire
from holdfast.wire.step_proof import ProofVerdict, ResumeProof, read_proof
from tests.support.restoring import Ranks
from trainer_side.link.job_state import JobState
from trainer_side.link.stager_message import StagerMessage
from trainer_side.proof.digest_taker import StepInput
from trainer_side.proof.resume_check import ResumeCheck
from trainer_side.proof.step_digest import StepDigest
from trainer_side.ranks.peers import LonePeers, Peers
from trainer_side.tiers.slot_proof import KeptProof
from trainer_side.tiers.tier import Order
from trainer_side.tiers.tier_set import RankCouncil, TierSet

KEY = CheckpointId(1, 3)
NO_TIERS = TierSet(RankCouncil(lambda *_, **__: pytest.fail("not asked")))


class PlayedTiers(TierSet):
    """Simulated local tiers that keep all records."""

    keeps_proofs = True

    def __init__(self) -> None:
        super().__init__(RankCouncil(lambda *_, **__: pytest.fail("not asked")))
        self.digests: list[tuple[Order, Digest]] = []

    def keep_proof(self, order: Order, digest: Digest) -> None:
        self.digests.append((order, digest))


class PlayedLink:
    """A link to a simulated stager that keeps all records; `alone`: no stager at all."""

    def __init__(
        self, store: Path, *, rank: int = 0, ring: ProofRecord | None = None, alone: bool = False
    ) -> None:
        attempt = None if alone else 1
        self.job = JobState(rank, 1, store_url=str(store), chunk_bytes=4096, attempt=attempt)
        self.digests: list[tuple[CheckpointId, Digest]] = []
        self.verdicts: list[tuple[CheckpointId, ResumeProof]] = []
        self._ring = ring

    def send_message(self, message: StagerMessage) -> None:
        if not self.job.has_stager:
            return
        key, said = read_proof(wire.decode(message.encode(self.job.attempts)))
        if isinstance(said, ResumeProof):
            self.verdicts.append((key, said))
        else:
            self.digests.append((key, said))

    def fetch(self, fetch_kind: FetchKind, *, attempt: int, step: int) -> bytes | None:
        assert (fetch_kind, attempt, step) == (FetchKind.PROOF, *KEY)
        return None if self._ring is None else self._ring.to_bytes()


class Trained:
    """One rank with an optimizer and its own batches."""

    def __init__(
        self,
        link: Any,
        peers: Peers,
        *,
        tiers: TierSet = NO_TIERS,
        stops: bool = False,
        lr: float = 0.5,
    ) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        self.check = ResumeCheck(
            {"optimizer": optimizer},
            link,
            tiers,
            peers,
            EventLog(None, role="trainer"),
            stop_on_difference=stops,
        )
        self._rank = peers.rank

    def step(self, step: int, *, newest: int = -1, shift: int = 0) -> ResumeProof | None:
        batch = [100 * self._rank + step + shift]
        return self.check.on_step_end(step, StepInput(batch, float(step)), newest)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def recorded(store: Path, ranks: int) -> ProofRecord:
    """As a run with this many ranks leaves it, of step 4."""

    def record(peers: Peers) -> Digest:
        link = PlayedLink(store, rank=peers.rank)
        trained = Trained(link, peers)
        trained.step(3)
        trained.check.on_saved(3)
        trained.step(4, newest=3)
        trained.step(5, newest=3)
        ((key, digest),) = link.digests
        assert key == KEY
        return digest

    return ProofRecord(KEY, tuple(Ranks(ranks).run(record)))


def resumed(
    store: Path, ranks: int, *, ring: ProofRecord | None = None, wrong: Callable[[int], int] = lambda _: 0
) -> list[ResumeProof]:
    def resume(peers: Peers) -> ResumeProof:
        link = PlayedLink(store, rank=peers.rank, ring=ring)
        trained = Trained(link, peers)
        trained.check.set_resumed(KEY)
        proof = trained.step(4, shift=wrong(peers.rank))
        assert trained.step(5) is None, "once"
        assert link.verdicts == ([(KEY, proof)] if peers.rank == 0 else [])
        assert proof is not None
        return proof

    found = Ranks(ranks).run(resume)
    assert len(set(found)) == 1
    return found


@pytest.mark.parametrize("where", ["ring", "store"])
def test_a_resume_is_verified_from_the_ring_or_the_store(store: Path, where: str) -> None:
    record = recorded(store, 2)
    if where == "store":
        (store / proof_name("step-000000003.pt")).write_bytes(record.to_bytes())
    proof = resumed(store, 2, ring=record if where == "ring" else None)[0]
    assert proof.text == "resume verified: data, learning rate and loss are those of the run before"


def test_a_rank_that_differs_is_named_on_all(store: Path) -> None:
    proof = resumed(store, 3, ring=recorded(store, 3), wrong=lambda rank: int(rank == 2))[0]
    assert proof.verdict is ProofVerdict.DIFFERS
    assert "data differ on rank 2 (" in proof.text


def test_another_number_of_ranks_is_said(store: Path) -> None:
    proof = resumed(store, 3, ring=recorded(store, 2))[0]
    assert proof.verdict is ProofVerdict.VERIFIED
    assert "3 ranks instead of 2" in proof.text


def test_a_resume_of_which_nothing_was_recorded_is_not_proven(store: Path) -> None:
    proof = resumed(store, 2)[0]
    assert proof.verdict is ProofVerdict.NOT_PROVEN
    assert (
        "nothing is recorded of the step after step 3 (attempt 1): the run before ended before" in proof.text
    )


def test_a_damaged_proof_proves_nothing(store: Path) -> None:
    whole = recorded(store, 1).to_bytes()
    for at in range(0, len(whole), 5):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        (store / proof_name("step-000000003.pt")).write_bytes(damaged)
        assert resumed(store, 1)[0].verdict is ProofVerdict.NOT_PROVEN


def test_a_run_that_begins_with_another_step_is_not_proven(store: Path) -> None:
    trained = Trained(PlayedLink(store, ring=recorded(store, 1)), LonePeers())
    trained.check.set_resumed(KEY)
    proof = trained.step(7)
    assert proof is not None
    assert "step 4 was recorded, and this run begins with step 7" in proof.text


def test_a_difference_ends_the_training_on_every_rank_if_asked_to(store: Path) -> None:
    record = recorded(store, 2)

    def resume(peers: Peers) -> None:
        link = PlayedLink(store, rank=peers.rank, ring=record)
        trained = Trained(link, peers, stops=True, lr=0.1 if peers.rank else 0.5)
        trained.check.set_resumed(KEY)
        trained.step(4)

    _, errors = Ranks(2).outcomes(resume)
    assert all(isinstance(error, ResumeDiffers) for error in errors)
    assert "learning rate differs on rank 1 (that of optimizer was 0.5 before, and is 0.1)" in str(errors[0])


def test_an_unproven_resume_does_not_end_the_training(store: Path) -> None:
    trained = Trained(PlayedLink(store), LonePeers(), stops=True)
    trained.check.set_resumed(KEY)
    proof = trained.step(4)
    assert proof is not None
    assert proof.verdict is ProofVerdict.NOT_PROVEN


def test_a_rank_that_does_not_come_leaves_the_resume_unproven(store: Path) -> None:
    class Gone(LonePeers):
        def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
            raise PeerLost("rank 1 did not come")

    trained = Trained(PlayedLink(store), Gone())
    trained.check.set_resumed(KEY)
    proof = trained.step(4)
    assert proof is not None
    assert proof.verdict is ProofVerdict.NOT_PROVEN
    assert "rank 1 did not come" in proof.text


def test_a_state_that_cannot_be_read_leaves_the_resume_unproven_and_the_step_unrecorded(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = PlayedLink(store, ring=recorded(store, 1))
    trained = Trained(link, LonePeers())
    trained.check._taker._optimizers["broken"] = object()
    trained.check.set_resumed(KEY)
    proof = trained.step(4)
    assert proof is not None
    assert proof.verdict is ProofVerdict.NOT_PROVEN
    trained.step(5, newest=4)
    assert "step 5: what it used is not recorded" in caplog.text
    assert not link.digests


def test_each_checkpoint_has_one_step_recorded_and_other_steps_none(store: Path) -> None:
    link = PlayedLink(store)
    trained, newest = Trained(link, LonePeers()), -1
    for step in range(12):
        trained.step(step, newest=newest)
        if step % 4 == 3:
            newest = step
            trained.check.on_saved(step)
    trained.check.close()
    assert [key.step for key, _ in link.digests] == [3, 7]
    assert [digest["step"] for _, digest in link.digests] == [4, 8]


def test_the_next_call_is_recorded_where_a_loop_leaves_calls_out(store: Path) -> None:
    link = PlayedLink(store)
    trained = Trained(link, LonePeers())
    trained.step(3)
    trained.check.on_saved(3)
    for step in (6, 7):
        trained.step(step, newest=3)
    ((key, digest),) = link.digests
    assert (key, StepDigest.from_json(digest).step) == (KEY, 6)
    trained.check.on_saved(8)
    link.job.attempt = 2  # the ranks have joined another stager, which has no such checkpoint
    trained.step(10, newest=8)
    assert len(link.digests) == 1


def test_a_checkpoint_of_save_alone_is_recorded_by_the_next_step(store: Path) -> None:
    link = PlayedLink(store)
    trained = Trained(link, LonePeers())
    trained.step(3)
    trained.step(4, newest=3)
    assert [key for key, _ in link.digests] == [KEY]
    trained.step(9, newest=7)
    assert len(link.digests) == 1, "it is not the step after the checkpoint"


def test_a_verified_resume_is_information_and_others_are_warnings(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        resumed(store, 1, ring=recorded(store, 1))
        resumed(store, 1)
    levels = [one.levelno for one in caplog.records if one.message.startswith("resume ")]
    assert levels == [logging.WARNING, logging.WARNING]


# -- local tiers ---------------------------------------------------------------------------------------------------


def kept_by(record: ProofRecord, *ranks: int, of: int = 0) -> list[KeptProof]:
    """As the tiers that have the slices of these ranks give it."""
    digests = record.digests
    return [
        KeptProof(rank, of or len(digests), digests[rank] if rank in ranks else None)
        for rank in range(len(digests))
    ]


def resumed_from_tiers(
    store: Path,
    kept: Sequence[Sequence[KeptProof]],
    *,
    stored: ProofRecord | None = None,
    wrong: Callable[[int], int] = lambda _: 0,
) -> ResumeProof:
    """The verdict of a job without a stager in which each rank has found this in its tiers."""
    if stored is not None:
        (store / proof_name("step-000000003.pt")).write_bytes(stored.to_bytes())

    def resume(peers: Peers) -> ResumeProof | None:
        link = PlayedLink(store, rank=peers.rank, alone=True)
        trained = Trained(link, peers, tiers=PlayedTiers())
        trained.check.set_resumed(KEY, kept[peers.rank])
        return trained.step(4, shift=wrong(peers.rank))

    found = Ranks(len(kept)).run(resume)
    assert found[0] is not None
    assert len(set(found)) == 1
    return found[0]


def test_without_a_stager_each_rank_records_into_its_tiers(store: Path) -> None:
    tiers = PlayedTiers()
    trained = Trained(PlayedLink(store, alone=True), LonePeers(), tiers=tiers)
    trained.step(3)
    trained.check.on_saved(3)
    tiers.last_begun = (7, 3)
    for step in (4, 5, 6):
        trained.step(step, newest=3)
    trained.check.on_saved(7)  # the tiers had no slot for this one
    for step in (8, 9):
        trained.step(step, newest=7)
    ((order, digest),) = tiers.digests
    assert (order, digest["step"]) == ((7, 3), 4)


def test_with_a_stager_one_digest_goes_to_both(store: Path) -> None:
    link, tiers = PlayedLink(store), PlayedTiers()
    trained = Trained(link, LonePeers(), tiers=tiers)
    tiers.last_begun = (9, 3)  # the tiers were ahead of the store
    trained.step(4, newest=3)
    trained.check.close()
    ((key, told),) = link.digests
    ((order, kept),) = tiers.digests
    assert (key, order) == (KEY, (9, 3))
    assert told == kept


def test_a_resume_is_verified_by_what_each_rank_has_kept(store: Path) -> None:
    record = recorded(store, 2)
    verified = "resume verified: data, learning rate and loss are those of the run before"
    own = [kept_by(record, rank) for rank in (0, 1)]
    assert resumed_from_tiers(store, own).text == verified
    # The ranks have changed their machines, or rank 0 has found all.
    assert resumed_from_tiers(store, own[::-1]).text == verified
    assert resumed_from_tiers(store, [kept_by(record, 0, 1), []]).text == verified
    assert resumed_from_tiers(store, own, stored=record).text == verified


def test_a_rank_that_differs_from_what_it_had_kept_is_named(store: Path) -> None:
    record = recorded(store, 2)
    proof = resumed_from_tiers(store, [kept_by(record, 0, 1), []], wrong=lambda rank: rank)
    assert proof.verdict is ProofVerdict.DIFFERS
    assert "data differ on rank 1 (" in proof.text


def test_a_machine_that_is_lost_leaves_the_resume_unproven_unless_others_differ(store: Path) -> None:
    record = recorded(store, 3)
    kept = [kept_by(record, 0, 1), [], []]
    assert resumed_from_tiers(store, kept).text == (
        "resume not proven: nothing is recorded of rank 2; data, learning rate and loss are those of the run before "
        "on rank 0, 1"
    )
    proof = resumed_from_tiers(store, kept, wrong=lambda rank: rank)
    assert proof.verdict is ProofVerdict.DIFFERS
    assert "data differ on rank 1 (" in proof.text
    assert proof.text.endswith("; nothing is recorded of rank 2")
    assert resumed_from_tiers(store, kept, stored=record).verdict is ProofVerdict.VERIFIED


def test_other_ranks_are_compared_with_one_that_kept_something(store: Path) -> None:
    proof = resumed_from_tiers(store, [kept_by(recorded(store, 2), 1)])
    assert proof.verdict is ProofVerdict.VERIFIED
    assert "1 ranks instead of 2" in proof.text


def test_places_that_do_not_agree_prove_nothing(store: Path) -> None:
    record = recorded(store, 2)
    other = record._replace(digests=(record.digests[0], {**record.digests[1], "batch": 1}))
    said = "resume not proven: the records of rank 1 differ between the places that have one"
    for kept, stored in (
        ([kept_by(record, 0, 1), []], other),
        ([kept_by(record, 0, 1), kept_by(other, 1)], None),
        ([kept_by(record, 1, of=3), []], record),
    ):
        (store / proof_name("step-000000003.pt")).unlink(missing_ok=True)
        assert resumed_from_tiers(store, kept, stored=stored) == (ProofVerdict.NOT_PROVEN, said)


def test_a_damaged_file_beside_a_slot_is_named(store: Path) -> None:
    torn = KeptProof(0, 1, None, "rank 0: tier memory: rank-00000-ab.1.proof: the proof is cut short")
    proof = resumed_from_tiers(store, [[torn]])
    assert proof.verdict is ProofVerdict.NOT_PROVEN
    assert proof.text.endswith(f"had neither a stager nor local tiers; {torn.problem}")
