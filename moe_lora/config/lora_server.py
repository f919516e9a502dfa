# SPDX-License-Identifier: Apache-2.0
"""Settings of the LoRA Server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .settings import Settings, setting

TRANSPORTS = ("shm", "gloo", "nixl")
DEVICE_PUTS = ("none", "ibgda")
MAX_PUT_INSTANCES = 24
"""Each has a stream on every server GPU, of which CUDA runs 32 side by side, and torch hands out as many."""


@dataclass(frozen=True, kw_only=True)
class LoraServerConfig(Settings):
    """The LoRA Server of a cluster, as its ranks and its clients know it. On one host address
    and store_dir are chosen when it is started."""

    SECTION: ClassVar[str] = "lora_server"
    GROUP: ClassVar[str] = "LoRA Server"
    OPENED_BY: ClassVar[str] = "layout"

    layout: str = setting("EP1-PP1", option="--lora-server", metavar="LAYOUT", unset="none")
    """Compute deltas in a LoRA Server, such as EP1-PP1.  In EPx-PPy, x ranks share the experts of each of y
    stages of layers.  Also EPx, PPy, and DPm (adapters spread over m ranks, for comparison).  x must divide
    the number of experts; x·y processes must be started."""
    capacity: int = setting(64, least=1, option="--lora-capacity")
    """Adapters on the LoRA Server at once, if its memory suffices.  More adapters may be known."""
    memory_gb: float | None = setting(
        None,
        above=0,
        option="--lora-server-memory-gb",
        metavar="GB",
        unset="chosen",
    )
    """Room for adapters on each rank, in 10^9 bytes.  Chosen: capacity times the largest adapter known at the
    start, or times an adapter of rank 16 on all targets if that is larger and at most an eighth of the
    memory.  A larger adapter is refused when it is loaded."""
    address: str = ""
    """host:port of the first rank for other hosts; on one host the path of a socket."""
    certificates: str | None = setting(None, in_file=False)
    """Folder of the cluster's certificates; None: all is on one host."""
    store_dir: str = setting("", path="folder")
    """Folder of packed adapters.  Roles on one host share the folder; other hosts receive missing files."""
    transport: str = setting("shm", choices=TRANSPORTS)
    """Exchange of rows between instances and LoRA Server: shm (one host), gloo (two-sided, any hosts), nixl
    (one-sided, any hosts; pip install "moe-lora[nixl]").  Avoid nixl on networks that break: after a cut, a
    server rank once ended with a segmentation fault (no request was lost)."""
    device_puts: str = setting("none", choices=DEVICE_PUTS)
    """ibgda: GPUs of instances put rows of decode steps to the server's GPUs (NVSHMEM), and receive the
    deltas.  transport carries the rest, and everything after the end of a participant until all start
    together.  Needs layout EPx-PPy and one GPU an instance.  Experimental: docs/reference/support.md lists
    what ran.  none: transport carries everything."""
    sites: str = setting("auto", choices=("auto", "all", "experts"))
    """LoRA sites of the server.  all; experts: instances compute attention and dense sites; auto: experts if
    the model has experts, else all."""
    max_rows: int = setting(512, least=1, fixed="512 rows fit a message of every transport")
    """Rows in one message between an instance and a server rank."""
    depth: int = setting(4, least=1, fixed="4 messages keep every transport busy")
    """Messages under way between an instance and a server rank."""
    answer_timeout_s: float = setting(30.0, above=0)
    """Time for an answer; then the instance computes the deltas."""
    lease_timeout_s: float = setting(5.0, above=0, fixed="5 s serve all networks")
    """Time that leases of a vanished instance stay."""
    load_gb_per_s: float | None = setting(None, above=0, unset="none")
    """Upper bound on the ranks' rate of loading adapters, in 10^9 bytes per second."""
    host_workers: int = setting(0, least=0, former="--lora-server-host-workers")
    """CPU processes beside each rank for rows of layers that are still loading; 0: such rows wait."""
    host_tokens_per_worker: int = setting(32, least=1, fixed="32 rows serve all models")
    """Rows of one layer for one worker; more are divided."""
    layer_wise: bool = setting(True, fixed="layers always serve as soon as each is there")
    """A layer of an adapter serves as soon as it is loaded; false: only with all layers, for comparisons."""
