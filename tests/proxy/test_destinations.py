"""One normaliser: every spelling of a host is one host, what is not a host is none, and no address passes for another."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.destinations import (
    METADATA_ADDRESSES,
    AddressClass,
    Host,
    InvalidHost,
    Unparsed,
    classify_address,
    embedded_ipv4,
    observe_authority,
    observe_host,
    parse_host,
    parse_port,
)

SPELLINGS = [
    ("example.com", ["EXAMPLE.com", "example.com.", "ExAmPlE.CoM."]),
    ("xn--bcher-kva.example", ["bücher.example", "BÜCHER.example.", "XN--BCHER-KVA.example", "bu\u0308cher.example"]),
    ("xn--strae-oqa.example", ["straße.example", "STRAẞE.example"]),
    ("a.b.example", ["a。b。example", "a．b.example", "ａ.b.example"]),
    ("_dmarc.example", ["_DMARC.example"]),
    (
        "127.0.0.1",
        ["127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F.1", "0177.0.0.1", "017700000001", "127.0.0.1."],
    ),
    ("127.0.0.1", ["[::ffff:127.0.0.1]", "::ffff:7f00:1", "１２７.0.0.1", "127。0。0。1"]),
    ("169.254.169.254", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "0xa9.254.0xa9fe", "169.254.43518"]),
    ("0.0.0.0", ["0", "0x0", "0x", "00000000"]),
    ("::1", ["[::1]", "0:0:0:0:0:0:0:1", "[0000::0001]"]),
    ("fe80::1", ["[FE80::1]"]),
]


@pytest.mark.parametrize(("normal", "spelling"), [(normal, text) for normal, texts in SPELLINGS for text in texts])
def test_every_spelling_of_a_host_is_the_same_host(normal: str, spelling: str) -> None:
    assert parse_host(spelling) == parse_host(normal)
    assert parse_host(spelling).text == normal


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a..b", ".a", "a..", "-a.example", "a-.example", "a b.example", " a.example", "a.example\n", "a\0.example",
        "a/b", "a\\b", "a@b", "a?b", "a#b", "a%2eb", "*.example", "a:80", "user@a.example", "[a.example]", "[::1", "::1]", "[]",
        "[1.2.3.4]", "fe80::1%eth0", "[fe80::1%25eth0]", "1.2.3.4.5", "256.1.1.1", "1.2.3.256", "4294967296", "0x100000000",
        "1.16777216", "09.1.1.1", "1.2.3.a4.5", "example.1", "a.0x1", "1..2.3", "a" * 64, ("a" * 60 + ".") * 5, "a" * 5000,
        "xn--é.example", "\u200d.example", "a\u202eb.example", "\ud800.example", "９" * 2000, "日" * 300, "a．．b",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(InvalidHost) as caught:
        parse_host(text)
    assert str(caught.value)
    observed = observe_host(text)
    assert isinstance(observed, Unparsed)
    assert observed.why == str(caught.value)


@given(st.text(max_size=40) | st.text(alphabet="aZ0.-_:[]%x1279é．１ß", max_size=20))
def test_reading_a_host_is_total_and_idempotent(text: str) -> None:
    observed = observe_host(text)
    if isinstance(observed, Host):
        assert parse_host(observed.text) == observed
        assert observed.text.isascii()
        assert observed.text == observed.text.lower()
        assert not observed.text.endswith(".")


@given(st.ip_addresses())
def test_an_address_is_read_back_from_every_form_of_it(address: IPv4Address | IPv6Address) -> None:
    host = parse_host(str(address))
    assert host.address is not None
    assert parse_host(str(host)) == host
    if isinstance(address, IPv4Address):
        for form in (str(int(address)), hex(int(address)), f"[::ffff:{address}]", f"0{int(address):o}"):
            assert parse_host(form).address == address
    else:
        assert parse_host(f"[{address.exploded}]") == host


@pytest.mark.parametrize(
    ("above", "host", "covered"),
    [
        ("example.com", "example.com", True),
        ("example.com", "a.b.example.com", True),
        ("example.com", "notexample.com", False),
        ("example.com", "example.com.evil.test", False),
        ("a.example.com", "example.com", False),
        ("1.2.3.4", "1.2.3.4", True),
        ("1.2.3.4", "a.test", False),
        ("4.test", "1.2.3.4", False),
    ],
)
def test_a_name_covers_itself_and_what_lies_below_it(above: str, host: str, covered: bool) -> None:
    assert parse_host(above).covers(parse_host(host)) is covered


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a.test", "a.test", None),
        ("A.test.:8080", "a.test", 8080),
        ("a.test:", "a.test", None),
        ("[::1]", "::1", None),
        ("[::1]:443", "::1", 443),
        ("127.1:80", "127.0.0.1", 80),
    ],
)
def test_an_authority_is_a_host_and_perhaps_a_port(text: str, host: str, port: int | None) -> None:
    assert observe_authority(text) == (parse_host(host), port)


@pytest.mark.parametrize(
    "text",
    [
        "", ":80", "a:b:c", "::1", "a.test:0", "a.test:65536", "a.test:+80", "a.test: 80", "a.test:８０", "a.test:x@evil.test",
        "u@a.test", "[::1", "[::1]80", "[::1]:x", "a.test/", "a.test\t", "a.test\r\nX: y", "a.test,evil.test", "[", "]", "[]:80",
    ],
)  # fmt: skip
def test_what_is_no_authority_is_unparsed(text: str) -> None:
    host, port = observe_authority(text)
    assert isinstance(host, Unparsed)
    assert port is None or host.text != text


@given(st.text(max_size=30) | st.text(alphabet="a.:[]@/0189 ", max_size=15))
def test_reading_an_authority_never_raises(text: str) -> None:
    host, port = observe_authority(text)
    assert isinstance(host, (Host, Unparsed))
    assert port is None or 1 <= port <= 65535


@pytest.mark.parametrize(("text", "port"), [("1", 1), ("65535", 65535), ("00080", 80), ("0", None), ("65536", None)])
def test_a_port_is_a_number_from_1_to_65535(text: str, port: int | None) -> None:
    assert parse_port(text) == port


@pytest.mark.parametrize("text", ["", " 1", "1 ", "+1", "-1", "1_0", "٨٠", "0x50", "8e1", "9" * 500])
def test_a_port_is_plain_decimal_digits(text: str) -> None:
    assert parse_port(text) is None


CLASSES = [
    ("93.184.216.34", AddressClass.PUBLIC),
    ("2606:4700::1111", AddressClass.PUBLIC),
    ("127.0.0.2", AddressClass.LOOPBACK),
    ("::1", AddressClass.LOOPBACK),
    ("10.1.2.3", AddressClass.PRIVATE),
    ("172.31.255.255", AddressClass.PRIVATE),
    ("172.32.0.0", AddressClass.PUBLIC),
    ("192.168.0.1", AddressClass.PRIVATE),
    ("fd12::1", AddressClass.PRIVATE),
    ("fec0::1", AddressClass.PRIVATE),
    ("100.64.0.1", AddressClass.SHARED),
    ("100.128.0.0", AddressClass.PUBLIC),
    ("169.254.1.1", AddressClass.LINK_LOCAL),
    ("fe80::1", AddressClass.LINK_LOCAL),
    ("169.254.169.254", AddressClass.METADATA),
    ("168.63.129.16", AddressClass.METADATA),
    ("100.100.100.200", AddressClass.METADATA),
    ("fd00:ec2::254", AddressClass.METADATA),
    ("224.0.0.1", AddressClass.MULTICAST),
    ("ff02::1", AddressClass.MULTICAST),
    ("0.0.0.0", AddressClass.UNSPECIFIED),
    ("0.1.2.3", AddressClass.UNSPECIFIED),
    ("::", AddressClass.UNSPECIFIED),
    ("192.0.2.1", AddressClass.DOCUMENTATION),
    ("2001:db8::1", AddressClass.DOCUMENTATION),
    ("198.18.0.1", AddressClass.BENCHMARKING),
    ("255.255.255.255", AddressClass.RESERVED),
    ("240.0.0.1", AddressClass.RESERVED),
    ("4000::1", AddressClass.RESERVED),
    ("100::1", AddressClass.RESERVED),
    # An IPv4 address inside an IPv6 one
    ("::ffff:10.0.0.1", AddressClass.PRIVATE),
    ("::127.0.0.1", AddressClass.LOOPBACK),
    ("2002:7f00:1::", AddressClass.LOOPBACK),
    ("2002:a9fe:a9fe::", AddressClass.METADATA),
    ("64:ff9b::a9fe:a9fe", AddressClass.METADATA),
    ("64:ff9b:1::10.0.0.1", AddressClass.PRIVATE),
    ("2001:0:4136:e378:8000:63bf:3fff:fdd2", AddressClass.DOCUMENTATION),
    ("2606:4700::5efe:10.0.0.1", AddressClass.PRIVATE),
    ("64:ff9b::5db8:d822", AddressClass.RESERVED),
    ("2002:5db8:d822::1", AddressClass.RESERVED),
]


@pytest.mark.parametrize(("text", "kind"), CLASSES)
def test_the_class_of_an_address(text: str, kind: AddressClass) -> None:
    assert classify_address(ip_address(text)) is kind


@given(st.ip_addresses())
def test_only_what_the_standard_library_calls_global_is_public(address: IPv4Address | IPv6Address) -> None:
    """`ipaddress` knows fewer special ranges than we do, so public here must be a subset of global there."""
    if classify_address(address) is AddressClass.PUBLIC:
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=4))
def test_wrapping_an_address_in_ipv6_never_makes_it_public(address: IPv4Address) -> None:
    number = int(address)
    wrapped = [
        IPv6Address(f"::ffff:{address}"),
        IPv6Address((0x2002 << 112) | (number << 80) | 1),
        IPv6Address((0x0064FF9B << 96) | number),
        IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF)),
        IPv6Address((0x26064700 << 96) | (0x00005EFE << 32) | number),
    ]
    for outer in wrapped:
        assert embedded_ipv4(outer) == address
        if outer.ipv4_mapped is None:
            assert classify_address(outer) is not AddressClass.PUBLIC
    if address in METADATA_ADDRESSES:
        assert {classify_address(outer) for outer in wrapped} == {AddressClass.METADATA}
