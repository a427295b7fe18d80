"""Values of parameters that a format writes as text, by the JSON Schema of the tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coderepairrl.tokens.reading import Tool, parse_json

if TYPE_CHECKING:
    from referencing._core import Resolver

Schema = Any
"""A JSON Schema as a client sent it: usually a mapping, but nothing about it is checked."""
Types = frozenset[str]
"""Names of JSON's types. ``number`` stands for numbers with a fraction."""
ANY: Types = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
NAMED: Mapping[str, Types] = {**{name: frozenset((name,)) for name in ANY}, "number": frozenset(("number", "integer"))}
IMPLIED: Mapping[str, Types] = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), NAMED["object"]),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), NAMED["array"]),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NAMED["number"]),
    **dict.fromkeys(("pattern", "minLength", "maxLength"), NAMED["string"]),
}
"""What a schema without a type means, by its keywords."""


def typed(text: str, name: str, schema: Schema) -> object:
    """The value of the parameter `name` in `text`: JSON where `schema`, that of all parameters, allows its type.

    Everything else is text: JSON that is not strict (`parse_json`), and parameters that the schema does not name.
    """
    types = parameter_types(name, schema)
    word = text.strip().lower()  # templates write Python's names
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word in ("null", "none"):
        return None
    if not types - NAMED["string"]:
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if type_of(value) in types and not isinstance(value, str) else text


def parameters(tools: Sequence[Tool], name: str) -> Schema:
    """The schema of the parameters of the tool `name`; an empty one for a tool that is not among `tools`."""
    return next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None) or {}


def parameter_types(name: str, schema: Schema) -> Types:
    """The types that `schema` allows for the property `name`; empty if it does not name the property."""
    direct = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(direct, Mapping) and direct.get(name) == {"type": "string"}:
        return NAMED["string"]
    resolver = _resolver(schema)
    parts = list(_parts(schema, resolver, set()))
    described = [(each["properties"][name], at) for each, at in parts if name in _mapping(each, "properties")]
    if not described:
        rest = [(each["additionalProperties"], at) for each, at in parts if _mapping(each, "additionalProperties")]
        described = rest
    found = [allowed_types(each, at, {}) for each, at in described]
    return frozenset().union(*([types for types in found if types != ANY] or found))


def allowed_types(schema: Schema, resolver: Resolver[Schema] | None, known: dict[int, Types]) -> Types:
    """The types that `schema` allows: `ANY` where it says nothing. `known` are those of schemas, by their identity."""
    if not isinstance(schema, Mapping):
        return ANY
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = frozenset()  # adds nothing to a union that refers to itself
    types = ANY
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types = frozenset().union(*(NAMED.get(name, frozenset()) for name in names if isinstance(name, str)))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        types &= frozenset(map(type_of, values))
    if (referred := _referred(schema, resolver)) is not None:
        types &= allowed_types(*referred, known)
    for each in _list(schema, "allOf"):
        types &= allowed_types(each, resolver, known)
    for union in ("anyOf", "oneOf"):
        if branches := _list(schema, union):
            types &= frozenset().union(*(allowed_types(each, resolver, known) for each in branches))
    if types == ANY:
        types = next((IMPLIED[keyword] for keyword in IMPLIED if keyword in schema), ANY)
    if schema.get("nullable") is True:
        types |= NAMED["null"]
    known[id(schema)] = types
    return types


def type_of(value: object) -> str:
    """The JSON type of a parsed value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds: tuple[tuple[type, str], ...] = ((int, "integer"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _parts(
    schema: Schema, resolver: Resolver[Schema] | None, seen: set[int]
) -> Iterator[tuple[Mapping[str, Any], Resolver[Schema] | None]]:
    """`schema` and all schemas that it refers to or combines, each once, with what resolves its references."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema, resolver
    if (referred := _referred(schema, resolver)) is not None:
        yield from _parts(*referred, seen)
    for keyword in ("allOf", "anyOf", "oneOf"):
        for each in _list(schema, keyword):
            yield from _parts(each, resolver, seen)


def _resolver(schema: Schema) -> Resolver[Schema] | None:
    """What resolves references within `schema`. It never asks the network."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("$id", ""), str):
        return None
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    return Registry().resolver_with_root(DRAFT202012.create_resource(schema))


def _referred(
    schema: Mapping[str, Any], resolver: Resolver[Schema] | None
) -> tuple[Schema, Resolver[Schema] | None] | None:
    """The schema that `schema` refers to; None without a reference that leads somewhere."""
    reference = schema.get("$ref", schema.get("$dynamicRef"))
    if resolver is None or not isinstance(reference, str):
        return None
    from referencing.exceptions import Unresolvable

    try:
        found = resolver.lookup(reference)
    except (Unresolvable, ValueError, TypeError, AttributeError):  # nothing was checked before
        return None
    return found.contents, found.resolver


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], keyword: str) -> list[Schema]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
