"""Entry point of a role's process: a LoRA Server rank, or an LLM instance, of the cluster in a file.

    torchrun --nproc-per-node 2 -m moe_lora.dist.launch.run_role --config cluster.yaml --role lora-server
    torchrun -m moe_lora.dist.launch.run_role --config cluster.yaml --role instance --name instance-1

A role of one process needs no torchrun: python -m moe_lora.dist.launch.run_role and the same options.
With --start-fd it is one that `moe-lora serve` started on its own host.
"""

from __future__ import annotations

import argparse
import logging
import sys

from moe_lora.core.errors import MoeLoraError
from moe_lora.core.host import quiet_teardown

from .host_roles import StartInstance, StartRank, failure_told, read_start


def serve_started(start: StartInstance | StartRank, status: int | None, starts: int) -> int:
    """Do what this process was started for, until it is told to stop; the exit code."""
    from .roles import serve_local_instance, serve_local_rank

    if isinstance(start, StartInstance):
        return serve_local_instance(start, status, starts)
    return serve_local_rank(start, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="cluster.yaml, see docs/reference/cluster_file.md")
    parser.add_argument("--role", choices=("lora-server", "instance"))
    parser.add_argument("--name", help="of the instance, unlike all others'  [default: instance-0]")
    for hidden in ("--start-fd", "--parent", "--status-fd", "--starts"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if options.start_fd is None and (options.config is None or options.role is None):
        parser.error("--config and --role are needed")
    if options.name is not None and options.role != "instance":
        parser.error("--name is an instance's")
    from .roles import end_with, serve_role

    start = None if options.start_fd is None else read_start(options.start_fd)
    directory = start.directory if start is not None else None
    if options.parent is not None:
        end_with(options.parent, directory)
    status, starts = options.status_fd, options.starts or 0
    try:
        with failure_told(status):
            if start is not None:
                code = serve_started(start, status, starts)
            else:
                code = serve_role(options.config, options.role, options.name or "instance-0", status)
    except (MoeLoraError, ValueError) as error:
        sys.exit(f"Error: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
