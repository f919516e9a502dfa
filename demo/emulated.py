# SPDX-License-Identifier: Apache-2.0
"""`python -m demo.emulated SYSTEM`: serve the demo on emulated devices on which its adapters do not all fit.

The engines, their scheduling, their copies and their answers are real. Emulated are a device's memory and
its times: each step is slept out to what `bench/profiles/dbrx_hopper96.json` derives for DBRX on GPUs of
96 GB, and adapters are copied at the rate of its links (50 GB/s a GPU: 21 ms for one of DBRX's). DBRX leaves
an instance of 4 GPUs room for 12 of its adapters beside KV; 4 GPUs of a LoRA Server hold 90. The demo has
36 adapters, a third of 108, so it gets a third of both: 4 and 30. Both systems have 12 GPUs, the same kernels
and the routing that suits the coupled one best. All times are SLOWDOWN times the device's, so that two cores
can keep up.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path

from bench.lora_server.disagg_device import SERVER_EP, read_device
from moe_lora.core.teardown import quiet_teardown

HERE = Path(__file__).parent
SCALE = 3
NUM_LAYERS = 4
SLOWDOWN = 4.0
EMULATES = (
    "DBRX on 12 GPUs of 96 GB: 3 instances with room for 4 of the 36 adapters each, or 2 and a LoRA Server "
    f"with room for 30; copies at 50 GB/s a GPU; run {SLOWDOWN:g} times slower"
)
"""What the results say of these devices."""
CACHE_SHARE = 0.5
"""Of what the weights leave of a coupled instance's memory; the rest is for KV."""


@dataclass(frozen=True)
class System:
    """instances of 4 GPUs; server_gpus: of the LoRA Server."""

    num_instances: int
    server_gpus: int


SYSTEMS = {"coupled": System(3, 0), "server": System(2, SERVER_EP)}


def serve(system: System, port: int) -> None:
    """Serve over HTTP until a signal ends it."""
    from moe_lora import assemble
    from moe_lora.config import EmulationConfig, EngineConfig, FrontEndConfig, LoraServerConfig
    from moe_lora.config.cluster import ClusterConfig

    device = read_device()
    adapters = tuple(sorted((place.parent.name, str(place.parent)) for place in _adapter_files()))
    num_bytes = sum(place.stat().st_size for place in _adapter_files()) / len(adapters)

    def load_gb_per_s(num_gpus: int) -> float:
        return num_bytes / (SLOWDOWN * device.load_s(num_gpus)) / 1e9

    model_dir = HERE / "model"
    engine = EngineConfig(
        model_dir=str(model_dir),
        adapters=adapters,
        # Beside a LoRA Server an instance keeps the attention's part only, a fiftieth of DBRX's bytes.
        max_loras=len(adapters) if system.server_gpus else device.instance_slots(CACHE_SHARE) // SCALE,
        max_num_seqs=256,
        eager=True,
        num_instances=system.num_instances,
        emulation=EmulationConfig(
            step_profile=device.step_profile(NUM_LAYERS, SLOWDOWN, kernel_ratio=1.0, overlap=True),
            load_gb_per_s=load_gb_per_s(device.instance_gpus),
        ),
    )
    lora_server = (
        LoraServerConfig(
            capacity=device.server_slots(system.server_gpus) // SCALE,
            load_gb_per_s=load_gb_per_s(system.server_gpus),
        )
        if system.server_gpus
        else None
    )
    assemble.serve(
        ClusterConfig(
            engine=engine,
            served_model_name=model_dir.name,
            lora_server=lora_server,
            front_end=FrontEndConfig(host="127.0.0.1", port=port, routing="adapter_affinity"),
        )
    )


def _adapter_files() -> list[Path]:
    return list((HERE / "adapters").glob("*/adapter_model.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    quiet_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(SYSTEMS[options.system], options.port)


if __name__ == "__main__":
    main()
