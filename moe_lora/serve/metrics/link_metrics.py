"""Metrics of a front end's link to its controller (see docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_lora.dist.cluster.controller.controller_link import ControllerLink


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
