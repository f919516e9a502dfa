"""GET / and /docs: what this server is, for whoever opens its address in a browser."""

from __future__ import annotations

import json
from html import escape

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response

import moe_lora

from moe_lora.serve.frontend import Frontend

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>moe_lora: {model}</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }}
pre {{ background: #eee; padding: 1em; overflow: auto }} td {{ padding-right: 1.5em }}</style>
<h1>{model}</h1>
<p>moe_lora {version} serves this model and its LoRA adapters through the OpenAI interface.
<code>model</code> names the base model or an adapter; <a href="v1/models">/v1/models</a> lists them.</p>
<pre>curl {url}v1/completions -H 'Content-Type: application/json' \\
    -d '{body}'</pre>
<table>{rows}</table>
<p>The same for programs, with all fields: <a href="openapi.json">/openapi.json</a>.</p></html>
"""


def welcome_router(frontend: Frontend, app: FastAPI) -> APIRouter:
    """The page at both addresses.  It loads nothing from elsewhere."""
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_model=None)
    @router.get("/docs", response_model=None)
    async def welcome(request: Request) -> Response:
        # Without a tokenizer the server takes token ids only.
        prompt = "hello" if frontend.tokenizer is not None else [1, 2, 3]
        body = json.dumps({"model": frontend.model_name, "prompt": prompt, "max_tokens": 16})
        return HTMLResponse(
            PAGE.format(
                model=escape(frontend.model_name),
                version=escape(moe_lora.__version__),
                url=escape(str(request.base_url)),
                body=escape(body.replace("'", "\\u0027"), quote=False),
                rows="".join(_rows(app)),
            )
        )

    return router


def _rows(app: FastAPI) -> list[str]:
    """A row of the table for each endpoint."""
    return [
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{escape(one.get('description', ''))}"
        for path, methods in app.openapi()["paths"].items()
        for method, one in methods.items()
    ]
