# SPDX-License-Identifier: Apache-2.0
"""Plan of `bench_disagg`: systems, request rates, durations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .disagg_device import Device

GPUS_PER_INSTANCE = 4
PARTS = ("rates", "cache ratio", "ablation", "unpaced")
FIXED_RATE_PER_S = 100.0
"""For parts without a sweep: above the coupled baseline's rate within its SLO."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to use the devices.

    slots: adapters of each instance, or, with server_gpus, of the LoRA Server.  kv_requests: average requests
    with KV on an instance.  kernel_ratio: time of the LoRA kernels over the paper's.
    """

    name: str
    num_instances: int
    slots: int
    kv_requests: float
    server_gpus: int = 0
    queue: str = "fcfs"
    kernel_ratio: float = 1.0
    overlap: bool = True
    layer_wise: bool = True

    @property
    def num_gpus(self) -> int:
        return self.num_instances * GPUS_PER_INSTANCE + self.server_gpus


@dataclass(frozen=True, kw_only=True)
class Series:
    """One system under rising rates (emulated requests/s); skips the last after a bad failure."""

    part: str
    system: System
    rates_per_s: tuple[float, ...]
    arrivals: str = "poisson"
    paced: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """slowdown: factor of the emulated device's times and of arrival gaps.

    duration_s: of arrivals, emulated; the first warm_up_s are not judged.
    """

    num_adapters: int = 256
    slowdown: float = 2.0
    duration_s: float = 10.0
    warm_up_s: float = 2.0
    num_layers: int = 2
    series: tuple[Series, ...] = field(default=())


def coupled(device: Device, adapter_share: float, num_instances: int) -> System:
    """S-LoRA: every instance its own cache, kernels and loads of the baseline."""
    percent = round(100 * adapter_share)
    return System(
        name=f"coupled {percent}/{100 - percent}",
        num_instances=num_instances,
        slots=device.instance_slots(adapter_share),
        kv_requests=device.kv_requests(adapter_share),
        kernel_ratio=device.assumed["baseline_kernel_ratio"],
    )


def disaggregated(device: Device, num_instances: int, server_gpus: int) -> System:
    return System(
        name="disaggregated",
        num_instances=num_instances,
        slots=device.server_slots(server_gpus),
        kv_requests=device.kv_requests(0.0),
        server_gpus=server_gpus,
    )


def with_sjf(system: System) -> System:
    return replace(system, name=f"{system.name} SJF", queue="sjf-oracle")


def with_cache_ratio(system: System, ratio: float, num_adapters: int) -> System:
    """Slots for this share of all adapters over all instances, regardless of memory (paper, section 2.3)."""
    slots = max(1, round(ratio * num_adapters / system.num_instances))
    return replace(system, name=f"cache ratio {ratio:.0%}", slots=slots)


def ablation(base: System, disagg: System, baseline_kernels: float) -> list[System]:
    """The steps of section 6.4 at equal capacity; each changes one switch of the previous.

    +disagg: server, remote call in series with the base GEMMs, whole-adapter loads, baseline kernels.
    """
    capacity = base.slots * base.num_instances
    last = replace(disagg, name="+kernels", slots=capacity)
    layer_wise = replace(last, name="+layer-wise loading", kernel_ratio=baseline_kernels)
    overlap = replace(layer_wise, name="+overlap", layer_wise=False)
    return [
        replace(base, name="coupled"),
        replace(overlap, name="+disagg", overlap=False),
        overlap,
        layer_wise,
        last,
    ]


def make_plan(device: Device, size: str) -> Plan:
    """size: "full", "quick" or "tiny".  12 GPUs: 3 coupled instances, or 2 and a LoRA Server of 4 GPUs."""
    if size == "tiny":
        base, remote = coupled(device, 0.5, 2), disaggregated(device, 1, 4)
        series = [Series(part="rates", system=system, rates_per_s=(20.0,)) for system in (base, remote)]
        return Plan(num_adapters=16, slowdown=1.0, duration_s=1.5, warm_up_s=0.3, series=tuple(series))
    base, less, remote = coupled(device, 0.5, 3), coupled(device, 0.4, 3), disaggregated(device, 2, 4)
    if size == "quick":
        series = [
            Series(part="rates", system=base, rates_per_s=(50.0, 100.0)),
            Series(part="rates", system=remote, rates_per_s=(100.0, 200.0)),
        ]
        return Plan(duration_s=6.0, warm_up_s=1.0, series=tuple(series))
    few, many = (50.0, 65.0, 80.0, 95.0, 120.0), (50.0, 130.0, 210.0, 290.0, 370.0)
    series = [
        Series(part="rates", system=s, rates_per_s=few) for s in (base, with_sjf(base), less, with_sjf(less))
    ]
    series.append(Series(part="rates", system=remote, rates_per_s=many))
    series += [
        Series(part="rates", system=system, rates_per_s=rates, arrivals="trace")
        for system, rates in ((base, few[::2]), (remote, many[:3]))
    ]
    series += [
        Series(part="cache ratio", system=with_cache_ratio(base, ratio, 256), rates_per_s=(FIXED_RATE_PER_S,))
        for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    series += [
        Series(part="ablation", system=system, rates_per_s=(FIXED_RATE_PER_S,))
        for system in ablation(base, remote, base.kernel_ratio)
    ]
    series += [
        Series(part="unpaced", system=s, rates_per_s=(FIXED_RATE_PER_S,), paced=False) for s in (base, remote)
    ]
    return Plan(series=tuple(series))
