"""The argument `URL[@STEP]` of the tools."""

from __future__ import annotations

import re
import threading
from concurrent import futures
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from holdfast.checkpoints.catalog import Catalog, CatalogListing
from holdfast.errors import ConfigError, StoreError, StoreMissing
from holdfast.image.manifest import Manifest, State
from holdfast.store.base import Store

_ANSWER_SECONDS_MAX = 10.0
# A step is accepted only at the very end: user names (`s3://me@host`) and directories may contain an @.
_STEP = re.compile(r"(?P<url>.+)@(?P<step>\d{1,18}|latest)", re.DOTALL)


class Target(NamedTuple):
    """A run, and one of its steps; None: the step of the newest good checkpoint."""

    url: str
    step: int | None

    def catalog(self) -> Catalog:
        from holdfast.store import open_store  # imports boto3 or fsspec: not for --help

        store = open_store(self.url)
        _check_reachable(store)
        return Catalog(store)

    def read_listing(self) -> CatalogListing:
        """List the run. Raises `StoreMissing`: its URL has no content."""
        listing = self.catalog().read_listing()
        if listing.is_empty:
            raise StoreMissing(f"{listing.url}: there is nothing at this URL; check the URL")
        return listing

    def find(self) -> tuple[Catalog, Manifest]:
        """Return the catalog, and the manifest of the step. Raises `StoreMissing`, which names the nearest steps."""
        catalog = self.catalog()
        return catalog, catalog.get(self.step)

    def find_good(self, use: str) -> tuple[Catalog, Manifest]:
        """As `find`. Raises `ConfigError`: the checkpoint is bad; `use` completes the message "and is not …"."""
        catalog, manifest = self.find()
        if manifest.state is State.BAD:
            raise ConfigError(
                f"{manifest.file}: this checkpoint is bad ({manifest.note}) and is not {use}; `holdfast ls` shows "
                "other steps"
            )
        return catalog, manifest


def _check_reachable(store: Store) -> None:
    """Report a wrong endpoint or a hanging store within seconds: later calls retry for minutes. Raises `StoreError`."""
    answer: futures.Future[None] = futures.Future()

    def check() -> None:
        try:
            store.check(write=False)
        except Exception as error:  # noqa: BLE001 - raised by `result`
            answer.set_exception(error)
        else:
            answer.set_result(None)

    # A daemon thread, not an executor: the process must not wait at its end for a call that hangs.
    threading.Thread(target=check, name="holdfast-check", daemon=True).start()
    if not futures.wait([answer], _ANSWER_SECONDS_MAX).done:
        raise StoreError(
            f"{store.url}: no answer within {_ANSWER_SECONDS_MAX:g} s; see the network, the mount, and "
            "for S3 AWS_ENDPOINT_URL"
        )
    answer.result()


def parse_target(text: str) -> Target:
    """Split `URL@123` or `URL@latest`; any other text is a URL. A name that ends in `@` and digits needs `@latest`."""
    match = _STEP.fullmatch(text)
    if match is None:
        return Target(text, None)
    return Target(match["url"], None if match["step"] == "latest" else int(match["step"]))


class _TargetType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    def __init__(self, *, with_step: bool) -> None:
        self._with_step = with_step
        self.name = "URL[@STEP]" if with_step else "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:  # noqa: ARG002
        if isinstance(value, Target):
            return value
        target = parse_target(str(value))
        if not target.url.strip():
            raise ConfigError(
                "expected the URL of a run, such as s3://bucket/run or /mnt/run, got an empty text"
            )
        if not self._with_step and target.step is not None:
            raise ConfigError(
                f"expected the URL of a run, got {value}, which is one step; leave @{target.step} out"
            )
        return target

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        # Complete directories: most runs are one, and listing a remote store would take too long.
        return [CompletionItem(incomplete, type="dir")]


TARGET = _TargetType(with_step=True)
URL = _TargetType(with_step=False)
