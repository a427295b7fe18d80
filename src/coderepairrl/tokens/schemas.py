"""Values of parameters written as text, by the tool's JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coderepairrl.tokens.reading import Tool, parse_json

KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
IMPLIED: dict[str, str] = {
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""Types implied by keywords in a schema without a type."""
COMBINED = ("allOf", "anyOf", "oneOf")


def parameters(tools: Sequence[Tool], name: str) -> ToolSchema:
    """Schema of the tool `name`; empty for an unknown tool."""
    return ToolSchema(
        next((each["function"].get("parameters") for each in tools if each["function"]["name"] == name), {})
    )


class ToolSchema:
    """Unchecked schema `root` of a tool's parameters."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, set[type]] = {}

    def typed(self, text: str, name: str) -> object:
        """Value of parameter `name`: JSON if the schema allows its type, else `text`."""
        try:
            types = set[type]().union(*map(self._types, self._described(name)))
        except RecursionError:  # schemas that refer to each other a thousand times
            return text
        word = text.strip().lower()  # templates write Python's names
        if bool in types and word in ("true", "false"):
            return word == "true"
        if type(None) in types and word in ("null", "none"):
            return None
        try:
            value = parse_json(text)
        except ValueError:
            return text
        integral = int if isinstance(value, float) and value.is_integer() else type(value)
        return value if {type(value), integral} & (types - {str}) else text

    def _described(self, name: str) -> list[Any]:
        schemas = list(self._combined(self._root, set()))
        named = [each["properties"][name] for each in schemas if name in _mapping(each.get("properties"))]
        return named or [each.get("additionalProperties") for each in schemas]

    def _combined(self, schema: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            for each in (self._referred(schema), *(part for key in COMBINED for part in _list(schema.get(key)))):
                yield from self._combined(each, seen)

    def _types(self, schema: Any) -> set[type]:
        if not isinstance(schema, Mapping) or id(schema) in self._known:
            return self._known.get(id(schema), set())
        self._known[id(schema)] = set()  # while its parts may refer to it
        names = _list(schema.get("type")) or [schema.get("type")]
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        conditions: list[set[type]] = [
            {each for name in names if isinstance(name, str) for each in KINDS.get(name, ())},
            {each for value in values for each in (KINDS["number"] if isinstance(value, float) else (type(value),))},
            *map(self._types, (self._referred(schema), *_list(schema.get("allOf")))),
            *(set[type]().union(*map(self._types, _list(schema.get(key)))) for key in ("anyOf", "oneOf")),
        ]
        stated = [types for types in conditions if types]
        types = (
            set.intersection(*stated)
            if stated
            else {each for key in IMPLIED if key in schema for each in KINDS[IMPLIED[key]]}
        )
        self._known[id(schema)] = types | ({type(None)} if schema.get("nullable") is True else set())
        return self._known[id(schema)]

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """Schema that `schema` refers to within `root`, or None. Never uses the network."""
        if not isinstance(reference := schema.get("$ref"), str):
            return None
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        try:
            return Registry().resolver_with_root(DRAFT202012.create_resource(self._root)).lookup(reference).contents
        except (Unresolvable, ValueError, TypeError, AttributeError):  # nothing was checked before
            return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
