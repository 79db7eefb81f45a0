"""The dashboard and the alarms query metrics, labels and values that exist; each alarm has an explanation for the
operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.ring.ring import Ring
from holdfast.telemetry.metrics import Metrics, RingChunks, StoreRetries

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "infra/grafana/dashboards/holdfast.json"
PROMETHEUS = ROOT / "infra/prometheus"
FROM_PROMETHEUS = {"job", "instance"}  # labels that Prometheus adds to every sample
VARIABLE = "$run"  # the dashboard's choice of runs

Query = tuple[str, str]  # place, query


class Selected(NamedTuple):
    """A metric with its label matchers in a query."""

    name: str
    matchers: list[Any]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def marks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["annotations"]["list"]
    return found


def dashboard_queries() -> list[Query]:
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return [*asked, *((note["name"], note["expr"]) for note in marks())]


def queries() -> list[Query]:
    return [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in rules())]


def selectors(expression: Any) -> Iterator[Selected]:
    """Yield every metric that a parsed query names."""
    match expression:
        case promql.VectorSelector():
            yield Selected(expression.name or "", list(expression.matchers.matchers))
        case promql.MatrixSelector():
            yield from selectors(expression.vector_selector)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from selectors(expression.expr)
        case promql.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case _:
            assert isinstance(expression, promql.NumberLiteral | promql.StringLiteral), expression


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Return name → labels of the samples that stager and flusher expose after each kind of event."""
    stager, flusher = Metrics("stager", "s3://bucket/run"), Metrics("flusher", "s3://bucket/run")
    stager.handle_event("staged", {"image_bytes": 1, "pgt1_seconds": 1.0}, 1)
    stager.handle_event("declined", {"reason": "busy: …"}, 2)
    flusher.handle_event("durable", {"attempt": 1, "image_bytes": 1, "pgt2_seconds": 1.0}, 1)
    flusher.handle_event("verified", {"attempt": 1, "seconds": 1.0}, 1)
    found: dict[str, list[dict[str, str]]] = {"up": [{"job": "stager"}, {"job": "flusher"}]}
    with Ring.create(tmp_path_factory.mktemp("ring"), chunk_bytes=4096, ring_chunks=8, attempt=1) as ring:
        flusher.registry.register(RingChunks(ring))
        flusher.registry.register(StoreRetries(lambda: {"write_part": 2}))
        for metrics in (stager, flusher):
            for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(sample.labels)
    return found


def missing(query: str, exposed: dict[str, list[dict[str, str]]]) -> list[str]:
    """List the metrics, labels and values of a query that no process exposes."""
    found = []
    for selected in selectors(promql.parse(query)):
        if selected.name not in exposed:
            found.append(f"no metric {selected.name}")
            continue
        for matcher in selected.matchers:
            values = {labels[matcher.name] for labels in exposed[selected.name] if matcher.name in labels}
            if matcher.value == VARIABLE:
                values.add(VARIABLE)
            if matcher.name in FROM_PROMETHEUS:
                values |= {"stager", "flusher"}
            wanted = matcher.value.split("|") if matcher.op == promql.MatchOp.Re else [matcher.value]
            found += [f"no {matcher.name}={one} of {selected.name}" for one in wanted if one not in values]
    return found


def test_dashboard_and_alarms_ask_for_metrics_that_exist(exposed: dict[str, list[dict[str, str]]]) -> None:
    wrong = []
    for where, query in queries():
        wrong += [f"{where}: {what}" for what in missing(query, exposed)]
        wrong += [] if list(selectors(promql.parse(query))) else [f"{where}: asks for nothing"]
    assert not wrong, "\n".join(wrong)


def test_dashboard_asks_only_about_the_chosen_run_and_source() -> None:
    document = json.loads(DASHBOARD.read_text())
    run, source = (
        next(one for one in document["templating"]["list"] if one["name"] == name)
        for name in ("run", "source")
    )
    assert run["query"]["query"] == "label_values(holdfast_info, run)"
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    for where, query in dashboard_queries():
        metrics = list(selectors(promql.parse(query)))
        chosen = [one for one in metrics if any(matcher.value == VARIABLE for matcher in one.matchers)]
        assert {one.name for one in chosen} == {"holdfast_info"}, where
        assert len(chosen) * 2 == len(metrics), f"{where}: each metric is joined with the run"
    asked = [*panels(), *(target for panel in panels() for target in panel["targets"]), *marks()]
    assert {one["datasource"]["uid"] for one in asked} == {"${source}"}


def test_dashboard_marks_kills_and_shows_their_loss_first() -> None:
    assert any("holdfast_ranks_lost_total" in note["expr"] for note in marks())
    first = min(panels(), key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    assert "holdfast_newest_saved_timestamp_seconds" in first["targets"][0]["expr"]


def test_names_are_as_prometheus_wants_them(exposed: dict[str, list[dict[str, str]]]) -> None:
    ours = {name for name in exposed if name.startswith("holdfast_")}
    assert len(ours) > 15
    for name in ours:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not re.search(r"_(ms|mib|gib|kb|mb)\b", name), "base units only"
    assert {n for n in ours if "bytes" in n} == {"holdfast_checkpoint_bytes_total"}


def test_every_metric_and_every_alarm_is_explained() -> None:
    text = (ROOT / "docs/monitoring.md").read_text()
    metrics, alarms = text.split("## Metrics\n")[1].split("\n### Alarms\n")
    alarms = alarms.split("\n## ")[0]
    assert set(re.findall(r"^\| `(Holdfast\w+)` \|", alarms, re.MULTILINE)) == {
        rule["alert"] for rule in rules()
    }
    shown = {
        name
        for role in ("stager", "flusher")
        for family in Metrics(role, "r").registry.collect()
        if (name := family.name).startswith("holdfast_")
    } | {"holdfast_ring_chunks", "holdfast_store_retries"}
    explained = {name.removesuffix("_total") for name in re.findall(r"`(holdfast_\w+)", metrics)}
    assert explained == shown


def test_alarms_say_what_is_the_case_and_how_bad_it_is() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"], rule
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}, rule


def test_prometheus_scrapes_the_ports_that_the_compose_file_sets() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    port = int(services["stager"]["environment"]["HOLDFAST_METRICS_PORT"])
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    asked = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert asked == {"stager": [f"stager:{port}"], "flusher": [f"stager:{port + 1}"]}


def test_every_panel_says_what_it_shows_and_lies_in_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["description"], panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
