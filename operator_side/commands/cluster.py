"""`holdfast cluster up|status|down`: a run's machines on AWS (operator_side/cluster/)."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, print_json, seconds, table
from holdfast.errors import BusyError, ConfigError

if TYPE_CHECKING:
    from operator_side.cluster.cloud import Node
    from operator_side.cluster.file import ClusterFile
    from operator_side.cluster.raising import Budget, Cluster


_FILE = click.option(
    "--from",
    "path",
    type=click.Path(path_type=Path),
    default="terraform-output.json",
    show_default=True,
    help="What `terraform output -json` printed.",
)
_BUDGET = click.option(
    "--budget-per-hour", type=click.FloatRange(0, min_open=True), help="US dollars; more is refused."
)
_STAGER_PRICE = click.option(
    "--stager-price",
    type=click.FloatRange(0),
    default=0.0,
    help="Of the stager, USD per hour; EC2 does not tell it.",
)
_ON_DEMAND_PRICE = click.option(
    "--on-demand-price", type=click.FloatRange(0), help="Of a trainer on demand, USD per hour."
)


@click.group(
    short_help="Raise, show and end a run's machines on AWS.",
    epilog=examples(
        "terraform output -json > terraform-output.json",
        "holdfast cluster up --nodes 8 --types c7i.4xlarge,c6i.4xlarge --hostfile hosts",
        "holdfast cluster down",
    ),
)
def cluster() -> None:
    """Raise, show and end the machines of one run on AWS.

    Networks, roles and launch templates come from Terraform (infra/); this starts and ends the machines.
    """


@cluster.command(
    short_help="Raise the cluster: all trainers or none, and the stager.",
    epilog=examples(
        "holdfast cluster up --nodes 8 --types c7i.4xlarge,c6i.4xlarge --hostfile hosts",
        "holdfast cluster up --nodes 8 --nodes-min 4 --types g6.xlarge --on-demand-max 2 "
        "--on-demand-price 0.81 --budget-per-hour 20",
    ),
)
@_FILE
@click.option("--nodes", type=click.IntRange(1), required=True, help="Training nodes.")
@click.option("--nodes-min", type=click.IntRange(1), help="So few will do. Default: --nodes.")
@click.option(
    "--types", required=True, help="Instance types to choose from, such as c7i.4xlarge,c6i.4xlarge."
)
@click.option("--more-types", default="", help="Types that will do if there is no capacity for those.")
@click.option("--subnet", "subnets", multiple=True, help="More subnets, in other zones; repeatable.")
@click.option(
    "--on-demand-max", type=click.IntRange(0), default=0, help="So many may be on demand in the end."
)
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Ranks on each node.")
@_BUDGET
@_STAGER_PRICE
@_ON_DEMAND_PRICE
@click.option(
    "--hostfile", type=click.Path(path_type=Path), help="Write the trainers there, as mpirun reads it."
)
@click.option(
    "--wait-seconds-max",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="How long machines may take to come up.",
)
@json_option
def up(as_json: bool, path: Path, **options: Any) -> None:
    """Raise the cluster, or what is missing of it. May be interrupted, and run again.

    Without capacity it asks for --more-types, then other --subnet, then fewer nodes down to --nodes-min, then a share
    on demand up to --on-demand-max, and ends with 10 if nothing helps; then nothing was started.

    JSON: {"generation", "made", "hostfile", "mpirun", "run", "nodes": [{"id", "role", "state", "type", "address",
    "zone", "spot", "launched"}]}.
    """
    from operator_side.cluster.fleet import settings_path
    from operator_side.cluster.ladder import FleetWish

    file, raised_by = _cluster(path)
    nodes_min = options["nodes_min"] or options["nodes"]
    if nodes_min > options["nodes"]:
        raise ConfigError(f"--nodes-min {nodes_min} is more than --nodes {options['nodes']}")
    wish = FleetWish(
        _names(options["types"], "--types"),
        tuple(dict.fromkeys((file.subnet_id, *options["subnets"]))),
        options["nodes"],
        nodes_min,
        _names(options["more_types"], "--more-types", empty=True),
        options["on_demand_max"],
    )
    budget = _budget(options)
    settings = settings_path(file)
    settings.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    said = {**dataclasses.asdict(wish), "budget": dataclasses.asdict(budget), "slots": options["slots"]}
    settings.write_text(json.dumps(said))
    raised = raised_by.up(wish, budget, seconds_max=options["wait_seconds_max"])
    lines = "".join(f"{node.address} slots={options['slots']}\n" for node in raised.trainers)
    ranks = len(raised.trainers) * options["slots"]
    if options["hostfile"] is not None:
        options["hostfile"].write_text(lines)
    hosts = options["hostfile"] or "hosts"
    mpirun = (
        f"mpirun --with-ft ulfm --hostfile {hosts} -n {ranks} python train.py : "
        f"--host {raised.stager.address}:1 -n 1 holdfast stager --store {file.store_url}"
    )
    supervised = f"holdfast run -n {ranks} --store {file.store_url} --cluster {path} -- python train.py"
    if as_json:
        print_json(
            {
                "generation": raised.generation,
                "made": list(raised.made),
                "hostfile": lines,
                "mpirun": mpirun,
                "run": supervised,
                "nodes": [_document(node) for node in (*raised.trainers, raised.stager)],
            }
        )
        return
    _show((*raised.trainers, raised.stager))
    out = console()
    out.print("\non the stager:", supervised, sep="\n  ", markup=False, soft_wrap=True)
    out.print("or by hand:", mpirun, sep="\n  ", markup=False, soft_wrap=True)


@cluster.command(
    short_help="Nodes, ages, prices, what was taken.",
    epilog=examples("holdfast cluster status", "holdfast cluster status --budget-per-hour 20 --json"),
)
@_FILE
@_BUDGET
@_STAGER_PRICE
@_ON_DEMAND_PRICE
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    help="Write the running trainers there, as mpirun reads it.",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks on each node, for --hostfile.",
)
@json_option
def status(as_json: bool, path: Path, **options: Any) -> None:
    """Show the cluster. Ends with 10 if it costs more than --budget-per-hour.

    JSON: {"per_hour", "nodes": [as of up], "taken": [as of up, "reason"]}. per_hour is null where a price is not known.
    """
    _, found = _cluster(path)
    standing = found.standing(_budget(options))
    if options["hostfile"] is not None:
        running = [n for n in standing.trainers if n.state == "running"]
        options["hostfile"].write_text("".join(f"{n.address} slots={options['slots']}\n" for n in running))
    nodes = (*standing.trainers, *standing.stagers)
    if as_json:
        print_json(
            {
                "per_hour": None if standing.per_hour is None else round(standing.per_hour, 4),
                "nodes": [_document(node) for node in nodes],
                "taken": [{**_document(node), "reason": node.reason} for node in standing.taken],
            }
        )
    else:
        _show((*nodes, *standing.taken))
        cost = (
            "a price is not known" if standing.per_hour is None else f"{standing.per_hour:.2f} USD per hour"
        )
        console().print(
            f"\n{len(standing.trainers)} trainers, {len(standing.stagers)} stager, {cost}", markup=False
        )
    limit = options["budget_per_hour"]
    if limit is not None and standing.per_hour is not None and standing.per_hour > limit:
        raise BusyError(f"the cluster costs {standing.per_hour:.2f} USD per hour, the budget is {limit:.2f}")


@cluster.command(
    short_help="End every machine of the run, and look that none is left.",
    epilog=examples("holdfast cluster down", "holdfast cluster down --from other/terraform-output.json"),
)
@_FILE
@click.option(
    "--wait-seconds-max",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="How long machines may take to end.",
)
@json_option
def down(as_json: bool, path: Path, wait_seconds_max: float) -> None:
    """End every machine with the run's tags, wait, and look for anything that is left: instances, volumes, interfaces,
    spot requests. Ends with 9 and names it if there is. What Terraform made stays.

    JSON: {"ended": [ids]}.
    """
    file, found = _cluster(path)
    ended = found.down(seconds_max=wait_seconds_max)
    if as_json:
        print_json({"ended": list(ended)})
        return
    out = console()
    out.print(f"ended: {', '.join(ended) or 'nothing was there'}", markup=False)
    out.print(f"nothing is left with Project={file.project}, RunId={file.run_id}", markup=False)


def _cluster(path: Path) -> tuple[ClusterFile, Cluster]:
    from operator_side.cluster.cloud import Ec2
    from operator_side.cluster.file import ClusterFile
    from operator_side.cluster.fleet import state_path
    from operator_side.cluster.raising import Cluster

    file = ClusterFile.load(path)
    return file, Cluster(file, Ec2(file), state_path(file))


def _budget(options: dict[str, Any]) -> Budget:
    from operator_side.cluster.raising import Budget

    return Budget(options["budget_per_hour"], options["stager_price"], options["on_demand_price"])


def _names(text: str, option: str, *, empty: bool = False) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found and not empty:
        raise ConfigError(f"{option}: expected instance types such as c7i.4xlarge,c6i.4xlarge, got {text!r}")
    return found


def _document(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "role": node.role,
        "state": node.state,
        "type": node.type,
        "address": node.address,
        "zone": node.zone,
        "spot": node.is_spot,
        "launched": node.launched.astimezone(UTC).isoformat(timespec="seconds"),
    }


def _show(nodes: tuple[Node, ...]) -> None:
    rows = table("ROLE", "ID", "STATE", "TYPE", "LIFE", "ADDRESS", "ZONE", "AGE", "REASON", right=("AGE",))
    for node in nodes:
        age = max(0.0, (datetime.now(UTC) - node.launched).total_seconds())
        life = "spot" if node.is_spot else "on demand"
        rows.add_row(
            node.role,
            node.id,
            node.state,
            node.type,
            life,
            node.address or "-",
            node.zone,
            seconds(age),
            node.reason or "-",
        )
    console().print(rows)
