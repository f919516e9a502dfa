# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from moe_lora.cli.main import main
from moe_lora.cli.serve import serve
from moe_lora.cli.serve_settings import _setting
from moe_lora.cli.vllm_words import former_options
from moe_lora.config import FrontEndConfig, LoraServerConfig, PoolConfig, ProvisionConfig, RegistryConfig
from moe_lora.config.cluster import SECTIONS, ClusterConfig
from moe_lora.config.settings import settings_of
from moe_lora.core.errors import CapacityError, EngineDeadError
from moe_lora.dist.launch.local import checked

MOST_OPTIONS = 45
LINES_OF_A_SCREEN = 50


@pytest.fixture
def served(monkeypatch):
    """What `moe-lora serve` would start: a list that gets the engine's settings, and the others by name."""
    calls = []

    def start(cluster: ClusterConfig, reload: object) -> None:
        others = {
            "host": cluster.front_end.host,
            "port": cluster.front_end.port,
            "served_model_name": cluster.served_model_name,
            "routing": cluster.front_end,
            "lora_server": cluster.lora_server,
            "provision": cluster.provision,
            "registry": cluster.registry,
            "cors_origins": cluster.front_end.cors_origins,
            "drain_s": cluster.front_end.drain_s,
        }
        calls.append((cluster.engine, others))

    monkeypatch.setattr("moe_lora.assemble.serve", start)
    return calls


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    fields = {"num_hidden_layers": 1, "vocab_size": 9, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **fields}))
    return str(folder)


def adapter(folder, name, value=1.0, **config):
    """A folder with an adapter of the model in `model_dir`, filled with `value`."""
    place = folder / name
    place.mkdir(parents=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **config}
    (place / "adapter_config.json").write_text(json.dumps(fields))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 8), "B": (8, 2)}
    tensors = {key.format(part): np.full(shapes[part], value, np.float32) for part in "AB"}
    save_file(tensors, place / "adapter_model.safetensors")
    return str(place)


def run(*words):
    return CliRunner().invoke(main, ["serve", *words])


def test_defaults_are_those_of_the_engine(served, model_dir):
    assert run(model_dir).exit_code == 0
    [(config, keywords)] = served
    assert config == type(config)(model_dir=model_dir)
    assert keywords == {
        "host": "127.0.0.1",
        "port": 8000,
        "served_model_name": "base",
        "routing": FrontEndConfig(),
        "lora_server": None,
        "provision": None,
        "registry": None,
        "cors_origins": (),
        "drain_s": 20.0,
    }


def test_lora_server_options_reach_the_server(served, model_dir):
    options = ["--lora-server", "EP2-PP1", "--lora-capacity", "7", "--set", "engine.lora_kernel=mbgmv"]
    assert run(model_dir, *options).exit_code == 0
    [(config, keywords)] = served
    assert config.lora_kernel == "mbgmv"
    assert keywords["lora_server"] == LoraServerConfig(layout="EP2-PP1", capacity=7)


def test_lora_server_options_without_a_lora_server_are_refused(served, model_dir):
    result = run(model_dir, "--lora-capacity", "7")
    assert result.exit_code == 2
    assert "--lora-server" in result.output
    assert not served


def test_options_reach_the_engine(served, model_dir):
    numbers = [
        "--max-loras",
        "3",
        "--max-num-seqs",
        "5",
        "--max-num-batched-tokens",
        "99",
        "--block-size",
        "8",
    ]
    words = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--eager",
        "--threads",
        "1",
        "--set",
        "engine.prefix_caching=false",
    ]
    room = ["--max-model-len", "77", "--kv-cache-gb", "0.5", "--lora-memory-gb", "0.25"]
    assert run(model_dir, *numbers, *words, *room, "--port", "0", "--served-model-name", "m").exit_code == 0
    [(config, keywords)] = served
    assert (config.max_loras, config.max_num_seqs, config.max_num_batched_tokens) == (3, 5, 99)
    assert (config.block_size, config.max_model_len, config.kv_cache_gb) == (8, 77, 0.5)
    assert (config.dtype, config.device, config.eager, config.prefix_caching) == (
        "float32",
        "cpu",
        True,
        False,
    )
    assert (config.num_threads, config.lora_memory_gb) == (1, 0.25)
    assert (keywords["port"], keywords["served_model_name"]) == (0, "m")


def test_arenas_and_their_policy(served, model_dir):
    options = ["--set", "engine.arena_mb=64", "--set", "engine.host_arena_mb=128"]
    options += ["--cache-policy", "lru", "--kv-cache-gb", "0.05"]
    assert run(model_dir, *options).exit_code == 0
    [(config, _)] = served
    assert (config.arena_mb, config.host_arena_mb, config.cache_policy) == (64, 128, "lru")
    assert config.kv_cache_gb == 0.05


def test_instances_and_their_routing(served, model_dir):
    assert run(model_dir, "--instances", "3", "--routing", "round_robin").exit_code == 0
    [(config, keywords)] = served
    assert (config.num_instances, keywords["routing"].routing) == (3, "round_robin")


def test_options_say_how_adapters_are_placed(served, model_dir, cluster_file):
    options = ["--placement", "loraserve", "--set", "front_end.placement_interval_s=5"]
    options += ["--set", "front_end.operating_points=points.json"]
    assert run(model_dir, "--instances", "2", *options).exit_code == 0
    routing = served[0][1]["routing"]
    assert (routing.routing, routing.placement, routing.placement_interval_s) == (None, "loraserve", 5.0)
    assert routing.operating_points == "points.json"
    for words, reason in (
        (["--config", cluster_file, "--placement", "loraserve"], "leave one of them out"),
        ([model_dir, "--routing", "phi"], "need a placement"),
        ([model_dir, "--set", "front_end.operating_points=p"], "need a placement"),
    ):
        result = run(*words)
        assert result.exit_code == 1
        assert reason in result.output


def test_a_placement_needs_instances(model_dir):
    result = run(model_dir, "--port", "0", "--placement", "optimal")
    assert result.exit_code == 1
    assert "give --instances 2 or more" in result.output


def test_adapters_lie_in_a_pool_if_it_is_asked_for(served, model_dir, cluster_file):
    assert run(model_dir).exit_code == 0
    assert run(model_dir, "--instances", "3", "--set", "pool.replicas=2").exit_code == 0
    assert [config.pool for config, _ in served] == [None, PoolConfig(replicas=2)]
    for words, reason in (
        (["--config", cluster_file, "--set", "pool.replicas=1"], "a LoRA Server do not go together"),
        (
            [model_dir, "--lora-server", "EP1-PP1", "--set", "pool.replicas=1"],
            "LoRA Server do not go together",
        ),
    ):
        result = run(*words)
        assert result.exit_code == 1
        assert reason in result.output


def test_a_pool_of_no_instance_is_refused(model_dir):
    result = run(model_dir, "--set", "pool.replicas=0")
    assert result.exit_code == 2
    assert "pool.replicas=0 must be 1 or more" in result.output


def test_a_pool_needs_instances(model_dir):
    result = run(model_dir, "--port", "0", "--set", "pool.replicas=1")
    assert result.exit_code == 1
    assert "give --instances 2 or more" in result.output


@pytest.fixture
def cluster_file(tmp_path, model_dir):
    path = tmp_path / "cluster.yaml"
    adapter(tmp_path, "places/a")
    b = adapter(tmp_path, "places/b")
    path.write_text(
        f"model_dir: {model_dir}\nadapters: {{a: places/a, b: {b}}}\ncertificates: certificates\n"
        "engine: {max_num_seqs: 5, max_loras: 3}\n"
        "lora_server: {layout: EP2-PP1, capacity: 9, address: 'h:1', store_dir: s}\n"
        "front_end: {port: 77, routing: round_robin, engines_address: 'h:2'}\n"
    )
    return str(path)


def test_a_file_gives_the_settings_and_options_go_before_it(served, cluster_file, tmp_path, model_dir):
    given = adapter(tmp_path, "given")
    options = ["--max-loras", "4", "--lora-capacity", "8", "--port", "78", "--lora-modules", f"b={given}"]
    result = run("--config", cluster_file, *options)
    assert result.exit_code == 0, result.output
    [(config, keywords)] = served
    assert (config.model_dir, config.max_num_seqs, config.max_loras) == (model_dir, 5, 4)
    assert config.adapters == (("a", str(tmp_path / "places/a")), ("b", given))
    assert keywords == {
        "host": "127.0.0.1",
        "port": 78,
        "served_model_name": "base",
        "routing": FrontEndConfig(port=78, routing="round_robin", engines_address="h:2"),
        "lora_server": LoraServerConfig(
            layout="EP2-PP1", capacity=8, address="h:1", store_dir=str(tmp_path / "s")
        ),
        "provision": None,
        "registry": None,
        "cors_origins": (),
        "drain_s": 20.0,
    }


def test_options_say_how_the_load_is_watched(served, cluster_file, model_dir):
    words = ["--set", "provision.target_iar=0.9", "--set", "provision.window_s=60"]
    assert run(model_dir, *words).exit_code == 0
    assert served[0][1]["provision"] == ProvisionConfig(target_iar=0.9, window_s=60.0)
    with open(cluster_file, "a") as file:
        file.write("provision: {target_iar: 0.8, min_capacity: 3}\n")
    words = ["--set", "provision.target_iar=0.7", "--set", "provision.auto_resize=true"]
    assert run("--config", cluster_file, *words).exit_code == 0
    assert served[1][1]["provision"] == ProvisionConfig(target_iar=0.7, min_capacity=3, auto_resize=True)
    result = run(model_dir, "--set", "provision.auto_resize=true")
    assert result.exit_code == 1
    assert "provision.auto_resize needs a LoRA Server" in result.output


def test_front_end_alone_serves_the_cluster_of_the_file(monkeypatch, cluster_file):
    calls = []
    monkeypatch.setattr(
        "moe_lora.assemble.serve_front_end", lambda *given, reload: calls.append((*given, reload))
    )
    assert run("--config", cluster_file, "--role", "front-end", "--host", "0.0.0.0").exit_code == 0
    [(cluster, name, reload)] = calls
    assert name is None
    assert reload is not None
    assert (cluster.front_end.host, cluster.front_end.port) == ("0.0.0.0", 77)
    assert cluster.engines_address() == "h:2"
    assert cluster.certificates.endswith("/certificates")


@pytest.mark.parametrize("role", ["front-end", "controller"])
def test_a_role_alone_needs_a_file(model_dir, role):
    result = run(model_dir, "--role", role)
    assert result.exit_code == 2
    assert f"--role {role} needs --config" in result.output


def test_a_name_is_a_front_ends(cluster_file):
    result = run("--config", cluster_file, "--role", "controller", "--name", "one")
    assert result.exit_code == 2
    assert "--name is one of front_ends or controllers" in result.output


def test_a_role_of_its_own_starts_no_front_ends(cluster_file):
    result = run("--config", cluster_file, "--role", "front-end", "--front-ends", "3")
    assert result.exit_code == 2
    assert "--front-ends starts them all on this host" in result.output


def test_a_controller_needs_its_section(cluster_file):
    result = run("--config", cluster_file, "--role", "controller")
    assert result.exit_code == 1
    assert "no controller section" in result.output


@pytest.mark.parametrize("option", ["--port", "--host", "--api-key", "--api-keys"])
def test_a_controller_takes_no_options_of_http(cluster_file, option):
    result = run("--config", cluster_file, "--role", "controller", option, "80")
    assert result.exit_code == 2
    assert f"a controller serves no HTTP; give {option} to the front ends" in result.output


def test_options_say_where_one_of_several_front_ends_is(monkeypatch, tmp_path):
    file = tmp_path / "several.yaml"
    file.write_text(
        "model_dir: base\nfront_ends:\n  one: {port: 81, engines_address: 'h:2'}\n"
        "  two: {port: 82, engines_address: 'h:3', admin_address: 'h:6'}\n"
        "controller: {address: 'h:4', engines_address: 'h:5'}\n"
    )
    calls = []
    monkeypatch.setattr("moe_lora.assemble.serve_front_end", lambda *given, reload: calls.append(given))
    options = ("--role", "front-end", "--name", "two", "--port", "90")
    options += ("--set", "front_end.admin_address=h:8000")
    assert run("--config", str(file), *options).exit_code == 0
    [(cluster, name)] = calls
    assert cluster.front_end_named("two").admin_address == "h:8000"
    assert (name, cluster.front_end_named("two").port, cluster.front_end_named("one").port) == ("two", 90, 81)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--port", "6"], "front_end.port=5"),
        (["--max-model-len", "6"], "engine.max_model_len=null"),
        (["--eager"], "engine.eager=false"),
        (["--eager", "--no-enforce-eager"], "engine.seed=1"),
    ],
)
def test_an_option_and_another_value_by_set_are_refused(served, model_dir, words, place):
    result = run(model_dir, *words, "--set", place)
    assert result.exit_code == 2
    assert f"{words[0]}; give one of them" in " ".join(result.output.split())
    assert not served


def test_an_option_and_the_same_value_by_set_are_one(served, model_dir):
    words = ["--port", "6", "--set", "front_end.port=6", "--eager", "--set", "engine.eager=true"]
    assert run(model_dir, *words, "--set", "engine.seed=1", "--set", "engine.seed=2").exit_code == 0
    assert (served[0][1]["port"], served[0][0].seed) == (6, 2)


@pytest.mark.parametrize("option", ["--lora-modules", "--lora-dir", "--registry"])
def test_adapters_beside_a_controller_are_given_to_the_controller(monkeypatch, tmp_path, option):
    monkeypatch.setattr("moe_lora.assemble.serve_front_end", lambda *_, reload: pytest.fail("started"))
    file, place = tmp_path / "several.yaml", adapter(tmp_path, "a")
    file.write_text(
        "model_dir: base\nfront_ends:\n  one: {port: 81, engines_address: 'h:2'}\n"
        "controller: {address: 'h:4', engines_address: 'h:5'}\n"
    )
    value = f"a={place}" if option == "--lora-modules" else place
    result = run("--config", str(file), "--role", "front-end", "--name", "one", option, value)
    assert result.exit_code == 2
    assert f"give {option} to the controller" in " ".join(result.output.split())


def test_a_front_end_that_the_file_does_not_have(cluster_file):
    result = run("--config", cluster_file, "--role", "front-end", "--name", "three")
    assert result.exit_code == 1
    assert "front_ends has none named 'three'" in result.output


def test_front_ends_that_repeat_the_files_port_follow_the_option(monkeypatch, model_dir, tmp_path):
    file = tmp_path / "several.yaml"
    file.write_text(
        f"model_dir: {model_dir}\nfront_end: {{port: 81}}\nfront_ends:\n"
        "  one: {port: 81, host: 127.0.0.1, engines_address: 'h:2'}\n  two: {engines_address: 'h:3'}\n"
        "controller: {address: 'h:4', engines_address: 'h:5'}\n"
    )
    served = []

    def serve_host(cluster, num_front_ends, reload):
        served.append(checked(cluster))
        return 0

    monkeypatch.setattr("moe_lora.assemble.serve_host", serve_host)
    result = run("--config", str(file), "--port", "90", "--host", "0.0.0.0")
    assert result.exit_code == 0, result.output
    for name in ("one", "two"):
        place = served[0].front_end_named(name)
        assert (place.host, place.port) == ("0.0.0.0", 90)


def test_several_front_ends_are_processes_of_this_host(monkeypatch, model_dir):
    calls = []

    def serve_host(cluster, num_front_ends, reload):
        assert reload is None  # without a file there is nothing to read again
        calls.append((cluster, num_front_ends))
        return 0

    monkeypatch.setattr("moe_lora.assemble.serve_host", serve_host)
    options = ("--front-ends", "2", "--instances", "3", "--placement", "loraserve", "--port", "79")
    assert run(model_dir, *options).exit_code == 0
    [(cluster, num_front_ends)] = calls
    assert (num_front_ends, cluster.engine.num_instances, cluster.front_end.port) == (2, 3, 79)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--placement", "loraserve"), "a placement is over several instances"),
        (("--threads", "4096"), "num_threads=4096"),
        (("--routing", "rank_aware"), "needs a performance model"),
    ],
)
def test_several_front_ends_that_can_not_work_start_nothing(model_dir, options, reason):
    result = run(model_dir, "--front-ends", "2", "--port", "0", *options)
    assert result.exit_code == 1
    assert reason in result.output


def test_several_front_ends_keep_the_number_of_instances(model_dir):
    result = run(model_dir, "--front-ends", "2", "--port", "0", "--set", "scaling.max_instances=2")
    assert result.exit_code == 2
    assert "scaling is for one front end with all its instances" in result.output


def test_neither_model_nor_file_is_an_error_that_names_both(served):
    result = run()
    assert result.exit_code == 2
    assert "MODEL_DIR" in result.output
    assert "--config" in result.output


def test_more_threads_than_cores_are_refused_before_anything_starts(model_dir):
    result = run(model_dir, "--port", "0", "--instances", "2", "--threads", "4096")
    assert result.exit_code == 1
    assert "num_threads=4096 for each of 2 instances makes 8192 threads" in result.output


def test_adapters_by_name_and_by_folder(served, model_dir, tmp_path):
    below = [adapter(tmp_path / "all", name) for name in ("b", "deep/a")]
    given = adapter(tmp_path, "given")
    result = run(model_dir, "--lora-modules", f"x={given}", f"y={given}", "--lora-dir", str(tmp_path / "all"))
    assert result.exit_code == 0, result.output
    assert served[0][0].adapters == (("x", given), ("y", given), ("a", below[1]), ("b", below[0]))


def test_folders_in_which_peft_saves_adapters_by_name_are_found(served, model_dir, tmp_path):
    only = adapter(tmp_path, "one/first")
    several = [adapter(tmp_path, f"several/{name}") for name in ("first", "second")]
    one, many = str(tmp_path / "one"), str(tmp_path / "several")
    result = run(model_dir, "--lora-modules", f"x={one}", f"second={many}")
    assert result.exit_code == 0, result.output
    assert served[0][0].adapters == (("x", only), ("second", several[1]))
    result = run(model_dir, "--lora-modules", f"x={many}")
    assert result.exit_code == 2
    assert "2 adapters (first, second) and none called 'x'" in result.output


def adapters_in(folder, model_dir, served):
    """Names that --lora-dir finds, with the folder that each leads to."""
    result = run(model_dir, "--lora-dir", str(folder))
    assert result.exit_code == 0, result.output
    return {name: os.path.realpath(path) for name, path in served[0][0].adapters}


def test_lora_dir_follows_links_and_takes_their_names(served, model_dir, tmp_path):
    folder, elsewhere = tmp_path / "all", tmp_path / "elsewhere"
    real = adapter(folder, "real")
    hub = adapter(elsewhere / "models--org--x" / "snapshots", "abc123")
    volume = adapter(elsewhere / "..2026_01", "x")
    team = adapter(elsewhere / "team", "theirs")
    os.symlink("..2026_01", elsewhere / "..data")
    os.symlink("../elsewhere/..data/x", folder / "volume")
    os.symlink(hub, folder / "hub")
    os.symlink(elsewhere / "team", folder / "team")
    os.symlink("real", folder / "stable")
    (folder / "README.md").write_text("x")
    (folder / "empty").mkdir()
    adapter(folder / ".cache", "hidden")
    found = {"real": real, "hub": hub, "volume": volume, "theirs": team, "stable": real}
    assert adapters_in(folder, model_dir, served) == found


def test_lora_dir_over_a_mounted_volume_has_each_adapter_once(served, model_dir, tmp_path):
    place = adapter(tmp_path / "..2026_01", "x")
    os.symlink("..2026_01", tmp_path / "..data")
    os.symlink("..data/x", tmp_path / "upper")
    assert adapters_in(tmp_path, model_dir, served) == {"upper": place}


def test_lora_dir_ends_in_loops_of_links(served, model_dir, tmp_path):
    one = adapter(tmp_path / "a", "one")
    two = adapter(tmp_path / "b", "two")
    os.symlink("../b", tmp_path / "a" / "other")
    os.symlink("../a", tmp_path / "b" / "other")
    os.symlink("..", tmp_path / "a" / "up")
    os.symlink(".", tmp_path / "a" / "one" / "self")
    os.symlink("loop", tmp_path / "loop")
    os.symlink("gone", tmp_path / "dangling")
    assert adapters_in(tmp_path, model_dir, served) == {"one": one, "two": two}


def test_lora_dir_that_is_a_link_to_an_adapter_names_it(served, model_dir, tmp_path):
    place = adapter(tmp_path / "all", "v3")
    os.symlink("all/v3", tmp_path / "stable")
    assert adapters_in(tmp_path / "stable", model_dir, served) == {"stable": place}


def test_one_name_of_two_adapters_behind_links_is_refused(served, model_dir, tmp_path):
    adapter(tmp_path / "all", "x")
    adapter(tmp_path / "elsewhere", "x")
    os.symlink("../elsewhere", tmp_path / "all" / "more")
    result = run(model_dir, "--lora-dir", str(tmp_path / "all"))
    assert result.exit_code == 2
    assert "must be unique" in result.output


@pytest.fixture
def good_and_bad(tmp_path):
    """A folder with adapters a, b, c, d and e, of which a and e can be served."""
    folder = tmp_path / "all"
    adapter(folder, "a")
    adapter(folder, "b", use_dora=True)
    adapter(folder, "c", r=10**400)
    damaged = Path(adapter(folder, "d")) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    adapter(folder, "e")
    return folder


def test_all_adapters_that_can_not_be_served_are_named_before_anything_starts(
    served, model_dir, good_and_bad
):
    result = run(model_dir, "--lora-dir", str(good_and_bad))
    assert result.exit_code == 1
    assert not served
    first, *lines = result.output.splitlines()
    assert "3 of 5 adapters can't be served" in first
    assert "--skip-bad-adapters" in first
    assert [line.split(":")[0].strip() for line in lines] == ["b", "c", "d"]
    for line, reason in zip(lines, ("use_dora", "r=1000", "not a readable safetensors"), strict=True):
        assert reason in line


def test_adapters_that_can_not_be_served_are_left_out_if_that_is_asked_for(
    served, model_dir, good_and_bad, caplog
):
    adapter(good_and_bad, "f", value=np.inf)
    options = ["--lora-dir", str(good_and_bad), "--skip-bad-adapters"]
    assert run(model_dir, *options).exit_code == 0
    assert [name for name, _ in served[0][0].adapters] == ["a", "e"]
    left_out = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [line.split(":")[1].strip() for line in left_out] == [f"adapter {name}" for name in "bcdf"]
    assert "NaN or infinite" in left_out[-1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lora-modules", "x"], "NAME=PATH"),
        (["--lora-modules", "=p"], "NAME=PATH"),
        (["--lora-modules", "x=p", "x=q"], "unique"),
        (["--lora-modules", "base=p"], "--served-model-name"),
        (["--lora-dir", "."], "no adapter_config.json"),
        (["--lora-modules", "x,y=p"], "without commas"),
        (["--port", "99999"], "0<=x<=65535"),
        (["--max-loras", "0"], "0 is not in the range x>=1"),
        (["--instances", "0"], "0 is not in the range x>=1"),
        (["--routing", "by_adapter"], "round_robin"),
        (["--max-loras", "9" * 20], "choose at most"),
        (["--kv-cache-gb", "-1"], "kv_cache_gb"),
        (["--set", "engine.arena_mb=0"], "arena_mb"),
        (["--set", "engine.host_arena_mb=-1"], "host_arena_mb"),
        (["--set", "engine.arena_mb=9", "--lora-memory-gb", "1"], "leave one of them out"),
        (["--cache-policy", "mru"], "fastlibra"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_bad_options_are_one_line_errors(served, model_dir, tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(model_dir)
    result = run(model_dir, *words)
    assert result.exit_code != 0
    assert reason in result.output
    assert "Traceback" not in result.output
    assert not served


@pytest.mark.parametrize("error", [EngineDeadError("the engine ended"), CapacityError("too big")])
def test_a_start_that_fails_is_a_one_line_error(monkeypatch, model_dir, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("moe_lora.assemble.serve", fail)
    result = run(model_dir)
    assert (result.exit_code, result.output) == (1, f"Error: {error}\n")


def test_a_registry_and_what_is_chosen_of_it_reach_the_server(served, model_dir, tmp_path, cluster_file):
    folder = str(tmp_path)
    assert run(model_dir, "--registry", folder).exit_code == 0
    two = ("--set", "registry.adapters=[a, b]")
    assert run(model_dir, "--registry", folder, *two, "--port", "1").exit_code == 0
    with open(cluster_file, "a") as file:
        file.write("registry: {folder: there, adapters: [c]}\n")
    assert run("--config", cluster_file).exit_code == 0
    assert run("--config", cluster_file, "--set", "registry.adapters=d").exit_code == 0
    assert run("--config", cluster_file, "--registry", folder).exit_code == 0
    there = str(tmp_path / "there")
    assert [keywords["registry"] for _, keywords in served] == [
        RegistryConfig(folder=folder),
        RegistryConfig(folder=folder, adapters=("a", "b")),
        RegistryConfig(folder=there, adapters=("c",)),
        RegistryConfig(folder=there, adapters=("d",)),
        RegistryConfig(folder=folder),
    ]


def test_registry_options_that_can_not_be_are_refused(served, model_dir):
    assert "needs --registry" in run(model_dir, "--set", "registry.adapters=a").output
    assert "does not exist" in run(model_dir, "--registry", "nowhere").output
    assert not served


def test_origins_reach_the_server_and_go_before_those_of_the_file(served, cluster_file, model_dir):
    origins = ["https://a.example.com", "http://localhost:3000"]
    assert run(model_dir, "--allowed-origins", json.dumps(origins)).exit_code == 0
    assert served[0][1]["cors_origins"] == tuple(origins)
    result = run(model_dir, "--set", "front_end.cors_origins=https://a.example.com/page")
    assert result.exit_code == 2
    assert "give scheme://host[:port] without a path" in result.output


def test_help_groups_the_options_and_shows_examples():
    text = run("--help").output
    headings = ("Model", "Adapters", "LoRA Server", "Scaling", "Access", "More")
    places = [text.index(f"\n{heading}:\n") for heading in headings]
    assert places == sorted(places)
    assert text.index("Adapters:") < text.index("--lora-dir") < text.index("LoRA Server:")
    assert "  moe-lora serve demo/model --lora-dir demo/adapters\n" in text
    assert "`moe-lora settings` lists" in text.splitlines()[-2]
    assert len(text.splitlines()) <= 2 * LINES_OF_A_SCREEN


def test_a_new_user_meets_few_options():
    assert len([one for one in serve.params if isinstance(one, click.Option)]) <= MOST_OPTIONS


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--heartbeat-dead-s", "40"], "--set front_end.heartbeat_dead_s=40"),
        (["--heartbeat_dead_s=40"], "--set front_end.heartbeat_dead_s=40"),
        (["--drain-s"], "--set front_end.drain_s=VALUE"),
        (["--no-prefix-caching"], "--set engine.prefix_caching=false"),
        (["--quantize-head", "--port", "1"], "--set engine.quantize_head=true"),
        (["--pool-replicas", "2"], "--set pool.replicas=2"),
        (["--provision-window-s=60"], "--set provision.window_s=60"),
        (["--lora-server-host-workers", "2"], "--set lora_server.host_workers=2"),
        (["--cors-origin", "a", "--cors-origin", "b"], '--set \'front_end.cors_origins=["a", "b"]\''),
        (["--trusted-proxy", "10.0.0.5"], "--set 'front_end.trusted_proxies=[\"10.0.0.5\"]'"),
        (["--registry-adapters", "a", "b"], '--set \'registry.adapters=["a", "b"]\''),
        (["--transport", "gloo"], "--set lora_server.transport=gloo or --set pool.transport=gloo"),
        (["--drain-s", "1", "--max-choices", "2"], "--max-choices is a setting of the file now"),
        (["--drain-s", "1", "--verify-merge"], "--verify-merge is no setting any more: tests compare"),
    ],
)
def test_an_option_that_is_a_setting_of_the_file_is_refused_with_its_place(served, model_dir, words, place):
    result = run(model_dir, *words)
    assert result.exit_code == 2
    assert place in result.output
    assert f"{words[0].partition('=')[0].replace('_', '-')} is a setting of the file now" in result.output
    assert not served


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("--cors-origin", "*", ["*"]),
        ("--trusted-proxy", "::1", ["::1"]),
        *(("--registry-adapters", name, [name]) for name in ("on", "7", "b: c", "null", "[x")),
        *(("--state-dir", name, name) for name in ("#x", "~", "~/a", "on", "a: b", "[x")),
    ],
)
def test_the_place_of_a_former_option_keeps_any_value(option, value, found):
    [words] = [place.words([value]) for place in former_options()[option]]
    assert _setting(shlex.split(words)[1])[2] == found


def test_a_setting_without_a_value_is_refused(served, model_dir):
    for name in ("front_end.admin_address", "front_end.api_keys", "engine.max_num_seqs"):
        result = run(model_dir, "--set", f"{name}=")
        assert result.exit_code == 2
        assert f"{name.partition('.')[2]} has no value" in result.output
    assert not served


@pytest.mark.parametrize("option", sorted(former_options()))
def test_the_place_of_a_former_option_is_a_setting(option):
    for place in former_options()[option]:
        one = settings_of(SECTIONS[place.section]).get(place.name)
        assert place.reason or (one is not None and one.rule.in_file and not one.rule.option)


def test_values_of_set_have_the_type_of_their_setting(served, model_dir):
    words = ["async_scheduling=on", "memory_utilization=1e-1", "host_arena_mb=1.5", "lora_kernel=bgmv"]
    given = [word for one in words for word in ("--set", f"engine.{one}")]
    given += ["--set", "front_end.migration=off", "--set", "front_end.performance_model=null"]
    result = run(model_dir, *given)
    assert result.exit_code == 0, result.output
    [(config, keywords)] = served
    assert (config.async_scheduling, config.memory_utilization, config.host_arena_mb) == ("on", 0.1, 1.5)
    assert (keywords["routing"].migration, keywords["routing"].performance_model) == ("off", None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "engine.block_size=x"], "engine.block_size='x' must be a whole number"),
        (["--set", "engine.block_size=0"], "engine.block_size=0 must be 1 or more"),
        (["--set", "engine.block_size"], "is not SECTION.NAME=VALUE"),
        (["--set", "engine.block_size=[1"], "is not valid YAML"),
        (["--block-size", "8", "--set", "engine.block_size=4"], "both mean --set engine.block_size"),
        (["--set", "lora_server.transport=gloo"], "lora_server.transport needs --lora-server"),
    ],
)
def test_bad_values_of_set_are_refused_by_place(served, model_dir, words, reason):
    result = run(model_dir, *words)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())
    assert not served
