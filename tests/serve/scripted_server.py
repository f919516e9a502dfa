# SPDX-License-Identifier: Apache-2.0
"""A server over a scripted engine, a program; its argument: `drain_s`, `files` and the engine settings."""

from __future__ import annotations

import json
import logging
import resource
import sys

from moe_lora.serve.server import bind, run_server
from tests.small_tokenizers import characters, wrapped

from .conftest import frontend_of, scripted


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    settings = json.loads(sys.argv[1])
    drain_s, tokenizer = settings.pop("drain_s"), wrapped(characters())
    if files := settings.pop("files", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    engine = scripted(tokenizer, **settings)
    run_server(frontend_of(engine, tokenizer), [bind("127.0.0.1", 0)], drain_s=drain_s)
    print("aborted", len(engine.aborted), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
