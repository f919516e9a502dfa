# SPDX-License-Identifier: Apache-2.0
"""Who may do what at a front end, and by which connection (docs/guides/tenants.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from moe_lora.core.address import parse_address
from moe_lora.core.errors import ConfigError

from .settings import Settings, setting


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
