# SPDX-License-Identifier: Apache-2.0
"""README.md can't rot: its commands parse, its files exist, its Python runs and prints what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from moe_lora.cli.main import main
from moe_lora.serve.openai.protocol import CompletionRequest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(README) if kind == language]


def bash_commands() -> Iterator[list[str]]:
    """The words of every command, comments and variables before it left out."""
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            if words:
                yield words


def commands_of(program: str) -> list[list[str]]:
    return [words[1:] for words in bash_commands() if Path(words[0]).name == program]


def parse(words: list[str]) -> None:
    """Raises click.UsageError for what moe-lora would refuse, without running anything."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"moe-lora has no command {words[0]!r}"
        command, words = found, words[1:]
    command.make_context(command.name, list(words))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_bash_blocks_are_bash() -> None:
    for block in blocks("bash"):
        subprocess.run(["bash", "-n", "-c", block], check=True)


def test_first_two_commands_are_make_demo_and_make_test() -> None:
    assert [words[:2] for words in bash_commands()][:2] == [["make", "demo"], ["make", "test"]]


def test_make_commands_and_mentions_are_targets() -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    mentioned = set(re.findall(r"`make ([a-z][\w-]*)", README))
    asked = {word for words in commands_of("make") for word in words if "=" not in word}
    assert asked
    assert asked | mentioned <= targets


@pytest.mark.parametrize("words", commands_of("moe-lora"), ids=lambda words: " ".join(words[:2]))
def test_moe_lora_commands_are_accepted(words: list[str]) -> None:
    parse(words)


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(click.UsageError, match="--lora-directory"):
        parse(["serve", "demo/model", "--lora-directory", "demo/adapters"])


def test_python_commands_name_modules_and_files_that_exist() -> None:
    mentioned = [shlex.split(text)[1:] for text in re.findall(r"`(python3? [^`]+)`", README)]
    for words in (*commands_of("python"), *mentioned):
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"no module {words[1]}"
        else:
            assert Path(words[0]).is_file(), f"no file {words[0]}"


def test_curl_commands_send_bodies_the_server_takes() -> None:
    for words in commands_of("curl"):
        body = json.loads(words[words.index("-d") + 1])
        if any(word.endswith("/v1/completions") for word in words):
            CompletionRequest.model_validate(body)


@pytest.mark.parametrize("program", blocks("python"), ids=lambda text: text.strip().splitlines()[0])
def test_python_snippets_run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    if "reverse" in program and "hello" in program:
        assert "olleh" in done.stdout
