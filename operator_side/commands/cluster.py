"""`holdfast cluster up|status|down`: start, show and end a run's machines on AWS."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import console, format_seconds, json_option, print_json, print_line, table
from holdfast.errors import BusyError, ConfigError
from operator_side.cluster.ec2 import Ec2, Node
from operator_side.cluster.file import ClusterFile
from operator_side.cluster.ladder import FleetRequest
from operator_side.cluster.raising import Budget, Cluster
from operator_side.commands import options as option

_FILE = option.file(
    "--from path", "File with the output of `terraform output -json`.", "terraform-output.json"
)
_BUDGET = option.number(
    "--budget-per-hour",
    "Largest price of the cluster in US dollars per hour; a cluster that costs more is refused.",
    above=0,
)
_HOSTFILE = option.file(
    "--hostfile", "File to write with the addresses of the trainers, as mpirun's --hostfile expects it."
)
_SLOTS = option.count("--slots", "Training ranks on each node.", 1)
_WAIT = option.number("--wait-seconds-max", "Seconds that machines may take to start or to end.", 600.0)


@click.group(
    short_help="Start, show and end a run's machines on AWS.",
    epilog=examples(
        "terraform output -json > terraform-output.json",
        "holdfast cluster up --nodes 8 --types c7i.4xlarge,c6i.4xlarge --hostfile hosts",
        "holdfast cluster down",
    ),
)
def cluster() -> None:
    """Start, show and end the machines of one run on AWS.

    Terraform creates the networks, roles and launch templates (infra/); this command starts and ends the machines.
    """


@cluster.command(
    short_help="Start the cluster: the stager, and all trainers or none.",
    epilog=option.exit_codes("10 no capacity was found; nothing was started")
    + examples(
        "holdfast cluster up --nodes 8 --types c7i.4xlarge,c6i.4xlarge --hostfile hosts",
        "holdfast cluster up --nodes 8 --nodes-min 4 --types g6.xlarge --on-demand-max 2 "
        "--on-demand-price 0.81 --budget-per-hour 20",
    ),
)
@_FILE
@option.count("--nodes", "Number of training nodes that are wanted.", required=True)
@option.count(
    "--nodes-min",
    "Smallest number of training nodes to accept where capacity is short. Default: the value of --nodes.",
)
@option.text(
    "--types",
    "Instance types of the training nodes, separated by commas, such as c7i.4xlarge,c6i.4xlarge.",
    required=True,
)
@option.text(
    "--more-types", "More instance types, separated by commas, for when there is no capacity for --types.", ""
)
@option.text(
    "--subnet subnets",
    "ID of a further subnet, in another zone, for when capacity is short; repeatable.",
    multiple=True,
)
@option.count(
    "--on-demand-max",
    "Largest number of training nodes that may be on-demand instances where spot capacity is short.",
    0,
    least=0,
)
@_SLOTS
@_BUDGET
@option.STAGER_PRICE
@option.ON_DEMAND_PRICE
@_HOSTFILE
@_WAIT
@json_option
def up(as_json: bool, path: Path, **options: Any) -> None:
    """Start the machines of the cluster that are not running yet. The command may be interrupted and run again.

    Where EC2 has no capacity, the command tries --more-types, then the further subnets, then fewer nodes down to
    --nodes-min, then on-demand nodes up to --on-demand-max.

    JSON: {"generation", "made", "hostfile", "mpirun", "run", "nodes": [{"id", "role", "state", "type", "address",
    "zone", "spot", "launched"}]}.
    """
    file, machines = _cluster(path)
    nodes_min = options["nodes_min"] or options["nodes"]
    if nodes_min > options["nodes"]:
        raise ConfigError(f"--nodes-min {nodes_min} is more than --nodes {options['nodes']}")
    request = FleetRequest(
        _names(options["types"], "--types"),
        tuple(dict.fromkeys((file.subnet_id, *options["subnets"]))),
        options["nodes"],
        nodes_min,
        _names(options["more_types"], "--more-types", empty=True),
        options["on_demand_max"],
    )
    budget = _budget(options)
    file.settings_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    more = {"budget": dataclasses.asdict(budget), "slots": options["slots"]}
    file.settings_path.write_text(json.dumps(dataclasses.asdict(request) | more))
    raised = machines.up(request, budget, seconds_max=options["wait_seconds_max"])
    lines = _hostfile(raised.trainers, options)
    ranks = len(raised.trainers) * options["slots"]
    # Open MPI refuses --host beside --hostfile: "already filled"
    hosts = ",".join(f"{node.address}:{options['slots']}" for node in raised.trainers)
    mpirun = (
        f"mpirun --with-ft ulfm --host {hosts} -n {ranks} python train.py : "
        f"--host {raised.stager.address}:1 -n 1 holdfast stager --store {file.store_url}"
    )
    supervised = f"holdfast run -n {ranks} --store {file.store_url} --cluster {path} -- python train.py"
    if as_json:
        print_json(
            {
                "generation": raised.generation,
                "made": list(raised.started_ids),
                "hostfile": lines,
                "mpirun": mpirun,
                "run": supervised,
                "nodes": [_document(node) for node in (*raised.trainers, raised.stager)],
            }
        )
        return
    _show_nodes((*raised.trainers, raised.stager))
    print_line(f"\nrun this on the stager:\n  {supervised}")
    print_line(f"or start the job without `holdfast run`:\n  {mpirun}")


@cluster.command(
    short_help="Show the nodes, their ages and prices, and the preempted ones.",
    epilog=option.exit_codes("10 the cluster costs more than --budget-per-hour")
    + examples("holdfast cluster status", "holdfast cluster status --budget-per-hour 20 --json"),
)
@_FILE
@_BUDGET
@option.STAGER_PRICE
@option.ON_DEMAND_PRICE
@_HOSTFILE
@_SLOTS
@json_option
def status(as_json: bool, path: Path, **options: Any) -> None:
    """Show the machines of the cluster, their prices, and the machines that were preempted.

    JSON: {"per_hour", "nodes": [as of up], "taken": [as of up, "reason"]}. per_hour is null if a price is unknown.
    """
    _, found = _cluster(path)
    standing = found.status(_budget(options))
    _hostfile([n for n in standing.trainers if n.state == "running"], options)
    nodes = (*standing.trainers, *standing.stagers)
    if as_json:
        print_json(
            {
                "per_hour": None if standing.per_hour is None else round(standing.per_hour, 4),
                "nodes": [_document(node) for node in nodes],
                "taken": [{**_document(node), "reason": node.reason} for node in standing.preempted],
            }
        )
    else:
        _show_nodes((*nodes, *standing.preempted))
        cost = (
            "the price is not known" if standing.per_hour is None else f"{standing.per_hour:.2f} USD per hour"
        )
        print_line(f"\n{len(standing.trainers)} trainers, {len(standing.stagers)} stager, {cost}")
    limit = options["budget_per_hour"]
    if limit is not None and standing.per_hour is not None and standing.per_hour > limit:
        raise BusyError(
            f"the cluster costs {standing.per_hour:.2f} USD per hour, and --budget-per-hour is {limit:.2f}; "
            "raise the budget, or end the machines with `holdfast cluster down`"
        )


@cluster.command(
    short_help="End every machine of the run, and check that none is left.",
    epilog=option.exit_codes("9 something is left; the message names it")
    + examples("holdfast cluster down", "holdfast cluster down --from other/terraform-output.json"),
)
@_FILE
@_WAIT
@json_option
def down(as_json: bool, path: Path, wait_seconds_max: float) -> None:
    """End every machine with the run's tags, wait until they have ended, and check that no instance, volume, network
    interface or spot request is left. Everything that Terraform created stays.

    JSON: {"ended": [ids]}.
    """
    file, found = _cluster(path)
    ended = found.down(seconds_max=wait_seconds_max)
    if as_json:
        print_json({"ended": list(ended)})
        return
    print_line(f"ended: {', '.join(ended) or 'no machine was running'}")
    print_line(f"nothing is left with Project={file.project}, RunId={file.run_id}")


def _cluster(path: Path) -> tuple[ClusterFile, Cluster]:
    file = ClusterFile.load(path)
    return file, Cluster(file, Ec2(file), file.state_path)


def _budget(options: dict[str, Any]) -> Budget:
    return Budget(options["budget_per_hour"], options["stager_price"], options["on_demand_price"])


def _names(text: str, name: str, *, empty: bool = False) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))
    if not found and not empty:
        raise ConfigError(f"{name}: expected instance types such as c7i.4xlarge,c6i.4xlarge, got {text!r}")
    return found


def _hostfile(nodes: Sequence[Node], options: dict[str, Any]) -> str:
    """Return the hostfile lines of these nodes; write them to --hostfile if it is given."""
    lines = "".join(f"{node.address} slots={options['slots']}\n" for node in nodes)
    if options["hostfile"] is not None:
        options["hostfile"].write_text(lines)
    return lines


def _document(node: Node) -> dict[str, Any]:
    fields = {name: getattr(node, name) for name in ("id", "role", "state", "type", "address", "zone")}
    launched = node.launched.astimezone(UTC).isoformat(timespec="seconds")
    return {**fields, "spot": node.is_spot, "launched": launched}


def _show_nodes(nodes: Sequence[Node]) -> None:
    rows = table("ROLE", "ID", "STATE", "TYPE", "LIFE", "ADDRESS", "ZONE", "AGE", "REASON", right=("AGE",))
    for node in nodes:
        age = format_seconds(max(0.0, (datetime.now(UTC) - node.launched).total_seconds()))
        life, address = "spot" if node.is_spot else "on demand", node.address or "-"
        rows.add_row(
            node.role, node.id, node.state, node.type, life, address, node.zone, age, node.reason or "-"
        )
    console().print(rows)
