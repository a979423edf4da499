"""The certificate authority that attempts trust: EC P-256, key 0600 in a 0700 directory, in mitmproxy's own layout.

Owns: the directory. Must not: be reachable from a sandbox, where only the certificate goes.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from proxy.directories import make_private

_KEY_FILE = "mitmproxy-ca.pem"  # key and certificate: the name mitmproxy looks for
_CERTIFICATE_FILE = "mitmproxy-ca-cert.pem"
_LIFETIME = datetime.timedelta(days=365)
_RENEW_BEFORE = datetime.timedelta(days=30)
_BACKDATED = datetime.timedelta(days=2)  # clocks differ


class AuthorityUnavailable(Exception):
    """The directory cannot be used. The message names it, and what to change."""


def certificate_path(directory: Path) -> Path:
    return directory / _CERTIFICATE_FILE


def ensure_authority(directory: Path) -> Path:
    """Make the authority if there is none or it soon expires; return the certificate's path.

    Safe to call from several processes at once. Raises `AuthorityUnavailable`, also when others could read the key.
    """
    try:
        make_private(directory)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise AuthorityUnavailable(f"`{directory}` belongs to uid {status.st_uid}, not to this process")
        if status.st_mode & 0o077:
            directory.chmod(0o700)
        lock = os.open(directory / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_usable(directory):
                _create(directory)
        finally:
            os.close(lock)
    except OSError as error:
        raise AuthorityUnavailable(
            f"the certificate authority's directory `{directory}` cannot be used: {error}\n"
            "hint: it must be a directory that this user owns and can write to"
        ) from error
    return certificate_path(directory)


def _is_usable(directory: Path) -> bool:
    key = directory / _KEY_FILE
    try:
        if key.stat().st_mode & 0o077:
            key.chmod(0o600)
        certificate = x509.load_pem_x509_certificate(key.read_bytes())
        shown = x509.load_pem_x509_certificate(certificate_path(directory).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    now = datetime.datetime.now(datetime.UTC)
    return certificate == shown and certificate.not_valid_after_utc - now > _RENEW_BEFORE


def _create(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    common_name = f"Sluicegate sandbox authority {secrets.token_hex(4)}"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
                key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    public = certificate.public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _replace(directory / _KEY_FILE, private + public, 0o600)
    _replace(certificate_path(directory), public, 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
