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
    """Adapters on the LoRA Server.  The memory of its ranks bounds the number too.  More adapters
    may be known than that."""
    memory_gb: float | None = setting(
        None,
        above=0,
        option="--lora-server-memory-gb",
        metavar="GB",
        unset="chosen",
    )
    """Room for adapters on each rank, in 10^9 bytes.  Chosen is capacity times the largest adapter known at
    the start, or times one of rank 16 on all targets if that takes more and at most an eighth of the memory.
    An adapter within the budget is served, and
    others are evicted for it; a larger one is refused when it is loaded."""
    address: str = ""
    """host:port of its first rank, as every other host reaches it; on one host the path of a socket."""
    certificates: str | None = setting(None, in_file=False)
    """Folder of the cluster's certificates; None: all is on one host."""
    store_dir: str = setting("", path="folder")
    """Where packed adapters lie as files.  Roles on one host share it; hosts need not: missing files are sent
    over."""
    transport: str = setting("shm", choices=TRANSPORTS)
    """How instances and LoRA Server exchange rows: shm (one host), gloo (two-sided, any hosts), nixl
    (one-sided, any hosts; `pip install "moe-lora[nixl]"`).  nixl is not dependable yet when the network is
    cut and comes back: a server rank was seen to end with a segmentation fault (no request was lost by
    it)."""
    device_puts: str = setting("none", choices=DEVICE_PUTS)
    """ibgda: instances of one GPU each put the rows of decode steps to the server's GPUs themselves
    (NVSHMEM), and get the deltas so; transport has the rest, and everything from when one of them has ended
    until all are started together.  Needs layout EPx-PPy.  Experimental: docs/reference/support.md says what
    ran.  none: transport has all."""
    sites: str = setting("auto", choices=("auto", "all", "experts"))
    """Which LoRA sites the server computes: all; or experts, and instances compute attention and dense sites;
    auto: experts where the model has any."""
    max_rows: int = setting(512, least=1, fixed="512 rows fit a message of every transport")
    """Rows in one message between an instance and a server rank."""
    depth: int = setting(4, least=1, fixed="4 messages keep every transport busy")
    """Messages under way between an instance and a server rank."""
    answer_timeout_s: float = setting(30.0, above=0)
    """An answer that takes longer is computed by the instance."""
    lease_timeout_s: float = setting(5.0, above=0, fixed="5 s serve all networks")
    """How long the leases of an instance that vanished are kept."""
    load_gb_per_s: float | None = setting(None, above=0, unset="none")
    """Bound on the rate at which its ranks load adapters, in 10^9 bytes per second."""
    host_workers: int = setting(0, least=0, former="--lora-server-host-workers")
    """Processes beside each of its ranks that compute the rows of layers that are still being loaded; 0: such
    rows wait."""
    host_tokens_per_worker: int = setting(32, least=1, fixed="32 rows serve all models")
    """Rows of one layer that such a process computes in time; more are divided."""
    layer_wise: bool = setting(True, fixed="layers always serve as soon as each is there")
    """A layer of an adapter serves as soon as it is there; false: none before all are, for comparisons."""
