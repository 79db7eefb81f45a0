"""The candidates of a restore in their turn: of the store's manifests no more are read than the next one needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from holdfast.image.checkpoint_id import CheckpointId
from trainer_side.ranks.peers import Peers
from trainer_side.restore.choice import Candidate, Holder, Passed, RankPlace, candidates, pass_over
from trainer_side.restore.inventory import Shelf


class InTurn:
    """All checkpoints, newest first, each as a candidate or with the reason why it is none.

    Iterating is collective: every rank takes the same steps. It raises what `Shelf.more` raises.

    Args:
        holders: The slices that the ranks have found.
        shelf: The store's checkpoints.
        peers: The ranks.
        set_aside: Checkpoints that are passed over.
        places: Where each rank is, for people.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        shelf: Shelf,
        peers: Peers,
        set_aside: Collection[CheckpointId] = (),
        places: Sequence[RankPlace] = (),
    ) -> None:
        self._places = places
        self._holders, self._shelf, self._peers, self._set_aside = holders, shelf, peers, set_aside

    def __iter__(self) -> Iterator[Candidate | Passed]:
        number = 0
        while True:
            listed = self.known()
            while number < len(listed) and self._is_settled(listed[number]):
                yield listed[number]
                number += 1
            if self._shelf.unread is None:
                return
            # What is read now comes after all that was given: it is older, and nothing drifted was given yet.
            self._shelf.more(self._peers)

    def known(self) -> Sequence[Candidate | Passed]:
        """What is known so far, in order; between them may be others that were not read yet. Not collective."""
        return pass_over(candidates(self._holders, self._shelf.stored, self._places), self._set_aside)

    def first(self) -> Candidate | None:
        """The first candidate; whatever is newer is known then. Collective."""
        return next((one for one in self if isinstance(one, Candidate)), None)

    def _is_settled(self, one: Candidate | Passed) -> bool:
        """Whether nothing that was not read yet comes before it."""
        unread = self._shelf.unread
        if unread is None:
            return True
        is_drifted = isinstance(one, Candidate) and bool(one.drift)
        return not is_drifted and CheckpointId(one.attempt, one.step) > unread
