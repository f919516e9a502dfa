# SPDX-License-Identifier: Apache-2.0
"""Entry point of a role's process: a LoRA Server rank, or an LLM instance, of the cluster in a file.

    torchrun --nproc-per-node 2 -m moe_lora.dist.launch.run_role --config cluster.yaml --role lora-server
    torchrun -m moe_lora.dist.launch.run_role --config cluster.yaml --role instance --name instance-1

A single process needs no torchrun.
"""

from __future__ import annotations

import argparse
import logging
import sys

from moe_lora.core.errors import MoeLoraError
from moe_lora.core.teardown import quick_teardown, quiet_teardown
from moe_lora.dist.launch.host_roles import failure_told


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--config", metavar="FILE", required=True, help="cluster.yaml, see docs/reference/cluster_file.md"
    )
    parser.add_argument("--role", choices=("lora-server", "instance"), required=True)
    parser.add_argument("--name", help="of the instance, unlike all others'  [default: instance-0]")
    for hidden in ("--parent", "--status-fd", "--starts"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--spare", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    quiet_teardown()
    quick_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if options.name is not None and options.role != "instance":
        parser().error("--name is an instance's")
    from moe_lora.config.cluster import read_cluster
    from moe_lora.core.processes import set_log_level

    from .roles import (
        JobPlace,
        end_with,
        reread_on_hang_up,
        serve_instance,
        set_environment,
    )

    status, place = options.status_fd, JobPlace.here()
    try:
        with failure_told(status):
            cluster = read_cluster(options.config)
            set_log_level(cluster.front_end.log_level)
            if cluster.has_addresses:  # a user's file, under torchrun
                from moe_lora.adapters.sources import with_local_adapters

                cluster = with_local_adapters(cluster)
            reread_on_hang_up(options.config, place)
            if options.parent is not None:
                end_with(options.parent, cluster.folder_of_sockets)
            if options.role == "lora-server":
                from .server_role import serve_lora_server

                code = serve_lora_server(cluster, place, status)
            else:
                name, starts = options.name or "instance-0", options.starts
                if options.spare:
                    from .spare import wait_for_name

                    set_environment(cluster.instance(name), starts=1)
                    starts, name = wait_for_name(status, compiles=not cluster.engine.eager)
                    cluster = read_cluster(options.config)
                    set_log_level(cluster.front_end.log_level)
                code = serve_instance(cluster, place, name, status, starts)
    except (MoeLoraError, ValueError) as error:
        sys.exit(f"Error: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
