# SPDX-License-Identifier: Apache-2.0
"""Entry point of a front end or controller that `moe-lora serve` starts on its host."""

from __future__ import annotations

import argparse
import logging
import sys
from functools import partial

from moe_lora import assemble
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import MoeLoraError
from moe_lora.core.processes import set_log_level
from moe_lora.core.teardown import quick_teardown, quiet_teardown
from moe_lora.dist.launch.host_roles import failure_told
from moe_lora.dist.launch.roles import end_with
from moe_lora.serve.reload import Reload


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--role", choices=("front-end", "controller"), required=True)
    parser.add_argument("--name")
    parser.add_argument("--listen-fd", type=int, action="append", default=[])
    for number in ("--parent", "--status-fd", "--starts"):
        parser.add_argument(number, type=int)
    given = parser.parse_args()
    quiet_teardown()
    quick_teardown()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _serve(given)
    except (ValueError, OSError, MoeLoraError) as error:
        sys.exit(f"Error: {error}")


def _serve(given: argparse.Namespace) -> None:
    cluster = read_cluster(given.config)
    set_log_level(cluster.front_end.log_level)
    reload = Reload(partial(read_cluster, given.config))
    end_with(given.parent, cluster.folder_of_sockets)
    with failure_told(given.status_fd):
        if given.role == "front-end":
            assemble.serve_front_end(cluster, given.name, given.listen_fd, reload)
        else:
            assemble.serve_controller(cluster, reload, is_kept=True)


if __name__ == "__main__":
    main()
