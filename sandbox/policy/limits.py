"""The `limits:` section of the policy file, and what a tenant may say of it. Pure.

Owns: its keys, bounds and defaults. Must not: hold a call against them; that is `sandbox.narrowing`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import model_validator

from sandbox.contract import MAX_MEMORY_MIB, MAX_TIMEOUT_SECONDS, MIN_MEMORY_MIB
from sandbox.policy.rules import Section
from sandbox.policy.scalars import bounded, fault

MIN_TIMEOUT_SECONDS = 1  # the contract's
DEFAULT_TIMEOUT_SECONDS = 30  # the contract's
DEFAULT_MEMORY_MIB = 512  # the contract's
DEFAULT_MAX_CONNECTIONS = 256
DEFAULT_OUTPUT_MIB = 256
_MAX_CONNECTIONS = 65_535
_MAX_OUTPUT_MIB = 65_536


def _with_default(value: object, usual: int, lowest: int) -> object:
    """An omitted `default` is the usual one, or the maximum where that is lower. What is out of range is left alone."""
    if isinstance(value, dict) and "default" not in value:
        top = value.get("max")
        if isinstance(top, (int, float)) and not isinstance(top, bool) and lowest <= top < usual:
            return value | {"default": top}
    return value


def check_order(default: float, top: float) -> None:
    """Refuse a default above its maximum."""
    if default > top:
        fault(f"`default` is {default:g}, above `max`, {top:g}", "lower `default` or raise `max`")


SECONDS = bounded(MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS, "seconds", whole=False)
MEBIBYTES = bounded(MIN_MEMORY_MIB, MAX_MEMORY_MIB, "MiB", whole=True)


class TimeoutLimit(Section):
    default: Annotated[float, *SECONDS] = float(DEFAULT_TIMEOUT_SECONDS)
    max: Annotated[float, *SECONDS] = float(MAX_TIMEOUT_SECONDS)

    @model_validator(mode="before")
    @classmethod
    def _lower_default(cls, value: Any) -> Any:
        return _with_default(value, DEFAULT_TIMEOUT_SECONDS, MIN_TIMEOUT_SECONDS)

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutLimit:
        check_order(self.default, self.max)
        return self


class MemoryLimit(Section):
    default: Annotated[int, *MEBIBYTES] = DEFAULT_MEMORY_MIB
    max: Annotated[int, *MEBIBYTES] = MAX_MEMORY_MIB

    @model_validator(mode="before")
    @classmethod
    def _lower_default(cls, value: Any) -> Any:
        return _with_default(value, DEFAULT_MEMORY_MIB, MIN_MEMORY_MIB)

    @model_validator(mode="after")
    def _ordered(self) -> MemoryLimit:
        check_order(self.default, self.max)
        return self


class LimitsSection(Section):
    timeout_seconds: TimeoutLimit = TimeoutLimit()
    memory_mib: MemoryLimit = MemoryLimit()
    max_connections: Annotated[int, *bounded(1, _MAX_CONNECTIONS, "connections", whole=True)] = DEFAULT_MAX_CONNECTIONS
    output_mib: Annotated[int, *bounded(1, _MAX_OUTPUT_MIB, "MiB", whole=True)] = DEFAULT_OUTPUT_MIB
