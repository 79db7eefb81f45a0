"""Certificates for tests of TLS: a certificate authority, and the certificates that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class SignedPair:
    """Files with a certificate and its private key, as PEM."""

    cert: Path
    key: Path


class TestAuthority:
    """Signs certificates and stores them in `directory`.

    Attributes:
        cert: The file to trust.
    """

    __test__ = False

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._build(self._name, self._key.public_key(), days=10).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.cert = directory / f"{name}.pem"
        self.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(
        self, name: str, address: str = "127.0.0.1", *, host: str | None = None, days: int = 5
    ) -> SignedPair:
        """A certificate for a host name, or else an IP address; valid for `days` days, starting yesterday."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._build(subject, key.public_key(), days=days).add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(host) if host else x509.IPAddress(ipaddress.ip_address(address))]
            ),
            critical=False,
        )
        pair = SignedPair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pair.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair

    def _build(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *, days: int
    ) -> x509.CertificateBuilder:
        yesterday = dt.datetime.now(dt.UTC) - _DAY
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(yesterday - _DAY)
            .not_valid_after(yesterday + days * _DAY)
        )
