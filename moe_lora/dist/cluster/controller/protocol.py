# SPDX-License-Identifier: Apache-2.0
"""Verbs and messages between front ends and a separate controller."""

from __future__ import annotations

from moe_lora.dist.cluster.adapter_calls import FLEET_CHANGES
from moe_lora.dist.net.codec import Decoder, Interface, Protocol, verbs_of
from moe_lora.dist.net.session import Handshake

from .capacity_controller import CapacityController
from .cluster_controller import ClusterController
from .cluster_state import ClusterState, Figures, FrontEndReport, Leaving, StateChange, Taken
from .instance_control import InstanceControl
from .served_registry import RegistryVerbs

_PARTS = (ClusterController, InstanceControl, CapacityController, RegistryVerbs)
CONTROLLER_INTERFACE = Interface(
    {**FLEET_CHANGES, **{name: method for part in _PARTS for name, method in verbs_of(part).items()}}
)
HANDSHAKE = Handshake(
    "controller",
    version=12,
    payload=Decoder(ClusterState | None),
    dials=Protocol.of(ClusterState, StateChange, Figures, asks=CONTROLLER_INTERFACE),
    listens=Protocol.of(FrontEndReport, Leaving, Taken, answers=CONTROLLER_INTERFACE),
    welcome=Decoder(int),
)
"""The payload: the front end's last state.  The welcome: a leader's epoch, or 0."""
