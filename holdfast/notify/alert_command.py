"""Runs a command of the user for each message."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from holdfast.notify.alert import Alert
from holdfast.notify.webhook import Undelivered, alert_document

TIMEOUT_SECONDS = 30.0


class AlertCommand:
    """A command for `/bin/sh`; gets the message as JSON on stdin, and HOLDFAST_EVENT and HOLDFAST_TEXT. Any thread.
    `timeout_seconds`: kill the process group after this time. `name`: for people, without the command, which may
    contain a secret.
    """

    def __init__(self, command: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._command, self._timeout_seconds = command, timeout_seconds
        self.name = "--notify-command"

    def send(self, alert: Alert, context: Mapping[str, Any]) -> Undelivered | None:
        """Run the command to its end. No retry after a failure: the command may have done half of its work."""
        payload = json.dumps(alert_document(alert, context)).encode()
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "HOLDFAST_EVENT": alert.kind,
                    "HOLDFAST_TEXT": f"{alert.title}: {alert.text}",
                },
                start_new_session=True,
            )
        except OSError as error:
            return Undelivered(error.strerror or type(error).__name__, may_retry=False)
        try:
            process.communicate(payload, timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Undelivered(f"killed after {self._timeout_seconds:g} s", may_retry=False)
        status = process.returncode
        return Undelivered(f"exit code {status}", may_retry=False) if status else None
