"""The values that stand in a policy file: hosts, networks, ports, paths and the like, each with its own faults. Pure.

Owns: what one value may be, and the form to write instead. Must not: know sections.

These are validators of their own rather than pydantic's, so that a message can say what was meant.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proxy.destinations import Host, InvalidHost, IPAddress, IPNetwork, parse_host
from proxy.network import Mode, Protocol
from proxy.paths import normalise_path
from sandbox.policy.index_url import IndexUrl, InvalidIndex, parse_index
from sandbox.policy.problems import shown

_MAX_TEXT = 1024
_METHOD_MARKS = frozenset("!#$%&'*+.^_`|~-")  # RFC 9110 section 5.6.2, with letters and digits
_MAPPED = IPv6Network("::ffff:0:0/96")


def fault(message: str, hint: str | None = None) -> NoReturn:
    """Refuse a value. `hint` is the form to write."""
    raise PydanticCustomError("policy", "{message}", {"message": message, "hint": hint})


def kind_of(value: object) -> str:
    """What YAML made of a value, in YAML's words."""
    match value:
        case bool():
            return f"`{shown(value)}`"
        case int() | float():
            return f"a number (`{shown(value, 30)}`)"
        case str():
            return f"text (`{shown(value)}`)"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
    return "nothing"


def _text(value: object, what: str, hint: str | None = None) -> str:
    if not isinstance(value, str):
        fault(f"{what} is expected, not {kind_of(value)}", hint)
    return value


# Hosts and addresses


def _name(value: object, address_hint: str) -> Host:
    text = _text(value, "a host name", "write it as text, such as `example.com`")
    if text == "*":
        fault("`*` is not a host name", "leave `allow` out to let calls name any public host")
    if text.startswith(("*.", ".")):
        rest = shown(text.lstrip("*").lstrip("."))
        fault(f"`{shown(text)}` is not a host name", f"write `{rest}`: a rule covers its host and all names below it")
    if "*" in text:
        fault(f"`{shown(text)}` has a wildcard", "write the name whose subdomains are meant: a rule covers them")
    if "://" in text:
        bare = text.split("://", 1)[1].split("/", 1)[0].rpartition("@")[2]
        fault(f"`{shown(text)}` is an address of a page where a host name belongs", f"write `{shown(bare)}`")
    if "/" in text:
        try:
            network = ip_network(text, strict=False)
        except ValueError:
            fault(f"`{shown(text)}` is not a host name", "write the host alone, and paths in `paths`")
        fault(f"`{shown(text)}` is a network where a host name belongs", address_hint.format(network))
    name, colon, port = text.rpartition(":")
    if colon and ":" not in name and port.isascii() and port.isdigit():
        fault(f"`{shown(text)}` has a port", f"write `host: {shown(name)}` and `ports: [{shown(port)}]`")
    try:
        host = parse_host(text)
    except InvalidHost as error:
        fault(f"`{shown(text)}` is not a host name: {error}")
    if host.address is not None:
        single = f"{host}/{host.address.max_prefixlen}"
        fault(f"`{shown(text)}` is an address where a host name belongs", address_hint.format(single))
    return host


_HOST_TEXT = (
    PlainSerializer(lambda host: host.text, return_type=str),
    WithJsonSchema({"type": "string", "maxLength": 253, "description": "a host name"}),
)
_NAMES_ONLY_HINT = (
    "calls name host names, never addresses: give the address a name in `hosts`, such as "
    "`hosts: {{box.example: 192.0.2.1}}`, and allow that name"
)
_IN_HOSTS_HINT = "write a host name, and its address after the colon"

AllowName = Annotated[Host, PlainValidator(lambda value: _name(value, _NAMES_ONLY_HINT)), *_HOST_TEXT]
DenyName = Annotated[Host, PlainValidator(lambda value: _name(value, "write `cidr: {0}`")), *_HOST_TEXT]
PlainName = Annotated[Host, PlainValidator(lambda value: _name(value, "write a host name")), *_HOST_TEXT]


def _subject(value: object) -> Host:
    """The host of a private address: a name, or the address itself for programs that dial it by number."""
    if isinstance(value, str):
        try:
            host = parse_host(value)
        except InvalidHost:
            pass  # `_name` says what is wrong with it
        else:
            if host.address is not None:
                return host
    return _name(value, "write a host name here, and the network in `cidr`")


Subject = Annotated[Host, PlainValidator(_subject), *_HOST_TEXT]


def _address(value: object) -> IPAddress:
    text = _text(value, "an IP address", "write it as text, such as `127.0.0.1`")
    try:
        address = ip_address(text)
    except ValueError:
        fault(f"`{shown(text)}` is not an IP address", 'write it in full, such as `127.0.0.1` or `"::1"`')
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            fault(f"`{shown(text)}` has a zone, which is local to one machine")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
    return address


Address = Annotated[
    IPAddress,
    PlainValidator(_address),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "description": "an IPv4 or IPv6 address"}),
]


def _network(value: object) -> IPNetwork:
    text = _text(value, "a network", "write it as text, such as `10.1.2.0/24`")
    try:
        network: IPv4Network | IPv6Network = ip_network(text, strict=False)
    except ValueError:
        fault(f"`{shown(text)}` is not a network", "write an address and a prefix length, such as `10.1.2.0/24`")
    if str(network) != text.lower():
        fault(
            f"`{shown(text)}` is not a network in its usual form, with a prefix length and no bits beyond it",
            f"write `{network}`",
        )
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        fault(f"`{shown(text)}` holds IPv4 addresses", "write the IPv4 network")
    return network


Network = Annotated[
    IPNetwork,
    PlainValidator(_network),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "description": "a network in CIDR notation"}),
]


def _static_hosts(value: object) -> object:
    if not isinstance(value, dict):
        fault(f"a mapping is expected, not {kind_of(value)}", "write `{box.example: 127.0.0.1}`")
    seen: dict[Host, object] = {}
    for name in value:
        try:
            host = parse_host(name)
        except InvalidHost:
            continue  # the key's own validator says what is wrong with it
        if host in seen:
            fault(f"`{shown(name)}` and `{shown(seen[host])}` are the same host", "keep one of them")
        seen[host] = name
    return value


def _one_or_more(value: object) -> object:
    if isinstance(value, (list, tuple)):
        if not value:
            fault("the list is empty", "write an address, or leave the line out")
        return value
    return (value,)


def distinct[T](values: tuple[T, ...]) -> tuple[T, ...]:
    """A list that says nothing twice, compared by what was meant, not by spelling."""
    seen: set[T] = set()
    for value in values:
        if value in seen:
            fault(f"`{shown(str(value))}` is listed twice", "keep one of them")
        seen.add(value)
    return values


StaticName = Annotated[
    str, PlainValidator(lambda value: _name(value, _IN_HOSTS_HINT).text), WithJsonSchema({"type": "string"})
]
StaticAddresses = Annotated[
    tuple[Address, ...],
    BeforeValidator(_one_or_more, json_schema_input_type=str | list[str]),
    AfterValidator(distinct),
]
StaticHosts = Annotated[dict[StaticName, StaticAddresses], BeforeValidator(_static_hosts)]


# Lists


_NOT_EMPTY = Field(json_schema_extra={"minItems": 1})


def listed(example: str) -> BeforeValidator:
    """A list with something in it. `example` is the form to write."""

    def check(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            fault(f"a list is expected, not {kind_of(value)}", f"write `{example}`")
        if not value:
            fault("the list is empty, so nothing could match", f"write `{example}`, or leave the key out")
        return value

    return BeforeValidator(check)


def _port(value: object) -> int:
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("*", "any", "all") or "-" in text or ":" in text:
            fault(f"`{shown(value)}` is not a port: there are no wildcards and no ranges", "list them: `[443, 8443]`")
        hint = text if text.isascii() and text.isdigit() and len(text) <= 5 else "443"
        fault(f"a port is a number, not {kind_of(value)}", f"write `{hint}`, without quotation marks")
    if isinstance(value, bool) or not isinstance(value, int):
        fault(f"a port is a whole number, not {kind_of(value)}", "write `443`")
    if not 1 <= value <= 65535:
        fault(f"`{shown(value, 20)}` is not a port", "write a number from 1 to 65535")
    return value


PortNumber = Annotated[
    int, PlainValidator(_port), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535})
]  # fmt: skip
Ports = Annotated[tuple[PortNumber, ...], listed("[443]"), AfterValidator(distinct), _NOT_EMPTY]


def _method(value: object) -> str:
    text = _text(value, "a method", "write `GET`")
    if text == "*":
        fault("methods have no wildcard", "leave `methods` out to mean any")
    if text != text.upper():
        fault(f"`{shown(text)}` is not a method: methods are in capitals", f"write `{shown(text.upper())}`")
    if not text or not text.isascii() or not all(c.isalnum() or c in _METHOD_MARKS for c in text) or len(text) > 40:
        fault(f"`{shown(text)}` is not a method", "write `GET`")
    if text == "CONNECT":
        fault("`CONNECT` opens tunnels, which are judged by host and port alone", "leave it out")
    return text


MethodName = Annotated[
    str, PlainValidator(_method), WithJsonSchema({"type": "string", "pattern": "^[A-Z0-9!#$%&'*+.^_`|~-]+$"})
]
Methods = Annotated[tuple[MethodName, ...], listed("[GET, HEAD]"), AfterValidator(distinct), _NOT_EMPTY]


def _path(value: object) -> str:
    text = _text(value, "a path", 'write it as text, such as `"/public/**"`')
    if len(text) > _MAX_TEXT:
        fault(f"it is longer than {_MAX_TEXT} characters")
    if not text.startswith("/"):
        fault(f"`{shown(text)}` does not begin with a slash", f'write `"/{shown(text)}"`')
    if "?" in text or "#" in text:
        fault(f"`{shown(text)}` has a query or a fragment", "write the path alone: queries are not judged")
    if "%" in text:
        fault(f"`{shown(text)}` is percent-encoded", "write the characters themselves: paths are compared decoded")
    if normalise_path(text) != text:
        fault(
            f"`{shown(text)}` is no path: it has an empty or dot segment, a backslash or a control character",
            "write the path as the server knows it",
        )
    return text


PathPattern = Annotated[
    str,
    PlainValidator(_path),
    WithJsonSchema({"type": "string", "pattern": "^/", "description": "`*` within a segment, `**` across segments"}),
]
Paths = Annotated[tuple[PathPattern, ...], listed('["/public/**"]'), AfterValidator(distinct), _NOT_EMPTY]


# One word


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        fault(f"`true` or `false` is expected, not {kind_of(value)}", "write `true` or `false`")
    return value


Flag = Annotated[bool, PlainValidator(_flag), WithJsonSchema({"type": "boolean"})]


def _choice(value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        hint = ", ".join(f"`{choice}`" for choice in choices[:-1]) + f" or `{choices[-1]}`"
        fault(f"`{shown(value)}` is none of the values there are", f"write {hint}")
    return value


ModeName = Annotated[
    Mode,
    PlainValidator(lambda value: Mode(_choice(value, tuple(Mode)))),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"enum": [str(mode) for mode in Mode]}),
]
ProtocolName = Annotated[
    Protocol,
    PlainValidator(lambda value: Protocol(_choice(value, tuple(Protocol)))),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"enum": [str(protocol) for protocol in Protocol]}),
]


def _version(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value != 1:
        fault(f"`{shown(value)}` is no version of the policy file that is known", "write `version: 1`")
    return value


def _policy_name(value: object) -> str:
    text = _text(value, "a name", "put it in quotation marks")
    if not text or len(text) > 64 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in text):
        fault(f"`{shown(text)}` is not a name", "write up to 64 letters, digits, `.`, `_`, `-`, such as `team-default`")
    return text


def _file(value: object) -> str:
    text = _text(value, "a file name", "put it in quotation marks")
    if not text or not text.isprintable() or len(text) > _MAX_TEXT:
        fault(f"`{shown(text)}` is not a file name", "write `audit.jsonl`")
    return text


def _absolute_file(value: object) -> Path:
    text = _file(value)
    if not text.startswith("/"):
        fault(f"`{shown(text)}` is not an absolute file name", "write `/etc/ssl/certs/ca-certificates.crt`")
    return Path(text)


def _index(value: object) -> IndexUrl:
    text = _text(value, "an index address", "write it as text, such as `https://index.example/simple/`")
    try:
        url = parse_index(text)
    except InvalidIndex as error:
        fault(f"this is not an index address: {error}", "write `https://index.example/simple/`")
    if url.has_credentials:
        fault("there is a user name or password in the address", "write it without: code in the sandbox is given none")
    if url.host.address is not None:
        fault("the index is given by an IP address", "give the address a name in `hosts`, and write that name here")
    return url


Version = Annotated[int, PlainValidator(_version), WithJsonSchema({"const": 1})]
PolicyName = Annotated[
    str, PlainValidator(_policy_name), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"})
]
FileName = Annotated[str, PlainValidator(_file), WithJsonSchema({"type": "string"})]
AbsoluteFileName = Annotated[
    Path,
    PlainValidator(_absolute_file),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^/"}),
]
Index = Annotated[
    IndexUrl,
    PlainValidator(_index),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "description": "an https address, or a host name"}),
]


# Numbers


def bounded(low: int, high: int, unit: str, *, whole: bool) -> tuple[PlainValidator, WithJsonSchema]:
    """A number from `low` to `high`, both included; `whole` numbers stay ints, others become floats."""

    def check(value: object) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            fault(f"a number is expected, not {kind_of(value)}", f"write a number from {low} to {high} ({unit})")
        if not low <= value <= high or (whole and isinstance(value, float)):
            word = "a whole number" if whole else "a number"
            fault(f"`{shown(value, 30)}` is not {word} from {low} to {high}", f"write {word} of {unit} in that range")
        return value if whole else float(value)

    schema = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
    return PlainValidator(check), WithJsonSchema(schema)
