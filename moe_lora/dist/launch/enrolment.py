# SPDX-License-Identifier: Apache-2.0
"""Certificates for new hosts of a cluster: signed over TLS, a token each.

A host makes a private key and sends a signing request.  Private keys stay on the hosts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

from anyio import fail_after

from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import ConfigError
from moe_lora.dist.net.keys import AUTHORITY, MEMBER, Keys, make_request, sign_request

logger = logging.getLogger(__name__)

LIMIT_S = 30.0
_MAX_BYTES = 1 << 14
_END = b"-----END CERTIFICATE REQUEST-----\n"


class Enrolment:
    """Signs requests of token holders.  folder: of `make_keys`, with the authority's key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[bytes, str] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listen at a free port; returns host:port."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._folder / MEMBER)
        self._server = await asyncio.start_server(
            self._visit, host, 0, ssl=context, ssl_handshake_timeout=LIMIT_S, limit=_MAX_BYTES
        )
        return str(Address(host, self._server.sockets[0].getsockname()[1]))

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    @property
    def authority(self) -> str:
        """The authority's certificate, without secrets."""
        return (self._folder / AUTHORITY).read_text()

    def add_token(self, name: str) -> str:
        """A token for a single certificate with this name."""
        token = secrets.token_urlsafe(32)
        self._names[_digest(token)] = name
        return token

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with fail_after(LIMIT_S):
                token = (await reader.readline()).decode().strip()
                name = self._names.pop(_digest(token), None)
                if name is None:
                    raise ConnectionError("an unknown or used token")
                request = await reader.readuntil(_END)
                writer.write(await asyncio.to_thread(self._sign, name, request))
                await writer.drain()
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            logger.warning("a request for a certificate was refused: %s", error or type(error).__name__)
        finally:
            writer.close()

    def _sign(self, name: str, request: bytes) -> bytes:
        with TemporaryDirectory(dir=self._folder) as folder:
            Path(folder, "member.csr").write_bytes(request)
            sign_request(folder, name, "member.csr", MEMBER, self._folder)
            return Path(folder, MEMBER).read_bytes()


def enrol(address: str, token: str, authority: str, folder: Path) -> Keys:
    """Make this host's key and certificate in a private folder; `address` is an `Enrolment` of the authority.

    Raises ConfigError without openssl, and for a refused token.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as new:
        make_request(new, "member", "member.csr", "member.key")
        certificate = _signed(address, token, authority, Path(new, "member.csr").read_bytes())
        member = Path(new, MEMBER)
        member.touch(mode=0o600)
        member.write_bytes(certificate + Path(new, "member.key").read_bytes())
        member.replace(folder / MEMBER)
    (folder / AUTHORITY).write_text(authority)
    return Keys(folder)


def _signed(address: str, token: str, authority: str, request: bytes) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=authority)
    place, received = parse_address("the enrolment's address", address), b""
    try:
        with (
            socket.create_connection((place.host, place.port), LIMIT_S) as plain,
            context.wrap_socket(plain) as sock,
        ):
            sock.sendall(token.encode() + b"\n" + request)
            while len(received) < _MAX_BYTES and (part := sock.recv(_MAX_BYTES)):
                received += part
    except OSError as error:
        raise ConfigError(
            f"no certificate came from {address} ({error}); is the port open, and do both clocks agree?"
        ) from error
    if not received:
        raise ConfigError(f"{address} refused this host's token: a token counts once; get a new token")
    return received


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
