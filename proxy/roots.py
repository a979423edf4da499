"""Where this host keeps the certificates of the public authorities. Standard library only."""

from __future__ import annotations

from pathlib import Path

_BUNDLES = (  # by distribution: Debian, Fedora, openSUSE, Alpine
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
    Path("/etc/ssl/cert.pem"),
)


def host_ca_bundle() -> Path | None:
    """The host's bundle in PEM, with whatever its administrator added; None where there is none."""
    return next((path for path in _BUNDLES if path.is_file()), None)
