"""Terraform's rendering of an example: every resource with its values, from the state of a mocked test run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.infra.toolbox import Terraform

__all__ = ["Rendered", "Resource", "render"]


class Resource(NamedTuple):
    """One resource: its address (`module.network.aws_vpc.this`), type, and values."""

    address: str
    type: str
    values: dict[str, Any]


class Rendered:
    """All resources and outputs of one run."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.resources = [item for item in _walk(state["root_module"]) if item.type.startswith("aws_")]
        self.outputs = {name: output["value"] for name, output in state["outputs"].items()}

    def of(self, kind: str) -> list[Resource]:
        """All resources of one type; at least one."""
        found = [item for item in self.resources if item.type == kind]
        assert found, f"no {kind}"
        return found

    def one(self, address: str) -> dict[str, Any]:
        """Values of the resource at an address."""
        (found,) = [item for item in self.resources if item.address == address]
        return found.values

    def policy(self, address: str) -> dict[str, Any]:
        """The IAM policy of the resource at an address."""
        document: dict[str, Any] = json.loads(self.one(address)["policy"])
        return document

    def policies(self) -> dict[str, dict[str, Any]]:
        """All IAM role policies by address."""
        return {item.address: json.loads(item.values["policy"]) for item in self.of("aws_iam_role_policy")}


def render(terraform: Terraform, within: str) -> dict[str, Rendered]:
    """Run a module's tests, all of which must pass; return the runs by name."""
    messages = terraform.test(within, "-verbose")
    failed = [
        item
        for item in messages
        if item["type"] == "diagnostic" and item["diagnostic"]["severity"] == "error"
    ]
    assert not failed, failed
    return {
        item["@testrun"]: Rendered(item["test_state"]) for item in messages if item["type"] == "test_state"
    }


def _walk(module: dict[str, Any]) -> Iterator[Resource]:
    for item in module.get("resources", []):
        if item["mode"] == "managed":
            yield Resource(item["address"], item["type"], item["values"])
    for child in module.get("child_modules", []):
        yield from _walk(child)
