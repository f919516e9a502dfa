# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `moe-lora serve`: its addresses, and a process for each instance."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from moe_lora.core.host import CLUSTER_MARK, cluster_headers

ROLE = "import signal, sys, time; {0}; print('up', flush=True); time.sleep(600)"
STUCK = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Server:
    def __init__(self, content: dict[str, Any]) -> None:
        self.content, self.key = content, content["served_model_name"]
        self.roles: list[subprocess.Popen[bytes]] = []
        self.scale(2)

    def scale(self, number: int) -> None:
        while len(self.roles) > number:
            self.roles.pop().kill()
        for index in range(len(self.roles), number):
            code = ROLE.format(STUCK if self.key == "stuck" else "pass")
            words = ["--role", "instance", "--name", f"instance-{index}", "--starts", "1"]
            if self.key == "ranks":
                print(f"instance-{index} ended after 1.0 s: it was killed", flush=True)
                print("front-end-0 ended after 1.0 s: a port", flush=True)
                words = ["--role", "lora-server"]
            environment = {**os.environ, "RANK": str(index)}
            role = subprocess.Popen(
                [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, env=environment
            )
            assert role.stdout is not None
            role.stdout.readline()
            self.roles.append(role)

    def answer(self, method: str, url: str, key: str | None) -> tuple[int, dict[str, Any]]:
        place = urlsplit(url)
        if place.path == "/ready":
            return (503 if self.key == "slow" else 200), {}
        if self.key == "keys" and key != "Bearer secret":
            return 401, {"error": {"message": "a key is needed"}}
        if method == "POST":
            if self.key == "odd":
                return 404, {"detail": "Not Found"}
            if "scaling" not in self.content:
                return 400, {"error": {"message": "the number of instances is fixed"}}
            self.scale(int(parse_qs(place.query)["number"][0]))
        state = {"live": True, "silent": False, "drained": False, "restarts": 2}
        cards = [{"id": f"instance-{index}", **state} for index in range(len(self.roles))]
        if self.key == "ranks":
            cards[1]["live"] = False
        return 200, {"data": cards}

    def end(self, *_: object) -> None:
        if self.key == "busy":
            return
        for role in self.roles:
            role.kill()
            role.wait()
        sys.exit(143)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", required=True)
    parser.add_argument("--front-ends")
    with open(parser.parse_args().config) as file:
        content = yaml.safe_load(file)
    if content["served_model_name"] == "unfit":
        sys.exit("Error: it can't be:\n  one more line")
    server = Server(content)
    signal.signal(signal.SIGTERM, server.end)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = server.answer(self.command, self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for one in cluster_headers(os.environ[CLUSTER_MARK]).items():
                self.send_header(*one)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET

    port = content["front_end"]["port"]
    listening = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    import threading

    threading.Thread(target=listening.serve_forever, daemon=True).start()
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
