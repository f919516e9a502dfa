# SPDX-License-Identifier: Apache-2.0
"""`moe-lora cluster`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from .errors import user_errors

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def cluster() -> None:
    """Prepare, start and end a cluster over several hosts (docs/guides/cluster.md)."""


@cluster.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("certificates"),
    help="Folder to write; `certificates` in the file.",
)
@user_errors
def init(folder: Path) -> None:
    """Make the certificates by which the roles of one cluster know each other.

    Every host needs authority.pem and member.pem.  Who has member.pem takes part; keep it as a password.
    """
    from moe_lora.dist.net.keys import AUTHORITY, AUTHORITY_KEY, MEMBER, make_keys

    make_keys(folder)
    print(f"{folder}: copy {AUTHORITY} and {MEMBER} to every host, and name the folder as `certificates`.")
    print(f"{AUTHORITY_KEY} signs further members; no host needs it.")


def _by_name(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """NAME -> PATH."""
    found = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not (name and separator and path) or name in found:
            raise click.BadParameter(f"{text!r}: give NAME=PATH, a name once")
        found[name] = path
    return found


@cluster.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--image", required=True, help="Image with moe-lora.")
@click.option("--name", default="moe-lora", help="Start of the objects' names.")
@click.option("--namespace", default="default", help="Namespace of the objects.")
@click.option("--domain", default="cluster.local", help="Domain of the Kubernetes cluster.")
@click.option("--front-ends", "num_front_ends", type=click.IntRange(1, 64), default=1, help="Pods for HTTP.")
@click.option(
    "--claim",
    "claims",
    metavar="NAME=PATH",
    multiple=True,
    callback=_by_name,
    help="PersistentVolumeClaim and folder in the pods; repeatable.",
)
@click.option(
    "--secret",
    "secrets",
    metavar="NAME=PATH",
    multiple=True,
    callback=_by_name,
    help="Secret and folder in the pods, for API keys; repeatable.",
)
@user_errors
def manifests(file: str, **options: Any) -> None:
    """Print FILE's cluster as Kubernetes objects, for kubectl apply -f -.

    FILE: a cluster.yaml, or a plan of moe-lora provision, with paths as in the pods and without addresses.
    `controllers: 2` in FILE, with several front ends, adds a controller that stands by.
    """
    from moe_lora.config.cluster import read_content
    from moe_lora.dist.launch.kubernetes import Pods, manifests_text

    print(manifests_text(read_content(file), Pods(**options)), end="")


@cluster.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--name", default="moe-lora", show_default=True, help="Name of the job and its folders.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, resolve_path=True),
    default=".",
    help="Folder of all nodes, for the job's file and certificates.  [default: this one]",
)
@click.option(
    "--state-dir", default="/tmp", show_default=True, help="Folder of each node, for adapters' contents."
)
@user_errors
def sbatch(file: str, **options: str) -> None:
    """Print FILE's cluster as a batch script of Slurm.

    FILE: a cluster.yaml, or a plan of moe-lora provision, with paths as on the nodes and without addresses.
    """
    from moe_lora.config.cluster import read_content
    from moe_lora.dist.launch.slurm import Job, job_text

    print(job_text(read_content(file), Job(**options)), end="")


_AUTO = "auto"
_ON = "Where the cluster runs: as processes of this host, or on Ray."


def _place_options(command: Command) -> Command:
    """Options of the cluster's name and place."""
    for option in (
        click.option("--name", default="moe-lora", show_default=True, help="Name of the cluster."),
        click.option(
            "--ray-address", "address", default=_AUTO, show_default=True, help="Address of the Ray cluster."
        ),
        click.option(
            "--state-dir",
            type=click.Path(file_okay=False, resolve_path=True),
            help="Folder of state and log of clusters on this host.  [default: the user's]",
        ),
    ):
        command = option(command)
    return command


def _found_options(command: Command) -> Command:
    """As `_place_options`, of a started cluster."""
    return _place_options(click.option("--on", "kind", type=click.Choice(_KINDS), help=_ON)(command))


_KINDS = ["local", "ray"]


def _ray() -> ModuleType:
    """Commands of clusters on Ray.  Raises ConfigError without Ray."""
    from moe_lora.core.errors import ConfigError

    try:
        from moe_lora.dist.launch import ray_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("Ray is not installed; call on every host: pip install 'moe-lora[ray]'") from error
    return ray_cluster


def _may_be_on_ray(address: str) -> bool:
    """True if Ray is installed, and an address is given or of this host."""
    if find_spec("ray") is None:
        return False
    here = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    return address != _AUTO or "RAY_ADDRESS" in os.environ or here.exists()


def _one_place(kind: str | None, address: str, state_dir: str | None) -> str | None:
    """The place by the options, if any.  Raises UsageError for two."""
    named = {kind, "ray" if address != _AUTO else None, "local" if state_dir is not None else None} - {None}
    if len(named) > 1:
        raise click.UsageError("--ray-address goes with --on ray, --state-dir with --on local; leave one out")
    return named.pop() if named else None


def _found(name: str, kind: str | None, address: str, state_dir: str | None) -> tuple[ModuleType, str | None]:
    """The commands of the place of a cluster, and their address.  Raises ConfigError for two places."""
    from moe_lora.core.errors import ConfigError
    from moe_lora.dist.launch import local_cluster

    kind = _one_place(kind, address, state_dir)
    if kind == "ray" or (kind is None and not local_cluster.is_known(name, state_dir)):
        if kind is None and not _may_be_on_ray(address):
            click.echo(f"no cluster named {name} is on this host; is it on Ray?", err=True)
        return _ray(), address
    if kind is None and _may_be_on_ray(address) and _ray().is_known(name, address):
        raise ConfigError(
            f"a cluster named {name} is on this host and another on Ray; give --on local or ray"
        )
    return local_cluster, state_dir


@cluster.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--on", "kind", type=click.Choice(_KINDS), required=True, help=_ON)
@_place_options
@click.option(
    "--front-ends", "num_front_ends", type=click.IntRange(1, 64), default=1, help="Processes for HTTP."
)
@click.option(
    "--limit-s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time until the cluster is ready, or is ended again.",
)
@user_errors
def up(file: str, kind: str, name: str, address: str, state_dir: str | None, **options: Any) -> None:
    """Start FILE's cluster; print the URLs once ready.

    FILE: a cluster.yaml, or a plan of moe-lora provision.  On Ray, with paths as on the hosts and without
    addresses.
    """
    from moe_lora.config.cluster import read_content

    if _one_place(kind, address, state_dir) == "local":
        from moe_lora.dist.launch import local_cluster

        urls = local_cluster.up(file, name, state_dir=state_dir, say=click.echo, **options)
    else:
        urls = _ray().up(read_content(file), name, address=address, say=click.echo, **options)
    for url in urls:
        print(url)


@cluster.command()
@_found_options
@user_errors
def status(name: str, **place: Any) -> None:
    """Show the roles of a cluster started by `up`."""
    commands, where = _found(name, **place)
    roles = commands.status(name, where)
    here = "process" if any(role.process for role in roles) else "host"
    table = [("role", "state", here, "address", "restarts", "reason")]
    for role in roles:
        address = role.url or ", ".join(role.addresses.values())
        restarts = str(role.num_restarts + role.num_failures)
        table.append((role.name, role.state, getattr(role, here), address, restarts, role.problem))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


@cluster.command()
@click.argument("role", type=click.Choice(["instance"]))
@click.argument("number", metavar="N", type=click.IntRange(1, 4096))
@_found_options
@user_errors
def scale(role: str, number: int, name: str, **place: Any) -> None:
    """Have N instances in a cluster started by `up`.  Requests of ended instances go on elsewhere.

    On this host FILE needs `scaling`.
    """
    commands, where = _found(name, **place)
    commands.scale(name, where, number)
    print(f"{name} has {number} instances soon; see moe-lora cluster status")


@cluster.command()
@click.argument("host")
@_found_options
@user_errors
def drain(host: str, name: str, **place: Any) -> None:
    """Move the roles on HOST (see `status`) elsewhere, one at a time.  HOST gets none until `undrain`."""
    commands, where = _found(name, **place)
    commands.drain(name, where, host)
    print(f"{host} is drained and has no roles")


@cluster.command()
@click.argument("host")
@_found_options
@user_errors
def undrain(host: str, name: str, **place: Any) -> None:
    """Let a drained HOST have roles again."""
    commands, where = _found(name, **place)
    commands.undrain(name, where, host)
    print(f"{host} takes roles")


@cluster.command()
@_found_options
@user_errors
def down(name: str, **place: Any) -> None:
    """End a cluster started by `up`, after open requests."""
    commands, where = _found(name, **place)
    commands.down(name, where)
    print(f"{name} has ended")
