"""A provider for Terraform that has the AWS provider's schema and makes nothing.

Runs in the environment of toolbox.py, which has gRPC: as Terraform's plugin, started and stopped by Terraform, or with
the path of a socket to which many runs of Terraform attach. `validate` and mocked tests need only the schema. Other
calls (plan, apply, read) return UNIMPLEMENTED: nothing can look as if it was made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import tfplugin5_pb2 as wire

# Terraform's handshake with every plugin: the cookie is no secret, but shows a plugin that it was not started by hand.
_COOKIE = "d602bf8f470bc67ca7faa0386276bbdd4330efaf76d1a219cb4d6991ca9872b2"
_NESTING = {"single": 1, "list": 2, "set": 3, "map": 4}


def _block(entity: dict[str, Any]) -> Any:
    block = wire.Schema.Block()
    for name, attribute in entity["attributes"].items():
        block.attributes.add(
            name=name,
            type=json.dumps(attribute["type"]).encode(),
            required=attribute["required"],
            optional=attribute["optional"],
            computed=attribute["computed"],
        )
    for name, nested in entity["blocks"].items():
        block.block_types.add(
            type_name=name,
            block=_block(nested["block"]),
            nesting=_NESTING[nested["nesting"]],
            min_items=nested["least"],
            max_items=nested["most"],
        )
    return block


def _schema(document: dict[str, Any]) -> Any:
    answer = wire.ProviderSchema(provider=wire.Schema(block=_block(document["provider"])))
    for name, entity in document["resource"].items():
        answer.resource_schemas[name].CopyFrom(wire.Schema(block=_block(entity)))
    for name, entity in document["data"].items():
        answer.data_source_schemas[name].CopyFrom(wire.Schema(block=_block(entity)))
    return answer


def main(schema: Path, socket: Path) -> None:
    """Serve until Terraform stops the plugin, or a signal ends this process."""
    answer = _schema(json.loads(schema.read_text(encoding="utf-8")))
    stopped = threading.Event()

    def stop(_request: Any, _context: Any) -> Any:
        stopped.set()
        return wire.Empty()

    def handler(message: Any, answering: Callable[[Any, Any], Any]) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            answering,
            request_deserializer=message.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )

    provider = {
        "GetSchema": handler(wire.Empty, lambda _request, _context: answer),
        "PrepareProviderConfig": handler(
            wire.Configuration, lambda request, _context: wire.Prepared(prepared_config=request.config)
        ),
        "ValidateResourceTypeConfig": handler(wire.Empty, lambda _request, _context: wire.Empty()),
        "ValidateDataSourceConfig": handler(wire.Empty, lambda _request, _context: wire.Empty()),
        "Configure": handler(wire.Empty, lambda _request, _context: wire.Empty()),
        "Stop": handler(wire.Empty, stop),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("tfplugin5.Provider", provider),
            grpc.method_handlers_generic_handler(
                "plugin.GRPCController", {"Shutdown": handler(wire.Empty, stop)}
            ),
        )
    )
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    sys.stdout.write(f"1|5|unix|{socket}|grpc|\n")
    sys.stdout.flush()
    stopped.wait()
    server.stop(0.2).wait()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    elif os.environ.get("TF_PLUGIN_MAGIC_COOKIE") != _COOKIE:
        sys.exit("this is a plugin of Terraform, which starts it by itself")
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(sys.argv[1]), Path(folder) / "provider")
