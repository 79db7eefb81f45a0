"""The agreement of all ranks on this rank's state, before a plan is made.

    collect ─► table of tensors, a checksum of each ─► PROPOSE ─► all the same ─► Agreement: the room for what may grow
       │                                                  └─ other names on some ranks ─► PROPOSE with their places
       └─ fails ─► PROPOSE with the refusal ───────────► any refused, or differ ─► the same StateError on every rank

All ranks get here at the same step and wait for each other. A rank whose state cannot be saved therefore sends its
refusal in place of its table, so that the others do not wait until the deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import HoldfastError, StateError
from holdfast.image.replicas import format_tensors
from holdfast.wire.replica_proof import is_statistic
from holdfast.wire.state_messages import Agreement, Proposal
from trainer_side.save.rank_context import RankContext
from trainer_side.state.optimizer_places import first_names, keyed_by_name, parameter_names
from trainer_side.state.tensor_table import TensorTable, describe_change, table
from trainer_side.state.tree import UserState, collect

_log = logging.getLogger("holdfast.trainer")


class LayoutAgreement:
    """Negotiates the layout with the other ranks. Training thread."""

    def __init__(self, given: UserState, context: RankContext) -> None:
        self._user_state, self._state = given, given.current
        self._council, self._events = context.tiers.council, context.events
        self._rank, self._ranks = context.link.job.rank, context.link.job.ranks
        self._context = context
        self._reported: set[str] = set()
        self._has_warned_staged = False
        self._names: dict[str, list[list[str]]] = {}
        self._agreed_table: TensorTable | None = None
        self._step = -1
        self.sum_seconds = 0.0  # of the checksums when the ranks last agreed

    def check_fresh_run(self) -> None:
        """Refuse the first save if it would restart the run unasked (`FreshRunCheck`), and tell the other ranks."""
        if self._context.fresh_run.is_decided:
            return
        url, tiers = self._context.link.job.store_url, self._context.tiers.tiers
        if error := self._context.fresh_run.refusal(url, tiers, with_store=self._rank == 0):
            self._send_refusal(error)
            raise error

    def collect(self) -> Any:
        """Collect the state for an agreement. StateError: a `state_dict()` failed, here or on another rank."""
        try:
            self._user_state.refresh()
            return collect(self._state)
        except Exception as error:
            problem = StateError(f"state_dict() failed: {type(error).__name__}: {error}")
            self._send_refusal(error if isinstance(error, StateError) else problem)
            raise

    def agree(self, tree: Any, trailer_bytes: int, step: int = -1) -> Agreement:
        """Compare the state with that of the other ranks. Collective.

        `trailer_bytes` is the room that data.pkl needs beside the pickle. `step` is -1 if it is unknown.

        ConfigError: the first save of a rank was refused (`FreshRunCheck`). StateError: the state cannot be saved, here
        or on another rank; or the ranks hold different tensors, or different bytes in tensors of which one copy is
        saved; or this rank's state alone has changed. PeerLost: a rank did not answer in time.
        """
        self._names, self._step = {}, step
        proposed, agreement = self._propose(
            lambda: table(self._state, tree, rank=self._rank, ranks=self._ranks, trailer_bytes=trailer_bytes)
        )
        self.sum_seconds = proposed.sum_seconds
        if agreement.asks_stages:
            _, agreement = self._propose(lambda: self._staged_table(tree, proposed.sums))
            if agreement.union is None:
                raise StateError(
                    "the ranks could not agree on a layout; install the same holdfast version on every node"
                )
        self._agreed_table = proposed._replace(sums=())
        self._warn_staged(agreement)
        self._report_rank0_only(agreement.rank0_only)
        return agreement

    def to_agreed_form(self, tree: Any, agreement: Agreement) -> Any:
        """Return the agreed form of the tree: optimizer state keyed by name, if the ranks have different tensors."""
        union = agreement.union
        return tree if union is None else keyed_by_name(tree, self._names, union.groups)

    def _staged_table(self, tree: Any, sums: Sequence[int]) -> TensorTable:
        self._names = first_names(parameter_names(self._state))
        named = keyed_by_name(tree, self._names, self._names)
        return table(self._state, named, rank=self._rank, ranks=self._ranks, names=self._names, sums=sums)

    def _propose(self, make: Callable[[], TensorTable]) -> tuple[TensorTable, Agreement]:
        try:
            proposed = make()
        except StateError as error:
            self._send_refusal(error)
            raise
        agreement = self._council.agree(
            Proposal(
                table_digest=proposed.digest,
                table=proposed.rows,
                pickle_bytes=proposed.pickle_bytes,
                per_rank_bytes=proposed.per_rank_bytes,
                sums=proposed.sums,
                held=proposed.held,
                stage=proposed.stage,
                step=self._step,
                change="" if self._agreed_table is None else describe_change(self._agreed_table, proposed),
            )
        )
        return proposed, agreement

    def _send_refusal(self, error: HoldfastError) -> None:
        """Send this rank's error to all ranks. Raises it, or the error of a rank before this one."""
        try:
            self._council.agree(Proposal.refused(error, self._step))
        except (StateError, type(error)):
            raise
        except HoldfastError:
            _log.debug("the refusal could not be sent to the other ranks", exc_info=True)

    def _warn_staged(self, agreement: Agreement) -> None:
        """Warn once: a tensor that a rank lacks by mistake is saved like one of another stage."""
        union = agreement.union
        if union is None or self._rank != 0 or self._has_warned_staged:
            return
        self._has_warned_staged = True
        paths = [str(row[0]) for number, row in enumerate(union.table) if number in union.staged]
        _log.warning(
            "%d of %d tensors are not on every rank, as with pipeline stages; the checkpoint has each of them from the "
            "ranks that hold it: %s",
            len(paths),
            len(union.table),
            format_tensors(paths),
        )

    def _report_rank0_only(self, paths: Sequence[str]) -> None:
        """Report each tensor once: other ranks have other bytes there, which no checkpoint has."""
        news = [path for path in paths if path not in self._reported]
        self._reported.update(news)
        if not news or self._rank != 0:
            return
        self._events.emit("rank0_only", {"tensors": news})
        if statistics := format_tensors([path for path in news if is_statistic(path)]):
            _log.info(
                "running statistics of BatchNorm differ between the ranks, which is normal; rank 0's are saved: %s",
                statistics,
            )
        if others := format_tensors([path for path in news if not is_statistic(path)]):
            _log.warning(
                "only rank 0's value of %s is saved, and other ranks have another value there; if each rank must keep "
                "its own (a random number generator, for example), wrap it in PerRank(...)",
                others,
            )
