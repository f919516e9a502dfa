"""Metrics of the LoRA Server, and of what the controller makes of the load (docs/reference/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.controller_views import PlacementView, ProvisionView
from moe_lora.dist.lora_server.protocol.control_messages import ServerState

OUTLOOK_GAUGES = (
    (
        "moe_lora:iar_predicted",
        "Share of requests that start at once, by the corrected model.",
        "predicted_iar",
    ),
    ("moe_lora:iar_predicted_paper", "The same by InfiniLoRA's equation 4.", "predicted_iar_paper"),
    ("moe_lora:iar_measured", "Share of requests that started at once.", "measured_iar"),
    ("moe_lora:iar_target", "Share of requests that should start at once.", "target_iar"),
    ("moe_lora:adapter_capacity", "Adapters that fit at once.", "capacity"),
    ("moe_lora:adapter_capacity_needed", "The least capacity that meets the target.", "needed_capacity"),
    ("moe_lora:expected_active_adapters", "Adapters in use, mean by the model.", "expected_active"),
    ("moe_lora:global_batch", "Requests with an adapter in service, mean.", "global_batch"),
)
SERVER_GAUGES = (
    ("moe_lora:lora_server_capacity", "Adapters resident at once.", "capacity"),
    ("moe_lora:lora_server_resident_adapters", "Adapters resident.", "num_resident"),
    ("moe_lora:lora_server_leases", "Leases held by instances.", "num_leases"),
    ("moe_lora:lora_server_waiting", "Leases that instances wait for.", "num_waiting"),
    ("moe_lora:lora_server_resident_bytes", "Bytes of resident adapters.", "resident_bytes"),
)
SERVER_COUNTERS = (
    ("moe_lora:lora_server_loads", "Adapters loaded.", "num_loads"),
    ("moe_lora:lora_server_evictions", "Adapters that had to leave.", "num_evictions"),
    ("moe_lora:lora_server_loaded_bytes", "Bytes of adapters loaded.", "loaded_bytes"),
)


class ProvisionCollector:
    """A controller's last evaluation as metric families.

    server: the LoRA Server's state, None if it did not answer, or if there is none.
    """

    def __init__(self, model_name: str, controller: ProvisionView) -> None:
        self.server: ServerState | None = None
        self._controller = controller
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        for name, text, field in OUTLOOK_GAUGES:
            yield self._gauge(name, text, getattr(self._controller.latest, field, None))
        if not self._controller.has_server:
            return
        yield self._gauge("moe_lora:lora_server_up", "1 while its leader answers.", self.server is not None)
        for name, text, field in SERVER_GAUGES:
            yield self._gauge(name, text, getattr(self.server, field, None))
        for name, text, field in SERVER_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            if self.server is not None:
                counter.add_metric(self._label, getattr(self.server, field))
            yield counter

    def _gauge(self, name: str, text: str, value: float | None) -> GaugeMetricFamily:
        """Without a sample if there is no value."""
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        if value is not None:
            gauge.add_metric(self._label, value)
        return gauge


# Metrics of the placement (see docs/reference/metrics.md).


class PlacementCollector:
    """A placement controller's state as metric families."""

    def __init__(self, model_name: str, placement: PlacementView) -> None:
        self._placement = placement
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        placement, latest = self._placement, self._placement.latest
        for name, text, count in (
            ("moe_lora:placement_tables", "Routing tables so far.", placement.version),
            ("moe_lora:placement_moves", "Adapters moved to an instance.", placement.num_copies),
            ("moe_lora:placement_problems", "Placements that could not be made.", placement.num_problems),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._label, count)
            yield counter
        utilisation = GaugeMetricFamily(
            "moe_lora:placement_max_utilisation",
            "Forecast load of the busiest instance, 1 = its operating point.",
            labels=["model_name"],
        )
        held = GaugeMetricFamily(
            "moe_lora:placement_adapters_held", "Adapters of the fullest instance.", labels=["model_name"]
        )
        if latest is not None:
            held.add_metric(self._label, latest.most_held)
            if placement.has_points:
                utilisation.add_metric(self._label, latest.worst_load)
        yield utilisation
        yield held


# Metrics of a front end's link to its controller (see docs/reference/metrics.md).


class LinkCollector:
    """A link's state as metric families."""

    def __init__(self, model_name: str, link: ControllerLink) -> None:
        self._link = link
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        name = GaugeMetricFamily(
            "moe_lora:front_end",
            "1; which of several front ends behind one port these metrics are of.",
            labels=["model_name", "front_end"],
        )
        name.add_metric([*self._label, self._link.name], 1)
        yield name
        number = 0 if self._link.state is None else self._link.state.number
        for family, text, value in (
            ("moe_lora:controller_up", "1 while the controller is there.", self._link.up),
            ("moe_lora:controller_state", "Number of the state that this front end routes by.", number),
        ):
            gauge = GaugeMetricFamily(family, text, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        joins = CounterMetricFamily(
            "moe_lora:controller_joins", "Connections to the controller so far.", labels=["model_name"]
        )
        joins.add_metric(self._label, self._link.num_joins)
        yield joins
