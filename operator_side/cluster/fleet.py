"""The trainers of a cluster as hosts of `holdfast run`, from EC2's list of running instances, without ssh."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pydantic import TypeAdapter

from holdfast.errors import BusyError, ConfigError
from operator_side.cluster.ec2 import Ec2
from operator_side.cluster.file import ClusterFile
from operator_side.cluster.ladder import FleetRequest
from operator_side.cluster.raising import Budget, Cluster
from operator_side.supervise.hosts import Fleet, Host

_log = logging.getLogger("holdfast.cluster")


class Ec2Fleet(Fleet):
    """The running trainers as hosts. `request`: the one given to `up`, to replace lost trainers in the same zone."""

    def __init__(
        self, name: str, cluster: Cluster, *, slots: int, request: FleetRequest | None, budget: Budget
    ) -> None:
        self.name, self._cluster = name, cluster
        self._slots, self._request, self._budget = slots, request, budget

    def list_hosts(self) -> tuple[Host, ...]:
        """Return the running trainers, the oldest first. A trainer that is shutting down counts as gone."""
        return tuple(Host(node.address, self._slots) for node in self._cluster.running())

    def request_hosts(self, wanted: int) -> None:
        """Request the missing trainers. Without capacity or budget, log a warning; a later call tries again."""
        if self._request is None or wanted <= 0:
            return
        try:
            started = self._cluster.replace_lost(self._request, self._budget)
        except (BusyError, ConfigError) as error:
            _log.warning("lost trainers are not replaced yet; holdfast will try again: %s", error)
            return
        if started:
            _log.warning("started %d trainers in place of lost ones: %s", len(started), ", ".join(started))


def load_fleet(path: Path) -> Ec2Fleet:
    """Make the fleet of `holdfast run --cluster FILE`. Raises `ConfigError`: the file is not an output of Terraform."""
    file = ClusterFile.load(path)
    cluster = Cluster(file, Ec2(file), file.state_path)
    request, budget, slots = None, Budget(), 1
    try:
        saved = json.loads(file.settings_path.read_text())
        slots, budget = int(saved.pop("slots")), Budget(**saved.pop("budget"))
        request = TypeAdapter(FleetRequest).validate_python(saved)
    except FileNotFoundError:
        _log.warning(
            "`holdfast cluster up` was not run here: one rank runs on each node, and lost nodes are not replaced"
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file.settings_path}: {error!r}; remove it and run `holdfast cluster up` again"
        ) from error
    return Ec2Fleet(f"EC2 in {file.region}", cluster, slots=slots, request=request, budget=budget)
