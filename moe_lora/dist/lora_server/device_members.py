# SPDX-License-Identifier: Apache-2.0
"""Members of the group of devices with mutual puts: the first to come, once."""

from __future__ import annotations

import socket

from moe_lora.config import EngineConfig
from moe_lora.core.address import parse_address
from moe_lora.core.errors import LoraServerError

from .control import Visitor
from .reach import own_host


class DeviceMembers:
    """Kept by a LoRA Server's leader for its life.  config: of its instances."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.lora_server is not None
        self._config = config
        place = parse_address("lora_server.address", config.lora_server.address)
        host = place.host or own_host(config.lora_server.address)
        with socket.socket() as free:
            free.bind(("", 0))
            self.address = f"{host}:{free.getsockname()[1]}"
        self.max_rows = max(config.decode_buckets or (config.max_num_seqs,))
        self._instances: dict[str, int] = {}

    async def join(self, visitor: Visitor, instance: str) -> tuple[str, int, int, int]:
        """Meeting address, the instance's number, number of instances, and rows of a step.

        instance: "" for a server rank.  Raises LoraServerError for a late member.
        """
        number = -1
        if instance:
            if instance in self._instances or len(self._instances) == self._config.num_instances:
                raise LoraServerError(
                    f"{instance} comes too late: devices of {self._known} put to the LoRA Server; start it "
                    "and all instances together"
                )
            number = self._instances[instance] = len(self._instances)
        return self.address, number, self._config.num_instances, self.max_rows

    @property
    def _known(self) -> str:
        return ", ".join(self._instances)
