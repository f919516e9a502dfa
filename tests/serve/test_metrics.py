# SPDX-License-Identifier: Apache-2.0
"""GET /metrics, read as Prometheus reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from moe_lora.core.request import FleetStats, InstanceStats
from moe_lora.serve.api_keys import ApiKey, add_key
from moe_lora.serve.metric_families import loaded_family
from moe_lora.serve.metrics import CountsByName, RequestWatch
from moe_lora.serve.server import create_app

from .conftest import as_served, frontend_of, scripted, serving
from .live_server import ServerThread
from .scripted_engine import adapter_info


def samples(server):
    response = server.get("/metrics")
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for f in families for sample in f.samples
    }


def value(found, name, **labels):
    wanted = sorted({"model_name": "base", **labels}.items())
    return found[(name, *wanted)]


def test_requests_are_counted_and_timed(server):
    for max_tokens in (4, 50):
        server.post("/v1/completions", {"prompt": "hello", "max_tokens": max_tokens})
    found = samples(server)
    assert value(found, "vllm:request_success_total", finished_reason="length") == 1
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(found, "vllm:time_to_first_token_seconds_count") == 2
    assert value(found, "vllm:e2e_request_latency_seconds_count") == 2
    gaps = (4 - 1) + (len("hello world") + 1 - 1)
    assert value(found, "vllm:inter_token_latency_seconds_count") == gaps
    assert value(found, "vllm:time_per_output_token_seconds_count") == gaps
    assert value(found, "vllm:request_time_per_output_token_seconds_count") == 2
    assert value(found, "vllm:request_queue_time_seconds_count") == 2
    assert abs(value(found, "moe_lora:decode_ttft_seconds_sum") - 2 * 0.012) < 1e-9


def test_sizes_of_requests_and_steps_are_shown_as_vllms_board_asks(server):
    for max_tokens in (4, 50):
        server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": max_tokens, "n": 2})
    found = samples(server)
    generated = 2 * (4 + len("hello world") + 1)
    for name, total in {
        "request_prompt_tokens": 12,
        "request_generation_tokens": generated,
        "request_max_num_generation_tokens": generated,
        "request_params_max_tokens": 2 * 54,
        "request_params_n": 8,
    }.items():
        assert value(found, f"vllm:{name}_sum") == total, name
        assert value(found, f"vllm:{name}_count") == 4
    assert value(found, "vllm:request_num_preemptions_bucket", le="0.0") == 0
    assert value(found, "vllm:request_num_preemptions_bucket", le="2.0") == 4, "2 each"
    assert value(found, "vllm:request_params_n_bucket", le="1.0") == 0
    assert value(found, "vllm:request_decode_time_seconds_count") == 4
    assert value(found, "vllm:request_inference_time_seconds_count") == 4
    assert value(found, "vllm:iteration_tokens_total_bucket", le="+Inf") == 0, "this engine has no steps"


def test_every_series_of_vllms_boards_is_there(server):
    """Names and label of the boards in vLLM 0.33's examples."""
    server.post("/v1/completions", {"prompt": "hello"})
    found = {name for name, *labels in samples(server) if ("model_name", "base") in labels}
    histograms = {
        *("e2e_request_latency_seconds", "inter_token_latency_seconds", "iteration_tokens_total"),
        *("request_decode_time_seconds", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds"),
        *("request_time_per_output_token_seconds", "time_to_first_token_seconds"),
    }
    single = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    counters = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
    wanted = {f"vllm:{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    assert wanted | {f"vllm:{name}" for name in (*single, *counters)} <= found


def test_refused_requests_are_not_counted_as_finished(server):
    assert server.post("/v1/completions", {"prompt": "hello", "model": "nobody"}).status_code == 404
    assert not any(key[0] == "vllm:request_success_total" for key in samples(server))


def test_the_engines_numbers_are_shown_under_vllms_names(server):
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4})
    found = samples(server)
    assert value(found, "moe_lora:engine_up") == 1
    assert value(found, "vllm:num_requests_running") == 0
    assert value(found, "vllm:num_requests_waiting") == 5
    assert value(found, "vllm:kv_cache_usage_perc") == 0.25
    assert value(found, "vllm:prompt_tokens_total") == 3
    assert value(found, "vllm:generation_tokens_total") == 4
    assert value(found, "vllm:prefix_cache_queries_total") == 0
    assert value(found, "vllm:prefix_cache_hits_total") == 0
    assert value(found, "vllm:num_preemptions_total") == 0
    assert value(found, "moe_lora:adapter_loads_total") == 3
    assert value(found, "moe_lora:adapters_preloaded_total") == 2
    assert value(found, "moe_lora:adapter_evictions_total") == 0
    assert value(found, "moe_lora:adapter_load_bytes_total") == 4096


def test_what_the_arenas_hold_and_what_was_found_there_is_shown(server):
    found = samples(server)
    assert value(found, "moe_lora:adapter_hits_total") == 5
    assert value(found, "moe_lora:kv_hit_tokens_total", tier="host") == 6
    assert value(found, "moe_lora:swapped_bytes_total", direction="out") == 7
    assert value(found, "moe_lora:swapped_bytes_total", direction="in") == 0
    assert value(found, "moe_lora:arena_bytes", tier="device") == 1000
    assert value(found, "moe_lora:arena_used_bytes", tier="device", kind="kv") == 400
    assert value(found, "moe_lora:arena_used_bytes", tier="host", kind="adapter") == 8
    assert value(found, "moe_lora:kv_invalid_share") == 0.25


def labels_of(found, name):
    return [dict(key[1:]) for key in found if key[0] == name]


def test_routers_can_read_the_cache_of_an_instance(server):
    [labels] = labels_of(samples(server), "vllm:cache_config_info")
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "40")
    assert (labels["enable_prefix_caching"], labels["cache_dtype"]) == ("True", "float32")
    assert labels["kv_cache_size_tokens"] == str(16 * 40)
    assert labels["kv_cache_max_concurrency"] == "5.00"


def test_waiting_requests_are_counted_by_reason(server):
    found = samples(server)
    assert value(found, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(found, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2


def test_refusals_of_the_queue_are_counted_under_vllms_name_too(tokenizer):
    metrics = frontend_of(scripted(tokenizer), tokenizer).metrics
    for reason in ("queue", "client_queue", "queue", "key"):
        metrics.refuse(reason)
    text = metrics.render().decode()
    found = dict(re.findall(r'^vllm:admission_rejections_total\{.*reason="(\w+)"\} (\S+)$', text, re.M))
    assert found == {"queue": "2.0", "client_queue": "1.0", "queue_time": "0.0"}


def test_routers_can_read_where_each_adapter_is(server, engine):
    engine.adapters["b"] = replace(adapter_info("b"), residency="disk", lora_rank=64)
    engine.adapters["a"] = replace(adapter_info("a"), residency="device", pinned=True, lora_rank=8)
    found = labels_of(samples(server), "vllm:lora_adapter_loaded")
    assert {"adapter_name": "a", "level": "device", "pinned": "true", "rank": "8"} in found
    assert {"adapter_name": "b", "level": "disk", "pinned": "false", "rank": "64"} in found
    assert len(found) == 3


def test_adapters_on_the_device_are_all_listed_and_others_up_to_the_bound():
    adapters = [replace(adapter_info(f"d{i}"), residency="disk") for i in range(9)]
    adapters += [replace(adapter_info(f"r{i}"), residency="device") for i in range(5)]
    for limit, expected in ((0, 5), (3, 5), (7, 7), (99, 14)):
        names = [sample.labels["adapter_name"] for sample in loaded_family(adapters, limit).samples]
        assert len(names) == expected
        assert names[:5] == [f"r{i}" for i in range(5)]


def test_requests_tokens_and_ttft_are_counted_by_adapter(server, engine):
    for body in ({"max_tokens": 4}, {"model": "shout"}, {"model": "shout", "max_tokens": 2}):
        server.post("/v1/completions", {"prompt": "hello", **body})
    server.post("/v1/completions", {"prompt": "hello", "model": "nobody"})
    found = samples(server)
    assert value(found, "moe_lora:adapter_requests_total", adapter="base", finished_reason="length") == 1
    assert value(found, "moe_lora:adapter_requests_total", adapter="shout", finished_reason="stop") == 1
    prompts = value(found, "moe_lora:adapter_prompt_tokens_total", adapter="shout")
    assert prompts == 2 * (1 + len("hello"))  # one token begins each text
    assert value(found, "moe_lora:adapter_generation_tokens_total", adapter="shout") == len("fox") + 1 + 2
    assert value(found, "moe_lora:adapter_time_to_first_token_seconds_count", adapter="shout") == 2
    names = {labels["adapter"] for labels in labels_of(found, "moe_lora:adapter_prompt_tokens_total")}
    assert names == {"base", "shout"}
    assert not labels_of(found, "moe_lora:tenant_requests_total")
    server.post("/v1/unload_lora_adapter", {"lora_name": "shout"})
    names = {labels["adapter"] for labels in labels_of(samples(server), "moe_lora:adapter_requests_total")}
    assert names == {"base"}


def test_requests_tokens_and_ttft_are_counted_by_tenant_with_a_bound(engine, tokenizer, tmp_path):
    tenants, file = ("acme", "globex", "initech", "hooli"), tmp_path / "keys.json"
    ops = {"Authorization": f"Bearer {add_key(file, ApiKey(id='ops', digest='', tenant='ops', admin=True))}"}
    keys = {name: add_key(file, ApiKey(id=name, digest="", tenant=name)) for name in tenants}
    frontend = frontend_of(engine, tokenizer, api_keys=str(file), metrics_by_name=2)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        for number, key in enumerate(keys.values(), start=1):
            body = {"prompt": "hello", "max_tokens": number}
            for _ in range(2):
                headers = {"Authorization": f"Bearer {key}"}
                assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        served.http.headers.update(ops)
        found = samples(served)
    prompt = 1 + len("hello")
    for name, num_requests, num_tokens in (("acme", 2, 2), ("globex", 2, 4), ("other", 4, 14)):
        labels, requests = {"tenant": name}, {"tenant": name, "finished_reason": "length"}
        assert value(found, "moe_lora:tenant_requests_total", **requests) == num_requests
        assert value(found, "moe_lora:tenant_generation_tokens_total", **labels) == num_tokens
        assert value(found, "moe_lora:tenant_prompt_tokens_total", **labels) == num_requests * prompt
        ttft = "moe_lora:tenant_time_to_first_token_seconds"
        assert value(found, f"{ttft}_count", **labels) == num_requests
        assert value(found, f"{ttft}_sum", **labels) > 0
    for family in ("requests_total", "generation_tokens_total", "prompt_tokens_total"):
        shown = {labels["tenant"] for labels in labels_of(found, f"moe_lora:tenant_{family}")}
        assert shown == {"acme", "globex", "other"}


def test_counts_by_name_are_absent_when_off(engine, tokenizer):
    front_end = frontend_of(engine, tokenizer, metrics_by_name=0)
    assert front_end.metrics.by_adapter is front_end.metrics.by_tenant is None
    watch = RequestWatch(front_end.metrics, None, adapter="a", tenant="t", prompt_tokens=1)
    watch.tokens(1)
    watch.end("stop", None)
    assert b"moe_lora:adapter_requests" not in front_end.metrics.render()


def test_names_above_the_bound_are_counted_as_other():
    counts = CountsByName("adapter", 2, (0.1, 1.0), fixed=["base"])

    def shown():
        families = {family.name: family for family in counts.collect("base")}
        series = families["moe_lora:adapter_generation_tokens"].samples
        return {one.labels["adapter"]: one.value for one in series}

    for name in ("a", "b", "c", "d", "base", "a", "other"):
        counts.add(name, "stop", 1, 1, 0.5)
    assert shown() == {"base": 1, "a": 2, "b": 1, "other": 3}
    counts.remove_all_but({"b", "c"})
    assert shown() == {"base": 1, "b": 1, "other": 3}
    counts.add("c", "stop", 1, 1, None)
    assert shown() == {"base": 1, "b": 1, "c": 1, "other": 3}
    for number in range(1000):
        counts.add(f"n{number}", "stop", 1, 1, 0.5)
    assert len(shown()) == 4


def test_routers_can_read_which_adapters_are_ready_and_wait(server):
    keys = [dict(key[1:]) for key in samples(server) if key[0] == "vllm:lora_requests_info"]
    assert keys == [{"max_lora": "4", "running_lora_adapters": "shout", "waiting_lora_adapters": "other"}]


def test_a_dead_engine_shows_as_down(server, engine):
    engine.alive = False
    found = samples(server)
    assert value(found, "moe_lora:engine_up") == 0
    assert not any(key[0] == "vllm:num_requests_running" for key in found)


def test_each_of_several_instances_is_shown_beside_the_sums(server, engine, monkeypatch):
    def one(index: int, **values) -> InstanceStats:
        fields = (
            "num_running",
            "num_waiting",
            "kv_usage",
            "outstanding_tokens",
            "num_restarts",
            "num_resent",
        )
        return InstanceStats(
            index=index, name=str(index), live=index == 0, **{**dict.fromkeys(fields, 0), **values}
        )

    async def stats() -> FleetStats:
        return FleetStats(
            num_running=2,
            instances=(one(0, num_running=2, outstanding_tokens=90), one(1, num_restarts=3, num_resent=4)),
        )

    monkeypatch.setattr(engine, "stats", stats)
    found = samples(server)
    assert value(found, "vllm:num_requests_running") == 2
    assert [value(found, "moe_lora:instance_up", instance=i) for i in "01"] == [1, 0]
    assert value(found, "moe_lora:instance_requests_running", instance="0") == 2
    assert value(found, "moe_lora:instance_outstanding_tokens", instance="0") == 90
    assert value(found, "moe_lora:instance_restarts_total", instance="1") == 3
    assert value(found, "moe_lora:instance_requests_resent_total", instance="1") == 4


def test_a_single_engine_shows_no_instances(server):
    assert not [key for key in samples(server) if key[0].startswith("moe_lora:instance_")]


def test_two_apps_in_one_process_count_apart(server, engine, tokenizer):
    with serving(engine, tokenizer) as other:
        other.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        assert value(samples(other), "vllm:time_to_first_token_seconds_count") == 1
        assert value(samples(server), "vllm:time_to_first_token_seconds_count") == 0


def test_the_document_names_every_metric_and_no_other(server):
    server.post("/v1/completions", {"prompt": "hello"})
    page = (Path(__file__).parents[2] / "docs" / "reference" / "prometheus.md").read_text()
    named = set(re.findall(r"`((?:vllm|moe_lora):\w+)`", page.split("## Provisioning")[0]))
    families = text_string_to_metric_families(server.get("/metrics").text)
    exported = {
        f.name + ("_total" if f.type == "counter" else "") for f in families if "_created" not in f.name
    }
    assert named == exported
