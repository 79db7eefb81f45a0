"""`holdfast status --web`: serves the live page, and prints its URL."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import click

from holdfast.command.output import escape_controls
from holdfast.telemetry.event_files import log_directory
from operator_side.live.live_page import live_page
from operator_side.live.page_server import ADDRESS, PageServer, Response
from operator_side.live.run_log import RunLog
from operator_side.status.run_status import RunStatus
from operator_side.status.run_watch import RunWatches

_SSH_SERVER = 2  # of SSH_CONNECTION: client, its port, server, its port


def serve_web(site: StatusWeb, port: int) -> None:
    """Serve the page until Ctrl-C."""
    server = PageServer(port, site.respond)
    # The name by which other machines reach this one: the address that ssh connected to, or the host name.
    parts = os.environ.get("SSH_CONNECTION", "").split()
    host = escape_controls(parts[_SSH_SERVER]) if len(parts) > _SSH_SERVER else socket.gethostname()
    click.echo(server.url)
    click.echo(
        f"from another machine: ssh -N -L {server.port}:{ADDRESS}:{server.port} {host}, and open the same URL there"
    )
    click.echo("Ctrl-C ends it")
    try:
        server.serve()
    except KeyboardInterrupt:
        click.echo()
    finally:
        server.close()


@dataclass
class StatusWeb:
    """The pages: one per run, its main part alone, and the JSON document of all runs."""

    watches: RunWatches
    every_seconds: float
    events: Sequence[Path]
    dollars_per_hour: float | None
    _logs: dict[str, RunLog] = field(default_factory=dict, init=False)

    def respond(self, name: str, run: str) -> Response | None:
        if name not in {"", "main", "status.json"}:
            return None
        found = self.watches.poll()
        if name == "status.json":
            text = json.dumps({"runs": [one.document() for one in found]}, indent=2)
            return Response(text.encode(errors="backslashreplace"), "application/json")
        chosen = next((one for one in found if one.run == run), None if run else found[0])
        if chosen is None:
            return None
        body = live_page(
            chosen,
            self._log(chosen).read(),
            every_seconds=self.every_seconds,
            others=[one.run for one in found] if len(found) > 1 else (),
            is_full_page=not name,
            link=f"?run={quote(run, safe='')}" if run else "",
        )
        return Response(body, "text/html")

    def _log(self, status: RunStatus) -> RunLog:
        key = self.watches.keys[status.run]
        if key not in self._logs:
            paths = self.events or (log_directory(key),)
            self._logs[key] = RunLog(status.run, paths, dollars_per_hour=self.dollars_per_hour)
        return self._logs[key]
