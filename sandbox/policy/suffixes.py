"""Names under which unrelated people have sites: public suffixes and shared hosting. Pure.

Owns: asking tldextract's bundled list. Must not: fetch a newer one; what a policy means depends on no network.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from proxy.destinations import Host

if TYPE_CHECKING:
    from tldextract import TLDExtract


class Suffix(StrEnum):
    """What a name is by the public suffix list."""

    PUBLIC = "public"  # registries sell names right below it: `com`, `co.uk`
    SHARED = "shared"  # customers of one company get names right below it


@lru_cache(maxsize=4096)
def suffix_kind(host: Host) -> Suffix | None:
    """Whether the host is itself such a name; None for an ordinary name, and for single labels that the list lacks."""
    if host.address is not None:
        return None
    if _extractor(private=False).extract_str(host.text).suffix == host.text:
        return Suffix.PUBLIC
    if _extractor(private=True).extract_str(host.text).suffix == host.text:
        return Suffix.SHARED
    return None


@cache
def _extractor(*, private: bool) -> TLDExtract:
    # Imported here because it takes 0.15 s: it brings an HTTP client along, which it is told never to use.
    import tldextract

    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None, include_psl_private_domains=private)
