"""Where the front ends and the controller of a cluster are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_lora.core.config import MAX_COUNT, RoutingConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.net.connection import Address, parse_address

CONTROLLER = "controller"
ONE_FRONT_END = "front-end"
"""The name of a cluster's only front end, which its file need not name."""


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig(RoutingConfig):
    """Where the front end listens: for HTTP, and (engines_address: host:port, or the path of a socket on this
    host) for instances that dial in.

    cors_origins: whose pages a browser lets call it, such as https://app.example.com; "*" is all.
    drain_s: when it is told to end, requests under way get this long to finish; then each ends with an error.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    engines_address: str | None = None
    cors_origins: tuple[str, ...] = ()
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.drain_s <= MAX_COUNT:
            raise ConfigError(f"front_end.drain_s={self.drain_s} must be seconds, 0 or more")
        _check_port("front_end", self.port)
        for origin in self.cors_origins:
            _check_origin(origin)
        if self.engines_address is not None:
            parse_address("front_end.engines_address", self.engines_address)


@dataclass(frozen=True, kw_only=True)
class FrontEndPlace:
    """What one of several front ends has of its own; host, port: None = as `FrontEndConfig` says."""

    engines_address: str
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """Where the controller listens, both as `FrontEndConfig` says: for front ends (address) and instances."""

    address: str
    engines_address: str


def check_places(
    front_end: FrontEndConfig, front_ends: Mapping[str, FrontEndPlace], controller: ControllerConfig | None
) -> None:
    """Raises ConfigError for places that can't be right together."""
    addresses = {"front_end.engines_address": front_end.engines_address}
    if front_ends:
        _check_several(front_end, front_ends, controller)
    for name, place in front_ends.items():
        if place.port is not None:
            _check_port(f"front_ends.{name}", place.port)
        addresses[f"front_ends.{name}.engines_address"] = place.engines_address
    if controller is not None:
        addresses[f"{CONTROLLER}.address"] = controller.address
        addresses[f"{CONTROLLER}.engines_address"] = controller.engines_address
    first: dict[Address, str] = {}
    for setting, address in addresses.items():
        if address is None:
            continue
        other = first.setdefault(parse_address(setting, address), setting)
        if other != setting:
            raise ConfigError(f"{setting}={address!r} is {other} too; each needs a port of its own")


def _check_several(
    front_end: FrontEndConfig, front_ends: Mapping[str, FrontEndPlace], controller: ControllerConfig | None
) -> None:
    if controller is None:
        raise ConfigError(
            "front_ends needs a controller: where each decided by itself, their adapters and placements "
            "would differ; add a controller section with address and engines_address"
        )
    if CONTROLLER in front_ends:
        raise ConfigError(f"front_ends: the name {CONTROLLER!r} is the controller's; give another")
    if front_end.engines_address is not None:
        raise ConfigError(
            "front_end.engines_address and front_ends are both given; give each of front_ends its "
            "engines_address, and in front_end only what they share"
        )


def _check_origin(origin: str) -> None:
    """A browser sends scheme://host[:port], and nothing behind it; what differs never matches."""
    scheme, separator, host = origin.partition("://")
    if origin != "*" and not (scheme and separator and host and not set(host) & set("/?#@* ")):
        raise ConfigError(
            f"cors_origins: {origin!r} is no origin; give scheme://host[:port] without a path, such as "
            "https://app.example.com, or * for all"
        )


def _check_port(section: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{section}.port={port} must be between 0 and 65535")
