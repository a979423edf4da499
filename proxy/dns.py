"""Answers to the names that code asks for. Pure, but for the attempt's memory of which name has which address.

No query ever leaves: a denied name does not exist, an allowed one has a synthetic address of the attempt's own, and
what connects to it is judged under the name. An allowed name is not looked up here, so a query costs nothing and tells
nobody anything.

Owns: the messages, RFC 1035, as far as a query for one name needs them. They come from hostile code, so what is not
exactly such a query is refused, and the question goes back as it came, byte for byte. Must not: touch sockets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from proxy.attempts import Attempt, Connection
from proxy.destinations import Host, Unparsed, observe_host
from proxy.network import Reason, Request, RequestLayer, deny

_HEADER = struct.Struct("!HHHHHH")
_ANSWER = struct.Struct("!HHHIH")
_QUESTION_TAIL = struct.Struct("!HH")
_TTL_SECONDS = 60
_MAX_NAME_BYTES = 255  # RFC 1035 section 2.3.4, with the length bytes
_MAX_LABEL_BYTES = 63
_NAME_OF_QUESTION = 0xC00C  # RFC 1035 section 4.1.4: a pointer to the name right behind the header

_RESPONSE, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x0100, 0x0080
_OPCODE = 0x7800
_NOERROR, _FORMERR, _SERVFAIL, _NXDOMAIN, _REFUSED = 0, 1, 2, 3, 5
_TYPE_A, _CLASS_IN = 1, 1


@dataclass(frozen=True, slots=True)
class Question:
    """The one question of a query. `raw` is its bytes in the message: name, type, class."""

    host: Host | Unparsed
    type: int
    class_: int
    raw: bytes


def answer(attempt: Attempt, connection: Connection, query: bytes) -> bytes | None:
    """The response to one query: NXDOMAIN for a denied name, for an allowed one its address or an empty answer.

    A records only: with an empty AAAA answer every client uses IPv4, and no other type has anything to say.
    None for what cannot be answered: a response, or too few bytes to be a message.
    """
    if len(query) < _HEADER.size or query[2] & 0x80:
        _refuse(attempt, connection, Reason.MALFORMED_REQUEST, "not a DNS query")
        return None
    question = parse_question(query)
    if question is None:
        _refuse(attempt, connection, Reason.MALFORMED_REQUEST, "not a DNS query for one name")
        return _respond(query, b"", _FORMERR)
    request = Request(RequestLayer.DNS, question.host)
    decision = attempt.judge(request, connection)
    host = question.host
    if not decision.allowed or isinstance(host, Unparsed) or host.address is not None:
        return _respond(query, question.raw, _NXDOMAIN)
    if question.type != _TYPE_A or question.class_ != _CLASS_IN:
        return _respond(query, question.raw, _NOERROR)
    address = attempt.synthetic_address(host)
    if address is None:
        _refuse(attempt, connection, Reason.LIMIT_EXCEEDED, "the attempt has asked for too many names", host)
        return _respond(query, question.raw, _REFUSED)
    record = _ANSWER.pack(_NAME_OF_QUESTION, _TYPE_A, _CLASS_IN, _TTL_SECONDS, 4) + address.packed
    return _respond(query, question.raw, _NOERROR, record)


def fail(query: bytes) -> bytes | None:
    """The response to a query that could not be judged."""
    return _respond(query, b"", _SERVFAIL) if len(query) >= _HEADER.size else None


def parse_question(query: bytes) -> Question | None:
    """The question of a standard query for one name; None when it is anything else.

    What follows the question (EDNS, RFC 6891) is not looked at: a responder that knows nothing of it may leave it out.
    """
    _, flags, questions, answers, authorities, _ = _HEADER.unpack_from(query)
    if flags & _OPCODE or questions != 1 or answers or authorities:
        return None
    labels: list[bytes] = []
    place = _HEADER.size
    while True:
        if place >= len(query) or place - _HEADER.size >= _MAX_NAME_BYTES:
            return None
        size = query[place]
        place += 1
        if size == 0:
            break
        if size > _MAX_LABEL_BYTES:  # a compression pointer too: there is nothing before it that it could point to
            return None
        labels.append(query[place : place + size])
        place += size
    if place + _QUESTION_TAIL.size > len(query):
        return None
    kind, class_ = _QUESTION_TAIL.unpack_from(query, place)
    raw = query[_HEADER.size : place + _QUESTION_TAIL.size]
    return Question(_observe(labels), kind, class_, raw)


def _observe(labels: list[bytes]) -> Host | Unparsed:
    name = b".".join(labels)
    text = name.decode("latin-1")
    if b"." in b"".join(labels):
        return Unparsed(text, "a label has a dot in it")
    if not name.isascii():
        return Unparsed(text, "a label has a byte that no host name has")
    return observe_host(text)


def _respond(query: bytes, question: bytes, code: int, record: bytes = b"") -> bytes:
    ident, flags, *_ = _HEADER.unpack_from(query)
    flags = _RESPONSE | flags & (_OPCODE | _RECURSION_DESIRED) | _RECURSION_AVAILABLE | code
    return _HEADER.pack(ident, flags, bool(question), bool(record), 0, 0) + question + record


def _refuse(attempt: Attempt, connection: Connection, reason: Reason, detail: str, host: Host | None = None) -> None:
    request = Request(RequestLayer.DNS, host if host is not None else Unparsed("", detail))
    attempt.refuse(request, deny(reason, detail), connection)
