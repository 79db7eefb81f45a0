"""Proofs: digests that the ranks send for the steps after their checkpoints, and their way into the store.

in the store ⇒ beside     a proof lies beside a checkpoint that is listed, and belongs to that checkpoint
recorded ⇒ said           a proof has the digest of each rank of that job, and nothing else
kept                      a proof is removed only with its checkpoint
asked ⇒ that one          the stager answers with the proof of the checkpoint asked for, or with none
said ⇒ in the store       in a world without faults every digest is in the store in the end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, State, is_manifest_name
from holdfast.image.proof_record import Digest, ProofRecord
from holdfast.ring.remains import FetchKind
from tests.simulation.transport import Job
from trainer_side.link.stager_message import StagerMessage

if TYPE_CHECKING:
    from tests.simulation.world import World
    from trainer_side.link.link import Link

__all__ = ["ProofChecks", "ProofTeller"]

_ASKED_MAX = 4


class ProofTeller:
    """One rank, which sends the stager a digest of the step after each checkpoint, in worlds with proofs."""

    def __init__(self, world: World, job: Job, link: Link) -> None:
        self._world, self._job, self._link = world, job, link
        self._saved: CheckpointId | None = None

    def saved(self, step: int) -> None:
        """The rank has offered a step."""
        if self._world.plan.proves:
            self._saved = CheckpointId(self._link.job.attempt, step)

    def stepped(self) -> None:
        """The next step is done."""
        key, self._saved = self._saved, None
        if key is not None:
            rank = self._link.job.rank
            self._world.proofs.say(key, self._job.number, rank)
            self._link.send_message(StagerMessage.proof(key, used(key, self._job.number, rank)))

    def ask(self) -> None:
        """Rank 0 asks for the newest proofs, as a resuming rank does."""
        if not self._world.plan.proves or self._link.job.rank:
            return
        for key in sorted(self._world.proofs.said)[-_ASKED_MAX:]:
            try:
                answer = self._link.fetch(FetchKind.PROOF, attempt=key.attempt, step=key.step)
            except HoldfastError:
                return  # the stager is gone
            if answer is not None:
                self._world.proofs.check_record(ProofRecord.from_bytes(answer), key, "the stager")


def used(key: CheckpointId, job: int, rank: int) -> Digest:
    """The digest that a rank sends."""
    return {"step": key.step + 1, "job": job, "rank": rank}


class ProofChecks:
    """The invariants of the proofs in one world.

    Attributes:
        said: Checkpoint → the job, and its ranks that have sent a digest.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.said: dict[CheckpointId, tuple[int, set[int]]] = {}
        self._known: dict[str, tuple[bytes, bytes | None]] = {}  # proof → itself and the manifest beside it
        self._seen: set[str] = set()

    def say(self, key: CheckpointId, job: int, rank: int) -> None:
        self.said.setdefault(key, (job, set()))[1].add(rank)

    def after_change(self) -> None:
        """Check the proofs in the store."""
        objects = self._world.store.objects
        for name, data in objects.items():
            if not name.endswith(".proof.json"):
                continue
            beside = objects.get(_manifest_of(name))
            known = self._known.get(name)
            if known is not None and known[0] is data and known[1] is beside:
                continue
            if beside is None:
                self._broken(f"{name} lies in the store without its checkpoint")
                return
            key = Manifest.from_bytes(beside, source=name).order
            self.check_record(ProofRecord.from_bytes(data), key, name)
            self._known[name] = data, beside
            self._seen.add(name)

    def check_record(self, record: ProofRecord, key: CheckpointId, where: str) -> None:
        job, ranks = self.said.get(key, (-1, set[int]()))
        said = [used(key, job, rank) for rank in range(self._world.plan.ranks)]
        if record.key != key:
            self._broken(f"{where}: asked for the proof of {key}, got that of {record.key}")
        elif list(record.digests) != said or len(ranks) < len(said):
            self._broken(f"{where}: {key} has the proof {record.digests}, said was {said} by ranks {ranks}")

    def at_the_end(self, *, undisturbed: bool) -> None:
        world = self._world
        if world.intruder is not None:
            return
        objects = world.store.objects
        kept = self._kept(objects)
        for name in sorted(kept.keys() & self._seen - objects.keys()):
            self._broken(f"{name} was removed, and its checkpoint stays")
        if not undisturbed:
            return
        for name in sorted(kept.keys() - objects.keys()):
            _, ranks = self.said.get(kept[name], (-1, set[int]()))
            if len(ranks) == world.plan.ranks:
                self._broken(f"nothing is wrong, and {name} was never written")

    def _kept(self, objects: Any) -> dict[str, CheckpointId]:
        """Names of the proofs of all kept checkpoints; a flusher may have been killed during retention."""
        listed = [
            Manifest.from_bytes(data, source=name) for name, data in objects.items() if is_manifest_name(name)
        ]
        good: Sequence[Manifest] = sorted(
            (one for one in listed if one.state is not State.BAD), key=lambda one: one.order
        )
        return {
            one.file.removesuffix(".pt") + ".proof.json": one.order
            for one in good[-self._world.plan.keep_last :]
        }

    def _broken(self, what: str) -> None:
        self._world.checks.broken(what)


def _manifest_of(proof: str) -> str:
    return proof.removesuffix(".proof.json") + ".json"
