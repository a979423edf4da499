"""The policy of one tenant: the operator's, narrowed by the tenant's own section of the file. Pure.

Owns: what of both holds for the tenant. Must not: know tokens or calls; `sandbox.narrowing` holds a call against what
is made here, and says whose rule refuses it.

Effective = operator AND tenant AND call. What a tenant leaves out is the operator's to say, and nothing that a tenant
says is more than that, even in a policy that was never looked over by the linter.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox.policy.limits import LimitsSection
from sandbox.policy.problems import shown
from sandbox.policy.schema import Policy
from sandbox.policy.tenants import Tenant, TenantLimits
from sandbox.policy_file import LoadedPolicy, Narrowing


class UnknownTenant(LookupError):
    """The policy has no such tenant, or has it no more."""


def tenant_named(loaded: LoadedPolicy, name: str) -> Tenant | None:
    """A tenant's section of the policy; None when there is no such tenant."""
    return next((tenant for tenant in loaded.policy.tenants if tenant.name == name), None)


def of_tenant(loaded: LoadedPolicy, name: str) -> LoadedPolicy:
    """What holds for a tenant. The empty name is the operator, whom nothing narrows.

    Raises `UnknownTenant`, also when `loaded` is a tenant's already: it knows no other.
    """
    if not name:
        return loaded
    section = tenant_named(loaded, name)
    if section is None:
        raise UnknownTenant(f"the policy `{loaded.policy.name}` has no tenant `{shown(name)}`")
    narrowing = Narrowing(loaded.policy, section)
    return replace(loaded, policy=_narrowed(loaded.policy, section), narrowing=narrowing)


def _narrowed(operator: Policy, section: Tenant) -> Policy:
    """`network.allow` stays the operator's: two lists of which both must allow are not one list."""
    network, own = operator.network, section.network
    modes = network.modes if own.modes is None else tuple(mode for mode in network.modes if mode in own.modes)
    prepare = operator.packages.prepare and section.packages.prepare is not False
    changes = {
        "network": network.model_copy(update={"modes": modes, "deny": (*network.deny, *own.deny)}),
        "limits": _limits(operator.limits, section.limits),
        "packages": operator.packages.model_copy(update={"prepare": prepare}),
        "tenants": (),  # what holds for one says nothing of the others
    }
    return operator.model_copy(update=changes)


def _limits(operator: LimitsSection, own: TenantLimits) -> LimitsSection:
    changes = {}
    for name in ("timeout_seconds", "memory_mib"):
        theirs, narrower = getattr(operator, name), getattr(own, name)
        top = theirs.max if narrower.max is None else min(theirs.max, narrower.max)
        default = min(theirs.default if narrower.default is None else narrower.default, top)
        changes[name] = theirs.model_copy(update={"default": default, "max": top})
    return operator.model_copy(update=changes)
