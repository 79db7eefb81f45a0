"""Lets a rank join its job: with a stager, with local tiers, or with both.

a stager in the job ─► Link      HELLO ─► WELCOME: its attempt, its store
several             ─► StagerGroup  a link to each; the lead first, whose attempt the others are told
none, but tiers     ─► NoStager  attempt: one more than any tier or the store knows of
tiers               ─► LocalTiers  beside either; a plain TierSet without tiers
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from holdfast.checkpoints.catalog import CatalogListing
from holdfast.checkpoints.lease import claim_attempt
from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.faultpoint import identify
from holdfast.store import open_store, require_parent
from holdfast.telemetry.events import EventLog
from trainer_side.ledger import Ledger
from trainer_side.link.greeting import GreetedStager, greet
from trainer_side.link.inbox import ShareInbox, StagerInbox
from trainer_side.link.link import Link
from trainer_side.link.no_stager import NoStager
from trainer_side.link.rejoining import Reconnect
from trainer_side.link.stager_group import StagerGroup
from trainer_side.link.to_stager import ToStager
from trainer_side.notice.agreed_steps import AgreedSteps
from trainer_side.ranks.peers import Peers, agree, gather
from trainer_side.ranks.ports import StagerPort
from trainer_side.ranks.world import World
from trainer_side.restore.inventory import newest_attempt
from trainer_side.seat import claim_port
from trainer_side.tiers.tier import Tier
from trainer_side.tiers.tier_inventory import TierInventory, take_inventory
from trainer_side.tiers.tier_set import RankCouncil, TierSet

_log = logging.getLogger("holdfast.trainer")

_DISCONNECT_SECONDS_MAX = 5.0
# A member waits this long for a lost lead: its own next try comes after a pause that may be longer.
_LEAD_SECONDS_MAX = 5.0
_POLL_SECONDS = 0.05


def join(config: TrainerConfig, world: World, inbox: StagerInbox, events: EventLog) -> ToStager:
    """Compare settings with the other ranks, and connect to the stager if there is one. Collective; main thread.

    Raises:
        ConfigError: The job has neither a stager nor local tiers, or not the same ones on all ranks; or
            `torch.distributed` has other ranks than the job.
        PeerLost: A rank or the stager did not come.
        HoldfastError: The stager could not start.
    """
    without_stager = world.stagers == 0
    compare_settings(config, world.peers(), without_stager=without_stager)
    if without_stager and config.tiers:
        return NoStager(config, world)
    if world.stagers > 1:
        return connect_stagers(config, world, inbox, events)
    return connect_stager(config, world, inbox, events)


def connect_stager(config: TrainerConfig, world: World, inbox: StagerInbox, events: EventLog) -> Link:
    """Send HELLO, and wait for the stager's WELCOME, at most `start_seconds_max`; raises as `greet`. Main thread.

    ConfigError also: there is no stager in this job, this process has met it before, or it is one of several.
    """
    link = _connect_lead(config, world, inbox, events)
    link.close_at_exit()
    return link


def _connect_lead(config: TrainerConfig, world: World, inbox: StagerInbox, events: EventLog) -> Link:
    identify(f"rank:{world.rank}")
    greeted = _greet(config, world, world.port(), 0)
    reconnect, connect = None, _reconnect(world, lambda: link.job.attempt)
    if connect is not None and config.on_stager_lost != "end":
        reconnect = Reconnect(connect, lambda: _newest_published(greeted.welcome.store_url))
    link = Link(config, greeted, inbox, events, rank=world.rank, reconnect=reconnect)
    return link


def _reconnect(world: World, attempt: Callable[[], int]) -> Callable[[int], StagerPort] | None:
    """Return the call that reconnects to the only stager, or to the lead, whose next process may continue `attempt`."""
    if world.reconnect is None or world.stagers == 1:
        return world.reconnect
    return lambda generation: world.member(0, attempt(), generation)


def connect_stagers(config: TrainerConfig, world: World, inbox: StagerInbox, events: EventLog) -> StagerGroup:
    """Meet the lead, and then each of the other stagers, as `connect_stager`. Main thread.

    ConfigError also: a stager writes another run than the lead, or in other chunks.
    """
    lead = _connect_lead(config, world, inbox, events)
    links = [lead]
    try:
        others = range(1, world.stagers)
        links.extend(_connect_member(config, world, index, lead, inbox, events) for index in others)
    except BaseException:
        for link in links:
            link.close(seconds_max=0.0)
        raise
    group = StagerGroup(links, events)
    group.close_at_exit()
    return group


def _connect_member(
    config: TrainerConfig, world: World, index: int, lead: Link, inbox: StagerInbox, events: EventLog
) -> Link:
    attempt = lead.job.attempt
    greeted = _greet(config, world, world.member(index, attempt), index)
    actual = greeted.welcome.attempt, greeted.welcome.store_url, greeted.welcome.chunk_bytes
    expected = attempt, lead.job.store_url, lead.job.chunk_bytes
    if actual != expected:
        greeted.port.disconnect(_DISCONNECT_SECONDS_MAX)
        raise ConfigError(
            f"{greeted.name}: expected attempt {expected[0]} of {expected[1]} in chunks of {expected[2]} bytes, as the "
            f"first stager has it, got attempt {actual[0]} of {actual[1]} in chunks of {actual[2]} bytes; start all "
            "stagers with the same store and chunk_bytes"
        )
    reconnect = None
    if config.on_stager_lost == "train" and world.reconnect is not None:
        # The lead checks whether another start of the job has continued the run.
        reconnect = Reconnect(
            lambda generation: world.member(index, _wait_for_lead_attempt(lead), generation), lambda: 0
        )
    own = ShareInbox(world.rank, lambda: inbox.last_step)
    return Link(config, greeted, own, events, rank=world.rank, reconnect=reconnect)


def _wait_for_lead_attempt(lead: Link) -> int:
    """Return the attempt of the lead once it is reached. PeerLost: it is still lost; try again."""
    deadline = time.monotonic() + _LEAD_SECONDS_MAX
    while lead.job.problem is not None:
        if time.monotonic() > deadline:
            raise PeerLost(f"the first stager is lost: {lead.job.problem}")
        time.sleep(_POLL_SECONDS)
    return lead.job.attempt


def _greet(config: TrainerConfig, world: World, port: StagerPort, index: int) -> GreetedStager:
    claim_port(port)
    greeted = greet(port, ranks=world.ranks, seconds_max=config.start_seconds_max)
    welcome, name = greeted.welcome, _stager_name(config, world, index)
    if (welcome.share, welcome.shares) != (index + 1, world.stagers):
        port.disconnect(_DISCONNECT_SECONDS_MAX)
        raise ConfigError(
            f"{name}: expected the stager with share {index + 1}/{world.stagers}, got share "
            f"{welcome.share}/{welcome.shares}; name all stagers in HOLDFAST_STAGER in the order of their shares"
        )
    return greeted._replace(name=name)


def _stager_name(config: TrainerConfig, world: World, index: int) -> str:
    """Return a stager's name for messages; in an MPI job stagers have no address."""
    if world.stagers == 1:
        return "the stager"
    place = f" at {config.stagers[index]}" if len(config.stagers) == world.stagers else ""
    return f"stager {index + 1}/{world.stagers}{place}"


def _newest_published(store_url: str) -> int:
    names = CatalogListing(open_store(store_url)).manifests
    return names[0].order.attempt if names else 0


def compare_settings(config: TrainerConfig, peers: Peers, *, without_stager: bool) -> None:
    """Check that all ranks have the same stager, tiers and checkpoints set aside, and with `without_stager` the same
    settings that a stager would otherwise tell them. Collective.

    A rank without tiers would skip collective calls in which the others wait for it; ranks that set other checkpoints
    aside would restore different ones. ConfigError, on every rank: names the rank and the setting that differ.
    """
    if peers.all_agree(config.stager is None and not config.tiers and not config.restore_set_aside):
        return
    mine: dict[str, object] = {
        "stager": config.stager,  # first: where ranks differ in it, they also differ in `without_stager`
        "tiers": list(config.tiers),
        "restore_set_aside": [key.label for key in config.restore_set_aside],
    }
    if without_stager:
        mine |= {
            "store": config.store,
            "chunk_bytes": config.chunk_bytes,
            "on_divergence": config.on_divergence,
        }
    first, *others = [json.loads(one) for one in gather(peers, json.dumps(mine).encode())]
    for rank, other in enumerate(others, 1):
        for name in first:
            if other[name] != first[name]:
                raise ConfigError(
                    f"trainer setting {name}: rank {rank} has {other[name] or 'none'}, rank 0 has "
                    f"{first[name] or 'none'}; give all ranks the same"
                )


def open_tier_set(
    config: TrainerConfig,
    world: World,
    link: ToStager,
    agreed_steps: AgreedSteps,
    ledger: Ledger,
    events: EventLog,
) -> TierSet:
    """Open the local tiers, if any are set. Collective; main thread.

    Raises:
        ConfigError: A tier is unusable, or not the same on all ranks.
        StoreError: In a job without a stager the store does not answer, so that the attempt is not known.
        PeerLost: A rank is gone.
    """
    if not config.tiers:
        return TierSet(RankCouncil(link.agree))
    # Imported here, so that only jobs with tiers load this code.
    from trainer_side.tiers.local_tiers import LocalTiers, TierJob, TierReport
    from trainer_side.tiers.open_tiers import open_tiers

    peers, store_url, attempt = world.peers(), link.job.store_url, link.job.attempt
    tiers: Sequence[Tier] = ()
    error = None
    try:
        tiers = open_tiers(config, store_url)
    except ConfigError as problem:
        error = problem
    # A tier that hangs now is refused, like one that is too small: it would delay the first save as well.
    limit = min(config.start_seconds_max, config.tier_seconds_max)
    inventory = take_inventory(peers, tiers, error, seconds_max=limit)
    tier_agreed_steps = None if attempt else agreed_steps  # with a stager, the link receives them
    attempt = (
        _attempt_beside_stager(attempt, inventory, rank=world.rank)
        if attempt
        else _attempt_without_stager(config, store_url, inventory, peers)
    )
    job = peers.broadcast(uuid.uuid4().hex.encode() if peers.rank == 0 else None).decode()
    return LocalTiers(
        tiers,
        world.council_port(),
        config,
        job=TierJob(attempt, job),
        inventory=inventory,
        report=TierReport(world.rank, ledger, events),
        agreed_steps=tier_agreed_steps,
    )


def _attempt_beside_stager(attempt: int, inventory: TierInventory, *, rank: int) -> int:
    """Return the stager's attempt, or a higher one if a job without a stager got further, unknown to the store."""
    if inventory.newest_attempt < attempt:
        return attempt
    if rank == 0:
        _log.warning(
            "local tiers hold checkpoints of attempt %d, but this job is attempt %d: a job without a stager wrote them "
            "while it did not reach the store. Until the next job, restore takes them for newer than those of this job",
            inventory.newest_attempt,
            attempt,
        )
    return inventory.newest_attempt + 1


def _attempt_without_stager(
    config: TrainerConfig, store_url: str, inventory: TierInventory, peers: Peers
) -> int:
    """Return one more than the newest attempt in the store and in any rank's tiers; record it in the store."""
    agree(peers, _missing_parent_error(config, store_url))
    store = open_store(store_url)
    attempt = 1 + newest_attempt(
        inventory.newest_attempt,
        store,
        peers,
        without_store=config.restore_without_store,
        seconds_max=config.start_seconds_max,
    )
    if peers.rank == 0:
        try:
            claim_attempt(store, attempt)
        except HoldfastError as error:
            _log.warning("attempt %d of this job could not be recorded in the store: %s", attempt, error)
    return attempt


def _missing_parent_error(config: TrainerConfig, store_url: str) -> HoldfastError | None:
    try:
        require_parent(store_url, create=config.create or config.restore_without_store)
    except HoldfastError as error:
        return error
    return None
