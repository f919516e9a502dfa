# SPDX-License-Identifier: Apache-2.0
"""Certificates of a cluster, for mutual TLS."""

from __future__ import annotations

import os
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moe_lora.core.address import MAKE_KEYS, needs_keys
from moe_lora.core.errors import ConfigError

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig

AUTHORITY, AUTHORITY_KEY, MEMBER = "authority.pem", "authority.key", "member.pem"
_VALID_DAYS = 3650


@dataclass(frozen=True)
class Keys:
    """The authority's certificate in a folder, and a member's with its key.

    Raises ConfigError for unreadable certificates.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.context(server=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS context of one end: requires the same authority, but no host name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.folder / AUTHORITY)
            context.load_cert_chain(self.folder / MEMBER)
        except OSError as error:
            raise ConfigError(
                f"certificates={str(self.folder)!r}: {AUTHORITY} and {MEMBER} can't be read there ({error}); "
                f"make them once by `{MAKE_KEYS} --folder {self.folder}` and copy them to every host"
            ) from error
        return context

    def authority(self) -> bytes:
        """The authority's certificate: the cluster's identity."""
        return (self.folder / AUTHORITY).read_bytes()


def keys_in(folder: str | Path | None) -> Keys | None:
    """Certificates in the folder, if any."""
    return None if folder is None else Keys(Path(folder))


def keys_of(cluster: ClusterConfig) -> Keys | None:
    """Certificates of roles on several hosts; None on one host.

    Raises ConfigError for unreadable or missing certificates.
    """
    if cluster.certificates is None:
        for name, address in cluster.dialled_addresses().items():
            if not address.path:
                raise needs_keys(f"{name}.engines_address", address)
    return keys_in(cluster.certificates)


def make_keys(folder: Path) -> Keys:
    """Make a cluster's authority and member certificate in a private folder.

    AUTHORITY and MEMBER go to every host; AUTHORITY_KEY signs more members and may stay offline.  Raises
    ConfigError for existing certificates, an unwritable folder, or no openssl.
    """
    made = [folder / name for name in (AUTHORITY, AUTHORITY_KEY, MEMBER)]
    for path in made:
        if path.exists():
            raise ConfigError(
                f"{path} exists; a cluster has one authority: keep it, or give another --folder"
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as new:
            root = ("-addext", "basicConstraints=critical,CA:TRUE", "-out", AUTHORITY, *_VALID, *_NEW_KEY)
            _openssl(new, "moe_lora cluster", *root, "-keyout", AUTHORITY_KEY)
            make_request(new, "member", "member.csr", "member.key")
            sign_request(new, "member", "member.csr", MEMBER, Path(new))
            with open(f"{new}/{MEMBER}", "ab") as member:
                member.write(Path(new, "member.key").read_bytes())
            for path in made:
                os.chmod(f"{new}/{path.name}", 0o600)
                os.replace(f"{new}/{path.name}", path)
    except OSError as error:
        raise ConfigError(f"certificates can't be written to {folder}: {error.strerror}") from error
    return Keys(folder)


def make_request(folder: str, name: str, out: str, key: str) -> None:
    """Make a private key, and a request for a member's certificate.  Raises ConfigError."""
    _openssl(folder, name, "-new", "-out", out, "-keyout", key, *_NEW_KEY)


def sign_request(folder: str, name: str, request: str, out: str, authority: Path) -> None:
    """Sign a request with an authority's key; the name replaces the request's.  Raises ConfigError."""
    folder_of_key = authority.resolve()
    signed_by = ("-CA", str(folder_of_key / AUTHORITY), "-CAkey", str(folder_of_key / AUTHORITY_KEY))
    _openssl(folder, name, "-in", request, "-out", out, *_MEMBER, *_VALID, *signed_by)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_VALID = ("-x509", "-days", str(_VALID_DAYS))
_MEMBER = ("-addext", "basicConstraints=CA:FALSE")


def _openssl(folder: str, name: str, *words: str) -> None:
    try:
        command = ["openssl", "req", "-subj", f"/CN={name}", *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError("certificates are made by the command openssl, which is not installed") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"openssl can't make certificates: {error.stderr.strip()}") from error
