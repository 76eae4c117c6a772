"""What deploy/monitoring asks is what /metrics gives: each name, each label, each value of a label that is fixed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from billing.audit import QUESTIONS
from console.operations import metrics, signs
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
GUIDE = (ROOT / "docs" / "operations.md").read_text()
OF_PROMETHEUS = {"up": {"job"}}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
VALUES = {
    "state": {*JobState, "received", "parked", "quarantined"},
    "reason": set(EndReason),
    "before": set(JobState),
    "after": set(JobState),
    "what": set(QUESTIONS),
    "process": {signs.BEAT, signs.WORKER, signs.WATCHER, signs.LIVE, signs.CLUSTER, signs.BOOKS},
    "resource": {"cpus", "memory_mib", "gpus"},
    "outcome": {"success", "failure"},
}


def selectors(query: str) -> Iterator[promql_parser.VectorSelector]:
    """Every series that a query asks for; raises ValueError where Prometheus would not take the query."""
    seen: list[promql_parser.VectorSelector] = []

    def look(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            seen.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            look(node.vector_selector)
        else:
            for name in ("lhs", "rhs", "expr", "param"):
                if (inner := getattr(node, name, None)) is not None:
                    look(inner)
            for inner in getattr(node, "args", None) or ():
                look(inner)

    look(promql_parser.parse(query.replace("$__rate_interval", "5m")))
    return iter(seen)


@pytest.fixture
def exported(db, shared) -> dict[str, set[str]]:
    """Each name that Prometheus sees, with its labels. The families say theirs, be there samples or not."""
    found = dict(OF_PROMETHEUS)
    for family in metrics.families():
        labels = set(family._labelnames)
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def test_each_query_is_promql_and_asks_for_what_is_there(exported):
    asked = set()
    for title, query in QUERIES:
        found = list(selectors(query))
        assert found, f"{title}: {query} asks for nothing."
        for selector in found:
            assert selector.name in exported, f"{title}: there is no {selector.name}."
            asked.add(selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in exported[selector.name], f"{title}: {selector.name} has no {matcher.name}."
                values = set(matcher.value.split("|"))
                assert values <= VALUES.get(matcher.name, values), f"{title}: {matcher.name} is never {values}."
    assert len(asked) > 25


def test_what_is_grouped_by_or_shown_is_a_label(exported):
    for title, query in QUERIES:
        labels = set().union(*(exported[selector.name] for selector in selectors(query)))
        for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert {name.strip() for name in names.split(",")} <= labels, f"{title}: {query}"
    for panel in PANELS:
        for target in panel["targets"]:
            labels = set().union(*(exported[selector.name] for selector in selectors(target["expr"])))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, panel["title"]


def test_every_figure_is_looked_at_by_somebody(exported):
    looked = {selector.name for _title, query in QUERIES for selector in selectors(query)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in looked}
    unseen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} - families
    assert unseen == {"trainyard_figures_behind"}


def test_each_alert_has_its_page_of_what_to_do():
    headings = re.findall(r"^### (Trainyard\w+)$", GUIDE, re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        section = GUIDE.split(f"### {rule['alert']}\n")[1].split("\n##")[0]
        assert len(section) > 200, f"Say more about {rule['alert']}: what it means, where to look, what to do."


def test_each_panel_says_what_it_shows_and_none_lies_on_another():
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert all(panel["description"] and panel["targets"] for panel in PANELS)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_names_in_the_guide_are_exported_and_all_are_in_it(exported):
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} - {"up"}
    told = set(re.findall(r"`(trainyard_\w+)`", GUIDE))
    assert told == base


def test_scraping_is_described_as_it_works():
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    [job] = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"], job["authorization"]["type"]) == ("trainyard", "/metrics", "Bearer")
    assert config["rule_files"] == ["alerts.yaml"]
