# SPDX-License-Identifier: Apache-2.0
"""Map of the ranks of a host to its devices: the ranks of the instances in order, then of the LoRA Server.

A device number counts the entries of CUDA_VISIBLE_DEVICES, as torch does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lora.core.errors import ConfigError

LORA_SERVER = "lora_server"
"""Key of the LoRA Server's ranks, beside the names of instances."""
_ENTRY = re.compile(r"\+?\d|GPU-|MIG-")
"""Start of a valid entry of CUDA_VISIBLE_DEVICES."""
Devices = Mapping[str, tuple[int, ...]]
"""Role -> device numbers of its ranks."""


@dataclass(frozen=True)
class DeviceShare:
    """The device of a rank.  num_sharers: ranks of this host on the device, this rank included."""

    number: int
    num_sharers: int = 1


def instance_names(num_instances: int) -> list[str]:
    return [f"instance-{number}" for number in range(num_instances)]


def assign_devices(
    num_instances: int,
    num_ranks: int,
    num_server_ranks: int,
    num_devices: int,
    given: Devices | None = None,
    visible: str | None = None,
) -> dict[str, tuple[int, ...]]:
    """Role -> device numbers of its ranks: instance i, rank r, in order; then the ranks of the LoRA Server.

    num_ranks: per instance.  given: roles with chosen devices; further roles get the lowest free numbers.
    Only `given` shares a device.  visible: CUDA_VISIBLE_DEVICES, for the message.
    Raises ConfigError for too few devices, with the sum, and for an impossible `given`.
    """
    given = given or {}
    sizes = dict.fromkeys(instance_names(num_instances), num_ranks)
    if num_server_ranks:
        sizes[LORA_SERVER] = num_server_ranks
    for role, numbers in given.items():
        if role not in sizes:
            raise ConfigError(f"devices.{role}: this host starts no {role}; choose from {', '.join(sizes)}")
        check_size(role, numbers, sizes[role])
        _check_numbers(role, numbers, num_devices, visible)
    taken = {number for numbers in given.values() for number in numbers}
    free = [number for number in range(num_devices) if number not in taken]
    waiting = {role: size for role, size in sizes.items() if role not in given}
    if sum(waiting.values()) > len(free):
        raise ConfigError(_too_few(waiting, num_ranks, num_devices, len(taken), visible))
    devices = dict(given)
    for role, size in waiting.items():
        devices[role], free = tuple(free[:size]), free[size:]
    return {role: devices[role] for role in sizes}


def _too_few(
    sizes: Mapping[str, int], num_ranks: int, num_devices: int, num_taken: int, visible: str | None
) -> str:
    """The sum, the devices, the ways out."""
    parts = []
    if num_instances := sum(role != LORA_SERVER for role in sizes):
        parts.append(f"{_count(num_instances, 'instance')} x {_count(num_ranks, 'rank')}")
    if LORA_SERVER in sizes:
        parts.append(_count(sizes[LORA_SERVER], "LoRA Server rank"))
    first, size = next(iter(sizes.items()))
    example = [0] * size if first == LORA_SERVER else list(range(size))
    taken = f", and devices: takes {num_taken} of them" if num_taken else ""
    return (
        f"{' + '.join(parts)} = {_count(sum(sizes.values()), 'device')}, "
        f"{_host(num_devices, visible)}{taken}; start fewer instances or ranks, use device: cpu, or list "
        f"them under devices: in the cluster file, where roles may share a device "
        f"(devices: {{{first}: {example}}})"
    )


def check_devices(devices: Devices, num_ranks: int, *, has_server: bool) -> None:
    """Raise ConfigError for devices impossible on any host.  num_ranks: per instance."""
    for role, numbers in devices.items():
        if role != LORA_SERVER:
            if role.replace("-", "_").lower() == LORA_SERVER:
                raise ConfigError(f"devices.{role} is not a role; did you mean {LORA_SERVER}?")
            check_size(role, numbers, num_ranks)
            if len(set(numbers)) < len(numbers):
                raise ConfigError(
                    f"devices.{role}={list(numbers)}: ranks of one instance can't share a device; give each "
                    "rank a device of its own"
                )
        elif not has_server:
            raise ConfigError(
                f"devices.{role}: the file has no lora_server section; add one, or leave it out"
            )


def check_size(role: str, numbers: Sequence[int], num_ranks: int) -> None:
    """Raise ConfigError unless the number of devices is the number of ranks."""
    if len(numbers) != num_ranks:
        what = "the LoRA Server" if role == LORA_SERVER else "the instance"
        raise ConfigError(
            f"devices.{role}={list(numbers)} lists {_count(len(numbers), 'device')}, but {what} has "
            f"{_count(num_ranks, 'rank')}; list one device for each rank"
        )


def _check_numbers(role: str, numbers: Iterable[int], num_devices: int, visible: str | None) -> None:
    for number in numbers:
        if number >= num_devices:
            allowed = f"choose from 0 to {num_devices - 1}" if num_devices else "leave devices: out"
            raise ConfigError(
                f"devices.{role}: there is no device {number}, {_host(num_devices, visible)}; {allowed}"
            )


def _host(num_devices: int, visible: str | None) -> str:
    by = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"this host has {num_devices}{by}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def read_devices(given: Any) -> dict[str, tuple[int, ...]]:
    """The devices of a cluster file.  Raises ConfigError for anything but role: [numbers]."""
    if given is None:
        return {}
    example = "devices: {instance-0: [0, 1], lora_server: [2]}"
    if not isinstance(given, dict):
        raise ConfigError(f"devices={given!r} must be a mapping of roles to device numbers, as in {example}")
    for role, numbers in given.items():
        if not isinstance(role, str) or not role:
            raise ConfigError(f"devices: {role!r} is not the name of a role; give names as in {example}")
        right = isinstance(numbers, list) and numbers
        if not right or not all(type(number) is int and number >= 0 for number in numbers):
            raise ConfigError(
                f"devices.{role}={numbers!r} must be a list of device numbers from 0 on, as in {example}"
            )
    return {role: tuple(numbers) for role, numbers in given.items()}


def shares_of(role: str, devices: Devices) -> tuple[DeviceShare, ...]:
    """Devices of the ranks of a role, with the number of ranks per device; () for a role without devices."""
    ranks = Counter(number for numbers in devices.values() for number in numbers)
    return tuple(DeviceShare(number, ranks[number]) for number in devices.get(role, ()))


def narrowed(visible: str | None, numbers: Sequence[int]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a process with these devices.

    visible: the value now, indices or GPU UUIDs; an invalid entry ends the list.  None: unset.
    A value without an entry hides all devices and stays.  Raises ConfigError for a number beyond the entries.
    """
    if visible is None:
        return ",".join(map(str, numbers))
    entries: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if not _ENTRY.match(entry):
            break
        entries.append(entry)
    if not entries:
        return visible
    for number in numbers:
        if number >= len(entries):
            raise ConfigError(
                f"there is no device {number}: CUDA_VISIBLE_DEVICES={visible} lists "
                f"{_count(len(entries), 'device')}; list more there, or a lower number under devices:"
            )
    return ",".join(entries[number] for number in numbers)


def devices_text(devices: Devices, num_devices: int) -> str:
    """The map for the log: roles, shared devices, idle devices."""
    ranks = Counter(number for numbers in devices.values() for number in numbers)
    parts = [f"{role} {', '.join(map(device_name, numbers))}" for role, numbers in devices.items()]
    parts += [
        f"{device_name(one)} shared by {count} ranks" for one, count in sorted(ranks.items()) if count > 1
    ]
    if idle := [device_name(number) for number in range(num_devices) if number not in ranks]:
        parts.append(f"idle {', '.join(idle)}")
    return "; ".join(parts)


def device_name(number: int) -> str:
    return f"cuda:{number}"
