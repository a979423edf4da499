"""The authority is made once, kept from others, and renewed before it expires."""

from __future__ import annotations

import datetime as dt
import os
import ssl
import stat
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from proxy import authority
from proxy.authority import AuthorityUnavailable, certificate_path, ensure_authority


def key_path(directory: Path) -> Path:
    return directory / "mitmproxy-ca.pem"


def load(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate_path(directory).read_bytes())


class TestMaking:
    def test_only_its_owner_can_read_the_key(self, tmp_path: Path) -> None:
        directory = tmp_path / "a" / "authority"
        old = os.umask(0)
        try:
            ensure_authority(directory)
        finally:
            os.umask(old)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(key_path(directory).stat().st_mode) == 0o600

    def test_the_certificate_has_no_key_beside_it(self, tmp_path: Path) -> None:
        text = ensure_authority(tmp_path / "authority").read_text()
        assert text.count("BEGIN") == text.count("BEGIN CERTIFICATE") == 1

    def test_it_signs_certificates_and_nothing_else(self, tmp_path: Path) -> None:
        ensure_authority(tmp_path / "authority")
        certificate = load(tmp_path / "authority")
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        assert (usage.key_cert_sign, usage.key_encipherment) == (True, False)
        assert certificate.subject == certificate.issuer
        certificate.verify_directly_issued_by(certificate)

    def test_the_key_is_the_certificates(self, tmp_path: Path) -> None:
        ensure_authority(tmp_path / "authority")
        key = load_pem_private_key(key_path(tmp_path / "authority").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key() == load(tmp_path / "authority").public_key()

    def test_it_can_be_trusted_by_openssl(self, tmp_path: Path) -> None:
        context = ssl.create_default_context(cafile=str(ensure_authority(tmp_path / "authority")))
        assert len(context.get_ca_certs()) == 1

    def test_two_authorities_have_different_names(self, tmp_path: Path) -> None:
        """OpenSSL looks an issuer up by name."""
        for name in ("one", "two"):
            ensure_authority(tmp_path / name)
        assert load(tmp_path / "one").subject != load(tmp_path / "two").subject


class TestKeeping:
    def test_it_stays_the_same(self, tmp_path: Path) -> None:
        first = ensure_authority(tmp_path).read_bytes()
        assert ensure_authority(tmp_path).read_bytes() == first

    def test_made_by_many_at_once_there_is_one(self, tmp_path: Path) -> None:
        with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
            list(pool.map(ensure_authority, [tmp_path] * 8))
        assert certificate_path(tmp_path).read_text() in key_path(tmp_path).read_text()

    @pytest.mark.parametrize("name", ["mitmproxy-ca.pem", "mitmproxy-ca-cert.pem"])
    @pytest.mark.parametrize(
        "content", [None, b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
    )
    def test_a_damaged_one_is_made_anew(self, tmp_path: Path, name: str, content: bytes | None) -> None:
        first = ensure_authority(tmp_path).read_bytes()
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
        assert ensure_authority(tmp_path).read_bytes() != first
        assert certificate_path(tmp_path).read_text() in key_path(tmp_path).read_text()

    def test_one_that_soon_expires_is_made_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(authority, "_LIFETIME", dt.timedelta(days=29))
        first = ensure_authority(tmp_path).read_bytes()
        monkeypatch.undo()
        renewed = ensure_authority(tmp_path).read_bytes()
        assert renewed != first
        assert load(tmp_path).not_valid_after_utc - dt.datetime.now(dt.UTC) > dt.timedelta(days=300)

    def test_rights_that_were_loosened_are_tightened(self, tmp_path: Path) -> None:
        ensure_authority(tmp_path)
        tmp_path.chmod(0o755)
        key_path(tmp_path).chmod(0o644)
        ensure_authority(tmp_path)
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
        assert stat.S_IMODE(key_path(tmp_path).stat().st_mode) == 0o600

    def test_nothing_temporary_is_left(self, tmp_path: Path) -> None:
        ensure_authority(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {".lock", "mitmproxy-ca.pem", "mitmproxy-ca-cert.pem"}


class TestRefusing:
    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "authority").write_text("")
        with pytest.raises(AuthorityUnavailable, match="hint:"):
            ensure_authority(tmp_path / "authority")

    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        if os.getuid() == 0:
            os.chown(tmp_path, 12345, 12345)
            place = tmp_path
        else:
            place = Path("/etc")
        with pytest.raises(AuthorityUnavailable, match="belongs to uid"):
            ensure_authority(place)

    def test_a_link_in_place_of_the_lock(self, tmp_path: Path) -> None:
        (tmp_path / "authority").mkdir(mode=0o700)
        (tmp_path / "authority" / ".lock").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(AuthorityUnavailable):
            ensure_authority(tmp_path / "authority")
        assert not (tmp_path / "elsewhere").exists()
