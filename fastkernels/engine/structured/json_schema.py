"""Refuses JSON schemas with keywords, or combinations of keywords, that xgrammar would ignore."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 128
MAX_MULTIPLE = 1000
IGNORED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTHS = ("minLength", "maxLength")
FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "regex",
)  # not supported; the unknown have no meaning
BRANCHES = ("allOf", "anyOf", "oneOf")
ONE_SCHEMA = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
MANY_SCHEMAS = (*BRANCHES, "prefixItems")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that restrict a value: one of these next to a keyword of ALONE would be ignored
ASSERTIONS = frozenset(
    (
        *NUMBERS, *LENGTHS, *BRANCHES, "pattern", "format", "items", "prefixItems", "minItems", "maxItems",
        "unevaluatedItems", "properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
        "propertyNames", "required", "minProperties", "maxProperties", "enum", "const", "$ref", "type",
    )
)  # fmt: skip
ALONE = ("$ref", "const", "enum", *BRANCHES)
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def check_schema(schema: Any) -> None:
    """Raise ValueError, naming the keyword and its place, for what the output might not follow."""
    todo: list[tuple[Any, str, int]] = [(schema, "#", 1)]
    while todo:
        node, where, depth = todo.pop()
        if not isinstance(node, dict):
            continue  # true, or an error that xgrammar reports
        if depth > MAX_DEPTH:
            raise _refused("a schema", where, f"is nested more than {MAX_DEPTH} levels deep")
        for rule in (_keywords, _strings, _objects, _alone):
            rule(node, where)
        todo += [(child, place, depth + 1) for child, place in _children(node, where)]


def _children(node: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    for name in ONE_SCHEMA:
        yield node.get(name), f"{where}/{name}"
    for name in MANY_SCHEMAS:
        if isinstance(node.get(name), list):
            yield from ((child, f"{where}/{name}/{i}") for i, child in enumerate(node[name]))
    for name in NAMED_SCHEMAS:
        if isinstance(node.get(name), dict):
            yield from ((child, f"{where}/{name}/{key}") for key, child in node[name].items())


def _keywords(node: dict[str, Any], where: str) -> None:
    for name in IGNORED:
        if name in node:
            raise _refused(name, where)
    if node.get("uniqueItems"):
        raise _refused("uniqueItems", where)
    if "multipleOf" in node and (_types(node) != ["integer"] or not _is_small(node["multipleOf"])):
        raise _refused("multipleOf", where, f"must be 1 to {MAX_MULTIPLE}, with type 'integer'")
    ref = node.get("$ref", "#")
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise _refused("$ref", where, f"must point into this schema (#/$defs/...), got {reprlib.repr(ref)}")
    for names, kinds in ((NUMBERS, ("integer", "number")), ((*LENGTHS, "pattern", "format"), ("string",))):
        for name in names:
            if name in node and not any(kind in _types(node) for kind in kinds):
                raise _refused(name, where, f"needs type {' or '.join(map(repr, kinds))} next to it")


def _strings(node: dict[str, Any], where: str) -> None:
    if node.get("format") in FORMATS:
        raise _refused("format", where, f"{node['format']!r} is not supported")
    for name in ("pattern", "format"):
        for length in LENGTHS:
            if name in node and length in node:
                raise _refused(length, where, f"is not supported together with {name}")


def _objects(node: dict[str, Any], where: str) -> None:
    properties = node.get("properties", {})
    required = node.get("required", ())
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                raise _refused(
                    "required", where, f"names {reprlib.repr(name)}, which properties does not declare"
                )
    patterns = node.get("patternProperties")
    for first, second in (
        ("propertyNames", "properties"), ("propertyNames", "patternProperties"),
        ("propertyNames", "unevaluatedProperties"), ("patternProperties", "properties"),
    ):  # fmt: skip
        if first in node and second in node:
            raise _refused(first, where, f"is not supported together with {second}")
    if isinstance(patterns, dict) and len(patterns) > 1:
        raise _refused("patternProperties", where, "may have one pattern")


def _alone(node: dict[str, Any], where: str) -> None:
    main = next((name for name in ALONE if name in node), None)
    if main is None:
        return
    others = sorted((ASSERTIONS & node.keys()) - {main, "type"})
    if others:
        raise _refused(others[0], where, f"is not supported together with {main}")
    if main == "allOf" and isinstance(node[main], list) and len(node[main]) > 1:
        raise _refused("allOf", where, "may have one schema")
    if "type" not in node:
        return
    if main in ("const", "enum"):
        values = node[main] if isinstance(node[main], list) and main == "enum" else [node[main]]
        wrong = [v for v in values if not any(_is(v, kind) for kind in _types(node))]
        if wrong:
            raise _refused(
                main, where, f"has {reprlib.repr(wrong[0])}, which is not of type {node['type']!r}"
            )
    elif main == "$ref" or not all(_narrows(branch, node) for branch in node[main]):
        raise _refused(
            "type", where, f"is not supported together with {main}, unless each branch has this type"
        )


def _narrows(branch: Any, node: dict[str, Any]) -> bool:
    """Whether a branch has no other types than the schema."""
    if not isinstance(branch, dict):
        return False
    return bool(_types(branch)) and set(_types(branch)) <= set(_types(node))


def _types(node: dict[str, Any]) -> list[str]:
    found = node.get("type", [])
    return [t for t in (found if isinstance(found, list) else [found]) if isinstance(t, str)]


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _is_small(value: Any) -> bool:
    return _is(value, "integer") and 1 <= value <= MAX_MULTIPLE


def _refused(keyword: str, where: str, why: str = "is not supported") -> ValueError:
    return ValueError(f"structured_outputs: json: {keyword} at {where} {why}")
