"""Joins the job and puts the parts of a `Checkpointer` together. Each part gets only the parts that it calls.

settings, state ─► world ─► link, local tiers ─► copier, staging areas ─► planner, saver ─► notices ─► CheckpointerParts
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.notices.notice import Notice
from holdfast.process import at_exit
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from trainer_side.joining import join, open_tier_set
from trainer_side.leaving import EXIT_SECONDS_MAX, Leaving
from trainer_side.ledger import Ledger
from trainer_side.link.inbox import StagerInbox
from trainer_side.link.stager_message import StagerMessage
from trainer_side.link.to_stager import ToStager
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.notice.open_sources import PreemptionNotices
from trainer_side.pace.schedule import Schedule
from trainer_side.proof.resume_check import ResumeCheck
from trainer_side.ranks.joined import join_world
from trainer_side.ranks.peers import Peers
from trainer_side.ranks.world import World
from trainer_side.save.copier import Copier
from trainer_side.save.fresh_run_check import FreshRunCheck
from trainer_side.save.hook_coverage import CopyPolicy
from trainer_side.save.left_out import LeftOutCheck
from trainer_side.save.planner import Planner
from trainer_side.save.rank_context import RankContext
from trainer_side.save.saver import Saver
from trainer_side.save.staging import CopyEngine
from trainer_side.save.staging_pool import Areas, StagingPool
from trainer_side.state.tree import UserState
from trainer_side.tiers.tier_set import TierSet

if TYPE_CHECKING:
    from trainer_side.pace.pacer import Pacer

_log = logging.getLogger("holdfast.trainer")


@dataclass(frozen=True)
class CheckpointerParts:
    """The parts of one `Checkpointer`, in the order in which they are made."""

    peers: Peers  # used until the first step after a resume
    events: EventLog
    agreed_steps: AgreedSteps
    link: ToStager
    pacer: Pacer | None  # None unless `every="auto"`
    ledger: Ledger
    copy_policy: CopyPolicy
    copier: Copier
    tiers: TierSet
    areas: Areas
    engine: CopyEngine
    fresh_run: FreshRunCheck
    left_out: LeftOutCheck
    pool: StagingPool
    saver: Saver
    leaving: Leaving
    notices: PreemptionNotices
    resume_check: ResumeCheck
    cancel_at_exit: Callable[[], None]  # to call once the tiers are closed; otherwise they are closed at exit


def build(given: UserState, config: TrainerConfig, *, auto: bool, fresh: bool) -> CheckpointerParts:
    """Join the job, with its stager and local tiers, and make all parts. Collective; main thread.

    With `auto` holdfast chooses the interval. With `fresh` training may start from scratch although the run has
    checkpoints.

    Raises:
        ConfigError: A setting is wrong, or is not the same on all ranks; or the job has neither a stager nor tiers.
        StoreError: The stager, or rank 0 of a job without one, cannot use the store.
        PeerLost: A rank or the stager did not come in time.
    """
    state = given.current
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    world, ledger = join_world(config), Ledger()
    rank = world.rank
    events = EventLog(config.events, role="trainer", rank=rank)
    agreed_steps = AgreedSteps(wait_seconds_max=config.stager_seconds_max)
    schedule = Schedule(auto=auto, wait_seconds_max=config.stager_seconds_max)
    inbox = StagerInbox(rank, agreed_steps, schedule)
    link = join(config, world, inbox, events)
    pacer = _make_pacer(schedule, config, link, events, optimizers, world) if auto else None
    tiers = open_tier_set(config, world, link, agreed_steps, ledger, events)
    cancel_at_exit = at_exit(tiers.close, EXIT_SECONDS_MAX)

    def announce_doubt(doubt: Doubt) -> None:
        """Tell all ranks that this one no longer trusts copies behind the gate. Any thread."""
        tiers.mark_doubtful(doubt)  # first: the stager and the other ranks may be gone
        is_alive = link.job.is_alive
        link.send_message(StagerMessage.doubt(doubt))
        if not is_alive:
            tiers.council.send_doubt(doubt)

    copy_policy = CopyPolicy(
        rank,
        mode=config.copy,
        inside_ms_max=config.copy_inside_ms_max,
        send_doubt=announce_doubt,
        ledger=ledger,
        events=events,
    )

    def handle_doubt(doubt: Doubt) -> None:
        """Act on the doubt of any rank. Link's or council's thread."""
        tiers.mark_doubtful(doubt)
        copy_policy.handle_doubt(doubt)

    inbox.on_doubt = handle_doubt
    tiers.council.set_doubt_callback(handle_doubt)
    seconds_max = config.copy_seconds_max
    copier = Copier(
        optimizers, link, ledger=ledger, events=events, seconds_max=seconds_max, copy_policy=copy_policy
    )
    areas, engine = Areas(), CopyEngine(device_bytes_max=config.device_bytes_max)
    fresh_run = FreshRunCheck(fresh=fresh, seconds_max=config.start_seconds_max)
    context = RankContext(config, link, tiers, ledger, events, fresh_run)
    left_out = LeftOutCheck(state, rank=rank, events=events)
    pool = StagingPool(areas, context)
    saver = Saver(state, Planner(given, left_out, pool, engine, context), pool, copier, context)
    leaving = Leaving(
        copier,
        tiers,
        link,
        ledger,
        seconds_max=config.close_seconds_max,
        on_not_durable=config.on_not_durable,
    )
    send = _notice_sender(link) if link.job.has_stager else tiers.council.send_notice
    notices = PreemptionNotices(config, agreed_steps, send, rank=rank)
    peers = world.peers()
    resume_check = ResumeCheck(
        state, link, tiers, peers, events, stop_on_difference=config.on_unproven == "stop"
    )
    return CheckpointerParts(
        peers,
        events,
        agreed_steps,
        link,
        pacer,
        ledger,
        copy_policy,
        copier,
        tiers,
        areas,
        engine,
        fresh_run,
        left_out,
        pool,
        saver,
        leaving,
        notices,
        resume_check,
        cancel_at_exit,
    )


def _make_pacer(
    schedule: Schedule,
    config: TrainerConfig,
    link: ToStager,
    events: EventLog,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
) -> Pacer:
    """Make the pacer of this rank. ConfigError: the job has no stager."""
    if not link.job.has_stager:
        raise ConfigError(
            'every="auto" needs a stager, which brings all ranks to the same steps, and this job has none; '
            f"{world.stager_advice}, or give a number of steps"
        )
    from trainer_side.pace.pacer import Pacer  # here: most scripts set the interval themselves

    send_request = (
        (lambda request: link.send_message(StagerMessage.pace_request(request))) if world.rank == 0 else None
    )
    return Pacer(schedule, send_request, config, events, optimizers, observed=link.job.prior_failures)


def _notice_sender(link: ToStager) -> Callable[[Notice], None]:
    def send(notice: Notice) -> None:
        if link.job.lead_problem is not None:
            _log.error(
                "rank %d: %s; the stager is lost, so no step is named at which all ranks save",
                link.job.rank,
                notice.sentence(),
            )
        link.send_message(StagerMessage.notice(notice))

    return send
