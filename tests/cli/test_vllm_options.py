# SPDX-License-Identifier: Apache-2.0
"""vLLM's options: every row of the table, and command lines of peers."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.pages.setting_tables import vllm_table, with_tables
from moe_lora.cli.main import main
from moe_lora.cli.serve import serve
from moe_lora.cli.serve_settings import cluster_to_serve
from moe_lora.cli.vllm_option import ANY, MODEL, VllmOption
from moe_lora.cli.vllm_options import VLLM_OPTIONS, by_name
from moe_lora.cli.vllm_words import NOTES
from moe_lora.config.cluster import SECTIONS
from moe_lora.config.optional_parts import DLoraConfig
from moe_lora.config.settings import settings_of

from .test_serve import adapter, model_dir, run, served

__all__ = ["model_dir", "served"]
ROWS = [one for group in VLLM_OPTIONS.values() for one in group]
FOREIGN = "no-such-value"


def parsed(*words: str) -> tuple[dict[str, Any], list[str]]:
    """Values of the parameters of `serve` for these words, and lines for the log."""
    context = serve.make_context("serve", list(words))
    return context.params, context.meta[NOTES]


def spelled(option: VllmOption, name: str, value: str) -> list[str]:
    """The option with a value, as on a command line."""
    if option.takes != "flag":
        return [name, value]
    return [name if value == "true" else f"--no-{name[2:]}"]


def cases(*, refused: bool) -> list[Any]:
    return list(_cases(refused=refused))


def _cases(*, refused: bool) -> Iterator[Any]:
    """Each name of each option with each value of the table, or with a foreign value."""
    for option in ROWS:
        values = ("true", "false") if option.takes == "flag" else (*option.words, FOREIGN)
        for name in option.names:
            for value in values:
                known = value in option.words or ANY in option.words
                if value == FOREIGN and known:
                    continue
                if known != refused and not (option.takes == "flag" and not name.startswith("--")):
                    yield pytest.param(option, name, value, id=f"{name}={value}")


def example_of(option: VllmOption, value: str, folder: str) -> str:
    shown = option.example if value == ANY else value
    return {MODEL: folder, "": f"a={folder}"}.get(shown, shown) if value in (ANY, MODEL) else shown


@pytest.mark.parametrize(("option", "name", "value"), cases(refused=False))
def test_a_value_does_what_the_table_says(option, name, value, model_dir):
    given = spelled(option, name, example_of(option, value, model_dir))
    first = [] if option.words.get(ANY) == "{}" else [model_dir]
    found, notes = parsed(*first, *given)
    ours = option.words.get(value, option.words.get(ANY, ""))
    before, _ = parsed(model_dir)
    if not ours or ours == "{}":
        assert found == before
    elif option.own or option.convert:
        assert found != before
    else:
        filled = ours.replace("{}", given[-1]).replace("{tensor}", "1")
        assert (found, []) == parsed(model_dir, *filled.split())
    assert len(notes) == (not ours and not option.own)
    if option.is_unused:
        assert notes == [f"{given[0]} has no effect here: {option.text}"]


@pytest.mark.parametrize(("option", "name", "value"), cases(refused=True))
def test_a_value_that_is_not_to_be_had_is_refused_with_the_way_out(option, name, value, model_dir):
    given = spelled(option, name, value)
    with pytest.raises(click.UsageError) as caught:
        parsed(model_dir, *given)
    assert given[0] in caught.value.message
    assert option.text in caught.value.message


def test_the_table_names_each_option_once_and_shadows_none_of_ours():
    names = [name for one in ROWS for name in one.names]
    assert len(names) == len(set(names)) == len(by_name())
    ours = {name for one in serve.params if isinstance(one, click.Option) for name in one.opts}
    assert {one.name for one in ROWS if one.own} >= ours & set(names)
    assert all(one.text or one.own or any(one.words.values()) for one in ROWS)


def test_every_option_that_stands_for_one_of_ours_names_one_that_exists():
    ours = {name for one in serve.params if isinstance(one, click.Option) for name in one.opts}
    targets = {words.split()[0] for one in ROWS for words in one.words.values() if words not in ("", "{}")}
    assert targets <= ours


def test_the_help_shows_the_table_and_the_usual_help_does_not():
    shown = CliRunner().invoke(main, ["serve", "--help-vllm"])
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    for option in ROWS:
        assert f" {option.name} " in text
    usual = CliRunner().invoke(main, ["serve", "--help"]).output
    assert "--help-vllm" in usual
    hidden = {one.name for one in ROWS if not one.own and f"{one.name}s" != "--api-keys"}
    assert not [name for name in hidden if re.search(rf"{name}\b(?!-)", usual)]


def test_the_page_has_the_tables():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "vllm_options.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m bench.pages.setting_tables docs/*/*.md"
    assert all(vllm_table(heading) in page for heading in VLLM_OPTIONS)


COMMAND_LINES = {
    "kserve": [
        *("MODEL", "--served-model-name", "base", "publishers/ns/models/base", "--port", "8001"),
        *("--disable-uvicorn-access-log", "--shutdown-timeout", "15", "--tensor-parallel-size", "2"),
        *("--enable-ssl-refresh", "--ssl-certfile", "tls.crt", "--ssl-keyfile", "tls.key"),
        *("--disable-log-requests", "--trust-remote-code"),
    ],
    "kserve with data parallel": [
        *("MODEL", "--served-model-name", "base", "publishers/ns/models/base", "--port", "8001"),
        *("--api-server-count", "1", "--enable-expert-parallel", "--tensor-parallel-size", "2"),
        *("--data-parallel-size", "2", "--data-parallel-size-local", "2"),
        *("--data-parallel-address", "10.0.0.1", "--data-parallel-rpc-port", "5555"),
        *("--data-parallel-start-rank", "0", "--disable-access-log-for-endpoints", "/health,/metrics,/ping"),
    ],
    "production-stack": [
        *("MODEL", "--host", "0.0.0.0", "--port", "8000", "--enable-lora", "--no-enable-chunked-prefill"),
        *("--no-enable-prefix-caching", "--max-model-len", "32", "--dtype", "bfloat16"),
        *("--tensor-parallel-size", "1", "--max-num-seqs", "4", "--gpu_memory_utilization", "0.9"),
        *("--max_loras", "8", "--runner", "generate", "--convert", "auto", "--max_lora_rank", "64"),
    ],
    "kubeai": [
        *("--model=MODEL", "--served-model-name=m", "--max-model-len=32", "--max-num-batched-token=8192"),
        *("--gpu-memory-utilization=0.9", "--disable-log-requests", "--enable-prefix-caching"),
        *("--enable-chunked-prefill=false", "--max-num-seqs=16", "--num-scheduler-steps=8", "--enable-lora"),
    ],
    "aibrix": [
        *("--host", "0.0.0.0", "--port", "8000", "--uvicorn-log-level", "warning", "--model", "MODEL"),
        *("--served-model-name", "m", "--enable-lora", "--max-loras", "8", "--max-cpu-loras", "16"),
        *("--disable-fastapi-docs", "--swap-space", "0", "--distributed-executor-backend", "mp"),
        *(
            "--api-key",
            "sk-1",
            "--lora-modules",
            '{"name": "a", "path": "ADAPTER", "base_model_name": "x/m"}',
        ),
    ],
    "llm-d": [
        *("MODEL", "--max-lora-rank", "32", "--block-size=64", "--async-scheduling", "--seed", "7"),
        *("--load-format", "auto", "--no-enable-log-requests", "--enforce-eager", "-O3", "-tp", "1"),
    ],
}


@pytest.mark.parametrize("peer", COMMAND_LINES)
def test_command_lines_of_peers_are_taken(peer, served, model_dir, tmp_path):
    place = adapter(tmp_path, "a")
    words = [word.replace("MODEL", model_dir).replace("ADAPTER", place) for word in COMMAND_LINES[peer]]
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert served


def test_values_reach_the_settings(served, model_dir, caplog):
    caplog.set_level(logging.WARNING)
    words = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "-dp", "3", "--seed=7"]
    more = ["--gpu_memory_utilization=.5", "--max-model-len", "0.032k", "--kv-offloading-size", "0.5"]
    assert run(model_dir, *words, *more, "--max-lora-rank", "64", "--trust-remote-code").exit_code == 0
    [(config, _)] = served
    assert (config.tensor_parallel, config.expert_parallel, config.num_instances) == (2, 2, 3)
    assert (config.seed, config.memory_utilization, config.max_model_len) == (7, 0.5, 32)
    assert (config.host_arena_mb, config.max_lora_rank) == (536.870912, 64)
    [line] = [one.getMessage() for one in caplog.records]
    assert line == "--trust-remote-code has no effect here: code of a checkpoint never runs"


@pytest.mark.parametrize("length", [["--max-model-len", "-1"], ["--max-model-len=auto"]])
def test_sizes_may_be_the_models_or_have_a_unit(served, model_dir, length):
    assert run(model_dir, *length, "--kv-cache-memory-bytes", "0.5G").exit_code == 0
    [(config, _)] = served
    assert (config.max_model_len, config.kv_cache_gb) == (None, 0.536870912)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tensor-parallel-size", "2", "--tensor-parallel", "4"], "both mean --tensor-parallel"),
        (["-dp", "4", "--data-parallel-size-local", "2"], "docs/guides/cluster.md"),
        (["--tensor-parallel-size"], "requires an argument"),
        (["--tensor-parallel-size", "x"], "not a valid integer"),
        (["--gpu-memory-utilization", "1.5"], "memory_utilization=1.5 must be above 0 and at most 1"),
        (["--max-model-len", "1.0005k"], "no whole number"),
        (["--tokenizer", "elsewhere"], "copy the tokenizer's files there"),
        (["--enable-lora=maybe"], "--no-enable-lora"),
        (["--no-enable-lora"], "--api-key keeps others"),
        (["--pipeline-parallel-size", "2"], "use --tensor-parallel or --expert-parallel"),
        (["--kv-transfer-config", '{"kv_role": "kv_both"}'], "can't be had here"),
        (["--kv-transfer-config.kv_role", "kv_both"], "can't be had here"),
        (["--max-lora", "1"], "--max-loras"),
        (["--set", "engine.sead=1"], "did you mean seed"),
        (["--set", "motor.seed=1"], "engine"),
        (["--api-key", ""], "without keys"),
        (["--api-key", "a b"], "no blank"),
        (["--allowed-origins", "*"], "JSON list"),
    ],
)
def test_bad_values_are_refused_by_name(served, model_dir, words, reason):
    result = run(model_dir, *words)
    assert result.exit_code in (1, 2)
    assert reason in " ".join(result.output.split())
    assert not served


def test_parameters_of_dlora_are_set_one_by_one(served, model_dir):
    words = ["--batching", "dlora", "--set", "dlora.credit=5", "--set", "dlora.period=3"]
    assert run(model_dir, *words).exit_code == 0
    [(config, _)] = served
    assert config.dlora == DLoraConfig(credit=5.0, period=3)
    refused = run(model_dir, "--set", "dlora.credit=5")
    assert refused.exit_code == 1
    assert "set engine.batching to dlora (--batching dlora)" in " ".join(refused.output.split())


def test_the_same_value_twice_is_no_contradiction(served, model_dir):
    assert (
        run(model_dir, "--data-parallel-size", "2", "--instances", "2", "--model", model_dir).exit_code == 2
    )
    assert run(model_dir, "--data-parallel-size", "2", "--instances", "2").exit_code == 0
    assert run(model_dir, "--tokenizer", model_dir).exit_code == 0


def test_a_tokenizer_is_compared_with_the_model_alone(served, model_dir):
    assert run("--tokenizer", model_dir, "--model", model_dir).exit_code == 0
    for words in (["--lora-dir", "x"], ["--served-model-name", "x"], ["--log-level", "x"]):
        result = run(model_dir, "--tokenizer", "x", *words)
        assert "copy the tokenizer's files there" in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["a: 1\nb\n", "x # y", "'quoted'", "007", "{{ a }}", "[1", "on", "~", " a "])
def test_a_text_arrives_as_given(text, served, model_dir):
    for words in (["--chat-template", text], ["--set", f"engine.chat_template={text}"]):
        result = run(model_dir, *words)
        assert result.exit_code == 0, result.output
        assert served.pop()[0].chat_template == text


def test_a_folder_that_ends_a_list_of_keys_is_the_model(model_dir, tmp_path):
    other = str(tmp_path)
    found, _ = parsed("--config", "x", "--api-key", "one", "two", model_dir)
    assert (found["given_keys"], found["model_dir"]) == (("one", "two"), model_dir)
    for words in (
        [model_dir, "--api-key", "one", other],
        ["--model", model_dir, "--api-key", "one", other],
        ["--api-key", "one", other, "--model", model_dir],
        ["--api-key", "one", other, f"--model={model_dir}"],
    ):
        found, _ = parsed(*words)
        assert (found["given_keys"], found["model_dir"]) == (("one", other), model_dir)
    for words in (["--api-key", other], ["--api-key", other, "one"]):
        found, _ = parsed("--config", "x", *words)
        assert (found["given_keys"], found["model_dir"]) == (tuple(words[1:]), None)


def test_a_name_that_is_a_folder_s_too_is_no_model(model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    for words, model in ((["--config", "x"], None), (["--model", model_dir], model_dir)):
        for given in (
            [*words, "--served-model-name", "prod", "demo"],
            ["--served-model-name", "prod", "demo", *words],
        ):
            found, _ = parsed(*given)
            assert (found["served_model_name"], found["model_dir"]) == (("prod", "demo"), model)


def test_the_last_of_several_values_counts(served, model_dir):
    flags = ["--no-enable-prefix-caching", "--enable-prefix-caching", "--headless", "--no-headless"]
    values = ["-pp", "2", "--pipeline-parallel-size", "1", "-tp", "4", "--tensor-parallel-size=2"]
    more = ["--enable-expert-parallel", "--dtype", "half", "--dtype", "float", "--async-scheduling", "off"]
    result = run(model_dir, *flags, *values, *more)
    assert result.exit_code == 0, result.output
    [(config, _)] = served
    assert (config.prefix_caching, config.tensor_parallel, config.expert_parallel) == (True, 2, 2)
    assert (config.dtype, config.async_scheduling) == ("float32", "off")
    assert run(model_dir, "--enable-expert-parallel", "--tensor-parallel", "2").exit_code == 0
    assert served[1][0].expert_parallel == 2
    assert run(model_dir, "--expert-parallel", "4", "--enable-expert-parallel", "-tp", "2").exit_code == 2


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("engine.generation_config", "none", ["--generation-config", "auto"]),
        ("engine.max_model_len", 32, ["--max-model-len", "auto"]),
        ("engine.max_model_len", 32, ["--max-model-len=-1"]),
        ("engine.load_format", "dummy", ["--load-format", "auto"]),
        ("engine.prefix_caching", False, ["--enable-prefix-caching"]),
        ("engine.eager", True, ["--no-enforce-eager"]),
        ("engine.expert_parallel", 2, ["--no-enable-expert-parallel"]),
        ("front_end.docs_page", False, ["--no-disable-fastapi-docs"]),
        ("front_end.tokens_only", True, ["--no-skip-tokenizer-init"]),
        ("front_end.tokens_only", True, ["--no-tokens-only"]),
        ("front_end.force_include_usage", True, ["--no-enable-force-include-usage"]),
        ("front_end.tool_call_parser", "none", ["--enable-auto-tool-choice", "--tool-call-parser", "auto"]),
    ],
)
def test_a_default_of_vllm_overrides_the_file(model_dir, tmp_path, place, value, words):
    section, name = place.split(".")
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"model_dir": model_dir, section: {name: value}}))
    for given, expected in (([], value), (words, settings_of(SECTIONS[section])[name].default)):
        options, _ = parsed("--config", str(file), *given)
        assert getattr(getattr(cluster_to_serve(str(file), None, options), section), name) == expected


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--enable-expert-parallel"], "--tensor-parallel"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_a_flag_that_depends_on_the_file_needs_its_value(served, model_dir, tmp_path, words, needed):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model_dir: {model_dir}\nengine: {{tensor_parallel: 2, expert_parallel: 2}}\n")
    refused = run("--config", str(file), *words)
    assert refused.exit_code == 2
    assert f"{words[0]} with --config needs {needed}; give both" in " ".join(refused.output.split())
    assert not served


@pytest.mark.parametrize("first", [[], ["--config", "FILE"]])
@pytest.mark.parametrize(
    "ranks", [["-tp", "2"], ["--tensor-parallel=2"], ["--set", "engine.tensor_parallel=2"]]
)
def test_experts_have_the_ranks_of_each_way_to_say_so(served, model_dir, tmp_path, first, ranks):
    file = tmp_path / "cluster.yaml"
    file.write_text("model_dir: x\nengine: {tensor_parallel: 4, expert_parallel: 4}\n")
    words = [str(file) if word == "FILE" else word for word in first]
    result = run(model_dir, *words, "--enable-expert-parallel", *ranks)
    assert result.exit_code == 0, result.output
    [(config, _)] = served
    assert (config.tensor_parallel, config.expert_parallel) == (2, 2)


@pytest.mark.parametrize("between", [["--port", "9"], ["--enable-lora"], ["--seed", "1"], ["--eager"]])
def test_a_list_ends_at_the_next_option(served, model_dir, tmp_path, between):
    place = adapter(tmp_path / "folder", "b")
    for words in (["--lora-modules", f"a={place}"], ["--lora-dir", str(tmp_path / "folder")]):
        result = run(*words, *between, model_dir, "--served_model_name", "m", "n", *between)
        assert result.exit_code == 0, result.output
    assert [dict(config.adapters) for config, _ in served] == [{"a": place}, {"b": place}]
    assert served[0][1]["served_model_name"] == "m"


def module(**fields: object) -> str:
    return json.dumps(fields)


def test_adapters_may_be_given_in_json(served, model_dir, tmp_path):
    places = [adapter(tmp_path, name) for name in "abc"]
    listed = json.dumps([{"name": "b", "path": places[1], "base_model_name": model_dir}])
    named = module(name="c", path=places[2], base_model_name="hub/base", is_3d_lora_weight=False)
    result = run(model_dir, "--lora-modules", f"a={places[0]}", listed, named)
    assert result.exit_code == 0, result.output
    assert served[0][0].adapters == tuple(zip("abc", places, strict=True))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"path": "p"}, "name is missing"),
        ({"name": "a"}, "path is missing"),
        ({"name": "a", "path": 3}, "path is missing"),
        ({"name": "a,b", "path": "p"}, "without commas"),
        ({"name": "a", "path": "p", "base_model_name": "other"}, "another base model than"),
        ({"name": "a", "path": "p", "base": "base"}, "allowed fields are name, path, base_model_name"),
    ],
)
def test_bad_adapters_in_json_are_refused(served, model_dir, fields, reason):
    for text in (module(**fields), json.dumps([fields])):
        result = run(model_dir, "--lora-modules", text)
        assert result.exit_code == 2
        assert reason in " ".join(result.output.split())
    assert run(model_dir, "--lora-modules", "{").exit_code == 2
    assert not served


def test_an_adapter_above_the_rank_limit_is_refused_before_anything_starts(served, model_dir, tmp_path):
    place = adapter(tmp_path, "a")
    refused = run(model_dir, "--lora-modules", f"a={place}", "--max-lora-rank", "1")
    assert refused.exit_code == 1
    assert "the LoRA rank 2 is above max_lora_rank=1" in " ".join(refused.output.split())
    assert not served
    assert run(model_dir, "--lora-modules", f"a={place}", "--max-lora-rank", "2").exit_code == 0


@pytest.fixture
def keys_of(monkeypatch):
    """Digests of the keys of a command line."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "moe_lora.assemble.serve", lambda cluster, _: calls.append(cluster.front_end.admin_key_digests)
    )

    def found(*words: str) -> tuple[str, ...]:
        result = run(*words)
        assert result.exit_code == 0, result.output
        return calls.pop()

    return found


def test_keys_come_from_the_option_else_from_the_environment(keys_of, model_dir, monkeypatch, tmp_path):
    def digest(key):
        return hashlib.sha256(key.encode()).hexdigest()

    assert keys_of(model_dir) == ()
    several = keys_of(model_dir, "--api-key", "one", "two", "--api-key", "three")
    assert several == tuple(map(digest, ("one", "two", "three")))
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    assert keys_of(model_dir) == (digest("hidden"),)
    assert keys_of(model_dir, "--api-key", "one") == (digest("one"),)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model_dir: {model_dir}\nfront_end:\n  admin_key_digests: [{digest('file')}]\n")
    assert keys_of("--config", str(file)) == (digest("file"),)
    assert keys_of("--config", str(file), "--api-key", "one") == (digest("file"), digest("one"))
    given = f"front_end.admin_key_digests={digest('set')}"
    assert keys_of(model_dir, "--set", given) == (digest("set"),)
    assert keys_of("--config", str(file), "--set", given, "--api-key", "a") == (digest("set"), digest("a"))
    file.write_text(f"model_dir: {model_dir}\nfront_end:\n")
    assert keys_of("--config", str(file), "--api-key", "one") == (digest("one"),)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert keys_of(model_dir) == ()


def test_options_hold_when_the_settings_are_read_again(model_dir, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model_dir: {model_dir}\n")
    words = ("--config", str(file), "--set", "front_end.max_connections=7", "--seed", "3", "--api-key", "one")
    options, _ = parsed(*words)
    read = [cluster_to_serve(str(file), None, options) for _ in range(2)]
    assert read[0] == read[1]
    assert (read[1].front_end.max_connections, read[1].engine.seed) == (7, 3)
