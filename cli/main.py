"""`moe-lora`: the table of commands, and a group that imports one only to run it."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

import click

from moe_lora import __version__


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command lives: a module of this package, the click command in it, and its line in --help."""

    module: str
    function: str
    short_help: str


COMMANDS: dict[str, LazyCommand] = {
    "serve": LazyCommand("serve", "serve", "Serve a model and its adapters over HTTP."),
    "cluster": LazyCommand("cluster", "cluster", "Make the certificates of a cluster of several hosts."),
    "replay": LazyCommand("replay", "replay", "Send a trace's traffic to a server and measure it."),
    "report": LazyCommand("report", "report", "Compare saved runs in one HTML page."),
    "capacity": LazyCommand("capacity", "capacity", "Show or change a LoRA Server's capacity."),
    "provision": LazyCommand("provision", "provision", "Size a cluster for a trace and two SLOs."),
    "profile": LazyCommand("profile", "profile", "Time a model's layer here, for provision."),
    "profile-steps": LazyCommand(
        "profile_steps", "profile_steps", "Time whole steps by rank; fit performance models."
    ),
    "operating-points": LazyCommand(
        "operating_points", "operating_points", "Find the most tokens/s of each rank within an SLO."
    ),
    "adapters": LazyCommand("adapters", "adapters", "Check adapters, keep a registry of them."),
    "env": LazyCommand("env", "env", "Show the machine and the versions in use."),
}


class LazyGroup(click.Group):
    """A group whose --help needs no command's module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {cmd_name!r}; did you mean {near[0]}?")
            return None
        module = importlib.import_module(f".{entry.module}", __package__)
        return getattr(module, entry.function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moe-lora")
def main() -> None:
    """Serve many LoRA adapters over one Mixture-of-Experts model."""


if __name__ == "__main__":
    from .entry import run

    run()
