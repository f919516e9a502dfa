# SPDX-License-Identifier: Apache-2.0
"""`moe-lora batch`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config import MAX_COUNT, EngineConfig, LoraServerConfig, RegistryConfig

from .errors import user_errors
from .options import VariadicCommand, headed, model_options, refuse_given, section_options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.config.cluster import ClusterConfig
    from moe_lora.serve.batches.lines import BatchLine, BatchLines

    from .batch_run import BatchRun

_EXAMPLES = """\b
Examples:
  moe-lora batch requests.jsonl -o results.jsonl --server http://127.0.0.1:8000
  moe-lora batch requests.jsonl demo/model --lora-dir demo/adapters -o results.jsonl
"""
INTERRUPTED = 130


@section_options(registry=RegistryConfig, engine=EngineConfig, lora_server=LoraServerConfig)
@click.command(
    cls=VariadicCommand,
    variadic=["--lora-modules", "--lora-dir"],
    headings=("Batch", "Model", "Adapters", "LoRA Server", "Scaling", "Access", "More"),
    context_settings={"max_content_width": 100},
    epilog=_EXAMPLES,
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@headed(
    "Batch",
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False),
    metavar="OUT",
    help="File of results.  Requests with a result there are left out.",
)
@headed("Batch", "--server", metavar="URL", help="Send to this server; start no instance.")
@headed("Batch", "--api-key", envvar="OPENAI_API_KEY", metavar="KEY", help="Key for --server.")
@headed(
    "Batch",
    "--concurrency",
    type=click.IntRange(1, 4096),
    default=64,
    metavar="N",
    help="Requests at once.  [default: 64]",
)
@model_options
@user_errors
def batch(
    file: str, output: str, server: str | None, api_key: str | None, concurrency: int, **options: Any
) -> None:
    """Answer the requests in FILE, OpenAI's batch format, with results in OUT.

    With --server a running server answers; else an instance of the model in MODEL_DIR. Requests of an adapter
    run together. After a kill or Ctrl-C the same command goes on. Exit status 1: requests failed, or lines
    are wrong.
    """
    from moe_lora.serve.batches.lines import Results, read_lines

    from .batch_run import BatchRun

    if Path(output).resolve() == Path(file).resolve():
        raise click.UsageError("--output is FILE itself; choose another file for results")
    if server is not None:
        refuse_given(options, "--server answers by itself; leave {} or --server out")
    else:
        refuse_given(("api_key",), "leave {} out, or give --server: an instance here needs no key")
    cluster = None if server is not None else _own_cluster(options)
    with open(file, "rb") as source, closing(Results(output)) as results:
        found = read_lines(source)
        for problem in found.problems:
            _report(f"line {problem.number}: {problem.message}")
        if found.further:
            _report(found.further)
        todo = [line for line in found.lines if line.custom_id not in results.finished]
        run = BatchRun(source, results, concurrency, _report)
        try:
            if todo and cluster is not None:
                _run_here(run, todo, cluster)
            elif todo and server is not None:
                _run_there(run, todo, server, api_key)
        finally:
            _report(run.described(len(todo)))
        _end(run, found)


def _report(text: str) -> None:
    click.echo(text, err=True)


def _end(run: BatchRun, found: BatchLines) -> None:
    if run.interrupted:
        _report("interrupted; the same command goes on with the rest")
        raise click.exceptions.Exit(INTERRUPTED)
    if run.failed or run.left or found.num_wrong:
        _report(f"{run.failed} failed, {run.left} without a result, {found.num_wrong} wrong lines")
        raise click.exceptions.Exit(1)


def _run_there(run: BatchRun, todo: list[BatchLine], server: str, api_key: str | None) -> None:
    """Raises ValueError if no server answers."""
    import asyncio

    import httpx

    from moe_lora.report.load_client import base_url

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    time_s = httpx.Timeout(None, connect=10.0)

    async def send() -> None:
        async with httpx.AsyncClient(
            base_url=base_url(server), headers=headers, limits=limits, timeout=time_s, trust_env=False
        ) as http:
            try:
                await http.get("/health", timeout=10.0)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = str(error) or type(error).__name__
                raise ValueError(
                    f"no server at {server} ({reason}); start it, or correct --server"
                ) from error
            await run.run(todo, http)

    asyncio.run(send())


def _own_cluster(options: dict[str, Any]) -> ClusterConfig:
    """Settings without keys and limits of clients.  Raises ConfigError and click.UsageError."""
    from .serve_settings import cluster_to_serve, fetched, fit_to_serve

    config_file, skips_bad = options.pop("config_file"), options.pop("skip_bad_adapters")
    if config_file is None and options["model_dir"] is None:
        raise click.UsageError("give --server, or MODEL_DIR of the model that answers")
    cluster = fetched(cluster_to_serve(config_file, None, {**options, "given_keys": ()}))
    of_all = ("max_queued_tokens", "max_bodies_bytes")
    limits = {name: MAX_COUNT for one in of_all for name in (one, f"{one}_per_client")}
    front_end = replace(cluster.front_end, api_keys=None, admin_key_digests=(), admin_address=None, **limits)
    engine = fit_to_serve(cluster.engine, skip_bad=skips_bad)
    return replace(cluster, front_end=front_end, engine=engine)


def _run_here(run: BatchRun, todo: list[BatchLine], cluster: ClusterConfig) -> None:
    import logging

    import httpx

    from moe_lora import assemble
    from moe_lora.core.processes import set_log_level

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_log_level(cluster.front_end.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def send(app: FastAPI) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport, timeout=None) as http:
            await run.run(todo, http)

    assemble.with_local_app(cluster, send)
