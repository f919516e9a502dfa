"""Metrics of the placement (see docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_lora.dist.cluster.controller.controller_views import PlacementView


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
