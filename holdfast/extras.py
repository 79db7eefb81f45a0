"""The packages of holdfast's extras, for messages that say what to install.

They name those packages and not this one: the package index has none of this name that is ours, so `pip install` of it
by its bare name could bring a stranger's.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires


def install_line(*extras: str) -> str:
    """The pip command for the requirements of these extras, as this installation states them."""
    try:
        stated = requires("holdfast") or []
    except PackageNotFoundError:  # run from its source, by the path
        return f"in its checkout: pip install '.[{','.join(extras)}]'"
    found = [
        one.partition(";")[0].strip()
        for extra in extras
        for one in stated
        if one.endswith((f"extra == '{extra}'", f'extra == "{extra}"'))
    ]
    return " ".join(["pip install", *(f"'{one}'" for one in dict.fromkeys(found))])
