"""What dashboards and alerts ask for is what a server and a gateway under load export."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from demo_server import Server
from gateway.gateways import running_gateway
from metrics_page import read_metrics
from paged_client import Client
from prometheus_client.parser import text_string_to_metric_families

DOCKER = Path(__file__).parent.parent / "docker"
DASHBOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))
ALERTS = DOCKER / "prometheus/alerts.yml"
OF_PROMETHEUS = {"up": {"job", "instance"}}  # metrics that it adds itself
TARGET_LABELS = {"job", "instance"}  # labels that it adds to all
VARIABLE = re.compile(r"\$(?:__)?\w+")
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
COUNTED = re.compile(r"_(total|bucket|sum|count)$")


@dataclass
class Exported:
    """A metric as a page shows it."""

    kind: str
    labels: dict[str, set[str]] = field(default_factory=dict)  # name -> values
    total: float = 0.0


@dataclass(frozen=True)
class Query:
    """Something that asks Prometheus, and what names the labels of its answer."""

    where: str
    expr: Any
    texts: tuple[str, ...] = ()


def parse(text: str) -> Any:
    """A query with Grafana's variables filled in."""
    filled = text.replace("$__rate_interval", "1m")
    return promql_parser.parse(VARIABLE.sub(".*", filled))


def panel_queries(path: Path) -> Iterator[Query]:
    dashboard = json.loads(path.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            where = f"{path.name}, {panel['title']} {target['refId']}"
            yield Query(where, parse(target["expr"]), (target["legendFormat"],))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = LABEL_VALUES.fullmatch(variable["definition"]).groups()
            assert variable["query"]["query"] == variable["definition"]
            yield Query(f"{path.name}, ${variable['name']}", parse(selector), (f"{{{{{label}}}}}",))


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_queries() -> Iterator[Query]:
    for rule in alert_rules():
        texts = tuple(rule["annotations"].values())
        yield Query(f"{ALERTS.name}, {rule['alert']}", parse(rule["expr"]), texts)


QUERIES = [*(query for path in DASHBOARDS for query in panel_queries(path)), *alert_queries()]


def named_labels(text: str) -> set[str]:
    """Labels that a legend (``{{model}}``) or an annotation (``{{ $labels.model }}``) shows."""
    return set(re.findall(r"\{\{(\w+)\}\}", text)) | set(re.findall(r"\$labels\.(\w+)", text))


def nodes(expr: Any, kind: type) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, kind):
            found.append(node)

    promql_parser.walk(expr, visit)
    return found


def read_page(url: str, pages: dict[str, Exported]) -> None:
    with urllib.request.urlopen(url) as response:
        text = response.read().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    # With their types, the parser would rename counters without _total.
    samples = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for family in text_string_to_metric_families(samples):
        for sample in family.samples:
            kind = kinds.get(sample.name) or kinds[COUNTED.sub("", sample.name)]
            metric = pages.setdefault(sample.name, Exported(kind))
            metric.total += sample.value
            for name, value in sample.labels.items():
                metric.labels.setdefault(name, set()).add(value)


@pytest.fixture(scope="module")
def exported(server: Server) -> dict[str, Exported]:
    """Read while requests are under way, after others have ended in every way."""
    pages: dict[str, Exported] = {}
    long = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True}
    running = server.running
    with (
        running_gateway("--triton", running.grpc_url) as gateway,
        Client(running.grpc_url) as client,
    ):
        for _ in range(2):
            client.generate("What does len do?", temperature=0, max_tokens=64)
            body = {"model": "paged_llm", "prompt": "What does abs do?", "max_tokens": 3}
            assert gateway.post("/v1/completions", body).status == 200
        streams = [client.stream(list(range(5, 105)), **long) for _ in range(4)]
        for stream in streams:
            next(stream)
        streams[0].cancel()
        # Histograms are published twice a second, and more seldom while the machine is busy.
        deadline = time.monotonic() + 60
        while not published(read_metrics(running.metrics_url)) and time.monotonic() < deadline:
            time.sleep(0.01)
        read_page(running.metrics_url, pages)
        read_page(f"http://{gateway.address}/metrics", pages)
        for stream in streams:
            stream.cancel()
    return pages


def published(shown: dict[str, float]) -> bool:
    """Whether three requests are under way and what came before them is counted."""
    counts = [value for name, value in shown.items() if name.endswith("_count")]
    return shown["num_requests_running"] == 3 and bool(counts) and all(counts)


def labels_of(name: str, exported: dict[str, Exported]) -> set[str]:
    return OF_PROMETHEUS.get(name) or set(exported[name].labels) | TARGET_LABELS


def result_labels(expr: Any, exported: dict[str, Exported]) -> set[str]:
    """Labels that the answer has, where there is one."""
    match expr:
        case promql_parser.VectorSelector():
            return labels_of(expr.name, exported)
        case promql_parser.MatrixSelector():
            return result_labels(expr.vector_selector, exported)
        case promql_parser.AggregateExpr():
            assert expr.modifier is None or expr.modifier.type == promql_parser.AggModifierType.By
            return set(expr.modifier.labels) if expr.modifier is not None else set()
        case promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
            return result_labels(expr.expr, exported)
        case promql_parser.Call():
            (vector,) = (arg for arg in expr.args if nodes(arg, promql_parser.VectorSelector))
            dropped = {"le"} if expr.func.name == "histogram_quantile" else set()
            return result_labels(vector, exported) - dropped
        case promql_parser.BinaryExpr():
            sides = [result_labels(side, exported) for side in (expr.lhs, expr.rhs)]
            return sides[0] or sides[1]
        case promql_parser.NumberLiteral():
            return set()
    raise AssertionError(f"this test does not know {type(expr).__name__}")


@pytest.mark.server
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_metric_and_label_of_a_query_is_exported_under_load(query, exported):
    selectors = nodes(query.expr, promql_parser.VectorSelector)
    assert selectors
    for selector in selectors:
        if selector.name in OF_PROMETHEUS:
            continue
        assert selector.name in exported
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels_of(selector.name, exported)
            values = exported[selector.name].labels.get(matcher.name)
            if values is not None and matcher.op == promql_parser.MatchOp.Equal:
                assert matcher.value in values
    for aggregate in nodes(query.expr, promql_parser.AggregateExpr):
        if aggregate.modifier is not None:
            assert set(aggregate.modifier.labels) <= result_labels(aggregate.expr, exported)
    for binary in nodes(query.expr, promql_parser.BinaryExpr):
        if binary.modifier is not None and binary.modifier.matching is not None:
            for side in (binary.lhs, binary.rhs):
                assert set(binary.modifier.matching.labels) <= result_labels(side, exported)
    for text in query.texts:
        assert named_labels(text) <= result_labels(query.expr, exported)


@pytest.mark.server
@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_functions_fit_the_kind_of_their_metric(query, exported):
    """Rates are of counters; a quantile is of buckets that have counted something."""
    rated = set()
    for call in nodes(query.expr, promql_parser.Call):
        if call.func.name in ("rate", "increase"):
            names = {s.name for s in nodes(call, promql_parser.VectorSelector)}
            assert all(exported[name].kind in ("counter", "histogram") for name in names)
            rated |= names
        if call.func.name == "histogram_quantile":
            (selector,) = nodes(call, promql_parser.VectorSelector)
            assert selector.name.endswith("_bucket")
            assert "+Inf" in exported[selector.name].labels["le"]
    for selector in nodes(query.expr, promql_parser.VectorSelector):
        if selector.name not in OF_PROMETHEUS and selector.name not in rated:
            assert exported[selector.name].kind == "gauge"
        if selector.name.endswith(("_bucket", "_sum", "_count")):
            assert exported[selector.name].total > 0


@pytest.mark.server
def test_what_a_query_asks_for_wrongly_is_noticed(exported):
    wrong = [
        "rate(paged_num_requests_runing[1m])",
        'paged_engine_up{modle="x"}',
        "sum by (server) (paged_engine_up)",
        "sum by (model) (rate(paged_generation_tokens_total[1m])) * on (version) paged_engine_up",
    ]
    check = test_every_metric_and_label_of_a_query_is_exported_under_load
    for text in wrong:
        with pytest.raises(AssertionError):
            check(Query(text, parse(text)), exported)
    with pytest.raises(AssertionError):
        check(Query("legend", parse("sum(paged_engine_up)"), ("{{model}}",)), exported)
    for text in ("rate(paged_engine_up[1m])", "paged_generation_tokens_total"):
        with pytest.raises(AssertionError):
            test_functions_fit_the_kind_of_their_metric(Query(text, parse(text)), exported)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_their_place(path):
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            used = {name for name in re.findall(r"\$(\w+)", target["expr"]) if name[0] != "_"}
            assert used <= variables, panel["title"]


def test_alerts_say_what_is_wrong_and_what_to_do():
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_prometheus_and_grafana_find_what_they_need_in_the_composition():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    mounts = {
        name: dict(volume.split(":")[:2] for volume in services[name]["volumes"])
        for name in ("prometheus", "grafana")
    }

    prometheus = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    assert prometheus["rule_files"] == [ALERTS.name]
    assert mounts["prometheus"]["./prometheus"] == "/etc/prometheus"
    for job in prometheus["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            assert target.partition(":")[0] in services
        secret = job.get("authorization", {}).get("credentials_file")
        if secret is not None:
            folder, _, name = secret.rpartition("/")
            assert folder == "/run/secrets" and name in services["prometheus"]["secrets"]

    provisioning = DOCKER / "grafana/provisioning"
    assert mounts["grafana"]["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = read_list(provisioning / "datasources/prometheus.yml", "datasources")
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = read_list(provisioning / "dashboards/dashboards.yml", "providers")
    assert provider["options"]["path"] == mounts["grafana"]["./grafana/dashboards"]


def read_list(path: Path, name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text())[name]
