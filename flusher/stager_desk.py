"""The flusher's side of one stager's connection: what it may say, and what it is told.

    hello ─► welcome | refused      begin, chunk, staged, abort ─► engine      finish ─► (drain) ─► drained

A stager that breaks the protocol is treated as one that died: its partial checkpoints are given up, its staged ones
published.
"""

from __future__ import annotations

import logging
import os

from flusher.engine import Engine
from flusher.steps import Key
from flusher.upkeep import ReadBack
from holdfast import ipc
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.ipc import Channel, Message
from holdfast.manifest import Manifest, State
from holdfast.ring import Ring, SlotState

__all__ = ["StagerDesk"]

_log = logging.getLogger("holdfast.flusher")
_TEXT_CHARACTERS_MAX = 4000  # a message must fit its packet, whatever an error says


class StagerDesk:
    """Talks to one stager. For the loop's thread.

    Args:
        channel: Its connection.
        ring: The ring.
        store_url: For the welcome.

    Attributes:
        welcomed: It said hello, and was answered.
        finishing: It said that the training is over.
    """

    def __init__(self, channel: Channel, ring: Ring, store_url: str) -> None:
        self.channel, self._ring, self._store_url = channel, ring, store_url
        self.welcomed = False
        self.finishing = False
        self.refuse_begins = ""

    # -- what the stager says ------------------------------------------------------------------------------------

    def hear(self, engine: Engine) -> bool:
        """Take what the stager has said. False: it has just said hello, and wants an answer.

        Raises:
            ProtocolError: It broke the protocol.
        """
        # Until nothing comes: a complaint about the last message is only raised when those before it were taken.
        while messages := self.channel.poll():
            for message in messages:
                if not self.welcomed:
                    if (
                        message.kind != "hello"
                        or message.fields["version"] != ipc.VERSION
                        or len(messages) > 1
                    ):
                        said = message.fields.get("version", message.kind)
                        raise ProtocolError(f"expected one hello of version {ipc.VERSION}, got {said!r:.60}")
                    return False
                self._take(message, engine)
        return True

    def welcome(self) -> None:
        """Answer hello: from now on its chunks may come."""
        self.welcomed = True
        self.channel.send(
            "welcome",
            version=ipc.VERSION,
            pid=os.getpid(),
            chunk_bytes=self._ring.chunk_bytes,
            ring_chunks=self._ring.ring_chunks,
            attempt=self._ring.attempt,
            store_url=self._store_url,
        )

    def refuse(self, error: HoldfastError) -> None:
        """Answer hello: no."""
        self.channel.send("refused", code=error.code, message=str(error)[:_TEXT_CHARACTERS_MAX])
        self.channel.close()

    def _take(self, message: Message, engine: Engine) -> None:
        fields = message.fields
        match message.kind:
            case "chunk":
                self._take_chunk(fields["slot"], engine)
            case "begin":
                self._take_begin(self._key(fields), fields["layout_digest"], engine)
            case "staged":
                engine.staged(self._key(fields))
            case "abort":
                engine.abort(self._key(fields), PeerLost(f"aborted by the stager: {fields['reason']}"))
            case "finish":
                self.finishing = True
                engine.abort_receiving(PeerLost("the training ended before all chunks had come"))
            case _:
                raise ProtocolError(f"message {message.kind} is not one that a stager sends")

    def _key(self, fields: dict[str, int]) -> Key:
        if fields["attempt"] != self._ring.attempt:
            raise ProtocolError(f"attempt {fields['attempt']}, this stager was given {self._ring.attempt}")
        return Key(fields["attempt"], fields["step"])

    def _take_begin(self, key: Key, layout_digest: str, engine: Engine) -> None:
        try:
            if self.refuse_begins:
                raise PeerLost(self.refuse_begins)
            layout = self._ring.layout(layout_digest)
        except HoldfastError as error:
            self.failed(key, error)
        else:
            engine.begin(key, layout)

    def _take_chunk(self, slot: int, engine: Engine) -> None:
        try:
            engine.chunk(self._ring.record(slot))
        except ProtocolError as error:
            # The record would say which checkpoint it is, so all that are coming in are suspect.
            _log.error("%s", error)
            engine.abort_receiving(error)

    # -- what the stager is told ---------------------------------------------------------------------------------

    def _concerns(self, key: Key) -> bool:
        return self.welcomed and key.attempt == self._ring.attempt

    def began(self, key: Key, part_chunks: int) -> None:
        """As `flusher.engine.Listener`."""
        if self._concerns(key):
            self.channel.send("began", **key._asdict(), part_chunks=part_chunks)

    def freed(self, slots: tuple[int, ...]) -> None:
        """As `flusher.engine.Listener`."""
        if self.welcomed:
            self.channel.send("freed", slots=list(slots))

    def durable(self, key: Key, manifest: Manifest) -> None:
        """As `flusher.engine.Listener`."""
        if self._concerns(key):
            self.channel.send(
                "durable",
                **key._asdict(),
                file=manifest.file,
                pgt2_seconds=manifest.pgt2_seconds,
                record=manifest.record.get("flusher", {}),
            )

    def read_back(self, result: ReadBack) -> None:
        """As `flusher.engine.Listener`."""
        if self._concerns(result.key):
            if result.state is State.VERIFIED:
                self.channel.send("verified", **result.key._asdict())
            elif result.state is State.BAD:
                self.channel.send("bad", **result.key._asdict(), note=result.note[:_TEXT_CHARACTERS_MAX])

    def failed(self, key: Key, error: HoldfastError) -> None:
        """As `flusher.engine.Listener`."""
        if self._concerns(key):
            message = str(error)[:_TEXT_CHARACTERS_MAX]
            self.channel.send("failed", **key._asdict(), code=error.code, message=message)

    # -- when it is gone -----------------------------------------------------------------------------------------

    def settle(self, engine: Engine) -> None:
        """The stager is gone: hear the last of it from the journal, publish what is staged, give up the rest."""
        for key in (Key(*name) for name in self._ring.checkpoint_names()):
            if not engine.knows(key):
                self._take_up(key, engine)
        held = engine.held_slots()
        for slot in range(self._ring.ring_chunks):
            try:
                record = self._ring.record(slot)
                if record.state is SlotState.FILLING:
                    self._ring.free(slot)  # its writer is gone, so this state is ours now
                elif record.state is SlotState.FULL and slot not in held:
                    engine.chunk(record)
            except ProtocolError as error:
                _log.error("slot stays out of use until the next start: %s", error)
        for key in engine.receiving():
            try:
                said = self._ring.checkpoint(*key)
                if said is None or said.state != "staged":
                    raise PeerLost(
                        f"{key}: the stager (process {self.channel.peer_pid}) ended before all chunks came"
                    )
                engine.staged(key)
            except HoldfastError as error:
                engine.abort(key, error)

    def _take_up(self, key: Key, engine: Engine) -> None:
        """A checkpoint file that no message spoke of: worth something only if it is staged."""
        try:
            said = self._ring.checkpoint(*key)
            if said is not None and said.state == "staged":
                engine.begin(key, self._ring.layout(said.layout_digest))
                return
        except HoldfastError as error:
            _log.error("%s", error)
        self._ring.remove_checkpoint(*key)
