"""The flusher's side of the connection to one stager.

    hello ─► welcome | refused      begin, chunk, staged, abort, doubt, proof ─► engine    finish ─► (drain) ─► drained

A stager whose flusher died repeats all that it knows to the next one. Known facts have no effect, and outcomes in
between are reported again.

A stager that breaks the protocol is disconnected. If it is alive, it reconnects, as to another flusher, and repeats all
that it knows; if not, its partial checkpoints are given up and its staged ones published.
"""

from __future__ import annotations

import logging
import os

from flusher.engine import Engine
from flusher.listener import DurableStep, FlushListener
from flusher.verify_and_prune import ReadBack
from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import State
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.ring import doorbell as ipc
from holdfast.ring.doorbell import Channel, Message
from holdfast.ring.journal import SlotState
from holdfast.ring.ring import Ring
from holdfast.wire.failure_count import FailureCount

_log = logging.getLogger("holdfast.flusher")
_TEXT_CHARACTERS_MAX = 4000  # a message must fit its packet, whatever an error says
_SLOTS_PER_MESSAGE_MAX = 4096  # per message; the numbers of a larger ring would not fit a packet


class StagerHandler(FlushListener):
    """Talks to one stager, in the loop's thread. `attempt`: the one whose ring the stager still has, from its hello; 0
    for a new job. `lead_attempt`: the lead's attempt, named by every other stager; from the lead itself 0, or the
    attempt that its last process had.
    """

    def __init__(self, channel: Channel, ring: Ring, store_url: str, share: ShareNumber = WHOLE) -> None:
        self.channel, self._ring, self._store_url, self._share = channel, ring, store_url, share
        self.welcomed = self.resumed = False
        self.attempt = self.lead_attempt = 0
        self.standing = False  # it may be started again within its job
        self._stager_share: list[int] = []
        self.finishing = False
        self.has_begun = False  # a checkpoint
        self.interrupted = False  # the stager said that the job was
        self.refuse_begins = ""
        self._held_sent = ""

    # -- messages from the stager --------------------------------------------------------------------------------

    def poll(self, engine: Engine) -> bool:
        """Handle the stager's messages; False: it said hello and needs an answer. Raises `ProtocolError`."""
        # Poll until empty: the error of a bad message is raised only once those before it were taken.
        while messages := self.channel.poll():
            for message in messages:
                if not self.welcomed:
                    if (
                        message.kind != "hello"
                        or message.fields["version"] != ipc.VERSION
                        or len(messages) > 1
                    ):
                        got = message.fields.get("version", message.kind)
                        raise ProtocolError(f"expected one hello of version {ipc.VERSION}, got {got!r:.60}")
                    self.attempt = message.fields["attempt"]
                    self.lead_attempt = message.fields["lead_attempt"]
                    self._stager_share = message.fields["share"]
                    self.standing = message.fields.get("standing") is True
                    return False
                self._handle(message, engine)
        return True

    def check_share(self) -> None:
        """Raise `ConfigError` unless the stager has this flusher's share, and names the lead's attempt if it must."""
        mine = [self._share.index, self._share.writers]
        if self._stager_share != mine:
            theirs = "/".join(str(number + (at == 0)) for at, number in enumerate(self._stager_share[:2]))
            raise ConfigError(
                f"{self._store_url}: a flusher on this machine (process {os.getpid()}) writes share {self._share}, and "
                f"the stager (process {self.channel.peer_pid}) has share {theirs}; "
                "the flusher ends once it has written what an earlier job has staged: wait for that, or end it by "
                "SIGTERM, and start the stager again"
            )
        if not (self._share.is_lead or self.lead_attempt or self.attempt):
            raise ConfigError(
                f"{self._store_url}: the stager of share {self._share} names attempt 0 of the stager that leads; "
                "expected that of the first stager from each other one"
            )

    def send_held(self, message: str) -> None:
        """Report why the store fails, when that has changed; the stager shows it where the user looks."""
        message = message[:_TEXT_CHARACTERS_MAX]
        if self.welcomed and message != self._held_sent:
            self._held_sent = message
            self.channel.send("held", message=message)

    def welcome(self, seen: FailureCount, *, resumed: bool) -> None:
        """Accept the stager. With `resumed` it repeats all it knows. `seen`: the failures of earlier attempts."""
        self.welcomed, self.resumed = True, resumed
        self.channel.send(
            "welcome",
            version=ipc.VERSION,
            pid=os.getpid(),
            chunk_bytes=self._ring.chunk_bytes,
            ring_chunks=self._ring.ring_chunks,
            attempt=self._ring.attempt,
            store_url=self._store_url,
            resumed=resumed,
            seen=seen.to_json(),
        )

    def refuse(self, error: HoldfastError) -> None:
        """Refuse the stager, and close the connection."""
        self.channel.send("refused", code=error.code, message=str(error)[:_TEXT_CHARACTERS_MAX])
        self.channel.close()

    def _handle(self, message: Message, engine: Engine) -> None:
        fields = message.fields
        match message.kind:
            case "chunk":
                self._handle_chunk(fields["slot"], engine)
            case "begin":
                self._handle_begin(self._key(fields), fields["layout_digest"], engine)
            case "staged":
                reach(Point.STAGED_HEARD)
                engine.mark_staged(self._key(fields))
            case "abort":
                self._handle_abort(self._key(fields), fields["reason"], engine)
            case "doubt":
                engine.load_doubts()
            case "proof":
                engine.load_proofs()
            case "finish":
                self.finishing, self.interrupted = True, fields.get("interrupted") is True
                engine.abort_receiving(PeerLost("the training ended before it was staged"))
            case _:
                raise ProtocolError(f"{message.kind} is not a message that a stager may send")

    def _key(self, fields: dict[str, int]) -> CheckpointId:
        if fields["attempt"] != self._ring.attempt:
            raise ProtocolError(
                f"the stager names attempt {fields['attempt']}, expected attempt {self._ring.attempt}"
            )
        return CheckpointId(fields["attempt"], fields["step"])

    def _handle_begin(self, key: CheckpointId, layout_digest: str, engine: Engine) -> None:
        try:
            if self.resumed and not engine.knows(key) and self._ring.checkpoint(*key) is None:
                engine.request_outcome(key)  # it ended while no stager listened, or its message was lost
                return
            if self.refuse_begins and not engine.knows(key):
                raise PeerLost(self.refuse_begins)
            layout = self._ring.layout(layout_digest)
        except (PeerLost, ProtocolError, ConfigError) as error:
            self.failed(key, error)
        else:
            self.has_begun = True
            engine.begin(key, layout)

    def _handle_abort(self, key: CheckpointId, reason: str, engine: Engine) -> None:
        error = PeerLost(f"aborted by the stager: {reason}")
        if engine.knows(key) or not self.resumed or self._ring.checkpoint(*key) is None:
            if self._ring.writers(key.attempt) > 1:
                engine.give_up(
                    key, error
                )  # even if it was not begun here: other flushers may wait for this share
            else:
                engine.abort(key, error)
            return
        # Given up while there was no flusher: nobody else frees its slots.
        freed = []
        for slot in range(self._ring.ring_chunks):
            record = self._ring.record(slot)
            if record.state is SlotState.FULL and (record.attempt, record.step) == key:
                self._ring.free(slot)
                freed.append(slot)
        self.freed(tuple(freed))
        engine.give_up(key, error)

    def _handle_chunk(self, slot: int, engine: Engine) -> None:
        try:
            record = self._ring.record(slot)
            if self.resumed and record.state is not SlotState.FULL:
                return  # repeated, and meanwhile written and freed
            engine.add_chunk(record)
        except ProtocolError as error:
            # Only the record says which checkpoint it is, so all that are being received are suspect.
            _log.error("%s", error)
            engine.abort_receiving(error)

    # -- messages to the stager ----------------------------------------------------------------------------------

    def _concerns(self, key: CheckpointId) -> bool:
        return self.welcomed and key.attempt == self._ring.attempt

    def began(self, key: CheckpointId, part_chunks: int) -> None:
        if self._concerns(key):
            self.channel.send("began", **key._asdict(), part_chunks=part_chunks)

    def freed(self, slots: tuple[int, ...]) -> None:
        if self.welcomed:
            for first in range(0, len(slots), _SLOTS_PER_MESSAGE_MAX):
                self.channel.send("freed", slots=list(slots[first : first + _SLOTS_PER_MESSAGE_MAX]))

    def grown(self, note: str) -> None:
        if self.welcomed:
            self.channel.send("grown", note=note)

    def durable(self, key: CheckpointId, durable: DurableStep) -> None:
        if self._concerns(key):
            self.channel.send(
                "durable",
                **key._asdict(),
                file=durable.file,
                pgt2_seconds=durable.pgt2_seconds,
                record=durable.record,
            )

    def read_back(self, result: ReadBack) -> None:
        if self._concerns(result.key):
            if result.state is State.VERIFIED:
                self.channel.send("verified", **result.key._asdict(), note=result.note[:_TEXT_CHARACTERS_MAX])
            elif result.state is State.BAD:
                self.channel.send("bad", **result.key._asdict(), note=result.note[:_TEXT_CHARACTERS_MAX])

    def failed(self, key: CheckpointId, error: HoldfastError) -> None:
        if self._concerns(key):
            message = str(error)[:_TEXT_CHARACTERS_MAX]
            self.channel.send("failed", **key._asdict(), code=error.code, message=message)
