"""A role's settings on the command line: options, help and defaults all come from its class in holdfast/config.py."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def setting_options(config: type[BaseSettings], **kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add an option for each named setting. `kinds`: click's types; `bool` gives the pair `--name/--no-name`."""

    def with_options(command: Callable[..., Any]) -> Any:
        descriptions = setting_descriptions(config)
        for name, kind in reversed(kinds.items()):
            option = f"--{name.replace('_', '-')}"
            if kind is bool:
                option, kind = f"{option}/--no-{name.replace('_', '-')}", None
            text = descriptions[name].replace("`", "")
            default = format_default(config, name)
            # Not click's default: an option that is not given may still be set in the environment or holdfast.toml.
            help_text = f"{text}  [default: {default}]" if default else text
            command = click.option(option, default=None, type=kind, help=help_text)(command)
        return command

    return with_options


def setting_descriptions(config: type[BaseSettings]) -> Mapping[str, str]:
    """Collect the descriptions of a role's settings from the docstrings of its class and base classes."""
    found: dict[str, str] = {}
    for kind in config.__mro__:
        section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?= {4}\w+:)", "\n" + section):
            name, _, text = entry.strip().partition(":")
            if name in config.model_fields:
                found.setdefault(name, " ".join(text.split()))
    return found


def format_default(config: type[BaseSettings], name: str) -> str:
    """Format the default as a user would write it; empty without a default."""
    value: Any = config.model_fields[name].get_default(call_default_factory=True)
    if value in (None, PydanticUndefined) or isinstance(
        value, tuple
    ):  # that of `watch` depends on the launcher
        return ""
    if isinstance(value, Path):
        return re.sub(f"-{os.getuid()}$", "-UID", str(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if name.endswith("_bytes"):
        for unit, nbytes in _UNITS:
            if value and value % nbytes == 0:
                return f"{value // nbytes}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)
