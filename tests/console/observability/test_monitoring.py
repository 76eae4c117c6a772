"""deploy/monitoring queries only series that /metrics exports: names, labels, and the values of fixed labels."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from billing.reconciliation import CHECKS
from console.monitoring import metrics
from console.observability import heartbeats
from jobs.states import EndReason, JobState

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
BOARD = json.loads((MONITORING / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *((rule["alert"], rule["expr"]) for rule in RULES),
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
]
GUIDE = ROOT / "docs" / "operator-guide"
# What Prometheus' text format appends to the name of a metric, by its type.
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
VALUES = {
    "state": {*JobState, "received", "parked", "quarantined"},
    "reason": set(EndReason),
    "before": set(JobState),
    "after": set(JobState),
    "what": set(CHECKS),
    "process": {
        heartbeats.BEAT, heartbeats.WORKER, heartbeats.WATCHER, heartbeats.WEB, heartbeats.CLUSTER, heartbeats.LEDGER,
    },
    "resource": {"cpus", "memory_mib", "gpus"},
    "outcome": {"success", "failure"},
}  # fmt: skip
"""All values of the labels whose values are fixed."""


def selectors(query):
    """Return every series that a query selects. Raise ValueError if Prometheus would not accept the query."""
    nodes, series = [promql_parser.parse(query.replace("$__rate_interval", "5m"))], []
    while nodes:
        node = nodes.pop()
        if isinstance(node, promql_parser.VectorSelector):
            series.append(node)
            continue
        inner = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
        nodes += [each for each in (*inner, *(getattr(node, "args", None) or ())) if each is not None]
    return series


def family(name):
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.fixture
def exported(db, redis_keys):
    """The labels of each name that Prometheus sees, also of families that have no samples now."""
    names = {"up": {"job"}}  # which Prometheus itself adds
    for each in metrics.collect_metrics():
        for suffix in SUFFIXES[each.type]:
            names[each.name + suffix] = set(each._labelnames) | ({"le"} if suffix == "_bucket" else set())
    return names


def test_each_query_asks_for_what_is_exported_and_all_that_is_exported_is_queried(exported):
    queried = set()
    for title, query in QUERIES:
        series = selectors(query)
        assert series, f"{title}: {query} asks for nothing."
        for selector in series:
            assert selector.name in exported, f"{title}: there is no {selector.name}."
            queried.add(family(selector.name))
            for matcher in selector.matchers.matchers:
                assert matcher.name in exported[selector.name], f"{title}: {selector.name} has no {matcher.name}."
                values = set(matcher.value.split("|"))
                assert values <= VALUES.get(matcher.name, values), f"{title}: {matcher.name} is never {values}."
    assert set(map(family, exported)) - queried == {"trainyard_figures_behind"}  # for people: see the guide


def test_queries_and_legends_name_labels_that_their_series_have(exported):
    labels = {query: set().union(*(exported[each.name] for each in selectors(query))) for _title, query in QUERIES}
    for title, query in QUERIES:
        for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert {name.strip() for name in names.split(",")} <= labels[query], f"{title}: {query}"
    for panel in PANELS:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[target["expr"]], panel["title"]


def test_each_alert_has_a_runbook():
    runbooks = (GUIDE / "alerts.md").read_text()
    assert re.findall(r"^### (Trainyard\w+)$", runbooks, re.MULTILINE) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["runbook"] == f"docs/operator-guide/alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        section = runbooks.split(f"### {rule['alert']}\n")[1].split("\n##")[0]
        assert len(section) > 200, f"Say more about {rule['alert']}: what it means, where to look, what to do."


def test_the_guide_names_each_metric(exported):
    documented = set(re.findall(r"`(trainyard_\w+)`", (GUIDE / "monitoring.md").read_text()))
    assert documented == set(map(family, exported)) - {"up"}


def test_the_scrape_configuration_authenticates_as_an_operator():
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    [job] = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"], job["authorization"]["type"]) == ("trainyard", "/metrics", "Bearer")
    assert config["rule_files"] == ["alerts.yaml"]
