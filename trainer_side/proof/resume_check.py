"""Records a digest of the first step after a checkpoint, and compares the first step after a resume with it.

    saved(S)      mark         step(S + 1)   digest, once it is ready ─► stager and local tiers
    restored(S)                step(S + 1)   digest · rank 0: the record in the ring or the store ─► all ranks
                                                    · each rank: the records in its local tiers ─► all ranks
                                             each compares its own ─► all agree, or all differences ─► ResumeProof

Other steps cost nothing. The step after a resume waits for a device and for the other ranks, once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.checkpoints.publish import names_of
from holdfast.errors import PeerLost, ResumeDiffers, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest, ProofRecord, proof_name
from holdfast.ring.remains import FetchKind
from holdfast.store import open_store
from holdfast.supervised import tell
from holdfast.telemetry.events import EventLog
from holdfast.wire.step_proof import ProofVerdict, ResumeProof
from trainer_side.link.stager_message import StagerMessage
from trainer_side.link.to_stager import ToStager
from trainer_side.proof.comparison import Comparison, compare, not_proven, resume_proof
from trainer_side.proof.digest_taker import DigestTaker, StepInput, PendingDigest
from trainer_side.proof.step_digest import StepDigest
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import Peers, gather
from trainer_side.tiers.slot_proof import KeptProof
from trainer_side.tiers.tier import Order
from trainer_side.tiers.tier_set import TierSet

_log = logging.getLogger("holdfast.trainer")
_STORE_SECONDS_MAX = 30.0
_PROOF_BYTES_MAX = 1 << 28


class ResumeCheck:
    """Records and compares the digests of one training. Training thread.

    Args:
        state: Names mapped to objects, as in the checkpoints.
        link: The stager, which keeps records.
        tiers: The local tiers, which keep records beside this rank's slices.
        peers: The other ranks.
        events: Event log of this rank.
        stops: Whether a resume that differs ends the training.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        link: ToStager,
        tiers: TierSet,
        peers: Peers,
        events: EventLog,
        *,
        stops: bool,
    ) -> None:
        self._taker = DigestTaker(state)
        self._link, self._tiers, self._peers, self._events, self._stops = link, tiers, peers, events, stops
        self._records = link.job.has_stager or tiers.keeps_proofs
        self._resumed: CheckpointId | None = None
        self._kept: Sequence[KeptProof] = ()
        self._unlike = ""
        self._marked: CheckpointId | None = None  # saved by `step()`, or before it
        self._recorded_step = -1
        self._taken: tuple[CheckpointId, Order, PendingDigest] | None = None

    def restored(self, key: CheckpointId, kept: Sequence[KeptProof] = (), *, unlike: str = "") -> None:
        """Compare the next step with the one after this checkpoint.

        Args:
            key: The restored checkpoint.
            kept: The proofs of that step in this rank's tiers.
            unlike: Why that step is meant to differ, so that nothing is compared; the same on every rank.
        """
        self._resumed, self._kept, self._unlike = key, kept, unlike

    def saved(self, step: int) -> None:
        """Mark the state at the end of `step()`, after a checkpoint of `step` was begun."""
        if self._records:
            self._marked = CheckpointId(self._link.job.attempt, step)
            self._taker.mark()

    def step(self, step: int, given: StepInput, newest_saved: int) -> ResumeProof | None:
        """Process the end of `step`. Return the proof after the first step of a resume, which is collective.

        Args:
            step: Its number.
            given: Arguments of `step()` for the digest.
            newest_saved: The newest step of which a checkpoint was begun.

        Raises:
            ResumeDiffers: On every rank: the resume differs, and `stops` is set.
        """
        if self._taken is not None:
            self._send(*self._taken)
        # A loop may omit calls, as Lightning's does before a validation; so does the resumed run.
        is_next = step == newest_saved + 1 or self._marked == CheckpointId(
            self._link.job.attempt, newest_saved
        )
        if is_next and newest_saved > self._recorded_step and self._records:
            self._record(step, given, newest_saved)
        if self._resumed is None:
            return None
        key, self._resumed = self._resumed, None
        found = not_proven(self._unlike) if self._unlike else self._compare(key, step, given)
        proof = self._say(key, found)
        if proof.verdict is ProofVerdict.DIFFERS and self._stops:
            raise ResumeDiffers(f"{proof.text}. Training ends, because on_unproven is stop")
        return proof

    def _record(self, step: int, given: StepInput, saved: int) -> None:
        self._recorded_step, marked, self._marked = saved, self._marked, None
        is_marked = marked is not None and marked.step == saved
        key = marked if marked is not None and is_marked else CheckpointId(self._link.job.attempt, saved)
        try:
            self._taken = key, self._tiers.begun, self._taker.take(step, given, is_marked=is_marked)
        except Exception as error:  # noqa: BLE001 - an unreadable state must not end the training
            _log.warning("step %d: what it used is not recorded for the proof of a resume: %r", step, error)
        else:
            self._send(*self._taken)

    def close(self) -> None:
        """Send a digest that is still pending; waits for the device."""
        if self._taken is not None:
            self._send(*self._taken, waits=True)

    def _send(self, key: CheckpointId, kept: Order, taken: PendingDigest, *, waits: bool = False) -> None:
        if waits or taken.ready:
            self._taken = None
            digest = taken.digest().to_json()
            self._link.tell(StagerMessage.proof(key, digest))
            if kept[1] == key.step:  # else no tier had a slot for the checkpoint
                self._tiers.prove(kept, digest)

    # -- the comparison ------------------------------------------------------------------------------------------

    def _compare(self, key: CheckpointId, step: int, given: StepInput) -> ResumeProof:
        try:
            return self._compared(key, self._now(step, given))
        except PeerLost as error:
            return not_proven(f"not all ranks reached the first step: {error}")

    def _now(self, step: int, given: StepInput) -> StepDigest | str:
        """Return the digest of this step, or why it failed: the other ranks wait for either."""
        try:
            return self._taker.take(step, given).digest().cut()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
            return f"rank {self._peers.rank} cannot tell what its first step used: {error!r}"

    def _compared(self, key: CheckpointId, now: StepDigest | str) -> ResumeProof:
        peers = self._peers
        digests = self._known(key)
        if isinstance(digests, str):
            return not_proven(digests)
        own = now if isinstance(now, str) else _compared_with(digests, peers, now)
        # The common case: no rank has differences or notes, so one agreement suffices.
        if peers.all_agree(isinstance(own, Comparison) and not (own.differences or own.notes)):
            assert isinstance(own, Comparison)
            return resume_proof([own] * peers.ranks, ranks_before=len(digests))
        told = own.to_json() if isinstance(own, Comparison) else own
        all_told = [json.loads(one) for one in gather(peers, json.dumps(told).encode())]
        if problems := [one for one in all_told if isinstance(one, str)]:
            return not_proven(problems[0])
        compared = [None if one is None else Comparison.from_json(one) for one in all_told]
        return resume_proof(compared, ranks_before=len(digests))

    def _known(self, key: CheckpointId) -> Sequence[Digest | None] | str:
        """Return each rank's digest of the step after this checkpoint, or why all are unknown. Collective."""
        peers, mine = self._peers, None
        if peers.rank == 0:
            found = self._recorded(key)
            mine = json.dumps(found if isinstance(found, str) else found.to_json()).encode()
        said = json.loads(peers.broadcast(mine))
        kept: list[KeptProof] = []
        if self._tiers.keeps_proofs:
            for told in gather(peers, json.dumps(self._kept).encode()):
                kept += [KeptProof(*one) for one in json.loads(told)]
        return united(said if isinstance(said, str) else ProofRecord.from_json(said).digests, kept)

    def _recorded(self, key: CheckpointId) -> ProofRecord | str:
        """Return the record of the step after this checkpoint, or why it was not found. Rank 0."""
        places: list[Callable[[], ProofRecord | None]] = [lambda: self._in_store(key)]
        if self._link.job.has_stager:
            places.insert(0, lambda: self._in_ring(key))
        problems: Sequence[str] = []
        for look in places:
            try:
                found = within(look, _STORE_SECONDS_MAX, name="holdfast-proof")
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
                problems = [*problems, str(error)]
                continue
            if found is not None and found.key == key:
                return found
        why = "; ".join(problems) or (
            "the run before ended before the next step, called save() without step(), or had neither a stager nor "
            "local tiers"
        )
        return f"nothing is recorded of the step after {key}: {why}"

    def _in_ring(self, key: CheckpointId) -> ProofRecord | None:
        answer = self._link.fetch(FetchKind.PROOF, attempt=key.attempt, step=key.step)
        return None if answer is None else ProofRecord.from_bytes(answer)

    def _in_store(self, key: CheckpointId) -> ProofRecord | None:
        store = open_store(self._link.job.store_url)
        for file in names_of(key):
            try:
                return ProofRecord.from_bytes(store.read(proof_name(file), _PROOF_BYTES_MAX))
            except StoreMissing:
                continue
        return None

    def _say(self, key: CheckpointId, proof: ResumeProof) -> ResumeProof:
        if self._peers.rank != 0:
            return proof
        _log.warning("%s", proof.text)  # a warning, so that scripts that do not configure logging show it
        self._events.emit("resume_proof", {"attempt": key.attempt, **proof.to_json()}, step=key.step)
        self._link.tell(StagerMessage.verdict(key, proof))
        tell("proof", step=key.step, **proof.to_json())
        return proof


def united(found: Sequence[Digest] | str, kept: Sequence[KeptProof]) -> Sequence[Digest | None] | str:
    """Merge the digests from ring or store and tiers, by rank of the previous run; or return why all are unknown."""
    digests = [] if isinstance(found, str) else found
    ranks = len(digests) or max((one.ranks for one in kept), default=0)
    known = dict(enumerate(digests))
    for one in kept:
        if one.digest is None:
            continue
        if one.ranks != ranks or known.setdefault(one.rank, one.digest) != one.digest:
            return f"the records of rank {one.rank} differ between the places that have one"
    if known:
        return [known.get(rank) for rank in range(ranks)]
    assert isinstance(found, str)
    return "; ".join([found, *(one.problem for one in kept if one.problem)])


def _compared_with(
    digests: Sequence[Digest | None], peers: Peers, now: StepDigest
) -> Comparison | str | None:
    """Compare this rank's step with the record, or return why it cannot be compared; None: nothing was recorded."""
    same_ranks = len(digests) == peers.ranks
    recorded = digests[peers.rank] if same_ranks else next(filter(None, digests))
    if recorded is None:
        return None
    try:
        before = StepDigest.from_json(recorded)
    except ValueError as error:
        return f"rank {peers.rank}: {error}"
    if before.step != now.step:
        return f"step {before.step} was recorded, and this run begins with step {now.step}"
    return compare(before, now, same_ranks=same_ranks)
