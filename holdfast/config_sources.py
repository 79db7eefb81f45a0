"""Sources of settings: arguments, environment and holdfast.toml; and the messages about wrong settings."""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from holdfast.errors import ConfigError

_ENVIRONMENT_PREFIX = "HOLDFAST_"
_SECRETS = frozenset({"key"})  # settings whose values no message shows
_CONFIG_VARIABLE = "HOLDFAST_CONFIG"
_DEFAULT_FILE = Path("holdfast.toml")
_ROLES: dict[
    str, type[RoleConfig]
] = {}  # filled by holdfast/config.py; each role accepts keys of other roles

_log = logging.getLogger("holdfast.config")


class RoleConfig(BaseSettings):
    """Base of a role's settings: their sources, the order of sources, and errors that say where a value came from.

    Attributes:
        events: File to which events are appended, one JSON object per line. At 32 MiB the file is renamed and a new
            one is started. Without a file, events go only to the log.
    """

    role: ClassVar[str] = ""
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=_ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        validate_default=True,
        defer_build=True,  # a process has one role, so build only that role's validators, on first use
    )

    events: Path | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.role:
            _ROLES[cls.role] = cls

    @classmethod
    def from_sources(cls, **arguments: Any) -> Self:
        """Build the settings, ignoring arguments of None. Raises `ConfigError`: names each wrong one and its source."""
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - .env and secret files are not read
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, holdfast.toml. The signature is pydantic-settings'."""
        _warn_of_misspelt_environment()
        return init_settings, env_settings, _TomlSource(settings_cls)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            lines = [_describe_error(cls, detail) for detail in error.errors(include_url=False)]
            # `from None`: pydantic's text would repeat the message.
            raise ConfigError("\n".join(lines)) from None


# -- the file ----------------------------------------------------------------------------------------------


class _TomlSource(PydanticBaseSettingsSource):
    """holdfast.toml, the last source. Every role refuses keys that no role has, so that a typo shows at once."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return None, field_name, False  # __call__ returns all fields

    def __call__(self) -> dict[str, Any]:
        assert issubclass(self.settings_cls, RoleConfig)
        return _settings_in_file(self.settings_cls)


def _config_path() -> Path | None:
    named = os.environ.get(_CONFIG_VARIABLE)
    if named:
        return Path(named)
    return _DEFAULT_FILE if _DEFAULT_FILE.is_file() else None


def _settings_in_file(cls: type[RoleConfig]) -> dict[str, Any]:
    """The settings in the file for this role; empty if there is no file."""
    path = _config_path()
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); make it readable, or let {_CONFIG_VARIABLE} name another file"
        ) from error
    except (ValueError, RecursionError) as error:
        # not TOML, not UTF-8, a number that is too long, nesting that is too deep
        raise ConfigError(
            f"{path}: expected TOML: {error}; correct it, or let {_CONFIG_VARIABLE} name another file"
        ) from error
    shared = {key: value for key, value in document.items() if key not in _ROLES}
    _reject_unknown(shared, _all_settings() | _ROLES.keys(), where=f"{path}")
    for role, config in _ROLES.items():
        table = document.get(role, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {role}: expected the table [{role}], got {table!r}")
        _reject_unknown(table, config.model_fields, where=f"{path}, table [{role}]")
    mine = {key: value for key, value in shared.items() if key in cls.model_fields}
    return {**mine, **document.get(cls.role, {})}


def _all_settings() -> set[str]:
    return {name for config in _ROLES.values() for name in config.model_fields}


def _reject_unknown(keys: Iterable[str], valid: Iterable[str], *, where: str) -> None:
    valid = sorted(valid)
    for key in keys:
        if key not in valid:
            raise ConfigError(f"{where}: {key}: no such setting; {_suggestion(key, valid)}")


def _suggestion(name: str, valid: Iterable[str]) -> str:
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"the settings are {', '.join(names)}"


# -- messages ----------------------------------------------------------------------------------------------


def _warn_of_misspelt_environment() -> None:
    """Warn only of variables that resemble a setting: other tools may use the same prefix."""
    names = {_ENVIRONMENT_PREFIX + name.upper() for name in _all_settings()} | {_CONFIG_VARIABLE}
    for variable in sorted(os.environ):
        if variable.startswith(_ENVIRONMENT_PREFIX) and variable not in names:
            close = difflib.get_close_matches(variable, sorted(names), n=1, cutoff=0.85)
            if close:
                _log.warning("environment variable %s is not used; did you mean %s?", variable, close[0])


def _describe_error(cls: type[RoleConfig], detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{cls.role} setting {name}: no such setting; {_suggestion(name, cls.model_fields)}"
    if detail["type"] == "missing":
        return (
            f"{cls.role} setting {name}: expected a value, got none; give --{name.replace('_', '-')}, "
            f"set {_ENVIRONMENT_PREFIX}{name.upper()}, or write it into {_DEFAULT_FILE}"
        )
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    got = detail["input"]
    shown = "a value that is not shown" if name in _SECRETS else repr(got)
    return f"{cls.role} setting {name}: expected {expected}, got {shown} ({_origin(cls, name, got)})"


def _origin(cls: type[RoleConfig], name: str, value: Any) -> str:
    variable = _ENVIRONMENT_PREFIX + name.upper()
    if os.environ.get(variable) == str(value):
        return f"from {variable}"
    in_file = _settings_in_file(cls)
    if name in in_file and in_file[name] == value:
        return f"from {_config_path()}"
    field = cls.model_fields.get(name)
    return "the default" if field is not None and field.default == value else "as argument"
