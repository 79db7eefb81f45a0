"""The settings of each role: read in one place, checked once, frozen.

    arguments  >  HOLDFAST_* environment  >  holdfast.toml  >  defaults

The file is `holdfast.toml` in the working directory, or the one that `HOLDFAST_CONFIG` names. A key at its
top level is for every role that has such a setting; a table `[trainer]`, `[stager]` or `[flusher]` is for
that role alone and wins:

    store = "s3://bucket/run"
    ring_bytes = "4GiB"
    [stager]
    keep_last = 5

Each name is a field below; its environment variable is the name in capitals with `HOLDFAST_` before it.
Sizes are bytes, or text with a unit. Whatever is wrong becomes one `ConfigError` that names field, expected,
got, and where it was set.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ValidationInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from holdfast.errors import ConfigError
from holdfast.image.layout import CHUNK_BYTES

__all__ = [
    "IN_FLIGHT_MAX",
    "RING_CHUNKS_MIN",
    "FlusherConfig",
    "StagerConfig",
    "TrainerConfig",
    "default_runtime_dir",
    "parse_size",
]

# Checkpoints under way at once: those in the staging areas of a rank, and one that begins while slower ranks end.
IN_FLIGHT_MAX = 9
RING_CHUNKS_MIN = 8  # below this the ring cannot overlap receiving, writing and freeing
_CHUNK_BYTES_MAX = 1 << 30  # one chunk is one MPI message, whose counts are 32 bits
_ENVIRONMENT_PREFIX = "HOLDFAST_"
_CONFIG_VARIABLE = "HOLDFAST_CONFIG"
_DEFAULT_FILE = Path("holdfast.toml")
_PAGE_BYTES = 4096
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|b|[kmgtp]i?b)", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}

_log = logging.getLogger("holdfast.config")


def parse_size(value: int | str) -> int:
    """Bytes from a number of bytes or a text such as `512MiB`, `1.5GiB` or `16 MB`.

    Raises:
        ValueError: It is not a size, or not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size in bytes, or with a unit such as "512MiB", "1GiB" or "16 MB"')
    number = Fraction(match[1]) * _UNIT_BYTES[match[2].lower()]
    if number.denominator != 1:
        raise ValueError("a whole number of bytes")
    return int(number)


def default_runtime_dir() -> Path:
    """Where rings live unless told otherwise: shared memory, one directory per user."""
    return Path(f"/dev/shm/holdfast-{os.getuid()}")  # noqa: S108 - made with mode 0700 and its owner checked (ring.py)


_Size = Annotated[int, BeforeValidator(parse_size)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_ChunkBytes = Annotated[_Size, Field(gt=0, le=_CHUNK_BYTES_MAX, multiple_of=_PAGE_BYTES)]
_StoreUrl = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=0)]
_OnDivergence = Literal["warn", "refuse", "off"]
_Watch = Literal["aws", "gcp", "azure", "auto", "sigterm", "sigusr1"]
_TierSpec = Annotated[str, Field(min_length=1, max_length=4096)]


def _listed(value: Any) -> Any:
    """A list, from text with commas as it is in the environment."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _steps_or_auto(value: Any) -> Any:
    """An interval; one message for both kinds."""
    text = str(value).strip()
    if text != "auto" and not text.isdecimal():
        raise ValueError('0 or more steps, or "auto"')
    return text if text == "auto" else int(text)


_Every = Annotated[int | Literal["auto"], BeforeValidator(_steps_or_auto)]


class _RoleConfig(BaseSettings):
    """What the three have in common: the sources, their order, and errors that say where a value came
    from.
    """

    role: ClassVar[str] = ""
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=_ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        validate_default=True,
    )

    events: Path | None = None
    """File to which events are appended, one JSON line each; None: only `logging`."""

    @classmethod
    def from_sources(cls, **arguments: Any) -> Self:
        """Build from arguments, environment and file. An argument that is None was not given (command line).

        Raises:
            ConfigError: naming each wrong field, what was expected and got, and where it was set.
        """
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - neither .env nor secret files are read
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The precedence, as pydantic-settings wants it."""
        _warn_of_misspelt_environment()
        return init_settings, env_settings, _TomlSource(settings_cls)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            lines = [_explanation(cls, detail) for detail in error.errors(include_url=False)]
            # No `from`: pydantic's text would only repeat it, in its own words.
            raise ConfigError("\n".join(lines)) from None


class TrainerConfig(_RoleConfig):
    """Settings of a training rank (`trainer_side`).

    Attributes:
        start_seconds_max: How long to wait for the stager at start-up.
        stager_seconds_max: How long a silent stager is waited for before it counts as lost.
        restore_seconds_max: How long reading one checkpoint may take, and again its exchange among ranks. A tier of
            which a request takes a tenth of it hangs: the next source is asked.
        close_seconds_max: How long `close()` waits for what is under way to become durable.
        in_flight_max: How many checkpoints a rank may be sending at once, beside one that is sent and not yet staged.
            Each takes a staging area of the size of this rank's slice, from when it is first needed.
        host_bytes_max: Most host memory for the staging areas of one rank: so many as fit are used, at most
            `in_flight_max`. None: no limit but that.
        device_bytes_max: Most memory of a CUDA device for a copy of what is behind the gate, from which it then goes
            to host memory while updates go on; 0: none. None: what is free at the first save, but for a tenth of all.
        on_full: What `save()` does while no staging area is free: `skip` declines the step and never waits; `wait`
            waits until the oldest step in flight is staged.
        full_seconds_max: With `on_full="wait"`, how long; then the step is declined. Give all ranks the same.
        copy_seconds_max: How long `optimizer.step()` waits for this rank's own copy; then the step is given up.
        on_divergence: `off`: no fingerprints of the replicas are made (`warn`, `refuse`: the stager's business).
        tiers: Where this rank's slices are kept beside the stager or without one, nearest first: `memory`,
            `nvme:/mnt/nvme0`, `store`; in the environment separated by commas. The same on every rank. Empty: nowhere.
        tier_slots: Slots of each tier, at least 2: one complete step, and those on their way. None: one more than
            `in_flight_max`.
        tier_writers: Threads that write to a tier. None: what the tier says.
        tier_seconds_max: How long the slowest rank's slice is waited for after the first one's seal; then the step is
            incomplete in that tier.
        store: URL of the run, where there is no stager to name it.
        chunk_bytes: Size of a chunk, where there is no stager to say it; a multiple of 4096.
        watch: Who is asked whether this machine will be taken away: `aws`, `gcp`, `azure`, or `auto` (the one whose
            metadata server answers, asked once); `sigterm`, `sigusr1`: signals to this process. Empty: nobody.
        watch_seconds: How often the metadata server is asked, by the first rank of each machine.
        watch_grace_seconds: How long after a watched signal the process is expected to be killed.
        every: After how many steps `Checkpointer.step()` saves where the script does not say it; 0 leaves it to
            `save()`; `auto`: it decides by what checkpoints cost (docs/interval.md). The same on every rank.
        overhead_max: With `auto`: how much longer training may take for its checkpoints; 0.03 is 3 %.
        every_seconds_max: With `auto`: the longest time between two checkpoints, whatever they cost.
        mtbf_hours: With `auto`: how long training goes on between two interruptions, on average; the interval is then
            the one that loses least of those that keep `overhead_max`. None: not known.
        dollars_per_hour: With `auto`: what all machines cost, to say what a loss costs. None: not said.
        restore_without_store: Where the store does not answer, restore the newest step that local tiers have, although
            the store may hold a newer one.
    """

    role: ClassVar[str] = "trainer"

    start_seconds_max: _Seconds = 300.0
    stager_seconds_max: _Seconds = 30.0
    restore_seconds_max: _Seconds = 600.0
    close_seconds_max: _Seconds = 600.0
    in_flight_max: Annotated[int, Field(ge=1, le=IN_FLIGHT_MAX - 1)] = 1
    host_bytes_max: Annotated[_Size, Field(gt=0)] | None = None
    device_bytes_max: _Size | None = None
    on_full: Literal["skip", "wait"] = "skip"
    full_seconds_max: _Seconds = 300.0
    copy_seconds_max: _Seconds = 300.0
    on_divergence: _OnDivergence = "warn"
    tiers: Annotated[tuple[_TierSpec, ...], BeforeValidator(_listed), NoDecode] = ()
    tier_slots: Annotated[int, Field(ge=2, le=64)] | None = None
    tier_writers: Annotated[int, Field(ge=1, le=64)] | None = None
    tier_seconds_max: _Seconds = 300.0
    store: _StoreUrl | None = None
    chunk_bytes: _ChunkBytes = CHUNK_BYTES
    watch: Annotated[tuple[_Watch, ...], BeforeValidator(_listed), NoDecode] = ()
    watch_seconds: _Seconds = 5.0
    watch_grace_seconds: _Seconds = 30.0
    every: _Every = 0
    overhead_max: Annotated[float, Field(gt=0, le=1)] = 0.03
    every_seconds_max: _Seconds = 3600.0
    mtbf_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dollars_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    restore_without_store: bool = False

    @field_validator("tiers", mode="after")
    @classmethod
    def _no_tier_twice(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each tier once")
        return value


class _RingConfig(_RoleConfig):
    """What stager and flusher share: the stager hands these on to the flusher that it starts.

    Attributes:
        store: URL of the run.
        chunk_bytes: Size of a chunk; a multiple of 4096.
        ring_bytes: Memory for the ring; at least 8 chunks. A larger checkpoint streams through it.
        keep_last: How many of the newest good checkpoints to keep; 0 keeps all.
        keep_every: Keep each step that this divides as well; 0 is off.
        verify: Read every checkpoint back after it was published, and mark it verified or bad.
        reuse: Whether a new checkpoint may be written over one that is no longer kept and that nobody has open (on ext4
            and XFS). To be off where other machines read the store's files over NFS from this one.
        linger: Whether the flusher stays after the training has ended.
        writers: How many threads write parts; by default as many as suit the store (`holdfast.store.parts_at_once`).
        runtime_dir: Where the ring, its journal and the socket live; wants to be in memory (tmpfs).
        niceness: CPU priority given up, 0 to 19. 10 has stager and flusher yield to training ranks on the same
            machine; it wants ranks that leave some of the cores' time (docs/design/028-priority.md).
        metrics_port: Port at which the stager serves `/metrics` to Prometheus; the flusher takes the next one. None:
            neither does.
        metrics_address: Address for both; those of other machines reach it only if it is not this machine's alone.
    """

    store: _StoreUrl
    chunk_bytes: _ChunkBytes = CHUNK_BYTES
    ring_bytes: _Size = 1 << 30
    keep_last: _Count = 3
    keep_every: _Count = 0
    verify: bool = True
    reuse: bool = True
    linger: bool = False
    writers: Annotated[int, Field(ge=1, le=64)] | None = None
    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    niceness: Annotated[int, Field(ge=0, le=19)] = 0
    metrics_port: Annotated[int, Field(ge=1, lt=65535)] | None = None
    metrics_address: Annotated[str, Field(min_length=1)] = "127.0.0.1"

    @field_validator("ring_bytes", mode="after")
    @classmethod
    def _ring_holds_enough_chunks(cls, value: int, info: ValidationInfo) -> int:
        chunk_bytes = info.data.get("chunk_bytes")
        if chunk_bytes is not None and value < RING_CHUNKS_MIN * chunk_bytes:
            least = RING_CHUNKS_MIN * chunk_bytes
            raise ValueError(
                f"at least {RING_CHUNKS_MIN} chunks of {chunk_bytes} bytes, which is {least} bytes"
            )
        return value

    @property
    def ring_chunks(self) -> int:
        """How many whole chunks the ring holds."""
        return self.ring_bytes // self.chunk_bytes


class StagerConfig(_RingConfig):
    """Settings of the stager.

    Attributes:
        offer_seconds_max: How long the slowest rank's offer of a step is waited for; then the step is
            aborted.
        chunk_seconds_max: How long a granted chunk may take to arrive.
        rank_seconds_max: How long a rank that gives no sign of life is waited for; then the step that needs it
            is aborted, and later ones are declined until it is heard again.
        start_seconds_max: How long to wait for all trainers, and for the flusher, at start-up.
        rebalance_factor: After a notice that a rank's machine may be taken, checkpoints are so many times as
            frequent; 1: as before.
        rebalance_seconds: For how long.
        on_divergence: What to do when replicas that should be the same are not: `warn` says it and stages, `refuse`
            fails the step, `off` does not look.
    """

    role: ClassVar[str] = "stager"

    offer_seconds_max: _Seconds = 60.0
    chunk_seconds_max: _Seconds = 120.0
    rank_seconds_max: _Seconds = 30.0
    start_seconds_max: _Seconds = 300.0
    rebalance_factor: Annotated[int, Field(ge=1, le=1000)] = 4
    rebalance_seconds: _Seconds = 1800.0
    on_divergence: _OnDivergence = "warn"


class FlusherConfig(_RingConfig):
    """Settings of the flusher.

    Attributes:
        grace_seconds: How long a flusher that has made all durable waits for a stager to attach again; then
            it ends.
        held_seconds_max: How long a flusher without a stager goes on trying a store that takes nothing; then it ends
            with the store's error, and leaves the ring for the next one.
        heartbeat_seconds: How often the claim on the run is renewed; other hosts take it for dead after two.
    """

    role: ClassVar[str] = "flusher"

    grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    held_seconds_max: _Seconds = 3600.0
    heartbeat_seconds: _Seconds = 5.0


_ROLES: dict[str, type[_RoleConfig]] = {c.role: c for c in (TrainerConfig, StagerConfig, FlusherConfig)}


# -- the file ----------------------------------------------------------------------------------------------


class _TomlSource(PydanticBaseSettingsSource):
    """holdfast.toml, the last source. Keys that no role has are refused whoever reads it: a slip shows at
    once.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return None, field_name, False  # all at once, in __call__

    def __call__(self) -> dict[str, Any]:
        assert issubclass(self.settings_cls, _RoleConfig)
        return _settings_in_file(self.settings_cls)


def _config_path() -> Path | None:
    named = os.environ.get(_CONFIG_VARIABLE)
    if named:
        return Path(named)
    return _DEFAULT_FILE if _DEFAULT_FILE.is_file() else None


def _settings_in_file(cls: type[_RoleConfig]) -> dict[str, Any]:
    """What the file says for this role; {} without a file."""
    path = _config_path()
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); {_CONFIG_VARIABLE} names it"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # no TOML, no UTF-8, a number without end, nesting without end
        raise ConfigError(
            f"{path}: not TOML: {error}; mend it, or let {_CONFIG_VARIABLE} name another file"
        ) from error
    shared = {key: value for key, value in document.items() if key not in _ROLES}
    _refuse_unknown(shared, _all_settings() | _ROLES.keys(), where=f"{path}")
    for role, config in _ROLES.items():
        table = document.get(role, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {role}: expected a table [{role}], got {table!r}")
        _refuse_unknown(table, config.model_fields, where=f"{path}, table [{role}]")
    mine = {key: value for key, value in shared.items() if key in cls.model_fields}
    return {**mine, **document.get(cls.role, {})}


def _all_settings() -> set[str]:
    return {name for config in _ROLES.values() for name in config.model_fields}


def _refuse_unknown(keys: Iterable[str], valid: Iterable[str], *, where: str) -> None:
    valid = sorted(valid)
    for key in keys:
        if key not in valid:
            raise ConfigError(f"{where}: {key}: no such setting; {_nearest(key, valid)}")


def _nearest(name: str, valid: Iterable[str]) -> str:
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


# -- messages ----------------------------------------------------------------------------------------------


def _warn_of_misspelt_environment() -> None:
    """Other tools may use the prefix too, so an unknown variable is no error; one that looks like ours is
    told.
    """
    names = {_ENVIRONMENT_PREFIX + name.upper() for name in _all_settings()} | {_CONFIG_VARIABLE}
    for variable in sorted(os.environ):
        if variable.startswith(_ENVIRONMENT_PREFIX) and variable not in names:
            close = difflib.get_close_matches(variable, sorted(names), n=1, cutoff=0.85)
            if close:
                _log.warning("environment variable %s is not used; did you mean %s?", variable, close[0])


def _explanation(cls: type[_RoleConfig], detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{cls.role} setting {name}: no such setting; {_nearest(name, cls.model_fields)}"
    if detail["type"] == "missing":
        return (
            f"{cls.role} setting {name}: expected a value, got none; give --{name.replace('_', '-')}, "
            f"set {_ENVIRONMENT_PREFIX}{name.upper()}, or write it into {_DEFAULT_FILE}"
        )
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    got = detail["input"]
    return f"{cls.role} setting {name}: expected {expected}, got {got!r} ({_origin(cls, name, got)})"


def _origin(cls: type[_RoleConfig], name: str, value: Any) -> str:
    """Where a wrong value was set: a person mends it there."""
    variable = _ENVIRONMENT_PREFIX + name.upper()
    if os.environ.get(variable) == str(value):
        return f"from {variable}"
    in_file = _settings_in_file(cls)
    if name in in_file and in_file[name] == value:
        return f"from {_config_path()}"
    field = cls.model_fields.get(name)
    return "the default" if field is not None and field.default == value else "as argument"
