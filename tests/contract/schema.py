"""A check of JSON values against the published JSON Schemas, with as much of JSON Schema as those use.

A keyword that it doesn't know is an error, so that nothing is passed over.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
}
_NO_CLAIM = {"$schema", "$defs", "title", "description", "default"}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, path: str = "$") -> list[str]:
    """Every place where the value is not as the schema says."""
    root = root or schema
    found: list[str] = []
    for keyword, claim in schema.items():
        match keyword:
            case "$ref":
                assert claim.startswith("#/$defs/"), claim
                found += faults(value, root["$defs"][claim.removeprefix("#/$defs/")], root, path)
            case "anyOf":
                if all(faults(value, one, root, path) for one in claim):
                    found.append(f"{path}: {value!r:.80} is none of {claim}")
            case "type":
                if not _is(value, claim):
                    found.append(f"{path}: {value!r:.80} is no {claim}")
            case "enum":
                if value not in claim:
                    found.append(f"{path}: {value!r:.80} is none of {claim}")
            case "const":
                if value != claim:
                    found.append(f"{path}: {value!r:.80} is not {claim!r}")
            case "properties":
                if isinstance(value, dict):
                    for name, inner in claim.items():
                        if name in value:
                            found += faults(value[name], inner, root, f"{path}.{name}")
            case "required":
                if isinstance(value, dict):
                    found += [f"{path}.{name} is missing" for name in claim if name not in value]
            case "additionalProperties":
                for name in value if isinstance(value, dict) else ():
                    if name in schema.get("properties", {}):
                        continue
                    if claim is False:
                        found.append(f"{path}.{name} is not known")
                    elif isinstance(claim, dict):
                        found += faults(value[name], claim, root, f"{path}.{name}")
            case "items":
                for place, one in enumerate(value if isinstance(value, list) else ()):
                    found += faults(one, claim, root, f"{path}[{place}]")
            case "minLength" | "minItems" | "minProperties":
                if hasattr(value, "__len__") and len(value) < claim:
                    found.append(f"{path}: shorter than {claim}")
            case "maxLength" | "maxItems" | "maxProperties":
                if hasattr(value, "__len__") and len(value) > claim:
                    found.append(f"{path}: longer than {claim}")
            case "minimum":
                if _is(value, "number") and not value >= claim:
                    found.append(f"{path}: below {claim}")
            case "maximum":
                if _is(value, "number") and not value <= claim:
                    found.append(f"{path}: above {claim}")
            case _ if keyword in _NO_CLAIM:
                pass
            case _:
                raise NotImplementedError(f"{path}: `{keyword}`")
    return found


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case _:
            return isinstance(value, _TYPES[kind])
