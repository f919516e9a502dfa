# SPDX-License-Identifier: Apache-2.0
"""`moe-lora`: commands, imported when run, and the process."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from moe_lora import __version__
from moe_lora.cli.errors import OUTPUT_CLOSED, close_output, is_output_closed
from moe_lora.core.teardown import quick_teardown, quiet_teardown

COMMANDS = {
    "serve": "Serve a model and its adapters over HTTP.",
    "batch": "Answer a file of requests, offline.",
    "settings": "List all settings of serve.",
    "cluster": "Prepare, start and end a cluster of several hosts.",
    "replay": "Send a trace's traffic to a server and measure it.",
    "report": "Compare saved runs in one HTML page.",
    "drain": "Give an instance no requests, before work on it.",
    "undrain": "Give a drained instance requests again.",
    "restart": "Start instances again, one by one, under load.",
    "scale": "Change the number of instances under load.",
    "capacity": "Show or change a LoRA Server's capacity.",
    "provision": "Size a cluster for a trace and two SLOs.",
    "profile": "Time a model's layer here, for provision.",
    "profile-steps": "Time whole steps by rank; fit performance models.",
    "operating-points": "Find the most tokens/s of each rank within an SLO.",
    "quantize": "Write a model with its linear layers quantised.",
    "keys": "Give tenants API keys.",
    "adapters": "Check adapters, keep a registry of them.",
    "env": "Show the machine and the versions in use.",
}
"""Text of --help by command; commands are in the module of their name or of `PLACES`."""
PLACES = dict.fromkeys(("drain", "undrain", "restart", "scale", "capacity"), "administrator")
INTERRUPTED = 130
"""A shell's status after Ctrl-C."""


@contextmanager
def _quiet_end() -> Iterator[None]:
    """End the command with OUTPUT_CLOSED if the output has no reader."""
    try:
        yield
    except BrokenPipeError:
        if not is_output_closed():
            raise
        raise click.exceptions.Exit(OUTPUT_CLOSED) from None


class LazyGroup(click.Group):
    """A group that shows --help without importing its commands."""

    def make_context(self, info_name: str | None, *args: Any, **kwargs: Any) -> click.Context:
        with _quiet_end():
            return super().make_context("moe-lora", *args, **kwargs)  # also under python -m

    def invoke(self, ctx: click.Context) -> Any:
        with _quiet_end():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {cmd_name!r}; did you mean {near[0]}?")
            return None
        name = cmd_name.replace("-", "_")
        return getattr(importlib.import_module(f".{PLACES.get(name, name)}", __package__), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="moe-lora")
def main() -> None:
    """Serve many LoRA adapters over one Mixture-of-Experts model."""


def run() -> NoReturn:
    """Run the command and exit.

    Ctrl-C, also during imports, and a closed output end the command without a traceback.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs ignore SIGINT
        signal.signal(signal.SIGINT, interrupt)
    quiet_teardown()
    quick_teardown()
    try:
        main()
    except (Exception, SystemExit, KeyboardInterrupt):
        if not interrupts:
            raise
    finally:
        close_output()
    sys.exit(INTERRUPTED if interrupts else 0)


if __name__ == "__main__":
    run()
