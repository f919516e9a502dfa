# SPDX-License-Identifier: Apache-2.0
"""Commands of a cluster on Ray: up, status, scale, drain and down."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moe_lora.core.errors import ConfigError

from .host_roles import FRONT_END, STOP_S
from .progress import LOOK_S, RoleFacts, check_name, ready_urls
from .ray_keeper import KEEPER, Keeper, alive_roles, cluster_on_ray

_LOOPBACK = ("127.0.0.1", "::1")
_ANSWER_S, _FACTS_S = 60.0, 10.0
DRAIN_LIMIT_S = 600.0
MOVES_S = 3600.0
"""Longest drain of a host."""


@contextmanager
def connected(address: str, name: str) -> Iterator[None]:
    """A connection to a Ray cluster, in the namespace of our cluster.  Raises ConfigError."""
    check_name(name)
    try:
        ray.init(
            address=address,
            namespace=f"moe_lora-{name}",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster answers at --ray-address {address} ({error}); start Ray by ray start --head, "
            "and with a token set RAY_AUTH_MODE=token here too"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def up(
    content: Any, name: str, *, num_front_ends: int, address: str, limit_s: float, say: Callable[[str], None]
) -> list[str]:
    """Start a cluster; returns the URLs of the ready front ends.

    say: gets lines of progress.  An error, Ctrl-C or the limit ends the roles.  Raises ConfigError.
    """
    cluster_on_ray(content, num_front_ends)
    with connected(address, name):
        _check_access()
        if ray.util.list_named_actors():
            raise ConfigError(_taken(name))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        keeper = ray.remote(Keeper).options(
            name=KEEPER, lifetime="detached", num_cpus=0, max_restarts=-1, scheduling_strategy=here
        )
        try:
            actor: Any = keeper.remote(name, content, num_front_ends)
        except ValueError as error:
            raise ConfigError(_taken(name)) from error
        try:
            return ready_urls(lambda left_s: _called(actor.status.remote(), left_s), limit_s, say)
        except BaseException:
            try:
                say("ending all roles")
            finally:
                _end_all()
            raise


def _taken(name: str) -> str:
    return (
        f"a cluster named {name} is on this Ray cluster; see moe-lora cluster status, call moe-lora "
        "cluster down, or give another --name"
    )


def _check_access() -> None:
    """Raises ConfigError for a Ray cluster without access control."""
    hosts = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    # For any further address Ray listens on every interface.
    reachable = [host for host in hosts if host not in _LOOPBACK]
    if reachable and not _needs_token(ray.get_runtime_context().gcs_address):
        raise ConfigError(
            f"any host with a way to {reachable[0]} can run commands on this Ray cluster; start Ray with "
            "RAY_AUTH_MODE=token and the same token on every host (ray get-auth-token --generate)"
        )


def _needs_token(address: str) -> bool:
    words = ["-m", "ray.scripts.scripts", "health-check", "--address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode != 0 and "AuthenticationError" in done.stderr


def _called(answer: Any, limit_s: float = _ANSWER_S) -> Any:
    """The keeper's answer.  Raises ConfigError."""
    try:
        return ray.get(answer, timeout=limit_s)
    except (RayActorError, GetTimeoutError) as error:
        reason = (str(error).strip() or "no answer in time").splitlines()[-1]
        raise ConfigError(f"the keeper does not answer ({reason}); call again after a while") from error
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise ConfigError(str(cause)) from error


def _keeper(name: str) -> Any:
    try:
        return ray.get_actor(KEEPER)
    except ValueError as error:
        if alive_roles():
            raise ConfigError(
                f"the host of {name}'s keeper was lost: roles serve on without new places; call "
                "moe-lora cluster down, then up again"
            ) from error
        raise ConfigError(
            f"no cluster named {name} is on this Ray cluster; start the cluster by up"
        ) from error


def is_known(name: str, address: str) -> bool:
    """True if a Ray cluster answers and has roles of this name."""
    with suppress(ConfigError), connected(address, name):
        return bool(ray.util.list_named_actors())
    return False


def status(name: str, address: str) -> list[RoleFacts]:
    """The state of every role.  Raises ConfigError."""
    with connected(address, name):
        found: list[RoleFacts] = _called(_keeper(name).status.remote())
        return found


def scale(name: str, address: str, num_instances: int) -> None:
    """Change the number of instances.  Raises ConfigError."""
    with connected(address, name):
        _called(_keeper(name).scale.remote(num_instances), _ANSWER_S + 2 * STOP_S)


def drain(name: str, address: str, host: str) -> None:
    """Move the roles of a host elsewhere.  Raises ConfigError."""
    with connected(address, name):
        _called(_keeper(name).drain.remote(host), MOVES_S)


def undrain(name: str, address: str, host: str) -> None:
    """Give a drained host roles again.  Raises ConfigError."""
    with connected(address, name):
        _called(_keeper(name).undrain.remote(host), MOVES_S)


def down(name: str, address: str) -> None:
    """End a cluster, front ends first.  Raises ConfigError without a cluster."""
    with connected(address, name):
        if not ray.util.list_named_actors():
            raise ConfigError(f"no cluster named {name} is on this Ray cluster")
        _end_all()


def _end_all() -> None:
    """End the roles, by the keeper if possible, and the actors.  Raises ConfigError for a stuck actor."""
    try:
        keeper = ray.get_actor(KEEPER)
        limit_s = ray.get(keeper.longest_stop_s.remote(), timeout=_ANSWER_S)
        ray.get(keeper.stop.remote(), timeout=limit_s)
        ray.kill(keeper)
    except (ValueError, RayError):
        with suppress(ValueError):
            ray.kill(ray.get_actor(KEEPER))
        roles = sorted(alive_roles(), key=lambda role: not role[0].startswith(FRONT_END))
        for *_, actor in roles:
            with suppress(RayError):  # an actor without a host does not answer
                ray.get(actor.facts.remote(), timeout=_FACTS_S)
                ray.get(actor.stop.remote(), timeout=2 * STOP_S + DRAIN_LIMIT_S)
            ray.kill(actor)
    deadline_s = time.monotonic() + _ANSWER_S
    while rest := ray.util.list_named_actors():
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{', '.join(rest)} did not end; call moe-lora cluster down again")
        time.sleep(LOOK_S)
