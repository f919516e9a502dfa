"""Certificates of a cluster: who has one signed by its authority takes part, over mutual TLS."""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from moe_lora.core.errors import ConfigError

AUTHORITY, AUTHORITY_KEY, MEMBER = "authority.pem", "authority.key", "member.pem"
MAKE_KEYS = "moe-lora cluster init"
_VALID_DAYS = 3650


@dataclass(frozen=True)
class Keys:
    """The certificates in a folder: the authority's, and a member's with its key.

    Raises ConfigError, saying how to make them, if they can't be read.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.context(server=False)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For one end of a connection: it shows this certificate and wants one of the same authority.

        Names of hosts are not looked at: a member may be found at any address.
        """
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


def needs_keys(setting: str, address: object) -> ConfigError:
    """What is wrong with an address of a network where there are no certificates."""
    return ConfigError(
        f"{setting}={address} is reached over a network, where the roles of a cluster know each other by "
        f"certificates; make them by `{MAKE_KEYS}` and name their folder as certificates"
    )


def keys_in(folder: str | Path | None) -> Keys | None:
    """The certificates there; None where there is no folder, since all is on one host."""
    return None if folder is None else Keys(Path(folder))


def make_keys(folder: Path) -> Keys:
    """Make a cluster's authority, and the certificate of its members, in a folder that only its user reads.

    AUTHORITY and MEMBER go to every host; AUTHORITY_KEY signs more members and need not be on any.
    Raises ConfigError if there are some already, or the folder can't be written.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(
        subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, *, authority: bool
    ) -> bytes:
        now = datetime.datetime.now(datetime.timezone.utc)
        built = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("moe_lora cluster"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not authority,
                    key_cert_sign=authority,
                    crl_sign=authority,
                    **dict.fromkeys(
                        (
                            *("content_commitment", "key_encipherment", "data_encipherment"),
                            *("key_agreement", "encipher_only", "decipher_only"),
                        ),
                        False,
                    ),
                ),
                critical=True,
            )
        )
        if not authority:
            uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            built = built.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def private(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    authority, member = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    contents = {
        AUTHORITY: certificate("moe_lora cluster", authority, authority, authority=True),
        AUTHORITY_KEY: private(authority),
        MEMBER: private(member) + certificate("member", member, authority, authority=False),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, content in contents.items():
            with open(os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(content)
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} exists; a cluster has one authority, so keep it, or give another --folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"certificates can't be written to {folder}: {error.strerror}") from error
    return Keys(folder)
