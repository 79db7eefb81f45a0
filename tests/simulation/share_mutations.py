"""Deliberate bugs for several flushers that write one file: `tests.simulation.shares` must detect each of them."""

# ruff: noqa: E501 - the strings are pieces of source

from __future__ import annotations

from tests.simulation.mutations import Mutation

__all__ = ["SHARE_MUTATIONS"]

SHARE_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation(
            "seal_of_another_write",
            "a seal is taken whoever wrote it",
            (
                (
                    "holdfast.checkpoints.share_records",
                    "        if actual != expected:\n",
                    "        if False:\n",
                ),
            ),
            2000,
        ),
        Mutation(
            "part_outside_the_share",
            "a share's parts are counted from its own first one",
            (
                (
                    "flusher.jobs",
                    "target.upload.write_part(job.part, buffers, job.crc32)",
                    "target.upload.write_part(max(job.part - 1, 0), buffers, job.crc32)",
                ),
            ),
        ),
        Mutation(
            "one_seal_missing",
            "whoever holds the run publishes when all seals but one are there",
            (
                (
                    "flusher.pipeline",
                    "        if share is None or len(seals) < share.shares.count:\n",
                    "        if share is None or len(seals) != max(2, share.shares.count - 1):\n",
                ),
                (
                    "flusher.orphaned_shares",
                    "        if len(seals) < start.count:\n",
                    "        if len(seals) < start.count - 1:\n",
                ),
                (
                    "holdfast.image.share_sums",
                    "    if len(sums) != shares.count:\n",
                    "    sums = [*sums, *sums[-1:]][: shares.count]\n    if False:\n",
                ),
            ),
        ),
        Mutation(
            "crcs_of_others_not_awaited",
            "the parts that state entries of another share are written without its CRCs",
            (
                (
                    "flusher.flight",
                    "        return owners - {share.index}\n",
                    "        self.chunk_left = [0] * index.layout.chunks\n        self.entry_crcs = [crc or 0 for crc in self.entry_crcs]\n        return set()\n",
                ),
            ),
        ),
        Mutation(
            "orphans_swept",
            "who takes the run over sweeps uploads that other flushers still write",
            (("flusher.lifetime", " | set(orphans.values())", ""),),
            2000,
        ),
        Mutation(
            "orphans_forgotten",
            "who takes the run over does not look for seals",
            (("flusher.lifetime", "        service.end_orphans(orphans)\n", ""),),
        ),
        Mutation(
            "seal_before_parts",
            "a share is sealed before its last part is written",
            (
                (
                    "flusher.pipeline",
                    "        written = flight.opened and len(flight.parts_done) == len(flight.parts)\n",
                    "        written = flight.opened and len(flight.parts_sent) == len(flight.parts)\n",
                ),
            ),
        ),
        Mutation(
            "lost_share_voided",
            "what a lost stager has not staged is given up before its next process comes",
            (("flusher.recovery", "        elif key.attempt != keep_attempt:\n", "        else:\n"),),
        ),
        Mutation(
            "lost_lead_ends_its_attempt",
            "the next process of the lead begins another attempt",
            (
                (
                    "flusher.service",
                    "                if not (continues and self._config.share.is_lead):\n",
                    "                if True:\n",
                ),
            ),
        ),
        Mutation(
            "lost_lead_not_waited_for",
            "what a lost lead has not staged is given up at once",
            (
                (
                    "flusher.service",
                    "        if self._config.share.writers == 1 or self._terminating or not self._is_standing:\n",
                    "        if self._config.share.leads or self._terminating or not self._is_standing:\n",
                ),
            ),
        ),
        Mutation(
            "chunk_sent_again_twice",
            "a chunk that the next process of a stager is sent counts as sent twice",
            (
                (
                    "flusher.pipeline",
                    "        if flight.share is not None and event.chunk in flight.received:\n",
                    "        if False:\n",
                ),
            ),
        ),
        Mutation(
            "start_without_record",
            "the others may join an upload that the lead has not recorded",
            (
                (
                    "flusher.jobs",
                    "        if upload.token is not None:\n            target.progress",
                    "        if job.share is not None:\n            self._share_jobs.record_start(job.key, layout, job.share, upload, file=file, write_id=write_id)\n            reach(Point.SHARES_BEGUN)\n        if upload.token is not None:\n            target.progress",
                ),
            ),
            2000,
        ),
    )
}
