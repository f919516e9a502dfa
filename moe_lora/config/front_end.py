# SPDX-License-Identifier: Apache-2.0
"""Settings of front ends and of the controller: addresses, access, limits of clients, decisions."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from moe_lora.core.address import parse_address, parse_dialled
from moe_lora.core.errors import ConfigError

from .settings import Settings, setting

CONTROLLER, CONTROLLERS = "controller", "controllers"
ONE_FRONT_END = "front-end"
"""The name of a cluster's only front end, which its file need not name."""
PERFORMANCE_FORMS = ("toppings", "full")
"""Forms of `timing.step_model.StepModel`."""
ROUTINGS = (
    "least_outstanding",
    "round_robin",
    "random",
    "join_shortest_queue",
    "first_fit",
    "adapter_affinity",
    "rank_aware",
    "shortest_pending_time",
    "phi",
)
"""Names of `policies.routing.routers.ROUTERS`."""
PLACEMENTS = ("loraserve", "optimal", "random", "contiguous", "disjoint", "everywhere", "burst_tolerance")
"""Names of `provision.placement.placement.PLACEMENTS`."""
MIGRATIONS = ("off", "dlora")
"""off: requests stay where they were sent; dlora: `policies.migration.triggers.DLoraMigration`."""
RANK_AWARE_COSTS = ("others", "all")
"""Forms of `policies.routing.model_routing.RankAware`'s cost."""
LOG_LEVELS = ("debug", "info", "warning", "error")
MIGRATION_SOLVERS = ("fast", "relaxed", "exact")
UNKNOWN_FIELDS = ("warn", "error")
AUTO = "auto"
TOOL_PARSERS = (
    AUTO,
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "harmony",
    "glm4",
    "deepseek_v3",
    "kimi",
    "granite",
    "gemma4",
    "minimax_m2",
)
"""Names of `serve.openai.parsers.TOOL_FORMATS`."""
REASONING_PARSERS = (
    AUTO,
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm4",
    "kimi",
    "gemma4",
    "mistral",
    "seed_oss",
    "harmony",
)
"""Names of `serve.openai.parsers.thinking.REASONING_FORMATS`, and harmony."""


def _check_digests(place: str, digests: tuple[str, ...]) -> None:
    for digest in digests:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ConfigError(
                f"{place} has a text of {len(digest)} characters; give the SHA-256 of a key in hex, 64 of "
                "0-9 and a-f, or let moe-lora serve --api-key KEY compute the digest"
            )


def _access(default: Any, **rule: Any) -> Any:
    return setting(default, group="Access", **rule)


@dataclass(frozen=True, kw_only=True)
class AccessConfig(Settings):
    """Keys, the place of administration, TLS."""

    SECTION: ClassVar[str] = "front_end"

    api_keys: str | None = _access(None, path="place", option="--api-keys", metavar="FILE", unset="none")
    """Require a key of this file.  moe-lora keys add writes the file; changes count at once."""
    admin_key_digests: tuple[str, ...] = _access((), check=_check_digests, unset="none")
    """SHA-256 digests, in hex, of administrators' keys beside api_keys; --api-key KEY adds one.  Without
    api_keys only paths below /v1 and loads of adapters need a key: health, version and metrics are open."""
    share_prefix_cache: bool = _access(False)
    """Share computed prompts between tenants, for the base model and common adapters.  The time of a prompt
    then reveals whether another tenant has sent the same prompt."""
    admin_address: str | None = _access(None, check=parse_address, metavar="ADDRESS", unset="with all else")
    """Address of administration, the only place for its paths: host:port, or the absolute path of a Unix
    socket with access for its owner only."""
    tls_cert: str | None = _access(None, path="place", option="--tls-cert", metavar="FILE", unset="none")
    """Certificate for HTTPS with its chain, in PEM."""
    tls_key: str | None = _access(None, path="place", option="--tls-key", metavar="FILE")
    """Private key of the certificate, in PEM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; give both, or neither")


def _check_proxies(place: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(
                f"{place}: {address!r} is no address or network ({error}); give one such as 10.0.0.5 or "
                "10.0.0.0/8"
            ) from error


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Settings):
    """What one client, and all together, may have of one front end; each of several counts its own.

    A client is an address (IPv6: its /64).
    """

    SECTION: ClassVar[str] = "front_end"

    trusted_proxies: tuple[str, ...] = setting(
        (), check=_check_proxies, former="--trusted-proxy", metavar="ADDRESS", unset="none"
    )
    """A proxy (address or network) whose X-Forwarded-For names the client; may be given several times. Its
    own connections count only in max_connections."""
    max_connections: int = setting(16384, least=1)
    """Open connections; more are answered with 503. The limit on open files may lower the number."""
    max_connections_per_client: int = setting(1024, least=1)
    """Open connections of one client; more are answered with 429."""
    idle_timeout_s: float = setting(3900.0, above=0)
    """Time until an idle connection closes. Clients and proxies (Envoy: an hour) should close first: a
    request on a closing connection fails with a reset."""
    header_timeout_s: float = setting(20.0, above=0)
    """Time from a request's first byte to the end of its headers; then 408. A new connection without a byte
    closes after the same time, unless a trusted proxy opened the connection."""
    body_timeout_s: float = setting(60.0, above=0)
    """Time from the end of the headers to the end of the body; then 408."""
    write_timeout_s: float = setting(30.0, above=0)
    """Time without reading after which a client's connection and requests end."""
    max_unread_steps: int = setting(
        4096, least=1, fixed="4096 steps are more than a client of any use leaves unread"
    )
    """Unread steps of an answer; then the request ends."""
    max_header_bytes: int = setting(1 << 16, least=1024)
    """Bytes of a request's first line and headers, and of trailers; then 400."""
    max_body_bytes: int = setting(2 << 20, least=1024)
    """Bytes of a generating request's body; then 413. Other bodies have at most 64 KiB."""
    max_bodies_bytes: int = setting(64 << 20, least=1024)
    """Bytes of all bodies being received or checked, without the first 16 KiB of each; then 503."""
    max_bodies_bytes_per_client: int = setting(16 << 20, least=1024)
    """The same, of one client; then 429."""
    max_json_depth: int = setting(32, least=4, fixed="no request needs more than 32 levels")
    """Nested lists and objects; then 400."""
    check_timeout_s: float = setting(20.0, above=0, fixed="20 s serve all bodies that the limits allow")
    """Time that a body from 16 KiB on may wait for its check; then 503. A separate process checks and
    tokenizes these bodies one by one, clients by turns."""
    max_choices: int = setting(128, least=1)
    """Choices of one request, prompts times n; then 400."""
    max_request_tokens: int = setting(1 << 20, least=1)
    """Tokens of one request's prompts and longest answers together; then 400. An answer without max_tokens
    counts at most 4,096 tokens. Log probabilities of other tokens count as further tokens. One choice without
    log probabilities may have the whole context."""
    unknown_fields: str = setting("warn", choices=UNKNOWN_FIELDS)
    """Unknown fields of a request. warn: the server ignores them, logs each name once, and lists them in the
    header X-Ignored-Fields. error: 400. Fields that would change the answer are a 400 in both cases."""
    tool_call_parser: str = setting(AUTO, choices=TOOL_PARSERS)
    """Format of tool calls in answers.  auto: by the chat template, else by the family; only requests with
    tools are parsed.  none: requests with tools are a 400."""
    reasoning_parser: str = setting("none", choices=REASONING_PARSERS)
    """Format of reasoning in answers of chats, for reasoning_content.  auto: by the chat template."""
    return_routed_experts: bool = setting(False)
    """Send the chosen experts of tokens with each choice, unless a request says otherwise. A step with such a
    request runs without compiled code and graphs."""
    received_mb: int = setting(4096, least=1)
    """Size in 2^20 bytes of all adapters with tensors in bodies, of each front end; then 413."""
    pause_timeout_s: float = setting(600.0, above=0)
    """Longest pause; then requests go on, as after /resume.  Each /pause starts the time anew."""
    max_queued_tokens: int = setting(1 << 23, least=1)
    """Tokens of all choices before their first token, at least 1,024 each; then 503."""
    max_queued_tokens_per_client: int = setting(1 << 21, least=1)
    """The same, of one client; then 429. One request may always wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_bodies_bytes", "max_bodies_bytes_per_client"):
            if (most := self.max_body_bytes) > (16 << 10) + (bound := getattr(self, name)):
                raise ConfigError(f"max_body_bytes={most} must be at most 16 KiB above {name}={bound}")


def _check_origins(place: str, origins: tuple[str, ...]) -> None:
    """A browser sends scheme://host[:port], and nothing behind it; what differs never matches."""
    for origin in origins:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and not (scheme and separator and host and not set(host) & set("/?#@* ")):
            raise ConfigError(
                f"{place}: {origin!r} is no origin; give scheme://host[:port] without a path, such as "
                "https://app.example.com, or * for all"
            )


def _port(default: Any, **rule: Any) -> Any:
    return setting(default, least=0, most=65535, **rule)


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(Settings):
    """How requests are spread over instances (docs/guides/placement.md)."""

    SECTION: ClassVar[str] = "front_end"
    GROUP: ClassVar[str] = "Scaling"

    routing: str | None = setting(
        None,
        choices=ROUTINGS,
        option="--routing",
        metavar="ROUTER",
        unset="least_outstanding, or the placement's",
    )
    """Policy that chooses an instance for a request (docs/guides/placement.md).  rank_aware and
    shortest_pending_time need front_end.performance_model."""
    performance_model: str | None = setting(None, path="place", metavar="FILE")
    """Step times by rank for rank_aware and shortest_pending_time, a file of moe-lora profile-steps."""
    performance_form: str = setting("full", choices=PERFORMANCE_FORMS)
    """Model of step times: full, or the papers' toppings."""
    slo_tpot_s: float | None = setting(None, above=0, unset="no such bound")
    """SLO of the time per token after the first, in seconds.  rank_aware avoids instances with a longer
    predicted decode step.  If all have longer steps, the instance with the least token work wins."""
    mean_output_tokens: float | None = setting(
        None, above=0, unset="the mean of the answers served, 128 at the start"
    )
    """Expected tokens of an answer.  rank_aware divides the time of a prompt by this number.  A placement
    expects this number (128 by default) before an adapter's first answers."""
    rank_aware_cost: str = setting(
        RANK_AWARE_COSTS[0], choices=RANK_AWARE_COSTS, policy="front_end.routing=rank_aware"
    )
    """rank_aware's cost.  others: the time that a request adds to other requests (Toppings, Algorithm 1).
    all: the time of its own tokens too."""
    adapter_load_s_per_rank: float = setting(0.0, least=0, policy="front_end.routing=shortest_pending_time")
    """Seconds to load an adapter, per rank, for shortest_pending_time.  With host workers 0 means the
    performance model's time; routers then count the shorter of load and host start."""
    placement: str | None = setting(
        None, choices=PLACEMENTS, option="--placement", metavar="NAME", unset="none"
    )
    """Divide adapters over instances, and route by the result.  Beside burst_tolerance, routing may be
    shortest_pending_time (docs/guides/placement.md)."""
    prefill_instances: tuple[str, ...] = setting((), unset="none: every instance does both")
    """Instances that compute prompts, by name (docs/guides/migration.md)."""
    placement_interval_s: float = setting(30.0, above=0)
    """Time between placements."""
    demand_steps: int = setting(8, least=1)
    """Placement intervals in the forecast of an adapter's demand.  With demand_smoothing 1 and no trend, only
    the latest interval counts, and an adapter is forgotten after this many idle intervals."""
    demand_smoothing: float = setting(1.0, above=0, most=1)
    """Weight of the latest interval in the forecast, at least 1 / demand_steps.  1: only the latest interval
    counts."""
    demand_trend: float = setting(0.0, least=0, most=1)
    """Weight of the latest change in the forecast's damped trend; 0: no trend."""
    operating_points: str | None = setting(None, path="place", metavar="FILE", unset="all ranks alike")
    """File with {"rank": tokens/s}: an instance's rate with adapters of one rank, for the placement."""
    heartbeat_timeout_s: float = setting(5.0, above=0)
    """Time without progress after which an instance gets no new requests.  A silent instance also loses its
    requests to others.  The time also ends the connection of a silent controller.  Raise the value for
    longer steps or loads."""
    heartbeat_dead_s: float = setting(30.0, above=0)
    """Time without progress after which all requests of an instance move and its connection ends.  With one
    front end its process ends too, otherwise after twice the time.  Raise the value for longer steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heartbeat_timeout_s >= self.heartbeat_dead_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s} must be positive and below "
                f"heartbeat_dead_s={self.heartbeat_dead_s}, both in seconds"
            )
        if self.placement is None and (self.operating_points is not None or self.routing == "phi"):
            raise ConfigError(
                "operating_points and routing='phi' need a placement; give one, such as placement='loraserve'"
            )
        is_proactive = self.placement == "burst_tolerance"
        allowed = (None, "phi", *(("shortest_pending_time",) if is_proactive else ()))
        if self.placement is not None and self.routing not in allowed:
            advice = "leave one of them out"
            raise ConfigError(
                f"placement={self.placement!r} routes by its own table, not by routing={self.routing!r}; "
                + (f"choose routing='shortest_pending_time', or {advice}" if is_proactive else advice)
            )


def _of_dlora(default: Any, **rule: Any) -> Any:
    return setting(default, policy="front_end.migration=dlora", **rule)


@dataclass(frozen=True, kw_only=True)
class MigrationConfig(Settings):
    """When running and waiting requests move to other instances (docs/guides/migration.md)."""

    SECTION: ClassVar[str] = "front_end"
    GROUP: ClassVar[str] = "Scaling"

    migration: str = setting("off", choices=MIGRATIONS, option="--migration", metavar="POLICY")
    """Move requests off overloaded instances: off or dlora.  An instance is overloaded if it lacks memory or
    if requests queue (docs/guides/migration.md)."""
    migration_interval_s: float = _of_dlora(1.0, above=0)
    """Least time between plans; up to 16 times as much while plans gain too little."""
    migration_queue_s: float = _of_dlora(0.5, least=0)
    """Wait of a request for its first step from which on an instance is overloaded."""
    migration_free_share: float = _of_dlora(0.05, least=0, most=1)
    """Share of device memory left for requests below which an instance is overloaded."""
    migration_min_gain: float = _of_dlora(0.1, least=0, most=1)
    """Least share of the slowest instance's time that a plan must save."""
    migration_solver: str = _of_dlora("fast", choices=MIGRATION_SOLVERS)
    """Solver of a plan.  fast: longest requests first, then a search.  relaxed: dLoRA's linear program over
    few instances.  exact: HiGHS on the whole problem, for a few instances, within migration_interval_s."""
    migration_selected: int = _of_dlora(4, least=1)
    """Instances in a plan, K.  relaxed: the K slowest give requests, to these and the K fastest.  fast: the
    search covers the slowest and the 2 K - 1 fastest; all above the mean give.  exact: unused."""
    migration_affinity_s: float = _of_dlora(0.0, least=0)
    """Cost of each further adapter on an instance, in seconds (dLoRA's eta)."""
    migration_bytes_per_s: float = _of_dlora(1e9, above=0)
    """Rate between two instances, for the choice between moving tokens and KV."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Settings):
    """Files and batches (docs/guides/batches.md)."""

    SECTION: ClassVar[str] = "front_end"

    batch_dir: str | None = setting(None, path="place", metavar="FOLDER", unset="a temporary folder")
    """Folder for files and batches.  The next start goes on with unfinished batches.  One server at a time
    uses the folder."""
    batch_bytes: int = setting(256 << 20, least=1024)
    """Bytes of all files and results of a tenant, without keys of all clients; then 413."""
    batch_concurrency: int = setting(16, least=1)
    """Requests of batches at once."""


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig(AccessConfig, LimitsConfig, BatchConfig, MigrationConfig, RoutingConfig):
    """Where the front end listens, for HTTP and for instances that dial in, how it routes, what clients may
    have of it."""

    host: str = setting("127.0.0.1", option="--host", metavar="HOST", group="Access")
    """Address to listen at for HTTP."""
    port: int = _port(8000, option="--port", group="Access")
    """Port of HTTP.  0 takes a free port."""
    engines_address: str | None = setting(None, check=parse_dialled)
    """Address for instances to dial: host:port or [IPv6]:port, or on one host a socket's absolute path."""
    cors_origins: tuple[str, ...] = setting(
        (), check=_check_origins, former="--cors-origin", metavar="ORIGIN", unset="none"
    )
    """Let pages of this origin call the server from a browser (https://app.example.com; *: all); may be given
    several times."""
    docs_page: bool = setting(True)
    """Serve the pages / and /docs, and /openapi.json."""
    force_include_usage: bool = setting(False)
    """Send the usage in every chunk of every stream, and at its end."""
    per_request_metrics: bool = setting(False)
    """Add vLLM's `metrics` to completions and chats: times of the request, and tokens per second."""
    return_tokens_as_token_ids: bool = setting(False)
    """Name tokens of log probabilities by id, as in "token_id:7", unless a request says otherwise."""
    tokens_only: bool = setting(False)
    """Serve token ids without the model's tokenizer.  Texts, chats and stop strings are a 400."""
    metrics_by_name: int = setting(64, least=0)
    """Number of adapters, and of tenants, with counts by name in /metrics.  Further names count as "other"; 0
    turns the counts off."""
    adapter_chat_template: bool = setting(False, option="--adapter-chat-template", group="Adapters")
    """Use an adapter's own chat template, and its end token if its tokenizer has the base model's tokens.  A
    template is a program: trust the author of the adapter."""
    log_level: str = setting("info", choices=LOG_LEVELS, option="--log-level", metavar="LEVEL", group="More")
    """Log level: debug, info, warning or error."""
    drain_s: float = setting(20.0, least=0)
    """Time for running requests after the signal to end.  Then each ends with an error: a stream with an
    error event, a request without a token with a 503.  A second signal ends everything at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        address = self.admin_address
        if address is not None and parse_address("admin_address", address).port == self.port > 0:
            raise ConfigError(
                f"admin_address={address} has port={self.port}, by which all else is served; give it another"
            )


@dataclass(frozen=True, kw_only=True)
class FrontEndPlace(Settings):
    """What one of several front ends has of its own."""

    engines_address: str = setting(check=parse_dialled)
    """Address for instances to dial this front end, as in front_end."""
    host: str | None = setting(None, unset="as in front_end")
    """Address to listen at for HTTP."""
    port: int | None = _port(None, unset="as in front_end")
    """Port of HTTP."""
    admin_address: str | None = setting(None, check=parse_address, unset="as in front_end")
    """Address of administration of this front end."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig(Settings):
    """Where the controller listens."""

    SECTION: ClassVar[str] = CONTROLLER

    address: str = setting(check=parse_dialled)
    """Address for front ends to dial: host:port, or the path of a socket."""
    engines_address: str = setting(check=parse_dialled)
    """Address for instances to dial the controller, beside every front end."""


STORES = ("etcd", "etcds", "sqlite", "kubernetes")
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LEASE = re.compile(rf"(?=[^/]{{1,63}}/.{{1,253}}\Z){_LABEL}/{_LABEL}(\.{_LABEL})*")


def split_store(setting: str, store: str) -> tuple[str, list[str], str]:
    """Scheme, members (host:port, or a namespace), and key, path or Lease of a store.  Raises ConfigError."""
    scheme, separator, rest = store.partition("://")
    places, slash, path = rest.partition("/")
    if scheme == "kubernetes" and separator:
        if not _LEASE.fullmatch(rest):
            raise ConfigError(f"{setting}={store!r} names no Lease; give kubernetes://NAMESPACE/NAME")
        return scheme, [places], path
    members = places.split(",") if places else []
    if not separator or scheme not in STORES or bool(members) == (scheme == "sqlite"):
        raise ConfigError(
            f"{setting}={store!r} names no store; give etcd://HOST:PORT,HOST:PORT, in pods "
            "kubernetes://NAMESPACE/NAME or, for controllers of one host, sqlite:///PATH"
        )
    for member in members:
        if "@" in member or parse_dialled(setting, member).path:
            raise ConfigError(
                f"{setting}: {member!r} is not HOST:PORT; etcd's users are not supported, use etcds:// or a "
                "private network"
            )
    if scheme == "sqlite" and not path:
        raise ConfigError(f"{setting}={store!r} has no path; give sqlite:///PATH of a file on this host")
    return scheme, members, slash + path if scheme == "sqlite" else path or "moe_lora"


@dataclass(frozen=True, kw_only=True)
class LeadershipConfig(Settings):
    """How one of several controllers becomes the leader."""

    SECTION: ClassVar[str] = "leadership"

    store: str = setting("", check=split_store, unset="must be given")
    """Store of the leader's lease: etcd://HOST:PORT,HOST:PORT/KEY with all members (etcds: TLS by the
    cluster's certificates), kubernetes://NAMESPACE/NAME of a Lease, for pods, or sqlite:///PATH for
    controllers of one host.  KEY (moe_lora) names the cluster."""
    ttl_s: float = setting(5.0, least=2)
    """Time without a renewal until another controller leads."""
    epoch: int = setting(0, in_file=False)
    """Number of the leadership of this process; 0: not a leader."""


@dataclass(frozen=True, kw_only=True)
class ProvisionConfig(Settings):
    """How the places for adapters are watched to meet the load (`provision.online`)."""

    SECTION: ClassVar[str] = "provision"

    target_iar: float = setting(0.95, above=0, most=1)
    """Target share of requests with a place for their adapter at once.  Watched with a LoRA Server, or if
    given."""
    window_s: float = setting(300.0, above=0, former="--provision-window-s")
    """Time for which a request counts in the share."""
    interval_s: float = setting(30.0, above=0, fixed="the load is evaluated every 30 s")
    """Time between evaluations."""
    auto_resize: bool = setting(False)
    """Adapt the LoRA Server's capacity to the target, within its memory."""
    min_capacity: int = setting(1, least=1)
    """Lower bound of the capacity."""


@dataclass(frozen=True, kw_only=True)
class RegistryConfig(Settings):
    """Where adapters are registered (`adapters.registry`), and which of them are served from the start."""

    SECTION: ClassVar[str] = "registry"
    GROUP: ClassVar[str] = "Adapters"
    OPENED_BY: ClassVar[str] = "folder"

    folder: str = setting(path="folder", option="--registry", metavar="FOLDER", unset="none")
    """Serve the adapters of a registry; moe-lora adapters add fills a registry.  The front end, or the
    controller, opens the folder.  Its store/ needs the same path on every host."""
    adapters: tuple[str, ...] | None = setting(
        None, former="--registry-adapters", metavar="NAME...", unset="all of this base model"
    )
    """Serve only these adapters from the start."""
