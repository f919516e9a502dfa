# SPDX-License-Identifier: Apache-2.0
"""A cluster's Kubernetes objects: valid for the API, consistent among themselves, and run as pods."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from moe_lora.cli.cluster import cluster as cluster_command
from moe_lora.cli.provision_result import plan_yaml
from moe_lora.cli.serve import serve
from moe_lora.config.cluster import cluster_of
from moe_lora.config.front_end import split_store
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import EngineStats
from moe_lora.dist.cluster.controller import ALIVE, READY
from moe_lora.dist.cluster.leadership import StoreError
from moe_lora.dist.cluster.leadership.kubernetes_store import KubernetesStore
from moe_lora.dist.cluster.leadership.leader import _POLL_S
from moe_lora.dist.cluster.listener import RECOVERY_S
from moe_lora.dist.launch import run_role
from moe_lora.dist.launch.kubernetes import CERTIFICATES, CONFIG, STATE, Pods, manifests, manifests_text
from moe_lora.dist.net.keys import make_keys
from moe_lora.serve.metrics import Metrics
from tests.dist.api_server import ApiServer
from tests.dist.cluster_jobs import ADAPTERS, DEMO, Drive, local_answers, make_requests, until
from tests.dist.launch import pods as standing_in
from tests.dist.namespaces import Unavailable
from tests.patience import PATIENCE_S
from tests.provision.plan.plans import planned
from tests.serve.test_placement import cluster_config

CONTENT: dict[str, Any] = {
    "model_dir": "/srv/models/model",
    "served_model_name": "demo",
    "adapters": {name: f"/srv/models/adapters/{name}" for name in ADAPTERS},
    "engine": {"num_instances": 2, "dtype": "float32", "eager": True, "num_threads": 1, "device": "cpu"},
    "lora_server": {"layout": "EP2-PP1", "capacity": 4},
    "front_end": {"routing": "round_robin"},
}
PODS = Pods(image="registry.example/moe-lora:1", claims={"models": "/srv/models"})


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def roles(objects: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Replicas and container of each StatefulSet."""
    found = {}
    for name, one in of_kind(objects, "StatefulSet").items():
        [container] = one["spec"]["template"]["spec"]["containers"]
        found[name] = one["spec"]["replicas"], container
    return found


def in_pods(objects: list[dict[str, Any]]) -> Any:
    [file] = of_kind(objects, "ConfigMap").values()
    return yaml.safe_load(file["data"]["cluster.yaml"])


@pytest.mark.parametrize(("num_front_ends", "num_controllers"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("scaling", [{}, {"scaling": {"max_instances": 6}}])
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_objects_follow_the_schemas_of_the_api(num_front_ends, num_controllers, scaling, version):
    pods = Pods(
        image="image",
        num_front_ends=num_front_ends,
        claims={"models": "/srv/models"},
        secrets={"api-keys": "/srv/keys"},
    )
    engine = {**CONTENT["engine"], "device": "cuda", "expert_parallel": 4}
    content = {**CONTENT, **scaling, "engine": engine, "controllers": num_controllers}
    for one in yaml.safe_load_all(manifests_text(content, pods)):
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(("num_front_ends", "num_controllers"), [(1, 1), (3, 1), (3, 2)])
def test_addresses_are_those_of_pods_behind_headless_services(num_front_ends, num_controllers):
    pods = Pods(image="image", num_front_ends=num_front_ends)
    objects = manifests({**CONTENT, "controllers": num_controllers}, pods)
    cluster = cluster_of(in_pods(objects), Path(CONFIG))
    services, hosts = of_kind(objects, "Service"), set()
    for name, one in of_kind(objects, "StatefulSet").items():
        service = services[one["spec"]["serviceName"]]["spec"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]
        assert service["selector"].items() <= labels.items()
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        hosts |= {
            f"{name}-{number}.{one['spec']['serviceName']}.default.svc.cluster.local"
            for number in range(one["spec"]["replicas"])
        }
    dialled = {address.host for address in cluster.dialled_addresses().values()}
    assert len(dialled) == num_front_ends + num_controllers * (num_front_ends > 1)
    assert cluster.lora_server is not None
    assert dialled | {cluster.lora_server.address.partition(":")[0]} <= hosts


def test_instances_and_ranks_are_pods_with_the_gpus_of_their_ranks():
    engine = {"num_instances": 6, "expert_parallel": 2}
    found = roles(manifests({**CONTENT, "engine": engine}, PODS))
    replicas, instance = found["moe-lora-instance"]
    assert (replicas, instance["resources"]) == (6, {"limits": {"nvidia.com/gpu": "2"}})
    replicas, rank = found["moe-lora-lora-server"]
    assert (replicas, rank["resources"]) == (2, {"limits": {"nvidia.com/gpu": "1"}})
    assert "resources" not in found["moe-lora-front-end"][1]


def test_an_autoscaler_sets_the_number_of_instances_by_metrics_of_the_clients_service():
    scaling = {"max_instances": 6, "waiting_high": 3, "add_pause_s": 40, "remove_pause_s": 200}
    objects = manifests({**CONTENT, "scaling": scaling}, PODS)
    [(name, scaler)] = of_kind(objects, "HorizontalPodAutoscaler").items()
    spec, sets = scaler["spec"], of_kind(objects, "StatefulSet")
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    assert {one for one in sets if "replicas" not in sets[one]["spec"]} == {name}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 6)
    assert name in of_kind(objects, "PodDisruptionBudget")
    shown = Metrics(cluster_config(), SimpleNamespace(figures=None, link=None))
    shown.stats = EngineStats()
    text = shown.render().decode()
    for one, value in zip(spec["metrics"], ("3", "51"), strict=True):  # 51: 80% of max_num_seqs
        found = one["object"]
        place = found["describedObject"]
        assert "http" in {
            port["name"] for port in of_kind(objects, place["kind"])[place["name"]]["spec"]["ports"]
        }
        assert found["target"] == {"type": "AverageValue", "averageValue": value}
        labels = found["metric"].get("selector", {"matchLabels": {}})["matchLabels"].items()
        series = re.compile(f"^{found['metric']['name'].replace('vllm_', 'vllm:')}{{(.*)}}", re.MULTILINE)
        assert any(all(f'{k}="{v}"' in line for k, v in labels) for line in series.findall(text))
    up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
    assert up == {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 40}],
    }
    assert down == {
        "stabilizationWindowSeconds": 200,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 200}],
    }


def test_the_autoscaler_alone_changes_with_the_bounds():
    fewer, more = (manifests({**CONTENT, "scaling": {"max_instances": most}}, PODS) for most in (3, 4))
    changed = [one["kind"] for one, other in zip(fewer, more, strict=True) if one != other]
    assert changed == ["HorizontalPodAutoscaler"]
    without = manifests(CONTENT, PODS)
    assert in_pods(fewer) == in_pods(without)
    assert "HorizontalPodAutoscaler" not in {one["kind"] for one in without}


@pytest.mark.parametrize("num_controllers", [1, 2])
def test_commands_are_those_of_the_roles(num_controllers):
    objects = manifests({**CONTENT, "controllers": num_controllers}, Pods(image="image", num_front_ends=2))
    for _, container in roles(objects).values():
        command = container["command"]
        assert command[command.index("--config") + 1] == f"{CONFIG}/cluster.yaml"
        if "moe-lora" in command:
            _, verb, *words = command[command.index("moe-lora") :]
            words = [word.replace(f"{CONFIG}/cluster.yaml", __file__) for word in words]
            given = serve.make_context("serve", words).params
            assert (verb, given["role"] in ("front-end", "controller")) == ("serve", True)
            is_named = given["role"] == "front-end" or num_controllers > 1
            assert given["name"] == (f"{given['role']}-$(INDEX)" if is_named else None)
        else:
            module = command.index("moe_lora.dist.launch.run_role")
            given = run_role.parser().parse_args([*command[module + 1 :], "--status-fd", "9"])
            assert given.role in ("lora-server", "instance")


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_every_role_says_when_it_is_ready(num_front_ends):
    objects = manifests(CONTENT, Pods(image="image", num_front_ends=num_front_ends))
    for name, (_, container) in roles(objects).items():
        assert "readinessProbe" in container, name


def of_controller() -> tuple[dict[str, Any], dict[str, str]]:
    """The container and its environment."""
    _, container = roles(manifests(CONTENT, Pods(image="image", num_front_ends=2)))["moe-lora-controller"]
    return container, {one["name"]: one.get("value", "") for one in container["env"]}


def test_a_controller_is_live_and_ready_while_its_files_have_a_recent_time(tmp_path):
    container, environment = of_controller()
    assert environment[ALIVE] != environment[READY]
    file = tmp_path / "probed"
    for probe, variable in (("startupProbe", ALIVE), ("livenessProbe", ALIVE), ("readinessProbe", READY)):
        words = container[probe]["exec"]["command"]
        assert environment[variable] in words[-1]
        here = [word.replace(environment[variable], str(file)) for word in words]

        def passes(here: list[str] = here) -> bool:
            return subprocess.run(here, capture_output=True, check=False).returncode == 0

        assert not passes()
        file.touch()
        assert passes()
        os.utime(file, (0, 0))
        assert not passes()
        file.unlink()


def test_a_restarted_controller_has_no_files_of_the_former(tmp_path):
    container, environment = of_controller()
    command, paths = container["command"], [environment[ALIVE], environment[READY]]
    words = [*command[: command.index("moe-lora")], "find", str(tmp_path), "-type", "f"]
    for number, path in enumerate(paths):
        file = tmp_path / str(number)
        file.touch()
        words = [word.replace(path, str(file)) for word in words]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == ""


def test_the_next_controller_decides_within_10_s_of_a_kill():
    objects = manifests({**CONTENT, "controllers": 2}, Pods(image="image", num_front_ends=2))
    leadership = cluster_of(in_pods(objects), Path(CONFIG)).leadership
    assert leadership is not None
    assert leadership.ttl_s + 2 * _POLL_S + RECOVERY_S <= 10


@pytest.mark.parametrize("number", [None, 1])
def test_one_controller_is_the_default(number):
    pods = Pods(image="image", num_front_ends=2)
    assert manifests({**CONTENT, "controllers": number}, pods) == manifests(CONTENT, pods)


def test_several_controllers_choose_a_leader_by_a_lease_that_no_other_pod_may_write(tmp_path):
    pods = Pods(image="image", name="demo", namespace="ml", num_front_ends=2)
    objects = manifests({**CONTENT, "controllers": 2}, pods)
    cluster = cluster_of(in_pods(objects), Path(CONFIG))
    assert cluster.leadership is not None
    scheme, [namespace], lease = split_store("", cluster.leadership.store)
    assert (scheme, namespace) == ("kubernetes", "ml")
    assert sorted(cluster.controllers) == ["controller-0", "controller-1"]
    [role] = of_kind(objects, "Role").values()
    [binding] = of_kind(objects, "RoleBinding").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    [subject] = binding["subjects"]
    accounts = of_kind(objects, "ServiceAccount")
    assert not any(one["automountServiceAccountToken"] for one in accounts.values())
    for name, one in of_kind(objects, "StatefulSet").items():
        spec = one["spec"]["template"]["spec"]
        leads = name == "demo-controller"
        assert (spec["serviceAccountName"] == subject["name"]) == leads
        assert spec.get("automountServiceAccountToken", False) == leads
        assert spec["serviceAccountName"] in accounts
    api = ApiServer(tmp_path, rules=role["rules"])
    api.start()
    try:
        with mock.patch.dict("os.environ", api.environment):
            stores = [KubernetesStore(namespace, lease, 300.0, api.account(name)) for name in "ab"]
            other = KubernetesStore(namespace, "other", 300.0, api.account("a"))
        _, epoch = stores[0].acquire("a")
        stores[0].renew()
        stores[0].release()
        assert stores[1].acquire("b")[1] > epoch
        with pytest.raises(StoreError, match="403"):
            other.acquire("a")
    finally:
        api.stop()
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "create", "update"}


def test_one_controller_needs_no_access_to_the_api():
    objects = manifests(CONTENT, Pods(image="image", num_front_ends=2))
    assert {"Role", "RoleBinding"}.isdisjoint(one["kind"] for one in objects)
    [account] = of_kind(objects, "ServiceAccount").values()
    assert not account["automountServiceAccountToken"]


def test_every_folder_that_a_role_writes_to_is_a_volume():
    cluster = cluster_of(in_pods(manifests(CONTENT, PODS)), Path(CONFIG))
    assert cluster.engine.state_dir == STATE
    assert cluster.certificates == CERTIFICATES
    assert cluster.lora_server is not None
    assert cluster.lora_server.store_dir.startswith(f"{STATE}/")
    for _, container in roles(manifests(CONTENT, PODS)).values():
        places = {one["mountPath"] for one in container["volumeMounts"]}
        assert {CONFIG, CERTIFICATES, STATE, "/tmp", "/dev/shm", "/srv/models"} == places
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_a_changed_file_starts_the_pods_anew():
    def read(content: dict[str, Any]) -> set[str]:
        objects = manifests(content, PODS)
        [file] = of_kind(objects, "ConfigMap")
        for one in of_kind(objects, "StatefulSet").values():
            sources = {volume["name"]: volume for volume in one["spec"]["template"]["spec"]["volumes"]}
            assert sources["config"]["configMap"]["name"] == file
        return {file}

    changed = {**CONTENT, "front_end": {"routing": "random"}}
    assert read(CONTENT) == read(CONTENT) != read(changed)


def test_access_is_for_pods_of_the_cluster_and_for_clients_of_the_front_end():
    objects = manifests(CONTENT, PODS)
    policies = of_kind(objects, "NetworkPolicy")
    own = policies["moe-lora"]["spec"]
    assert own["ingress"] == [{"from": [{"podSelector": own["podSelector"]}]}]
    clients = policies["moe-lora-http"]["spec"]
    service = of_kind(objects, "Service")["moe-lora"]["spec"]
    assert clients["podSelector"]["matchLabels"] == service["selector"]
    labels = of_kind(objects, "StatefulSet")["moe-lora-front-end"]["spec"]["template"]["metadata"]["labels"]
    assert own["podSelector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_dir": "models/base"}, "model_dir: models/base is a relative path"),
        ({"model_dir": "../base"}, "model_dir: ../base is a relative path"),
        ({"front_end": {"port": 7600}}, "front_end.port has port 7600"),
        ({"front_end": {"admin_address": "0.0.0.0:7701"}}, "front_end.admin_address has port 7701"),
        ({"front_end": {"placement": "loraserve"}, "engine": {}}, "a placement is over several instances"),
        ({"lora_server": {"device_puts": "ibgda"}}, "lora_server.device_puts joins processes of one host"),
        ({"engine": {"host_workers": 1, "host_cores": [1]}}, "engine.host_cores names cores of a host"),
        ({"adapters": {"a": "adapters/a"}}, "adapters.a: adapters/a is a relative path"),
        ({"certificates": "certificates"}, "certificates follows from the pods; leave the setting out"),
        ({"controllers": 2}, "controllers=2 needs several front ends; give --front-ends 2 or more"),
        *(
            ({"controllers": value}, f"controllers={value!r}: give a number from 1 to 64")
            for value in (0, 65, -1, "2", True, 2.0, "two", {}, {"a": {}})
        ),
        ({"leadership": {"store": "etcd://h:1"}}, "leadership follows from the pods"),
        ({"front_end": {"engines_address": "a:1"}}, "front_end.engines_address follows from the pods"),
        ({"front_end": {"host": "127.0.0.1"}}, "front_end.host follows from the pods"),
        ({"front_end": {"port": 0}}, "front_end.port has port 0"),
        ({"front_end": {"api_keys": "keys.json"}}, "front_end.api_keys: keys.json is a relative path"),
        ({"lora_server": {"address": "10.0.0.2:7500"}}, "lora_server.address follows from the pods"),
        ({"lora_server": {"transport": "shm"}}, "lora_server.transport=shm joins processes of one host"),
        ({"lora_server": {"layout": "EP2"}, "devices": {"lora_server": [0, 1]}}, "devices follows from"),
        ({"scaling": {"max_instances": 1}}, "2 instances are outside of scaling.min_instances=1 and"),
        ({"scaling": {"max_instances": 2, "ttft_ms": 500}}, "scaling.ttft_ms has no meaning for Kubernetes"),
        ({"scaling": {"max_instances": 2, "interval_s": 9}}, "scaling.interval_s has no meaning for"),
        ({"engine": {"max_loras": 0}}, "engine.max_loras"),
        ({"engine": {"no_such": 1}}, "no_such"),
    ],
)
def test_a_file_that_no_pod_could_use_is_refused(change, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        manifests({**CONTENT, **change}, PODS)


def test_several_controllers_share_no_registry():
    content = {**CONTENT, "controllers": 2, "registry": {"folder": "/srv/models/registry"}}
    pods = Pods(image="image", num_front_ends=2)
    with pytest.raises(ConfigError, match=r"controllers=2 and registry .*; give controllers: 1, or leave"):
        manifests(content, pods)
    manifests({**content, "controllers": 1}, pods)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "Moe_Lora"}, "name='Moe_Lora' is no name for Kubernetes"),
        ({"namespace": "1-a"}, "namespace='1-a' is no name for Kubernetes"),
        ({"claims": {"models": "models"}}, "models=models: give an absolute folder"),
        ({"claims": {"models": "/srv/../models"}}, "give an absolute folder"),
        ({"claims": {"models": "/"}}, "give an absolute folder"),
        ({"claims": {"models": "/srv"}}, "contain each other"),
        ({"claims": {"models": "/srv/a"}, "secrets": {"keys": "/srv/a/keys"}}, "contain each other"),
    ],
)
def test_pods_that_kubernetes_would_refuse_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Pods(image="image", **given)


def test_a_plan_of_provision_becomes_pods(tmp_path):
    plan, file = planned(), tmp_path / "plan.yaml"
    file.write_text(plan_yaml(plan, "/srv/models/base"))
    made = CliRunner().invoke(
        cluster_command, ["manifests", str(file), "--image", "image", "--claim", "models=/srv/models"]
    )
    assert made.exit_code == 0, made.output
    found = {name: one for name, (one, _) in roles(list(yaml.safe_load_all(made.output))).items()}
    assert found == {
        "moe-lora-front-end": 1,
        "moe-lora-lora-server": plan.lora_server_gpus,
        "moe-lora-instance": plan.instances,
    }


@pytest.mark.parametrize("claim", ["models", "models=", "=/srv/models"])
def test_a_claim_without_a_place_is_told(tmp_path, claim):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(CONTENT))
    made = CliRunner().invoke(cluster_command, ["manifests", str(file), "--image", "i", "--claim", claim])
    assert made.exit_code == 2
    assert "give NAME=PATH" in made.output


@pytest.mark.slow
def test_the_pods_answer_and_outlive_the_end_of_each_role(tmp_path):
    requests = make_requests(16)
    with ExitStack() as stack:
        models = tmp_path / "models"
        shutil.copytree(DEMO / "model", models / "model")
        shutil.copytree(DEMO / "adapters", models / "adapters")
        keys = make_keys(tmp_path / "certificates")
        objects = list(yaml.safe_load_all(manifests_text(CONTENT, PODS)))
        claims = {"models": models, "moe-lora-certificates": keys.folder}
        pods = standing_in.Pods(objects, tmp_path / "pods", claims)
        try:
            stack.enter_context(pods)
        except Unavailable as reason:
            pytest.skip(f"network namespaces can't be made here: {reason}")
        pods.start()
        front_end = "moe-lora-front-end-0"
        pods.wait_for(front_end, "startupProbe")
        for name in pods.pods:
            pods.wait_for(name, "readinessProbe")
        log = pods.pods[front_end].job
        assert log is not None
        log.wait_for("dialled in", 2)

        def drive(times: int) -> Drive:
            bodies = [
                {
                    "model": model or "demo",
                    "prompt": prompt,
                    "max_tokens": 8,
                    "ignore_eos": True,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                for model, prompt in requests * times
            ]
            host = pods.network.hosts[front_end]
            return Drive(host, {"url": f"http://{host.address}:8000", "bodies": bodies, "pause_s": 0.0})

        expected = local_answers(requests)
        assert drive(1).answers() == expected
        running = drive(4)
        assert pods.delete("moe-lora-instance-1") == 0
        pods.start("moe-lora-instance-1")
        assert running.answers() == expected * 4
        log.wait_for("instance instance-1 dialled in", 2)
        running = drive(4)
        for rank in ("moe-lora-lora-server-1", "moe-lora-lora-server-0"):
            pods.delete(rank)
            pods.start(rank)
            pods.wait_for(rank, "readinessProbe")
        assert running.answers() == expected * 4
        assert pods.delete(front_end) in (0, 143)
        pods.move(front_end)
        pods.start(front_end)
        pods.wait_for(front_end, "readinessProbe")
        assert drive(1).answers() == expected


@pytest.mark.slow
def test_controllers_in_pods_follow_each_other_by_a_lease(tmp_path):
    content = {name: value for name, value in CONTENT.items() if name != "lora_server"}
    content |= {"engine": {**content["engine"], "num_instances": 1}, "controllers": 2}
    objects = manifests(content, Pods(image="image", claims={"models": "/srv/models"}, num_front_ends=2))
    keys = make_keys(tmp_path / "certificates")
    claims = {"models": DEMO, "moe-lora-certificates": keys.folder}
    pods = standing_in.Pods(objects, tmp_path / "pods", claims)
    with ExitStack() as stack:
        try:
            stack.enter_context(pods)
        except Unavailable as reason:
            pytest.skip(f"network namespaces can't be made here: {reason}")
        pods.start()
        for name in pods.pods:
            pods.wait_for(name, "readinessProbe")
        controllers = [name for name in pods.pods if name.startswith("moe-lora-controller")]

        def num_leads(name: str) -> int:
            job = pods.pods[name].job
            assert job is not None
            return job.count("the controller begins: state")

        def load(adapter: str) -> int:
            front_end = "moe-lora-front-end-1"
            body = {"lora_name": adapter, "lora_path": f"/srv/models/adapters/{ADAPTERS[0]}"}
            url = f"http://{pods.network.hosts[front_end].address}:8000/v1/load_lora_adapter"
            with pods.network.entered(front_end):
                return httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False).status_code

        until(lambda: sum(map(num_leads, controllers)) == 1, lambda: "no controller leads")
        until(lambda: load("first") in (200, 400), lambda: "nothing loads")
        leader, standby = sorted(controllers, key=num_leads, reverse=True)
        pods.api.cut.add(standby)
        process = pods.pods[leader].job.process
        process.kill()
        process.wait(PATIENCE_S)
        assert load("none") == 503
        pods.api.cut.clear()
        until(lambda: num_leads(standby) == 1, lambda: "the standby does not lead")
        pods.start(leader)
        until(lambda: load("second") == 200, lambda: "nothing loads after the kill")
        pods.wait_for(leader, "readinessProbe")
        before = num_leads(leader)
        assert pods.delete(standby) == 0
        until(lambda: num_leads(leader) == before + 1, lambda: "nobody follows")
        pods.start(standby)
        for name in controllers:
            pods.wait_for(name, "livenessProbe")
        assert load("third") == 200
