"""The Grafana dashboard: what Grafana needs to load it, and queries for metrics that there are."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.observations import layer, native_layer, observation

from kv8.server.metric_families import ObservationCollector

FILE = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "kv8.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
COLUMNS = 24
SCRAPED = {"instance", "job"}  # labels that Prometheus adds


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Return the labels that /metrics gives each of its samples."""
    registry = CollectorRegistry()
    registry.register(ObservationCollector(observation([layer(0), native_layer(1)])))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|kv8):\w+", text))


def test_it_is_a_dashboard() -> None:
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert DASHBOARD["schemaVersion"] >= 36  # from then on a data source is an object
    assert DASHBOARD.get("id") is None  # Grafana gives it one


def test_the_user_chooses_the_data_source_and_every_query_uses_the_choice() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    chosen = variables["datasource"]
    assert (chosen["type"], chosen["query"]) == ("datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    for name in ("model", "instance"):
        assert variables[name]["datasource"] == source
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == source
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == source
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == variables.keys()


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [(panel["title"], panel["gridPos"]) for panel in PANELS]
    for title, at in places:
        assert at["w"] >= 1, title
        assert at["h"] >= 1, title
        assert 0 <= at["x"] <= COLUMNS - at["w"], title
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one, other)


def test_it_asks_only_for_metrics_there_are(labels: dict[str, set[str]]) -> None:
    asked = metrics_in(json.dumps(DASHBOARD))
    assert len(asked) > 10
    assert asked <= labels.keys()


@pytest.mark.parametrize("query", QUERIES)
def test_it_asks_only_for_labels_there_are(query: str, labels: dict[str, set[str]]) -> None:
    assert query.count("(") == query.count(")")
    for name, selector in re.findall(r"((?:vllm|kv8):\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=", selector)) <= labels[name] | SCRAPED
        if "rate(" + name in query:
            assert name.endswith(("_total", "_bucket", "_count", "_sum"))  # only these grow
    there = set().union(*(labels[name] for name in metrics_in(query))) | SCRAPED
    for listed in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query):
        assert set(re.split(r",\s*", listed)) <= there
    assert "model_name=" in query


def test_legends_name_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            for name in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
                grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
                if grouped:
                    assert name in re.split(r",\s*", grouped[1]), panel["title"]
