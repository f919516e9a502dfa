# SPDX-License-Identifier: Apache-2.0
"""cluster.yaml: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import pytest

from moe_lora.config import (
    ControllerConfig,
    EngineConfig,
    FrontEndConfig,
    FrontEndPlace,
    LoraServerConfig,
    PoolConfig,
    ProvisionConfig,
    RegistryConfig,
)
from moe_lora.config.cluster import cluster_text, read_cluster
from moe_lora.config.front_end import split_store
from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.dist.net.keys import keys_of, make_keys

WHOLE = """
model_dir: base
served_model_name: demo
adapters:
  upper: adapters/upper
  lower: /elsewhere/lower
certificates: certificates
engine: {dtype: float32, eager: true, kv_cache_gb: 1, host_workers: 2, host_cores: [1, 8]}
lora_server: {layout: EP2-PP1, capacity: 4, address: "10.0.0.2:7500", store_dir: store, transport: gloo}
registry: {folder: registered, adapters: [lower, third]}
front_end: {host: 0.0.0.0, port: 80, engines_address: "10.0.0.1:7600", routing: round_robin}
"""
SEVERAL = """
model_dir: base
front_end: {host: 0.0.0.0, port: 80, placement: loraserve}
front_ends:
  one: {engines_address: "10.0.0.1:7600"}
  two: {host: 10.0.0.2, port: 81, engines_address: "10.0.0.2:7600"}
controller: {address: "10.0.0.1:7700", engines_address: "10.0.0.1:7701"}
"""


def _controllers(a: str, b: str, store: str, more: str = "ttl_s: 5") -> str:
    """A file with two controllers; each one's second port is the next."""
    places = [f"{{address: '{one}', engines_address: '{one[:-1]}{int(one[-1]) + 1}'}}" for one in (a, b)]
    return (
        f"model_dir: m\ncontrollers: {{a: {places[0]}, b: {places[1]}}}\n"
        f"leadership: {{store: '{store}', {more}}}\nfront_end: {{engines_address: 'f:1'}}\n"
    )


@pytest.fixture
def read(tmp_path):
    def read_text(text: str):
        (tmp_path / "cluster.yaml").write_text(text)
        return read_cluster(tmp_path / "cluster.yaml")

    return read_text


def test_settings_of_every_section_arrive(read, tmp_path):
    cluster = read(WHOLE)
    assert cluster.engine == EngineConfig(
        model_dir=str(tmp_path / "base"),
        adapters=(("upper", str(tmp_path / "adapters/upper")), ("lower", "/elsewhere/lower")),
        dtype="float32",
        eager=True,
        kv_cache_gb=1.0,
        host_workers=2,
        host_cores=(1, 8),
    )
    assert cluster.front_end == FrontEndConfig(
        host="0.0.0.0", port=80, engines_address="10.0.0.1:7600", routing="round_robin"
    )
    assert cluster.registry == RegistryConfig(
        folder=str(tmp_path / "registered"), adapters=("lower", "third")
    )
    assert (cluster.served_model_name, cluster.certificates) == ("demo", str(tmp_path / "certificates"))
    config = cluster.instance("instance-1")
    assert config.instance == "instance-1"
    assert config.lora_server == LoraServerConfig(
        layout="EP2-PP1",
        capacity=4,
        address="10.0.0.2:7500",
        certificates=str(tmp_path / "certificates"),
        store_dir=str(tmp_path / "store"),
        transport="gloo",
    )


def test_a_value_may_lie_over_a_merged_one(read):
    assert read("model_dir: m\nengine: {<<: {max_loras: 3}, max_loras: 4}").engine.max_loras == 4


def test_a_model_alone_is_enough_for_one_host(read):
    cluster = read("model_dir: some/base")
    assert cluster.served_model_name == "base"
    assert cluster.instance().lora_server is None


def test_the_load_is_watched_as_the_file_says(read):
    assert read("model_dir: m").provision is None
    assert read("model_dir: m\nprovision:").provision == ProvisionConfig()
    found = read("model_dir: m\nlora_server: {}\nprovision: {window_s: 60, auto_resize: true}").provision
    assert found == ProvisionConfig(window_s=60.0, auto_resize=True)


def test_adapters_lie_in_a_pool_as_the_file_says(read):
    assert read("model_dir: m").instance().pool is None
    assert read("model_dir: m\npool: {}").instance().pool == PoolConfig()
    given = "{replicas: 2, transport: gloo, host: 10.0.0.3}"
    assert read(f"model_dir: m\npool: {given}").instance("one").pool == PoolConfig(
        replicas=2, transport="gloo", host="10.0.0.3"
    )


def test_parameters_of_dlora_are_the_files(read, tmp_path):
    config = read("model_dir: m\nengine: {batching: dlora}\ndlora: {credit: 32, period: 4}")
    assert config.engine.dlora == DLoraConfig(credit=32.0, period=4)
    again = tmp_path / "again.yaml"
    again.write_text(cluster_text(config))
    assert read_cluster(again).engine.dlora == config.engine.dlora, "each role reads them so"
    assert read("model_dir: m\nengine: {batching: dlora}").engine.dlora is None, "the defaults"


def test_certificates_are_read_from_the_folder(read, tmp_path):
    assert keys_of(read("model_dir: m\nfront_end: {engines_address: /run/s}")) is None
    with pytest.raises(ConfigError, match=r"front-end\.engines_address=h:1 .* `moe-lora cluster init`"):
        keys_of(read("model_dir: m\nfront_end: {engines_address: 'h:1'}"))
    with pytest.raises(ConfigError, match="moe-lora cluster init"):
        keys_of(read("model_dir: m\ncertificates: absent"))
    made = make_keys(tmp_path / "made")
    assert keys_of(read("model_dir: m\ncertificates: made")) == made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "must be a mapping"),
        ("a: b: c", "not valid YAML"),
        (f"{WHOLE}front_end: {{}}", "the name 'front_end' is given twice"),
        ("model_dir: m\nengine: {eager: true, dtype: auto, eager: false}", "'eager' is given twice"),
        ("engine: {}", "model_dir=None must be a text"),
        (
            "model_dir: m\nmodel_directory: x",
            "model_directory is not a setting; did you mean model_dir?  allowed are model_dir, served_",
        ),
        (
            "model_dir: m\nengine: {max_seqs: 3}",
            "engine.max_seqs is not a setting; did you mean max_num_seqs?  allowed are dtype",
        ),
        ("model_dir: m\nengine: {model_dir: x}", "engine.model_dir is not a setting"),
        ("model_dir: m\nlora_server: {key: x}", "lora_server.key is not a setting; allowed are layout"),
        ("model_dir: m\nfront_end: {admin_address: 'a:80', port: 80}", "admin_address=a:80 has port=80"),
        ("model_dir: m\nfront_end: {tls_key: k.pem}", "tls_cert and tls_key go together"),
        ("model_dir: m\nfront_end: {api_keys: 3}", "front_end.api_keys=3 must be a text"),
        (
            "model_dir: m\nengine: {adapter_root: a}\nregistry: {folder: b}",
            "is not in engine.adapter_root",
        ),
        ("model_dir: m\nfront_end: {ports: 1}", "allowed are routing, performance_model, performance_form"),
        ("model_dir: m\nengine: {max_loras: many}", "engine.max_loras='many' must be a whole number"),
        ("model_dir: m\nengine: {max_loras: true}", "engine.max_loras=True must be a whole number"),
        ("model_dir: m\nengine: {max_model_len: x}", "must be a whole number or null"),
        ("model_dir: m\nengine: {host_cores: [x]}", "must be a list of whole numbers"),
        ("model_dir: m\nengine: {max_loras: 0}", "max_loras=0 must be 1 or more"),
        ("model_dir: m\nlora_server: {capacity: 0}", "lora_server.capacity=0 must be 1 or more"),
        ("model_dir: m\nfront_end: {port: 70000}", "front_end.port=70000 must be between"),
        (
            "model_dir: m\nfront_end: {heartbeat_timeout_s: 40}",
            "heartbeat_timeout_s=40.0 must be positive and below heartbeat_dead_s=30.0",
        ),
        ("model_dir: m\nfront_end: {performance_form: half}", "choose one of toppings, full"),
        ("model_dir: m\nfront_end: {rank_aware_cost: mine}", "choose one of others, all"),
        ("model_dir: m\ndlora: {credit: 1}", "dlora is a section for batching='dlora', not for"),
        ("model_dir: m\nengine: {batching: auto}\ndlora: {}", "set engine.batching to dlora"),
        *(
            (f"model_dir: m\nengine: {{batching: dlora}}\ndlora: {{{given}}}", reason)
            for given, reason in (
                ("credits: 1", "dlora.credits is not a setting; did you mean credit?"),
                ("credit: 0", "dlora.credit=0.0 must be positive and finite"),
                ("credit: .nan", "dlora.credit=nan must be positive and finite"),
                ("gamma_mul: 0.5", "dlora.gamma_mul=0.5 must be 1 or more"),
                ("period: 1.5", "dlora.period=1.5 must be a whole number"),
                ("t_normal: 0", "dlora.t_normal=0.0 must be 1 or more"),
                ("t_starve: 4999", "dlora.t_normal=5000 is above dlora.t_starve=4999; lower the first"),
                ("alpha_switch: 2", "dlora.alpha_switch=2 is above dlora.most_threshold=1.5"),
                ("beta_switch: 0.05", "dlora.least_threshold=0.1 is above dlora.beta_switch=0.05"),
                ("least_threshold: 3, most_threshold: 2", "is above dlora."),
            )
        ),
        ("model_dir: m\nfront_end: {slo_tpot_s: 0}", "slo_tpot_s=0.0 must be positive and finite"),
        ("model_dir: m\nfront_end: {mean_output_tokens: .inf}", "mean_output_tokens=inf must be positive"),
        (
            "model_dir: m\nfront_end: {adapter_load_s_per_rank: -1}",
            "adapter_load_s_per_rank=-1.0 must be 0 or more",
        ),
        ("model_dir: m\nfront_end: {engines_address: here}", "'here' is not host:port"),
        ("model_dir: m\nfront_end: {engines_address: 'a..b:1'}", "'a..b:1' is not host:port"),
        ("model_dir: m\nfront_end: {engines_address: 'h:0'}", "'h:0' is not host:port"),
        ("model_dir: m\nfront_end: {engines_address: '::1:7600'}", "'::1:7600' is not host:port"),
        (
            "model_dir: m\nfront_end: {engines_address: '0.0.0.0:7600'}",
            "dialled by other roles, and names no",
        ),
        ("model_dir: m\nlora_server: {address: '[::]:7500'}", "lora_server.address=[::]:7500 is dialled by"),
        ("model_dir: m\nfront_end: {engines_address: 'h:²'}", "'h:²' is not host:port"),
        ("model_dir: m\nfront_ends: {a: {engines_address: 'h:1'}}", "front_ends needs a controller"),
        ("model_dir: m\ncontrollers: {a: {address: /a, engines_address: /b}}", "leadership go together"),
        ("model_dir: m\nleadership: {store: 'sqlite:///l'}", "controllers and leadership go together"),
        (f"{SEVERAL}leadership: {{store: 'sqlite:///l'}}", "in place of controller"),
        (_controllers("h:1", "h:3", "zk://h:1"), "'zk://h:1' names no store; give etcd://HOST:PORT"),
        (_controllers("h:1", "h:3", "sqlite://h/lease"), "names no store; give etcd://HOST:PORT"),
        (_controllers("h:1", "h:3", "sqlite:///"), "has no path; give sqlite:///PATH"),
        (
            _controllers("h:1", "h:3", "kubernetes://default"),
            "names no Lease; give kubernetes://NAMESPACE/NAME",
        ),
        (_controllers("h:1", "h:3", "kubernetes://a/B"), "names no Lease; give kubernetes://NAMESPACE/NAME"),
        (_controllers("h:1", "h:3", "kubernetes://a.b/c"), "names no Lease"),
        (_controllers("h:1", "h:3", "kubernetes://a/b..c"), "names no Lease"),
        (_controllers("h:1", "h:3", f"kubernetes://{'a' * 64}/b"), "names no Lease"),
        (_controllers("h:1", "h:3", f"kubernetes://a/{'b.' * 126}bb"), "names no Lease"),
        ("model_dir: m\ncontrollers: 2", "controllers=2: a number is for moe-lora cluster manifests alone"),
        (_controllers("h:1", "h:3", "etcd://me:x@h:1"), "etcd's users are not supported"),
        (_controllers("h:1", "h:3", "etcd://h"), "leadership.store='h' is not host:port"),
        (_controllers("h:1", "h:2", "etcd://h:1"), "controllers.b.address='h:2' is controllers.a.engines"),
        (_controllers("h:1", "i:1", "sqlite:///lease"), "is a file of one host, and controllers have 2"),
        (_controllers("h:1", "i:1", "etcd://h:1") + "registry: {folder: r}\n", "registry and controllers"),
        (_controllers("h:1", "h:3", "etcd://h:1", "ttl_s: 1"), "leadership.ttl_s=1.0 must be 2 or more"),
        ("model_dir: m\nfront_ends: [a]", "front_ends must be a mapping"),
        ("model_dir: m\nfront_ends: {a: {}}", "front_ends.a.engines_address is missing"),
        ("model_dir: m\nfront_ends: {a: {engines_address: null}}", "engines_address=None must be a text"),
        ("model_dir: m\nfront_ends: {a: {routing: x}}", "front_ends.a.routing is not a setting; allowed"),
        ("model_dir: m\nfront_ends: {'a,b': {engines_address: 'h:1'}}", "without commas"),
        ("model_dir: m\ncontroller: {address: 'h:1'}", "controller.engines_address is missing"),
        ("model_dir: m\ncontroller:", "controller.address is missing"),
        ("model_dir: m\ncontroller: {address: here, engines_address: 'h:1'}", "'here' is not host:port"),
        (
            "model_dir: m\ncontroller: {address: 'h:1', engines_address: 'h:1'}",
            "controller.engines_address='h:1' is controller.address too",
        ),
        (
            "model_dir: m\nfront_end: {engines_address: 'h:1'}\n"
            "controller: {address: 'h:2', engines_address: 'h:1'}",
            "controller.engines_address='h:1' is front_end.engines_address too",
        ),
        (
            SEVERAL.replace("{address:", "{key: x, address:"),
            "controller.key is not a setting; allowed are address, engines_address",
        ),
        (SEVERAL.replace("10.0.0.2:7600", "10.0.0.1:7600"), "two.engines_address='10.0.0.1:7600' is front_"),
        (SEVERAL.replace("two:", "controller:"), "the name 'controller' is the controller's"),
        (SEVERAL.replace("port: 80,", "engines_address: 'h:1',"), "in front_end only what they share"),
        (SEVERAL.replace("81", "70000"), "front_ends.two.port=70000 must be between"),
        (SEVERAL.replace("port: 81,", "port: 81, admin_address: '10.0.0.2:81',"), "by which all else is"),
        (
            SEVERAL.replace("port: 81,", "admin_address: '10.0.0.1:7600',"),
            "two.admin_address='10.0.0.1:7600' is front_ends.one.engines_address too",
        ),
        (
            SEVERAL.replace("port: 80,", "admin_address: '10.0.0.1:7700',"),
            "front_end.admin_address='10.0.0.1:7700' is controller.address too",
        ),
        ("model_dir: m\nprovision: {slo: 1}", "provision.slo is not a setting; allowed are target_iar"),
        (
            "model_dir: m\nprovision: {target_iar: 95}",
            "provision.target_iar=95.0 must be above 0 and at most 1",
        ),
        ("model_dir: m\nprovision: {auto_resize: true}", "provision.auto_resize needs a LoRA Server"),
        ("model_dir: m\npool: {copies: 1}", "pool.copies is not a setting; allowed are replicas, transport"),
        ("model_dir: m\npool: {replicas: 0}", "pool.replicas=0 must be 1 or more"),
        ("model_dir: m\npool: {}\nlora_server: {}", "pool and a LoRA Server do not go together"),
        ("model_dir: m\nadapters: [a]", "adapters must be a mapping"),
        ("model_dir: m\nadapters: {'a,b': x}", "without commas"),
        ("model_dir: m\nadapters: {1.10: x}", "adapters: the name 1.1 is no text; put it in quotes"),
        ("model_dir: m\nadapters: {no: x}", "the name False is no text; put it in quotes"),
        (SEVERAL.replace("two:", "007:"), "front_ends: the name 7 is no text; put it in quotes"),
        ("model_dir: m\nadapters: {m: x}", "names the base model and an adapter"),
        ("model_dir: m\nregistry: r", "registry must be a mapping"),
        ("model_dir: m\nregistry: {}", "registry.folder is missing; give a folder"),
        ("model_dir: m\nregistry: {path: r}", "registry.path is not a setting; allowed are folder, adapters"),
        ("model_dir: m\nregistry: {folder: r, adapters: a}", "registry.adapters='a' must be a list of texts"),
        ("model_dir: m\ncertificates: 5", "certificates=5 must be a text"),
        ("model_dir: m\nkey: a", "key is not a setting; allowed are model_dir"),
        ("model_dir: m\nkey_file: a", "key_file is not a setting; allowed are model_dir"),
    ],
)
def test_what_can_not_be_right_is_named(read, text, reason):
    with pytest.raises(ConfigError, match=r"cluster\.yaml") as caught:
        read(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lora_server: {address: 'h:1', store_dir: s}", "moe-lora cluster init"),
        ("lora_server: {store_dir: s}", "lora_server.address is needed"),
        ("lora_server: {address: 'h:1'}", "lora_server.store_dir is needed"),
    ],
)
def test_what_several_hosts_need_is_asked_for_when_a_role_starts(read, text, reason):
    with pytest.raises(ConfigError, match=reason):
        read(f"model_dir: m\n{text}").instance()


def test_where_instances_dial_in_must_be_known(read):
    with pytest.raises(ConfigError, match="engines_address is needed"):
        read("model_dir: m").engines_address()


def test_each_of_several_front_ends_has_its_own_places_and_shares_the_rest(read):
    cluster = read(SEVERAL)
    assert cluster.front_ends["one"] == FrontEndPlace(engines_address="10.0.0.1:7600")
    assert cluster.front_end_named("one") == FrontEndConfig(
        host="0.0.0.0", port=80, engines_address="10.0.0.1:7600", placement="loraserve"
    )
    assert cluster.front_end_named("two") == FrontEndConfig(
        host="10.0.0.2", port=81, engines_address="10.0.0.2:7600", placement="loraserve"
    )
    for unknown in ("three", "front-end"):
        with pytest.raises(ConfigError, match=f"none named '{unknown}'; give one of one, two"):
            cluster.front_end_named(unknown)


def test_each_of_several_front_ends_may_have_an_address_for_administrators(read):
    text = SEVERAL.replace("port: 81,", "port: 81, admin_address: '10.0.0.2:82',")
    for shared, found in (
        ("", [None, "10.0.0.2:82"]),
        ("admin_address: /run/admin, ", ["/run/admin", "10.0.0.2:82"]),
    ):
        cluster = read(text.replace("port: 80,", f"{shared}port: 80,"))
        assert [cluster.front_end_named(name).admin_address for name in ("one", "two")] == found


def test_instances_dial_the_controller_and_every_front_end(read):
    cluster = read(SEVERAL)
    assert cluster.controller == ControllerConfig(address="10.0.0.1:7700", engines_address="10.0.0.1:7701")
    assert cluster.dialled_addresses() == {
        "controller": Address("10.0.0.1", 7701),
        "one": Address("10.0.0.1", 7600),
        "two": Address("10.0.0.2", 7600),
    }


def test_front_ends_and_instances_know_every_controller(read, tmp_path):
    cluster = read(_controllers("h:1", "i:1", "etcd://h:9,i:9/key"))
    assert list(cluster.dialled_addresses()) == ["front-end", "controllers.a", "controllers.b"]
    (tmp_path / "again.yaml").write_text(cluster_text(cluster))
    assert read_cluster(tmp_path / "again.yaml") == cluster
    assert cluster.epoch == 0


@pytest.mark.parametrize("name", ["a.b-c.1d", "1", f"{'b.' * 126}b"])
def test_a_lease_may_have_any_name_of_kubernetes(read, name):
    store = f"kubernetes://my-space/{name}"
    cluster = read(_controllers("h:1", "i:1", store))
    assert cluster.leadership is not None
    assert split_store("", cluster.leadership.store) == ("kubernetes", ["my-space"], name)


def test_an_only_front_end_needs_no_name(read):
    cluster = read(WHOLE)
    assert cluster.dialled_addresses() == {"front-end": Address("10.0.0.1", 7600)}
    assert cluster.front_end_named("front-end") == cluster.front_end
    with pytest.raises(ConfigError, match="none named 'one'; give one of front-end"):
        cluster.front_end_named("one")
    with pytest.raises(ConfigError, match="engines_address is needed"):
        read("model_dir: m").dialled_addresses()
