# SPDX-License-Identifier: Apache-2.0
"""The link between front ends and a controller of its own process: verbs and messages."""

from __future__ import annotations

from moe_lora.dist.cluster.adapter_calls import ADAPTER_CHANGES
from moe_lora.dist.net.codec import Interface, Protocol, verbs_of

from .capacity_controller import CapacityController
from .cluster_state import Admitted, ClusterState, Figures, FrontEndHello, FrontEndReport, Taken
from .instance_control import InstanceControl
from .served_registry import RegistryVerbs

_PARTS = (InstanceControl, CapacityController, RegistryVerbs)
CONTROLLER_INTERFACE = Interface(
    {**ADAPTER_CHANGES, **{name: method for part in _PARTS for name, method in verbs_of(part).items()}}
)
CONTROLLER_SIDE = Protocol.of(FrontEndHello, FrontEndReport, Taken, answers=CONTROLLER_INTERFACE)
FRONT_END_SIDE = Protocol.of(Admitted, ClusterState, Figures, asks=CONTROLLER_INTERFACE)
