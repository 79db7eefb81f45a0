"""For tests of restore: real checkpoints on disk, a store that counts reads, and ranks as threads of one process."""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.errors import PeerLost
from holdfast.image.manifest import Manifest, TensorRecord, manifest_name, step_file_name
from holdfast.store.posix import PosixStore
from tests.support.checkpoints import CHUNK_BYTES, manifest_of, torch_image
from trainer_side.state.tree import tensor_paths

__all__ = ["CHUNK_BYTES", "CountingStore", "Ranks", "ThreadPeers", "publish"]

_T = TypeVar("_T")


def publish(
    root: Path,
    step: int,
    tree: Any,
    *,
    attempt: int = 1,
    ranks: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    plain: bool = False,
    image: bytes | None = None,
) -> Manifest:
    """Write the `torch.save` file of `tree` and its manifest; `plain`: under the name without the attempt.

    With `image`, write those bytes and ignore `tree`.
    """
    image = torch_image(tree) if image is None else image
    name = step_file_name(step, attempt=attempt if attempt > 1 and not plain else 0)
    manifest = manifest_of(image, step=step, attempt=attempt, file=name, chunk_bytes=chunk_bytes, ranks=ranks)
    # Ask torch for the offset of each storage, by other means than the code under test.
    index_of: dict[int | None, int] = {
        entry.offset: index for index, entry in enumerate(manifest.entries) if entry.nbytes
    }
    with FakeTensorMode():
        placed = torch.load(io.BytesIO(image), weights_only=True)
    tensors = tuple(
        TensorRecord(
            path=path,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            entry=index_of[tensor.untyped_storage()._checkpoint_offset],
        )
        for path, tensor in tensor_paths(placed)
        if tensor.untyped_storage().nbytes()
    )
    manifest = manifest.model_copy(update={"tensors": tensors})
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(image)
    (root / manifest_name(name)).write_bytes(manifest.to_bytes())
    return manifest


class CountingStore(PosixStore):
    """Counts reads of portable files; can call a hook before a read.

    Attributes:
        requests: Offset and size of each read, in the order in which they ended.
    """

    before_read: Callable[[str, int], None] | None = None

    def __init__(self, root: Path, *, request_bytes: int = 4 << 20) -> None:
        super().__init__(root)
        self.bytes_read = 0
        self.requests: list[tuple[int, int]] = []
        self._largest_bytes = request_bytes
        self._counting = threading.Lock()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if self.before_read is not None:
            self.before_read(name, offset)
        super().read_into(name, offset, buffer)
        with self._counting:
            self.bytes_read += buffer.nbytes
            self.requests.append((offset, buffer.nbytes))

    @property
    def request_bytes(self) -> int:
        return self._largest_bytes


class _Meeting:
    """Rounds in which each rank says something and gets all others' words; a rank that has left ends the waiting."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._changed = threading.Condition()
        self._rounds: list[dict[int, Any]] = []
        self._left: set[int] = set()
        self._mail: dict[tuple[int, int], list[list[bytes]]] = {}

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        with self._changed:
            while len(self._rounds) <= number:
                self._rounds.append({})
            said = self._rounds[number]
            said[rank] = value
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: len(said) == self.ranks or self._left - set(said), timeout=60
            )
            if not done or len(said) < self.ranks:
                raise PeerLost(f"rank {rank}: another rank has left")
            return [said[other] for other in range(self.ranks)]

    def post(self, sender: int, receiver: int, message: list[bytes]) -> None:
        with self._changed:
            self._mail.setdefault((sender, receiver), []).append(message)
            self._changed.notify_all()

    def fetch(self, sender: int, receiver: int) -> list[bytes]:
        mail = self._mail.setdefault((sender, receiver), [])
        with self._changed:
            self._changed.wait_for(lambda: mail or sender in self._left, timeout=60)
            if not mail:
                raise PeerLost(f"rank {receiver}: rank {sender} has left, or sends nothing")
            return mail.pop(0)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


class ThreadPeers:
    """One of several ranks; sharing copies memory from one rank's tensors to another's."""

    def __init__(self, meeting: _Meeting, rank: int, flip: Callable[[int, memoryview], None] | None) -> None:
        self._meeting, self._rank, self._flip = meeting, rank, flip
        self._round = 0
        self._shared = False
        self._awaited: list[tuple[int, list[tuple[int, int]]]] = []
        self.shared_bytes = 0
        self.sent_bytes = 0
        self.polls = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def ranks(self) -> int:
        return self._meeting.ranks

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        assert (data is not None) == (root == self._rank)
        result = self._exchange(data)[root]
        assert isinstance(result, bytes)
        return result

    def all_agree(self, ok: bool) -> bool:
        return all(self._exchange(ok))

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        theirs = self._exchange((root, list(pieces)))
        assert {other for other, _ in theirs} == {root}, "the ranks do not share in the same order"
        source = theirs[root][1]
        assert [nbytes for _, nbytes in source] == [nbytes for _, nbytes in pieces]
        if self._rank != root:
            for (address, nbytes), (origin, _) in zip(pieces, source, strict=True):
                ctypes.memmove(address, origin, nbytes)
                self.shared_bytes += nbytes
                if self._flip is not None:
                    self._flip(
                        self._rank, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
                    )
        self._exchange(None)
        self._shared = True

    def send(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        assert rank != self._rank
        self._meeting.post(self._rank, rank, [ctypes.string_at(*piece) for piece in pieces])
        self.sent_bytes += sum(nbytes for _, nbytes in pieces)

    def receive(self, pieces: Sequence[tuple[int, int]], rank: int) -> None:
        self._awaited.append((rank, list(pieces)))

    def poll(self) -> None:
        self.polls += 1

    def finish(self, deadline_seconds: float) -> None:
        assert deadline_seconds > 0
        for sender, pieces in self._awaited:
            message = self._meeting.fetch(sender, self._rank)
            assert [len(one) for one in message] == [nbytes for _, nbytes in pieces]
            for (address, nbytes), sent in zip(pieces, message, strict=True):
                ctypes.memmove(address, sent, nbytes)
                if self._flip is not None:
                    memory = (ctypes.c_ubyte * nbytes).from_address(address)
                    self._flip(self._rank, memoryview(memory).cast("B"))
        self._awaited.clear()
        if self._shared:
            self._shared = False
            self._exchange(None)

    def _exchange(self, value: Any) -> list[Any]:
        self._round += 1
        return self._meeting.exchange(self._round - 1, self._rank, value)


class Ranks:
    """Runs `work(peers)` once per rank, each in a thread of its own.

    Args:
        flip: Called on each receiving rank with the bytes that have just arrived; may alter them.
    """

    def __init__(self, ranks: int, *, flip: Callable[[int, memoryview], None] | None = None) -> None:
        self._meeting = _Meeting(ranks)
        self.peers = [ThreadPeers(self._meeting, rank, flip) for rank in range(ranks)]

    def run(self, work: Callable[[ThreadPeers], _T]) -> list[_T]:
        """The results in order of rank; raises the first rank's error, if any."""
        results, errors = self.outcomes(work)
        for error in errors:
            if error is not None:
                raise error
        return [result for result in results if result is not None]

    def outcomes(
        self, work: Callable[[ThreadPeers], _T]
    ) -> tuple[list[_T | None], list[BaseException | None]]:
        """The result or the error of each rank."""
        results: list[_T | None] = [None] * len(self.peers)
        errors: list[BaseException | None] = [None] * len(self.peers)

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.peers[rank])
            except BaseException as error:  # noqa: BLE001 - handed to the test
                errors[rank] = error
            finally:
                self._meeting.leave(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        return results, errors
