"""Records a digest of the first step after a checkpoint, and compares the first step after a resume with it.

    on_saved(S)       mark   on_step_end(S + 1)   digest, once it is ready ─► stager and local tiers
    set_resumed(S)           on_step_end(S + 1)   digest · rank 0: the record in the ring or the store ─► all ranks
                                                         · each rank: the records in its local tiers ─► all ranks
                                                  each compares its own ─► all agree, or all differences ─► ResumeProof

Other steps cost nothing. The step after a resume waits for a device and for the other ranks, once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.checkpoints.publish import candidate_names
from holdfast.errors import PeerLost, ResumeDiffers, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import Digest, ProofRecord, proof_name
from holdfast.ring.remains import FetchKind
from holdfast.store import open_store
from holdfast.supervised import emit_progress
from holdfast.telemetry.events import EventLog
from holdfast.wire.step_proof import ProofVerdict, ResumeProof
from trainer_side.link.stager_message import StagerMessage
from trainer_side.link.to_stager import ToStager
from trainer_side.proof.comparison import Comparison, compare, not_proven, resume_proof
from trainer_side.proof.digest_taker import DigestTaker, PendingDigest, StepInput
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

    `state`: Names mapped to objects, as in the checkpoints. `link` and `tiers` keep records: the stager, and the local
    tiers beside this rank's slices. `stop_on_difference`: Whether a resume that differs ends the training.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        link: ToStager,
        tiers: TierSet,
        peers: Peers,
        events: EventLog,
        *,
        stop_on_difference: bool,
    ) -> None:
        self._taker = DigestTaker(state)
        self._link, self._tiers, self._peers, self._events = link, tiers, peers, events
        self._stop_on_difference = stop_on_difference
        self._is_recording = link.job.has_stager or tiers.keeps_proofs
        self._resumed: CheckpointId | None = None
        self._kept_proofs: Sequence[KeptProof] = ()
        self._expected_difference = ""
        self._marked: CheckpointId | None = None  # saved by `step()`, or before it
        self._recorded_step = -1
        self._pending_digest: tuple[CheckpointId, Order, PendingDigest] | None = None

    def set_resumed(
        self, key: CheckpointId, kept: Sequence[KeptProof] = (), *, expected_difference: str = ""
    ) -> None:
        """Compare the next step with the one after this checkpoint.

        `key`: The restored checkpoint. `kept`: The proofs of that step in this rank's tiers. `expected_difference`: Why
        that step is meant to differ, so that nothing is compared; the same on every rank.
        """
        self._resumed, self._kept_proofs, self._expected_difference = key, kept, expected_difference

    def on_saved(self, step: int) -> None:
        """Mark the state at the end of `step()`, after a checkpoint of `step` was begun."""
        if self._is_recording:
            self._marked = CheckpointId(self._link.job.attempt, step)
            self._taker.mark()

    def on_step_end(self, step: int, step_input: StepInput, newest_saved: int) -> ResumeProof | None:
        """Process the end of `step`. Return the proof after the first step of a resume, which is collective.

        `newest_saved`: The newest step of which a checkpoint was begun. ResumeDiffers: On every rank: the resume
        differs, and `stop_on_difference` is set.
        """
        if self._pending_digest is not None:
            self._send(*self._pending_digest)
        # A loop may omit calls, as Lightning's does before a validation; so does the resumed run.
        newest = CheckpointId(self._link.job.attempt, newest_saved)
        is_next = step == newest_saved + 1 or self._marked == newest
        if is_next and newest_saved > self._recorded_step and self._is_recording:
            self._record(step, step_input, newest_saved)
        if self._resumed is None:
            return None
        key, self._resumed = self._resumed, None
        if self._expected_difference:
            proof = not_proven(self._expected_difference)
        else:
            proof = self._compare(key, step, step_input)
        self._report(key, proof)
        if proof.verdict is ProofVerdict.DIFFERS and self._stop_on_difference:
            raise ResumeDiffers(f"{proof.text}. Training ends, because on_unproven is stop")
        return proof

    def _record(self, step: int, step_input: StepInput, saved: int) -> None:
        self._recorded_step, marked, self._marked = saved, self._marked, None
        is_marked = marked is not None and marked.step == saved
        key = marked if marked is not None and is_marked else CheckpointId(self._link.job.attempt, saved)
        try:
            pending = self._taker.take(step, step_input, is_marked=is_marked)
        except Exception as error:  # noqa: BLE001 - an unreadable state must not end the training
            _log.warning("step %d: what it used is not recorded for the proof of a resume: %r", step, error)
        else:
            self._pending_digest = key, self._tiers.last_begun, pending
            self._send(*self._pending_digest)

    def close(self) -> None:
        """Send a digest that is still pending; waits for the device."""
        if self._pending_digest is not None:
            self._send(*self._pending_digest, wait=True)

    def _send(self, key: CheckpointId, kept: Order, pending: PendingDigest, *, wait: bool = False) -> None:
        if wait or pending.ready:
            self._pending_digest = None
            digest = pending.digest().to_json()
            self._link.send_message(StagerMessage.proof(key, digest))
            if kept[1] == key.step:  # else no tier had a slot for the checkpoint
                self._tiers.keep_proof(kept, digest)

    # -- the comparison ------------------------------------------------------------------------------------------

    def _compare(self, key: CheckpointId, step: int, step_input: StepInput) -> ResumeProof:
        try:
            return self._compare_on_all_ranks(key, self._digest_now(step, step_input))
        except PeerLost as error:
            return not_proven(f"not all ranks reached the first step: {error}")

    def _digest_now(self, step: int, step_input: StepInput) -> StepDigest | str:
        """Return the digest of this step, or why it failed: the other ranks wait for either."""
        try:
            return self._taker.take(step, step_input).digest().truncated()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
            return f"rank {self._peers.rank} cannot tell what its first step used: {error!r}"

    def _compare_on_all_ranks(self, key: CheckpointId, now: StepDigest | str) -> ResumeProof:
        peers = self._peers
        digests = self._gather_digests(key)
        if isinstance(digests, str):
            return not_proven(digests)
        own = now if isinstance(now, str) else _compare_with_record(digests, peers, now)
        # The common case: no rank has differences or notes, so one agreement suffices.
        if peers.all_agree(isinstance(own, Comparison) and not (own.differences or own.notes)):
            assert isinstance(own, Comparison)
            return resume_proof([own] * peers.ranks, ranks_before=len(digests))
        own_json = own.to_json() if isinstance(own, Comparison) else own
        all_results = [json.loads(one) for one in gather(peers, json.dumps(own_json).encode())]
        if problems := [one for one in all_results if isinstance(one, str)]:
            return not_proven(problems[0])
        compared = [None if one is None else Comparison.from_json(one) for one in all_results]
        return resume_proof(compared, ranks_before=len(digests))

    def _gather_digests(self, key: CheckpointId) -> Sequence[Digest | None] | str:
        """Return each rank's digest of the step after this checkpoint, or why all are unknown. Collective."""
        peers, mine = self._peers, None
        if peers.rank == 0:
            found = self._find_record(key)
            mine = json.dumps(found if isinstance(found, str) else found.to_json()).encode()
        answer = json.loads(peers.broadcast(mine))
        kept: list[KeptProof] = []
        if self._tiers.keeps_proofs:
            for encoded in gather(peers, json.dumps(self._kept_proofs).encode()):
                kept += [KeptProof(*one) for one in json.loads(encoded)]
        found_digests = answer if isinstance(answer, str) else ProofRecord.from_json(answer).digests
        return merge_digests(found_digests, kept)

    def _find_record(self, key: CheckpointId) -> ProofRecord | str:
        """Return the record of the step after this checkpoint, or why it was not found. Rank 0."""
        places: list[Callable[[], ProofRecord | None]] = [lambda: self._read_from_store(key)]
        if self._link.job.has_stager:
            places.insert(0, lambda: self._read_from_ring(key))
        problems: Sequence[str] = []
        for read in places:
            try:
                found = within(read, _STORE_SECONDS_MAX, name="holdfast-proof")
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

    def _read_from_ring(self, key: CheckpointId) -> ProofRecord | None:
        answer = self._link.fetch(FetchKind.PROOF, attempt=key.attempt, step=key.step)
        return None if answer is None else ProofRecord.from_bytes(answer)

    def _read_from_store(self, key: CheckpointId) -> ProofRecord | None:
        store = open_store(self._link.job.store_url)
        for file in candidate_names(key):
            try:
                return ProofRecord.from_bytes(store.read(proof_name(file), _PROOF_BYTES_MAX))
            except StoreMissing:
                continue
        return None

    def _report(self, key: CheckpointId, proof: ResumeProof) -> None:
        if self._peers.rank != 0:
            return
        _log.warning("%s", proof.text)  # a warning, so that scripts that do not configure logging show it
        self._events.emit("resume_proof", {"attempt": key.attempt, **proof.to_json()}, step=key.step)
        self._link.send_message(StagerMessage.verdict(key, proof))
        emit_progress("proof", step=key.step, **proof.to_json())


def merge_digests(found: Sequence[Digest] | str, kept: Sequence[KeptProof]) -> Sequence[Digest | None] | str:
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


def _compare_with_record(
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
