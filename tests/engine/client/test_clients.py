# SPDX-License-Identifier: Apache-2.0
"""The same contract for an engine in this process and for one in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.processes import instance_processes
from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    AdapterVersionError,
    ConfigError,
    EngineDeadError,
)
from moe_lora.core.request import GenerateRequest, SamplingParams, TokenOutput
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.client import EngineClient
from tests.dist.cluster_jobs import children, until
from tests.engine.ranks.test_expert_parallel import INSTANCE, followers_of

DEMO = Path(__file__).parents[3] / "demo"
CONFIG = EngineConfig(
    model_dir=str(DEMO / "model"),
    adapters=(("upper", str(DEMO / "adapters" / "upper")),),
    eager=True,
    max_num_seqs=8,
    num_threads=1,
)


@pytest.fixture(scope="module", params=["in_process", "process"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    if request.param == "process":
        with instance_processes(CONFIG) as [client]:
            yield client
        return
    owner = InProcessClient(build_engine(CONFIG))
    yield owner
    owner.shut_down()


def ask(request_id: str, adapter: str | None = None, max_tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=(1, 40, 41, 42), adapter=adapter, sampling=sampling
    )


async def collect(client: EngineClient, request: GenerateRequest) -> tuple[list[int], TokenOutput]:
    tokens: list[int] = []
    async for output in client.generate(request):
        tokens += output.token_ids
    return tokens, output


def test_streams_end_with_a_reason_and_timing(client):
    tokens, last = asyncio.run(collect(client, ask("one")))
    assert len(tokens) == 6
    assert last.finish_reason == "length"
    assert last.timing.decode_ttft_s >= 0


def test_concurrent_requests_get_the_tokens_they_get_alone(client):
    async def both() -> list[tuple[list[int], TokenOutput]]:
        return await asyncio.gather(
            *(collect(client, ask(f"mixed-{i}", "upper" if i % 2 else None)) for i in range(6))
        )

    mixed = [tokens for tokens, _ in asyncio.run(both())]
    alone = [asyncio.run(collect(client, ask("alone", adapter)))[0] for adapter in (None, "upper")]
    assert mixed == alone * 3


def test_leaving_a_stream_aborts_its_request(client):
    async def leave() -> int:
        async for _ in client.generate(ask("left", max_tokens=200)):
            break
        while (stats := await client.stats()).num_running:
            await asyncio.sleep(0.01)
        return stats.num_running + stats.num_waiting

    assert asyncio.run(leave()) == 0


def test_abort_ends_the_stream(client):
    async def abort() -> TokenOutput:
        stream = client.generate(ask("aborted", max_tokens=200))
        outputs = [await anext(stream)]
        await client.abort("aborted")
        outputs += [output async for output in stream]
        return outputs[-1]

    for _ in range(100):  # an answer may be over before its abort comes
        if (last := asyncio.run(abort())).finish_reason != "length":
            break
    assert last.finish_reason == "abort"


def test_adapters_come_and_go_while_requests_run(client):
    async def cycle() -> tuple[list[int], list[str]]:
        info = await client.call("load_adapter", "guest", str(DEMO / "adapters" / "upper"))
        assert (info.name, info.version) == ("guest", 1)
        stream = asyncio.create_task(collect(client, ask("guest", "guest", max_tokens=30)))
        await asyncio.sleep(0.05)
        await client.call("unload_adapter", "guest")
        tokens, last = await stream
        assert last.finish_reason == "length"
        with pytest.raises(AdapterNotFoundError, match="'guest' is not loaded"):
            await collect(client, ask("late", "guest"))
        return tokens, [adapter.name for adapter in await client.list_adapters()]

    tokens, names = asyncio.run(cycle())
    assert tokens == asyncio.run(collect(client, ask("same", "upper", max_tokens=30)))[0]
    assert names == ["upper"]


def test_answer_goes_on_only_with_the_version_that_began_it(client):
    async def go_on() -> None:
        path = str(DEMO / "adapters" / "upper")
        await client.call("load_adapter", "guest", path, version=2)
        _, last = await collect(client, ask("begun", "guest"))
        assert last.adapter_version == 2
        rest = replace(ask("rest", "guest"), adapter_version=2)
        assert len((await collect(client, rest))[0]) == 6
        await client.call("load_adapter", "guest", path, replace=True, version=3)
        with pytest.raises(AdapterVersionError, match=r"begun with version 2 .* version 3 is served here"):
            await collect(client, rest)
        with pytest.raises(AdapterVersionError, match=r"begun with other content of adapter 'guest'"):
            await collect(client, replace(rest, adapter_version=3, adapter_content="another"))
        await client.call("unload_adapter", "guest")

    asyncio.run(go_on())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answer_that_goes_on_has_the_tokens_of_one_that_was_never_cut(client, temperature):
    async def cut_everywhere() -> None:
        whole = ask("whole", "upper")
        sampling = replace(whole.sampling, temperature=temperature, seed=5, min_tokens=6, logprobs=1)
        whole = replace(whole, sampling=sampling)
        tokens, _ = await collect(client, whole)
        for cut in range(1, 6):
            rest = replace(whole, request_id="rest", generated=tuple(tokens[:cut]))
            found, last = await collect(client, rest)
            assert (found, last.finish_reason) == (tokens[cut:], "length")
        with pytest.raises(ValueError, match="generated has 6 tokens"):
            await collect(client, replace(whole, generated=tuple(tokens)))

    asyncio.run(cut_everywhere())


def test_caller_that_gives_up_on_an_answer_leaves_the_engine_alive(client):
    async def give_up() -> list[str]:
        call = asyncio.create_task(client.call("load_adapter", "late", str(DEMO / "adapters" / "upper")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while "late" not in (names := [adapter.name for adapter in await client.list_adapters()]):
            await asyncio.sleep(0.01)
        await client.call("unload_adapter", "late")
        return names

    assert sorted(asyncio.run(give_up())) == ["late", "upper"]


def test_request_of_a_wrong_type_is_refused_and_the_engine_goes_on(client):
    with pytest.raises(TypeError):
        asyncio.run(collect(client, GenerateRequest(request_id="t", prompt_token_ids=("a",))))
    assert asyncio.run(client.is_alive())


def test_event_loop_closed_under_a_stream_leaves_the_engine_alive(client):
    loop = asyncio.new_event_loop()
    stream = client.generate(ask("orphan", max_tokens=60))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def until_idle() -> None:
        while (await client.stats()).num_running:
            await asyncio.sleep(0.01)

    asyncio.run(until_idle())
    assert asyncio.run(client.is_alive())


def test_closed_engine_fails_what_waits_for_it_and_every_later_call():
    client = InProcessClient(build_engine(CONFIG))
    outputs: list[TokenOutput | Exception] = []
    client.submit(ask("dropped", max_tokens=200), outputs.append)
    client.shut_down()
    assert isinstance(outputs[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="was shut down"):
        client.start_call("stats")


def test_unload_waits_for_requests_of_replaced_versions_too(client):
    async def replace_and_unload() -> TokenOutput:
        upper = str(DEMO / "adapters" / "upper")
        await client.call("load_adapter", "replaced", upper)
        stream = client.generate(ask("old-version", "replaced", max_tokens=150))
        outputs = [await anext(stream)]
        await client.call("load_adapter", "replaced", upper, replace=True)
        unload = asyncio.create_task(client.call("unload_adapter", "replaced"))
        outputs += [output async for output in stream if not unload.done()]
        await unload
        return outputs[-1]

    assert asyncio.run(replace_and_unload()).finish_reason == "length"


def test_an_unload_without_a_wait_lets_the_request_end_and_the_name_load_again(client):
    async def answer(request_id: str, name: str) -> list[int]:
        return (await collect(client, ask(request_id, name, max_tokens=100)))[0]

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        expected = []
        for name in ("upper", "reverse"):
            await client.call("load_adapter", "alone", str(DEMO / "adapters" / name))
            expected.append(await answer("alone", "alone"))
            await client.call("unload_adapter", "alone")
        await client.call("load_adapter", "again", str(DEMO / "adapters" / "upper"))
        stream = client.generate(ask("running", "again", max_tokens=100))
        tokens = [*(await anext(stream)).token_ids]
        await client.call("unload_adapter", "again", waits=False)
        await client.call("load_adapter", "again", str(DEMO / "adapters" / "reverse"))
        later = await answer("later", "again")
        tokens += [token async for output in stream for token in output.token_ids]
        await client.call("unload_adapter", "again")
        return [tokens, later], expected

    found, expected = asyncio.run(run())
    assert found == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest(request_id="e", prompt_token_ids=()), "prompt is empty"),
        (GenerateRequest(request_id="l", prompt_token_ids=(1,) * 256), "raise max_model_len"),
        (GenerateRequest(request_id="v", prompt_token_ids=(1, 128)), "token id 128, outside"),
    ],
)
def test_request_that_cannot_run_is_refused(client, request_, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(collect(client, request_))


def test_bad_adapter_calls_say_what_is_wrong(client, tmp_path):
    async def load(name: str, path: Path) -> None:
        await client.call("load_adapter", name, str(path))

    with pytest.raises(AdapterExistsError, match="already loaded"):
        asyncio.run(load("upper", DEMO / "adapters" / "upper"))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        asyncio.run(load("empty", tmp_path))
    with pytest.raises(AdapterNotFoundError, match="'nobody' is not loaded"):
        asyncio.run(client.call("unload_adapter", "nobody"))


def test_engine_that_cannot_start_says_why(tmp_path):
    before = set(children(os.getpid()))
    config = EngineConfig(model_dir=str(tmp_path), num_instances=2, num_threads=1)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"), instance_processes(config):
        pass
    assert set(children(os.getpid())) == before


@pytest.mark.slow
def test_killed_engine_fails_its_requests_and_is_started_again():
    before = {*followers_of(os.getpid(), INSTANCE)}
    with instance_processes(CONFIG) as [client]:
        [pid] = {*followers_of(os.getpid(), INSTANCE)} - before

        async def kill() -> None:
            async for _ in client.generate(ask("victim", max_tokens=200)):
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(EngineDeadError, match="has ended"):
            asyncio.run(kill())
        with pytest.raises(EngineDeadError, match="has ended"):
            asyncio.run(collect(client, ask("late")))
        assert not asyncio.run(client.is_alive())
        asyncio.run(client.abort("victim"))  # of no use, and no error
        before.add(pid)
        until(lambda: {*followers_of(os.getpid(), INSTANCE)} - before, lambda: "it is not started again")
