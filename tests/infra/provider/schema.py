"""The schema of the AWS provider, taken from its generated TypeScript bindings.

    bindings (PyPI, MPL-2.0) ─► source of each type, in its source map ─► comments, getters, synthesis ─► schema.json

The generator has copied the provider's schema beside each attribute (`// http_tokens - computed: true, optional: true,
required: false`); the types are in the getters and in the synthesis to HCL. The bindings lack enumerations, rules
across fields, defaults, and the minimum number of blocks beyond one, so these are not checked.
"""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["extract", "types_used"]

_SOURCE_MAP = re.compile(r"sourceMappingURL=data:application/json;base64,(\S+)")
_FLAGS = re.compile(
    r"// (\w+) - computed: (true|false), optional: (true|false), required: (true|false)\n"
    r"(.*?)(?=\n  // \w+ - computed|\Z)",
    re.DOTALL,
)
_SYNTHESIS = re.compile(
    r"^ *(\w+): \{\n *value: (.*?),\n *isBlock: (true|false),\n *type: \"(\w+)\",\n *storageClassType: \"(\w+)\",",
    re.MULTILINE | re.DOTALL,
)
_SCALARS = {"string": "string", "number": "number", "boolean": "bool", "any": "string"}
_GETTERS = {
    "getStringAttribute": "string",
    "getNumberAttribute": "number",
    "getBooleanAttribute": "bool",
    "getStringMapAttribute": ["map", "string"],
    "getNumberMapAttribute": ["map", "number"],
    "getBooleanMapAttribute": ["map", "bool"],
    "getNumberListAttribute": ["list", "number"],
    "getListAttribute": ["list", "string"],
}
_USED = re.compile(r'^\s*(resource|data) "(aws_\w+)"', re.MULTILINE)


class _Synthesis(NamedTuple):
    value: str
    is_block: bool
    kind: str
    storage: str


def types_used(sources: Iterable[Path]) -> dict[str, set[str]]:
    """Resource and data source types in Terraform files: `{"resource": {"aws_vpc", …}, "data": {…}}`."""
    used: dict[str, set[str]] = {"resource": set(), "data": set()}
    for path in sources:
        for kind, name in _USED.findall(path.read_text(encoding="utf-8")):
            used[kind].add(name)
    return used


def extract(wheel: Path, used: dict[str, set[str]]) -> dict[str, Any]:
    """Schema of the provider's configuration and of the types in `used`.

    Raises:
        KeyError: The provider does not have this type.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
        bindings = archive.read(name)
    folders = {_folder("resource", name): ("resource", name) for name in used["resource"]}
    folders |= {_folder("data", name): ("data", name) for name in used["data"]}
    folders["provider"] = ("provider", "aws")
    schema: dict[str, Any] = {"provider": None, "resource": {}, "data": {}}
    with tarfile.open(fileobj=io.BytesIO(bindings)) as files:
        for member in files:
            kind, name = folders.get(
                member.name.removeprefix("package/lib/").removesuffix("/index.js"), ("", "")
            )
            if not kind or not member.name.endswith("/index.js"):
                continue
            content = files.extractfile(member)
            assert content is not None
            entity = _Bindings(_typescript(content.read().decode())).main()
            if kind == "provider":
                schema["provider"] = entity
            else:
                schema[kind][name] = entity
    missing = [
        f"{kind} {name}" for kind, name in folders.values() if kind != "provider" and name not in schema[kind]
    ]
    if missing:
        raise KeyError(f"the provider has no such types: {', '.join(sorted(missing))}")
    return schema


def _folder(kind: str, name: str) -> str:
    return ("data-aws-" if kind == "data" else "") + name.removeprefix("aws_").replace("_", "-")


def _typescript(javascript: str) -> str:
    match = _SOURCE_MAP.search(javascript)
    assert match is not None
    source: str = json.loads(base64.b64decode(match[1]))["sourcesContent"][0]
    return source


class _Bindings:
    """The source of one type: its main class, a class or a function and an interface for each nested block."""

    def __init__(self, source: str) -> None:
        self._source = source

    def main(self) -> dict[str, Any]:
        match = re.search(
            r"export class (\w+) extends cdktf\.Terraform(Resource|DataSource|Provider)", self._source
        )
        assert match is not None
        body = self._from(match.start())
        synthesis = body[body.index("synthesizeHclAttributes()") :]
        return self._entity(body, synthesis)

    def _from(self, start: int) -> str:
        return self._source[start : self._source.index("\n}\n", start)]

    def _entity(self, body: str, synthesis: str) -> dict[str, Any]:
        synthesised = {
            name: _Synthesis(value, block == "true", kind, storage)
            for name, value, block, kind, storage in _SYNTHESIS.findall(synthesis)
        }
        attributes: dict[str, Any] = {}
        blocks: dict[str, Any] = {}
        for name, computed, optional, required, rest in _FLAGS.findall(body):
            flags = {
                "computed": computed == "true",
                "optional": optional == "true",
                "required": required == "true",
            }
            known = synthesised.get(name)
            # A nested value that the provider may fill in is an attribute for Terraform, though written as a block.
            if known is not None and known.is_block and not flags["computed"]:
                blocks[name] = self._block(known, required=flags["required"])
            else:
                attributes[name] = {"type": self._type(known, rest), **flags}
        return {"attributes": attributes, "blocks": blocks}

    def _block(self, known: _Synthesis, *, required: bool) -> dict[str, Any]:
        nested = self._nested(re.sub("(OutputReference|List|Map)$", "", known.storage))
        if known.kind == "struct":
            return {"nesting": "single", "block": nested, "least": 0, "most": 0}
        many = "listMapperHcl" in known.value
        nesting = "set" if known.kind == "set" else "list"
        return {"nesting": nesting, "block": nested, "least": int(required), "most": 0 if many else 1}

    def _nested(self, name: str) -> dict[str, Any]:
        function = re.search(rf"export function {name[0].lower()}{name[1:]}ToHclTerraform\(", self._source)
        synthesis = self._from(function.start()) if function else ""
        reference = re.search(rf"export class {name}OutputReference extends", self._source)
        if reference:
            return self._entity(self._from(reference.start()), synthesis)
        # The provider's own blocks have no class; the interface shows which fields are required.
        interface = re.search(rf"export interface {name} \{{", self._source)
        assert interface is not None, name
        text = self._from(interface.start())
        flags = [
            f"// {_snake(member)} - computed: false, optional: {_js(bool(mark))}, required: {_js(not mark)}\n"
            for member, mark in re.findall(r"readonly (\w+)(\??):", text)
        ]
        return self._entity("\n  ".join(flags), synthesis)

    def _type(self, known: _Synthesis | None, rest: str) -> Any:
        if known is not None and not known.is_block:
            return _plain(known)
        nested = re.search(
            r"= new (\w+?)(List|Map|OutputReference)\(this, \"\w+\"(?:, (true|false))?\)", rest
        )
        if nested is not None:
            item = self._object(self._nested(nested[1]))
            shape = {"List": "set" if nested[3] == "true" else "list", "Map": "map"}.get(nested[2])
            return [shape, item] if shape else item
        getter = re.search(r"this\.(get\w+Attribute)\(", rest)
        if getter is None or getter[1] not in _GETTERS:
            return "dynamic"
        found = _GETTERS[getter[1]]
        return ["set", found[1]] if "Fn.tolist" in rest and isinstance(found, list) else found

    def _object(self, entity: dict[str, Any]) -> list[Any]:
        members = {name: attribute["type"] for name, attribute in entity["attributes"].items()}
        for name, block in entity["blocks"].items():
            item = self._object(block["block"])
            members[name] = item if block["nesting"] == "single" else [block["nesting"], item]
        return ["object", members]


def _plain(known: _Synthesis) -> Any:
    scalar = _SCALARS.get(re.sub("(List|Map)+$", "", known.storage))
    if scalar is None:
        return "dynamic"
    if known.kind == "simple":
        return scalar
    return [known.kind, ["list", scalar] if known.storage.endswith("ListList") else scalar]


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", name)


def _js(value: bool) -> str:
    return "true" if value else "false"
