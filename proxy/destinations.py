"""Hosts, ports and address classes, and the one normaliser of them. Pure.

Policy text and traffic both pass through `parse_host`, so an unnormalised name cannot reach a comparison:
a `Host` has no other constructor that code outside this module should use.

Owns: what a name or an address *is*. Must not: know policies, resolve, or log.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import idna

type IPAddress = IPv4Address | IPv6Address
type IPNetwork = IPv4Network | IPv6Network

_MAX_NAME = 253  # RFC 1035 section 2.3.4, without the root label's dot
_MAX_TEXT = 1024  # longer input is not looked at further
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z", re.ASCII)
_NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)\Z", re.ASCII)


class InvalidHost(ValueError):
    """The text is neither a host name nor an IP address. The message says why, without quoting the text."""


@dataclass(frozen=True, slots=True)
class Host:
    """A normalised host: lower-case A-labels without a trailing dot, or an address in canonical form.

    `text` is what is compared, logged and dialled; `address` is set when the host is an address literal.
    """

    text: str
    address: IPAddress | None = None

    def __str__(self) -> str:
        return self.text

    def covers(self, other: Host) -> bool:
        """True when `other` is this name or lies below it. Addresses cover only themselves."""
        if self.address is not None or other.address is not None:
            return self.address is not None and self.address == other.address
        return other.text == self.text or other.text.endswith("." + self.text)


@dataclass(frozen=True, slots=True)
class Unparsed:
    """What stood where a host belongs and could not be read as one. Kept for the log only."""

    text: str
    why: str

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=8192)
def parse_host(text: str) -> Host:
    """Normalise a host name or address literal.

    Folds case, one trailing dot, IDNA (UTS 46, non-transitional), IPv6 brackets, and every spelling of an IPv4
    address that `inet_aton` accepts (`127.1`, `0x7f000001`, `0177.0.0.1`), as WHATWG URL section 3.5 does: a name
    whose last label is a number *is* an IPv4 address or nothing. IPv4-mapped IPv6 becomes IPv4.

    Raises `InvalidHost`.
    """
    if not text:
        raise InvalidHost("it is empty")
    if len(text) > _MAX_TEXT:
        raise InvalidHost(f"it is longer than {_MAX_TEXT} characters")
    if text.startswith("["):
        if not text.endswith("]"):
            raise InvalidHost("it has an opening bracket without a closing one")
        return _address_host(_parse_ipv6(text[1:-1]))
    if ":" in text:
        return _address_host(_parse_ipv6(text))
    name = _to_ascii(text)
    name = name.removesuffix(".")
    if not name:
        raise InvalidHost("it is only a dot")
    if len(name) > _MAX_NAME:
        raise InvalidHost(f"it is longer than {_MAX_NAME} characters")
    labels = name.split(".")
    if _NUMBER.match(labels[-1]):
        return _address_host(_parse_ipv4(labels))
    for label in labels:
        if not _LABEL.match(label):
            raise InvalidHost("a label is empty, too long, or has a character that no host name has")
    return Host(name)


def observe_host(text: str) -> Host | Unparsed:
    """`parse_host` for what traffic carries: never raises."""
    try:
        return parse_host(text)
    except InvalidHost as error:
        return Unparsed(text, str(error))


def observe_authority(text: str) -> tuple[Host | Unparsed, int | None]:
    """Split `host[:port]` as a Host header or `:authority` has it; a bad port makes the whole unparsed."""
    if "@" in text or "/" in text or any(c.isspace() for c in text):
        return Unparsed(text, "it has a character that no authority has"), None
    host, port_text = text, ""
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        host += bracket
        if rest and not rest.startswith(":"):
            return Unparsed(text, "something other than a port follows the bracket"), None
        port_text = rest[1:]
    elif text.count(":") == 1:
        host, _, port_text = text.partition(":")
    elif ":" in text:
        return Unparsed(text, "an IPv6 address needs brackets here"), None
    if not port_text:
        return observe_host(host), None
    port = parse_port(port_text)
    if port is None:
        return Unparsed(text, "the port is not a number from 1 to 65535"), None
    return observe_host(host), port


def parse_port(text: str) -> int | None:
    """A TCP port from decimal text, or None."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    port = int(text)
    return port if 1 <= port <= 65535 else None


def _to_ascii(text: str) -> str:
    if text.isascii():
        return text.lower()
    try:
        return idna.encode(text, uts46=True, transitional=False, std3_rules=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError) as error:
        raise InvalidHost("it is not a valid internationalised name") from error


def _address_host(address: IPAddress) -> Host:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return Host(str(address), address)


def _parse_ipv6(text: str) -> IPv6Address:
    if "%" in text:
        raise InvalidHost("an address with a zone is local to one machine")
    try:
        return IPv6Address(text)
    except ValueError as error:
        raise InvalidHost("it is not an IPv6 address") from error


def _parse_ipv4(labels: list[str]) -> IPv4Address:
    """The `inet_aton` forms: one to four parts, decimal, octal or hexadecimal, the last one filling what is left."""
    if len(labels) > 4:
        raise InvalidHost("it ends in a number but is not an IPv4 address")
    parts = []
    for label in labels:
        if not _NUMBER.match(label) or len(label) > 20:
            raise InvalidHost("it ends in a number but is not an IPv4 address")
        try:
            if label.startswith("0x"):
                parts.append(int(label[2:] or "0", 16))
            elif len(label) > 1 and label.startswith("0"):
                parts.append(int(label, 8))
            else:
                parts.append(int(label))
        except ValueError as error:
            raise InvalidHost("it ends in a number but is not an IPv4 address") from error
    value = 0
    for part in parts[:-1]:
        if part > 255:
            raise InvalidHost("it ends in a number but is not an IPv4 address")
        value = value << 8 | part
    room = 8 * (5 - len(parts))
    if parts[-1] >= 1 << room:
        raise InvalidHost("it ends in a number but is not an IPv4 address")
    return IPv4Address(value << room | parts[-1])


class AddressClass(StrEnum):
    """What an address is for. Only `PUBLIC` may be dialled without a `private_addresses` entry."""

    PUBLIC = "public"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    LINK_LOCAL = "link-local"
    METADATA = "metadata"
    SHARED = "shared"  # carrier-grade NAT, RFC 6598
    MULTICAST = "multicast"
    UNSPECIFIED = "unspecified"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    RESERVED = "reserved"
    OWN = "own"  # this host's own address; only an effect can tell, see `proxy.resolver`


# Addresses at which cloud providers serve instance credentials, some of them inside otherwise public ranges.
METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Azure, GCP, OpenStack, DigitalOcean
        "169.254.170.2",  # AWS ECS task credentials
        "169.254.170.23",  # AWS EKS pod identity
        "fd00:ec2::254",  # AWS over IPv6
        "fd00:ec2::23",  # AWS EKS pod identity over IPv6
        "fd20:ce::254",  # GCP over IPv6
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure host agent
        "192.0.0.192",  # Oracle classic
    )
)

# First match wins. IANA IPv4 and IPv6 special-purpose address registries.
_CLASSES: tuple[tuple[IPNetwork, AddressClass], ...] = tuple(
    (ipaddress.ip_network(text), kind)
    for text, kind in (
        ("0.0.0.0/8", AddressClass.UNSPECIFIED),
        ("10.0.0.0/8", AddressClass.PRIVATE),
        ("100.64.0.0/10", AddressClass.SHARED),
        ("127.0.0.0/8", AddressClass.LOOPBACK),
        ("169.254.0.0/16", AddressClass.LINK_LOCAL),
        ("172.16.0.0/12", AddressClass.PRIVATE),
        ("192.0.0.0/24", AddressClass.RESERVED),
        ("192.0.2.0/24", AddressClass.DOCUMENTATION),
        ("192.88.99.0/24", AddressClass.RESERVED),
        ("192.168.0.0/16", AddressClass.PRIVATE),
        ("198.18.0.0/15", AddressClass.BENCHMARKING),
        ("198.51.100.0/24", AddressClass.DOCUMENTATION),
        ("203.0.113.0/24", AddressClass.DOCUMENTATION),
        ("224.0.0.0/4", AddressClass.MULTICAST),
        ("240.0.0.0/4", AddressClass.RESERVED),
        ("::/128", AddressClass.UNSPECIFIED),
        ("::1/128", AddressClass.LOOPBACK),
        ("2001:db8::/32", AddressClass.DOCUMENTATION),
        ("3fff::/20", AddressClass.DOCUMENTATION),
        ("2001:2::/48", AddressClass.BENCHMARKING),
        ("fc00::/7", AddressClass.PRIVATE),
        ("fe80::/10", AddressClass.LINK_LOCAL),
        ("fec0::/10", AddressClass.PRIVATE),
        ("ff00::/8", AddressClass.MULTICAST),
        # Everything else that is not global unicast, 2000::/3, or that carries another address inside.
        ("2001::/23", AddressClass.RESERVED),
    )
)
_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = IPv6Network("::/96")


def embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a transition address carries: mapped, compatible, 6to4, Teredo, NAT64, ISATAP."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    low = int(address) & 0xFFFFFFFF
    if address in _NAT64 or address in _NAT64_LOCAL:
        return IPv4Address(low)
    if address in _COMPATIBLE and int(address) > 0xFFFF:
        return IPv4Address(low)
    if int(address) >> 32 & 0xFFFFFFFF in (0x00005EFE, 0x02005EFE):
        return IPv4Address(low)
    return None


@lru_cache(maxsize=8192)
def classify_address(address: IPAddress) -> AddressClass:
    """The class of an address; a transition address that carries a non-public IPv4 address has that one's class.

    A transition prefix whose inner address is public is still `RESERVED`: no public service is named by one.
    """
    if address in METADATA_ADDRESSES:
        return AddressClass.METADATA
    if isinstance(address, IPv6Address):
        inner = embedded_ipv4(address)
        if inner is not None:
            kind = classify_address(inner)
            return AddressClass.RESERVED if kind is AddressClass.PUBLIC else kind
    for network, kind in _CLASSES:
        if address.version == network.version and address in network:
            return kind
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST_V6:
        return AddressClass.RESERVED
    return AddressClass.PUBLIC
