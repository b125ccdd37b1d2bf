"""The Helm chart: rendered by helm, checked against schemas, and its commands run for real."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from custom_resources import SCHEMAS
from helm_chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    ROOT,
    VALUES,
    Manifest,
    container,
    helm,
    named,
    objects,
    of_kind,
    pods,
    template,
)
from valid_json import validate

from paged_backend.launch.command import EXIT_TIMEOUT_S
from paged_backend.launch.ports import Endpoints, ReservedEndpoints, bind
from paged_backend.values.engine_args import from_mapping

DEFAULT = VALUES[0]
HPA = "HorizontalPodAutoscaler"
READY_TIMEOUT_S = 120
every_values = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


def example(name: str) -> list[Manifest]:
    return objects(CHART / "examples" / f"{name}.yaml")


# What is rendered


@every_values
def test_helm_has_nothing_to_say(values: Path) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@every_values
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_objects_obey_their_schemas(values: Path, version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    for manifest in objects(values):
        if manifest["kind"] in SCHEMAS:
            validate(manifest, SCHEMAS[manifest["kind"]])
        else:
            kubernetes.validate(manifest, version, strict=True)
    for pod in pods(objects(values)):
        kubernetes.validate(pod, version, strict=True)


@every_values
def test_pods_keep_to_the_restricted_standard(values: Path) -> None:
    for pod in pods(objects(values)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsUser"] == 1000
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for each in spec["containers"]:
            assert each["securityContext"] == {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            # A worker that has joined waits for its server's next engine without a limit.
            probes = {"startupProbe", "readinessProbe", "livenessProbe"} & set(each)
            assert len(probes) == (1 if each["name"] == "worker" else 3)
            assert "memory" in each["resources"]["limits"]


@every_values
def test_all_that_is_named_is_there(values: Path) -> None:
    manifests = objects(values)
    for pod in pods(manifests):
        spec = pod["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for workload in of_kind(manifests, "StatefulSet") + of_kind(manifests, "LeaderWorkerSet"):
            spec_of_claims = workload["spec"].get("leaderWorkerTemplate", workload["spec"])
            claims = spec_of_claims.get("volumeClaimTemplates", [])
            volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = {m["name"] for each in spec["containers"] for m in each["volumeMounts"]}
        assert mounts <= volumes
        maps = {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v}
        assert maps <= {m["metadata"]["name"] for m in of_kind(manifests, "ConfigMap")}
        assert named(manifests, "ServiceAccount", spec["serviceAccountName"])
    for service in of_kind(manifests, "Service"):
        (pod,) = selected(manifests, service["spec"]["selector"])
        ports = {p["name"] for each in pod["spec"]["containers"] for p in each.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "StatefulSet", "Deployment", "InferencePool"):
        for manifest in of_kind(manifests, kind):
            assert len(selected(manifests, manifest["spec"]["selector"]["matchLabels"])) == 1
    for workload in of_kind(manifests, "StatefulSet"):
        assert named(manifests, "Service", workload["spec"]["serviceName"])
    for monitor in of_kind(manifests, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        services = of_kind(manifests, "Service")
        (service,) = (s for s in services if labels <= s["metadata"]["labels"].items())
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def selected(manifests: list[Manifest], labels: Mapping[str, str]) -> list[Manifest]:
    return [pod for pod in pods(manifests) if labels.items() <= pod["metadata"]["labels"].items()]


@every_values
def test_policies_open_only_ports_that_are_listened_at(values: Path) -> None:
    manifests = objects(values)
    for policy in of_kind(manifests, "NetworkPolicy"):
        (pod,) = selected(manifests, policy["spec"]["podSelector"]["matchLabels"])
        containers, rules = pod["spec"]["containers"], policy["spec"]["ingress"]
        listening = {p["containerPort"] for c in containers for p in c.get("ports", [])}
        opened = {p["port"] for rule in rules for p in rule.get("ports", [])}
        assert opened <= listening
        assert all(rule["from"] for rule in rules)  # without: everybody
        # Ranks choose their ports, and only pods of the same release reach them.
        for rule in (rule for rule in rules if "ports" not in rule):
            (who,) = rule["from"]
            assert who["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == RELEASE
            assert not any(who.get(name) for name in ("namespaceSelector", "ipBlock"))


@every_values
def test_secrets_are_names(values: Path) -> None:
    assert of_kind(objects(values), "Secret") == []
    key = "password|token|key"
    for pod in pods(objects(values)):
        for each in pod["spec"]["containers"]:
            for variable in each.get("env", []):
                assert "value" not in variable or not re.search(key, variable["name"].lower())


@every_values
def test_open_requests_have_time_to_end(values: Path) -> None:
    for pod in pods(objects(values)):
        for each in pod["spec"]["containers"]:
            command, seconds = each["lifecycle"]["preStop"]["exec"]["command"]
            assert command == "sleep"
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            if each["name"] == "worker":  # it stays until its server has ended, and then just ends
                assert 5 + EXIT_TIMEOUT_S <= int(seconds) < grace
            else:
                assert grace >= int(seconds) + EXIT_TIMEOUT_S + 5


def test_the_gateway_knows_every_server_that_there_may_be() -> None:
    for manifests, number in ((example("gpu"), 2), (example("keda"), 8)):
        flags = [flag for flag in container(manifests, "gateway")["command"] if "--triton=" in flag]
        assert flags == [
            f"--triton={RELEASE}-server-{i}.{RELEASE}-server-pods:8001" for i in range(number)
        ]
    service = named(objects(DEFAULT), "Service", f"{RELEASE}-server-pods")
    assert service["spec"]["clusterIP"] == "None"


def test_autoscalers_set_the_number_of_servers() -> None:
    for name in ("keda", "hpa"):
        workload = named(example(name), "StatefulSet", f"{RELEASE}-server")
        assert "replicas" not in workload["spec"]
        (scaler,) = of_kind(example(name), "ScaledObject" if name == "keda" else HPA)
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("StatefulSet", f"{RELEASE}-server")


def test_autoscalers_ask_for_the_metric_under_its_prefix() -> None:
    prefix = ("--set", "model.options.metrics_prefix=vllm:")
    examples = CHART / "examples"
    (scaler,) = of_kind(objects(examples / "hpa.yaml", *prefix), HPA)
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == "vllm:num_requests_waiting"
    (scaler,) = of_kind(objects(examples / "keda.yaml"), "ScaledObject")
    assert scaler["spec"]["triggers"][0]["metadata"]["query"] == (
        f'sum(paged_num_requests_waiting{{namespace="{NAMESPACE}",pod=~"{RELEASE}-server-[0-9]+"}})'
    )


def test_servers_of_several_hosts_are_groups() -> None:
    manifests = example("several-hosts")
    (groups,) = of_kind(manifests, "LeaderWorkerSet")
    name = groups["metadata"]["name"]
    # LeaderWorkerSet makes a headless Service of this name.
    assert name not in {service["metadata"]["name"] for service in of_kind(manifests, "Service")}
    assert of_kind(manifests, "StatefulSet") == []
    flags = container(manifests, "gateway")["command"]
    assert f"--triton={name}-0.{name}:8001" in flags
    options = json.loads(named(manifests, "ConfigMap", f"{RELEASE}-model")["data"]["model.json"])
    for each in ("main", "worker"):
        mounts = {m["name"]: m["mountPath"] for m in container(manifests, each)["volumeMounts"]}
        assert options["cluster_key_file"] == f"{mounts['cluster-key']}/key"
    scaled = objects(CHART / "examples/several-hosts.yaml", "--set", "autoscaling.kind=hpa")
    (scaler,) = of_kind(scaled, HPA)
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": groups["apiVersion"],
        "kind": "LeaderWorkerSet",
        "name": name,
    }


def test_alerts_are_those_of_compose() -> None:
    (rules,) = of_kind(example("gpu"), "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())
    jobs = {
        endpoint["relabelings"][0]["replacement"]
        for monitor in of_kind(example("gpu"), "ServiceMonitor")
        for endpoint in monitor["spec"]["endpoints"]
    }
    assert jobs == {"triton", "gateway"}


@every_values
def test_models_are_written_as_the_launcher_does(values: Path) -> None:
    for config in of_kind(objects(values), "ConfigMap"):
        assert from_mapping(json.loads(config["data"]["model.json"]))
    config = named(objects(DEFAULT), "ConfigMap", f"{RELEASE}-model")["data"]
    ours = ROOT / "docker/models/paged_llm"
    assert config["config.pbtxt"] == (ours / "config.pbtxt").read_text()
    assert json.loads(config["model.json"]) == json.loads((ours / "1/model.json").read_text())


def test_large_numbers_of_options_stay_integers() -> None:
    number = 2**36
    (config,) = of_kind(
        objects(DEFAULT, "--set", f"model.options.kv_cache_memory_bytes={number}"), "ConfigMap"
    )
    assert f'"kv_cache_memory_bytes": {number}' in config["data"]["model.json"]


def test_versions_and_images_are_those_of_compose() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    services = yaml.safe_load((ROOT / "docker/compose.gpu.yaml").read_text())["services"]
    assert container(objects(DEFAULT), "main")["image"] == services["server"]["image"]


def test_kserve_gets_one_object_that_listens_at_its_port() -> None:
    kinds = sorted(manifest["kind"] for manifest in example("kserve"))
    assert kinds == ["ConfigMap", "LLMInferenceService", "ServiceAccount"]
    gateway, main = (container(example("kserve"), name) for name in ("gateway", "main"))
    assert "--port=8000" in gateway["command"]
    assert 8000 not in {port["containerPort"] for port in main["ports"]}
    entry_point = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "docker/Dockerfile").read_text(), re.M)
    assert entry_point and main["command"] == json.loads(entry_point[1].replace("\\\n", ""))


def test_a_package_of_the_chart_renders_the_same(tmp_path: Path) -> None:
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    flags = ("--namespace", NAMESPACE, "--values", str(CHART / "examples/gpu.yaml"))
    done = helm("template", RELEASE, str(package), *flags)
    assert [m for m in yaml.safe_load_all(done.stdout) if m] == example("gpu")


def test_documented_commands_render() -> None:
    pages = [ROOT / "docs/kubernetes.md", ROOT / "docker/README.md"]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    commands = re.findall(r"^helm install (.*)$", text, re.MULTILINE)
    assert len(commands) == len(pages)
    for command in commands:
        name, chart, *flags = shlex.split(command)
        flags = [str(ROOT / flag) if flag.endswith(".yaml") else flag for flag in flags]
        assert helm("template", name, str(ROOT / chart), *flags).returncode == 0
    (problem,) = re.findall(r"^Error: values.*?^- at .*?$", text, re.MULTILINE | re.DOTALL)
    assert problem in template("--set", "server.replica=2").stderr


# Values that are refused


def test_the_schema_knows_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]  # Helm's own
    known = set(paths(schema))
    assert known == set(leaves(yaml.safe_load(DEFAULT.read_text()), known))


def paths(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all values that have no values of their own."""
    if "properties" not in schema:
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from paths(inner, f"{path}/{name}")


def leaves(values: object, known: set[str], path: str = "") -> Iterator[str]:
    if path in known or not isinstance(values, dict):
        yield path
    else:
        for name, inner in values.items():
            yield from leaves(inner, known, f"{path}/{name}")


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("server.replica=2", "at '/server': additional properties 'replica' not allowed"),
        ("server.replicas=two", "at '/server/replicas': got string, want integer"),
        ("server.replicas=-1", "at '/server/replicas': minimum: got -1, want 0"),
        ("server.terminationGracePeriodSeconds=30", "at '/server/terminationGracePeriodSeconds':"),
        ("server.args={serve}", "at '/server/args/0': 'serve' does not match pattern"),
        ("server.sharedMemory=1GB", "at '/server/sharedMemory': '1GB' does not match pattern"),
        ("model.name=a/b", "at '/model/name': 'a/b' does not match pattern"),
        ("gateway.mode=pod", "at '/gateway/mode': value must be one of 'deployment', 'sidecar',"),
        ("gateway.apiKeys.value=abc", "at '/gateway/apiKeys': additional properties 'value' not"),
        ("huggingFace.token=hf_1", "at '/huggingFace': additional properties 'token' not allowed"),
        ("autoscaling.kind=vpa", "at '/autoscaling/kind': value must be one of 'none', 'hpa',"),
        ("kserve.uri=org/model", "at '/kserve/uri': 'org/model' does not match pattern"),
        # Combinations
        ("inferencePool.endpointPicker=epp", "gateway.mode: must be sidecar with inferencePool."),
        (
            "kserve.uri=hf://org/model,gateway.mode=sidecar",
            "gateway.apiKeys.secret: must be empty with inferencePool.endpointPicker or kserve.uri",
        ),
        ("monitoring.enabled=true", "monitoring.gatewayKey.secret: name a Secret with one of"),
        ("server.nodes=0", "at '/server/nodes': minimum: got 0, want 1"),
        (
            "server.nodes=2,model.options.tensor_parallel_size=3",
            "pipeline_parallel_size), which are 3; got 2",
        ),
        (
            "server.nodes=2,kserve.uri=hf://org/model,gateway.mode=sidecar,gateway.apiKeys.secret=",
            "server.nodes: must be 1 with kserve.uri",
        ),
        ("autoscaling.minReplicas=9", "autoscaling.minReplicas: must be at most autoscaling."),
    ],
)
def test_wrong_values_are_refused_by_name(flag: str, problem: str) -> None:
    done = template("--set", flag)
    assert done.returncode == 1
    assert problem in done.stderr


# The rendered commands, run on this machine


@pytest.fixture(scope="module")
def ports() -> Iterator[Endpoints]:
    with ReservedEndpoints("127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as reserved:
        yield reserved.endpoints


@contextmanager
def running(
    command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(
    manifests: list[Manifest], ports: Endpoints, folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The entry point with the rendered arguments, variables and files, when it is ready."""
    rendered = container(manifests, "main")
    variables = {each["name"]: each["value"] for each in rendered["env"] if "value" in each}
    data = named(manifests, "ConfigMap", f"{RELEASE}-model")["data"]
    for mount in rendered["volumeMounts"]:
        if "subPath" in mount:
            path = folder / mount["mountPath"].removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(data[mount["subPath"]].replace("/run/secrets", f"{folder}/run/secrets"))
    variables |= {
        "PAGED_MODELS": f"{folder}{variables['PAGED_MODELS']}",
        "PAGED_HOST": "127.0.0.1",
        "PAGED_HTTP_PORT": str(ports.http_port),
        "PAGED_GRPC_PORT": str(ports.grpc_port),
        "PAGED_METRICS_PORT": str(ports.metrics_port),
        "TMPDIR": str(folder),
        **environment,
    }
    command = [sys.executable, str(ROOT / "docker/entrypoint.py"), *rendered["args"]]
    with running(command, variables, folder / "log") as process:
        wait_for(ports.http_port, rendered["startupProbe"], process, folder / "log")
        yield process


@pytest.fixture(scope="module")
def main(
    ports: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    """The default server."""
    with server(objects(DEFAULT), ports, tmp_path_factory.mktemp("server"), {}) as process:
        yield process


def wait_for(
    port: int, probe: Mapping[str, Any], process: subprocess.Popen[bytes], log: Path
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while get(port, probe["httpGet"]["path"])[0] != 200:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)


def get(
    port: int, path: str, body: Mapping[str, Any] | None = None, key: str = ""
) -> tuple[int, str]:
    """Return status and text; a status of 0 where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        connection.close()


@contextmanager
def gateway(manifests: list[Manifest], ports: Endpoints, folder: Path) -> Iterator[int]:
    """Yield the port of a gateway with the rendered command, which finds the server here."""
    rendered = container(manifests, "gateway")
    keys = folder / "api_keys"
    keys.write_text("key-of-the-test\n")
    with bind("127.0.0.1", 0, "port") as free:
        port = free.getsockname()[1]
    program, *arguments = rendered["command"]
    assert program == "paged-backend"
    here = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--triton": f"127.0.0.1:{ports.grpc_port}",
        "--triton-metrics": f"127.0.0.1:{ports.metrics_port}",
        "--api-key-file": str(keys),
    }
    for i, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if equals:
            arguments[i] = f"{name}={here[name]}"
    command = [sys.executable, "-m", "paged_backend.cli", *arguments]
    with running(command, {}, folder / "log") as process:
        wait_for(port, rendered["readinessProbe"], process, folder / "log")
        yield port


CHAT = {
    "messages": [{"role": "user", "content": "What does len do?"}],
    "max_tokens": 16,
    "temperature": 0,
}


@pytest.mark.server
@pytest.mark.usefixtures("main")
def test_a_chat_through_the_rendered_gateway(ports: Endpoints, tmp_path: Path) -> None:
    with gateway(objects(DEFAULT), ports, tmp_path) as port:
        status, text = get(port, "/v1/chat/completions", CHAT, key="key-of-the-test")
        assert status == 200
        assert "Return the number of items in a container." in text
        assert get(port, "/v1/chat/completions", CHAT)[0] == 401
        assert get(port, "/metrics")[0] == 401
        assert get(port, "/metrics", key="key-of-the-test")[0] == 200
    assert "\npaged_num_requests_waiting{" in get(ports.metrics_port, "/metrics")[1]


@pytest.mark.server
@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("name", ["inference-pool", "kserve"])
def test_a_router_finds_requests_and_metrics_at_one_port(
    name: str, ports: Endpoints, tmp_path: Path
) -> None:
    values = CHART / "examples" / f"{name}.yaml"
    manifests = objects(values, "--set", "model.name=paged_llm")
    with gateway(manifests, ports, tmp_path) as port:
        assert get(port, "/v1/chat/completions", CHAT)[0] == 200
        metrics = get(port, "/metrics")[1]
        assert "nv_trt_llm_request_metrics{" in metrics
        assert "nv_trt_llm_kv_cache_block_metrics{" in metrics
        if name == "kserve":
            route = {"model": f"publishers/{NAMESPACE}/models/paged_llm"}
            assert get(port, "/v1/chat/completions", CHAT | route)[0] == 200
            assert get(port, "/health")[0] == 200


@pytest.mark.server
def test_the_server_ends_as_kubernetes_asks(main: subprocess.Popen[bytes]) -> None:
    main.send_signal(signal.SIGTERM)
    assert main.wait(EXIT_TIMEOUT_S + 15) == 0


@pytest.mark.server
def test_the_pods_of_a_group_answer_together(tmp_path: Path) -> None:
    """A leader and a worker with the variables of a LeaderWorkerSet."""
    flags = (
        "model.name=paged_llm,model.options.model=demo,model.options.tensor_parallel_size=1,"
        "model.options.max_model_len=1024"
    )
    manifests = objects(CHART / "examples/several-hosts.yaml", "--set", flags)
    key = tmp_path / "run/secrets/paged-cluster/key"
    key.parent.mkdir(parents=True)
    key.write_text("a secret of the hosts of this test")
    key.chmod(0o440)
    with bind("127.0.0.1", 0, "port") as free:
        port = free.getsockname()[1]
    group = {
        "LWS_LEADER_ADDRESS": "localhost",
        "LWS_GROUP_SIZE": "2",
        "MASTER_PORT": str(port),
        "HF_TOKEN": "",
    }
    program, *arguments = container(manifests, "worker")["args"]
    assert program == "paged-backend"
    for path in ("/tmp", "/run/secrets"):  # this order, as tmp_path is in /tmp
        arguments = [each.replace(f"={path}/", f"={tmp_path}{path}/") for each in arguments]
    probe = container(manifests, "worker")["startupProbe"]["exec"]["command"]
    probe = [each.replace("/tmp/", f"{tmp_path}/tmp/") for each in probe]
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "paged_backend.cli", *arguments]
    environment, log = group | {"LWS_WORKER_INDEX": "1"}, tmp_path / "log-of-the-worker"
    with ExitStack() as started:
        worker = started.enter_context(running(command, environment, log))
        reserved = started.enter_context(
            ReservedEndpoints("127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
        )
        assert subprocess.run(probe).returncode == 1, "there is no server yet"
        leader = group | {"LWS_WORKER_INDEX": "0"}
        started.enter_context(server(manifests, reserved.endpoints, tmp_path, leader))
        door = started.enter_context(gateway(manifests, reserved.endpoints, tmp_path))
        status, text = get(door, "/v1/chat/completions", CHAT, key="key-of-the-test")
        assert status == 200 and "Return the number of items in a container." in text
        assert "node 1 loads" in log.read_text()
        assert subprocess.run(probe).returncode == 0
        # Another pod takes the place of one that is lost, and joins the server's next engine.
        worker.kill()
        worker.wait()
        started.enter_context(running(command, environment, log))
        status, text = get(door, "/v1/chat/completions", CHAT, key="key-of-the-test")
        assert status == 200 and "Return the number of items in a container." in text
        assert "node 1 loads" in log.read_text()
