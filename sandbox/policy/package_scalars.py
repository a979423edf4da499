"""The values that stand in the `packages:` section: names, prefixes, ranges, versions, durations, dates. Pure.

Owns: what one value may be, and the form to write instead. Must not: know sections.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator
from pydantic import WithJsonSchema as Schema

from proxy.packages.judge import duration_text
from proxy.packages.model import (
    Ecosystem,
    InvalidName,
    InvalidVersion,
    PackageName,
    PackageVersion,
    parse_name,
    parse_version,
)
from proxy.packages.policy import EXEMPTIBLE, Action
from proxy.packages.ranges import Range, parse_range
from proxy.packages.reasons import PackageReason
from sandbox.policy.problems import shown
from sandbox.policy.scalars import fault, kind_of

_MAX_NAMES = 1_000  # of one list: the policy travels with every attempt's grant
_MAX_SECONDS = 3650 * 86_400


class Section(BaseModel):
    """Frozen, and strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


# Values


def _text(value: object, what: str, hint: str) -> str:
    if not isinstance(value, str):
        fault(f"{what} is expected, not {kind_of(value)}", hint)
    return value


def word(choices: type[StrEnum], only: tuple[str, ...] | None = None) -> tuple[Any, ...]:
    """One of the words of an enumeration; `only` some of them."""
    words = only or tuple(str(choice) for choice in choices)

    def check(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in words:
            hint = ", ".join(f"`{word}`" for word in words[:-1]) + f" or `{words[-1]}`"
            fault(f"`{shown(value)}` is none of the values there are", f"write {hint}")
        return choices(value)

    return PlainValidator(check), PlainSerializer(str, return_type=str), Schema({"enum": list(words)})


AllowOrDeny = Annotated[Action, *word(Action, ("allow", "deny"))]
AllowOrWarn = Annotated[Action, *word(Action, ("allow", "warn"))]
WarnOrDeny = Annotated[Action, *word(Action, ("warn", "deny"))]
AnyAction = Annotated[Action, *word(Action)]

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)


def _duration(value: object) -> int:
    """Seconds of `3d`. A bare number is refused: package clients disagree on whether it means days or minutes."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value == 0:
            return 0
        fault(f"`{shown(value, 30)}` has no unit", f"write `{shown(value, 20)}d`, `{shown(value, 20)}h` or the like")
    text = _text(value, "a duration", "write `3d`")
    match = _DURATION.fullmatch(text)
    if match is None:
        fault(f"`{shown(text)}` is not a duration", "write a number and `s`, `m`, `h`, `d` or `w`, such as `3d`")
    seconds = int(match[1]) * _UNITS[match[2]]
    if seconds > _MAX_SECONDS:
        fault(f"`{shown(text)}` is more than ten years", "write `0` to switch the rule off")
    return seconds


Duration = Annotated[
    int,
    PlainValidator(_duration),
    PlainSerializer(duration_text, return_type=str),
    Schema({"type": ["string", "integer"], "description": "`3d`, `48h`, `90m`, `30s`, `2w`; `0` switches it off"}),
]


def _until(value: object) -> datetime:
    """A date means its end; a time needs its zone."""
    text = _text(value, "a date", "write `2027-01-31`")
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            return datetime.combine(date.fromisoformat(text) + timedelta(days=1), time(), UTC)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        fault(f"`{shown(text)}` is not a date", "write `2027-01-31`")
    if moment.tzinfo is None:
        fault(f"`{shown(text)}` has no time zone", f"write `{shown(text)}Z`, or the date alone")
    return moment.astimezone(UTC)


Until = Annotated[
    datetime,
    PlainValidator(_until),
    PlainSerializer(lambda moment: moment.isoformat().replace("+00:00", "Z"), return_type=str),
    Schema({"type": "string", "description": "a date, to its end in UTC, or a time with its zone"}),
]


def _why(value: object) -> str:
    text = _text(value, "a sentence", "say why, such as `reviewed in SEC-12`")
    if not text.strip() or len(text) > 300 or not text.isprintable():
        fault("there is no reason in it" if not text.strip() else "it is not one line of up to 300 characters")
    return text


Why = Annotated[str, PlainValidator(_why), Schema({"type": "string", "minLength": 1, "maxLength": 300})]


def listed(example: str, *, most: int = _MAX_NAMES) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            fault(f"a list is expected, not {kind_of(value)}", f"write `{example}`")
        if len(value) > most:
            fault(f"there are more than {most} entries")
        return value

    return BeforeValidator(check)


def _path(value: object) -> Path:
    text = _text(value, "a file name", "put it in quotation marks")
    if not text.startswith("/") or not text.isprintable() or len(text) > 1024:
        fault(f"`{shown(text)}` is not an absolute path", "write an absolute path, such as `/var/lib/osv`")
    return Path(text)


AbsolutePath = Annotated[
    Path, PlainValidator(_path), PlainSerializer(str, return_type=str), Schema({"type": "string", "pattern": "^/"})
]

# Names, versions


def _name(ecosystem: Ecosystem) -> Callable[[object], PackageName]:
    def check(value: object) -> PackageName:
        text = _text(value, "a package's name", "put it in quotation marks")
        try:
            return parse_name(ecosystem, text)
        except InvalidName as error:
            hint = (
                "write the name alone; versions belong in `packages.versions.deny`"
                if re.search("[=<>]", text)
                else None
            )
            fault(f"`{shown(text)}` is not a package's name: {error}", hint)

    return check


_NAME_TEXT = (PlainSerializer(str, return_type=str), Schema({"type": "string"}))
PypiName = Annotated[PackageName, PlainValidator(_name(Ecosystem.PYPI)), *_NAME_TEXT]
NpmName = Annotated[PackageName, PlainValidator(_name(Ecosystem.NPM)), *_NAME_TEXT]


def _prefix(pattern: str, hint: str) -> Any:
    form = re.compile(pattern, re.ASCII)

    def check(value: object) -> str:
        text = _text(value, "the beginning of names", hint)
        if form.fullmatch(text.lower()) is None:
            fault(f"`{shown(text)}` can't be how names begin", hint)
        return text.lower()

    return PlainValidator(check)


# In the form of PEP 503: one dash for any run of `-`, `_` and `.`.
PypiPrefix = Annotated[str, _prefix(r"[a-z0-9]+(?:-[a-z0-9]+)*-?", "write `acme-`"), Schema({"type": "string"})]
NpmPrefix = Annotated[
    str,
    _prefix(r"@[a-z0-9][a-z0-9._-]*/[a-z0-9._-]*|[a-z0-9][a-z0-9._-]*", 'write `"@acme/"`'),
    Schema({"type": "string"}),
]


class PackageRange(Section):
    """A name with a range, as `urllib3<2`. Written, and written again, as one text."""

    name: PackageName
    versions: Range

    def __str__(self) -> str:
        return f"{self.name}{str(self.versions).partition(':')[2]}"


def _package_range(ecosystem: Ecosystem) -> Callable[[object], PackageRange]:
    example = "urllib3<2" if ecosystem is Ecosystem.PYPI else "event-stream==3.3.6"

    def check(value: object) -> PackageRange:
        text = _text(value, "a package with its versions", f'write `"{example}"`')
        match = re.fullmatch(r"([^=<>!~^]+)((?:==|!=|<=?|>=?).*)", text, re.DOTALL)
        if match is None:
            fault(
                f"`{shown(text)}` has no range of versions",
                f'write `"{example}"`; whole packages belong in `names.deny`',
            )
        try:
            return PackageRange(name=_name(ecosystem)(match[1]), versions=parse_range(ecosystem, match[2]))
        except InvalidVersion as error:
            fault(f"`{shown(text)}`: {error}", f'write `"{example}"` or `"{match[1][:60]}>=1.0.0,<1.5.2"`')

    return check


_RANGE_TEXT = (PlainSerializer(str, return_type=str), Schema({"type": "string"}))
PypiRange = Annotated[PackageRange, PlainValidator(_package_range(Ecosystem.PYPI)), *_RANGE_TEXT]
NpmRange = Annotated[PackageRange, PlainValidator(_package_range(Ecosystem.NPM)), *_RANGE_TEXT]


def _exact(ecosystem: Ecosystem) -> Callable[[object], PackageVersion]:
    def check(value: object) -> PackageVersion:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            fault(f"`{shown(value)}` is a number to YAML, which may have lost a zero", "put it in quotation marks")
        text = _text(value, "a version", 'write `"2.32.3"`')
        try:
            return parse_version(ecosystem, text)
        except InvalidVersion as error:
            fault(f"`{shown(text)}` is not a version: {error}", "an exemption is of one exact version")

    return check


PypiVersion = Annotated[PackageVersion, PlainValidator(_exact(Ecosystem.PYPI)), *_NAME_TEXT]
NpmVersion = Annotated[PackageVersion, PlainValidator(_exact(Ecosystem.NPM)), *_NAME_TEXT]

# One word


def _tag(value: object) -> str:
    text = _text(value, "a tag", "write `latest`")
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,63}", text, re.ASCII) is None:
        fault(f"`{shown(text)}` is not a tag", "write `latest`")
    return text


Tag = Annotated[str, PlainValidator(_tag), Schema({"type": "string"})]


def _advisory_id(value: object) -> str:
    text = _text(value, "an advisory's id", "write `GHSA-…`, `PYSEC-…`, `CVE-…` or `MAL-…`")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{2,79}", text, re.ASCII) is None:
        fault(f"`{shown(text)}` is not an advisory's id", "write `GHSA-…`, `PYSEC-…`, `CVE-…` or `MAL-…`")
    return text


AdvisoryId = Annotated[str, PlainValidator(_advisory_id), Schema({"type": "string"})]


def _lifted(value: object) -> PackageReason:
    words = sorted(str(reason) for reason in EXEMPTIBLE)
    if not isinstance(value, str) or value not in words:
        known = isinstance(value, str) and value in set(PackageReason)
        message = "has no exemption" if known else "is no reason that a version can be exempt of"
        fault(f"`{shown(value)}` {message}", "write one of " + ", ".join(f"`{word}`" for word in words))
    return PackageReason(value)


Lifted = Annotated[
    PackageReason,
    PlainValidator(_lifted),
    PlainSerializer(str, return_type=str),
    Schema({"enum": sorted(str(reason) for reason in EXEMPTIBLE)}),
]


def some_reasons(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not value:
        fault("a list of reasons is expected" if not isinstance(value, (list, tuple)) else "the list is empty",
              "write `[version_too_new]`")  # fmt: skip
    return value
