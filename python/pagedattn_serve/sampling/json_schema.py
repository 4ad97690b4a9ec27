"""JSON schemas in the words that llguidance knows, with the same meaning; and what no finite value can follow.

Libraries that write schemas use a few words of their own, of which llguidance does not know each. They are put into
words that it knows. What is left to llguidance is refused by it, with the keyword. Only of the format `regex` the
meaning is lost: any text will do.
"""

import json
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

# Where a schema has schemas: as the value, in a list, or by name in an object.
_ONE = ("items", "additionalProperties", "additionalItems", "propertyNames")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# Formats that any text has, as they say how to show or use the text; and `regex`, which no grammar here describes.
_FORMATS_OF_ANY_TEXT = ("binary", "directory-path", "file-path", "password", "path", "regex")
_BASE64 = "(?:[0-9a-zA-Z{0}]{{4}})*(?:[0-9a-zA-Z{0}]{{2}}==|[0-9a-zA-Z{0}]{{3}}=)?"
_FORMAT_PATTERNS = {"base64": f"^{_BASE64.format('+/')}$", "base64url": f"^{_BASE64.format('_-')}$"}
_KNOWN_FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "unknown",
    "uri",
    "uuid",
)
# The beginning of zod's pattern of a time, which has no offset, although the format `time` has to have one.
_LOCAL_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
# Patterns with look-around that zod writes, and what matches the same texts without.
_PATTERNS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
    ),
}
# Pydantic's patterns of a Decimal, with max_digits, decimal_places, both or none.
_DECIMAL = re.escape(r"^(?!^[-+.]*$)[+-]?0*")
_DECIMALS = (
    re.compile(_DECIMAL + r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d+)\}0\*)\$"),
    re.compile(
        _DECIMAL + r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
        r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(?P<places>\d+)\})(?:0\*)?\)\$"
    ),
)
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_MAX_REPEATED = 10_000  # characters of one schema that stands for several properties, together
_MAX_DEPTH = 20  # of references and choices that are followed to tell the kind of a value
_LARGEST = 1e300  # a bound beyond it is the largest float's, which is none


def prepare(text: str) -> str:
    """The schema for llguidance. Raises ValueError, which names the keyword, if no value can follow the schema."""
    root = json.loads(text)
    if root is False:
        raise ValueError("false, which no value follows")
    if root is True:
        return "{}"
    if not isinstance(root, dict):
        return text
    _empty_the_impossible(root)
    for schema in reversed(list(_schemas(root))):  # the inner first, whose new sizes count
        _rewrite(schema, root)
    return json.dumps(root)


class TextKind(Enum):
    """Whether the values of a schema are texts."""

    ALWAYS = "always"
    SOMETIMES = "sometimes"
    NEVER = "never"


def text_kind(schema: Any, root: dict[str, Any], depth: int = 0) -> tuple[TextKind, list[str]]:
    """Whether the values are texts, and which, where the schema lists them. root: where its references lead."""
    if not isinstance(schema, dict) or depth == _MAX_DEPTH:
        return TextKind.SOMETIMES, []
    if "$ref" in schema:
        return text_kind(_target(schema["$ref"], root), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    inner = schema.get("anyOf") or schema.get("oneOf")
    if values and isinstance(values, list):
        are_texts = {isinstance(value, str) for value in values}
        return _common_kind(TextKind.ALWAYS if each else TextKind.NEVER for each in are_texts), (
            values if are_texts == {True} else []
        )
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return _common_kind(TextKind.ALWAYS if each == "string" else TextKind.NEVER for each in types), []
    if isinstance(inner, list):
        return _common_kind(text_kind(each, root, depth + 1)[0] for each in inner), []
    return TextKind.SOMETIMES, []


def _common_kind(kinds: Iterable[TextKind]) -> TextKind:
    different = set(kinds)
    return different.pop() if len(different) == 1 else TextKind.SOMETIMES


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and the schemas in it, the outer before the inner. Values such as those of enum are none."""
    left: list[Any] = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            yield schema
            left += _inner(schema)


def _inner(schema: dict[str, Any]) -> list[Any]:
    inner = [schema[key] for key in _ONE if key in schema]
    for key in _LISTED:
        if isinstance(schema.get(key), list):
            inner += schema[key]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            inner += schema[key].values()
    return inner


def _target(reference: object, root: dict[str, Any]) -> Any:
    """What a reference in the document stands for. True, which demands nothing, for those left to llguidance."""
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        return True
    place: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict) and key in place:
            place = place[key]
        else:
            return True
    return place


def _empty_the_impossible(root: dict[str, Any]) -> None:
    """Make each schema that no finite value follows an empty enum, which llguidance takes as a choice or a property
    that cannot be. No value follows `not: {}`, which is zod's never. No finite value follows references that demand a
    value within itself. Raises ValueError if the root is such a schema."""
    schemas = list(_schemas(root))
    has_never = any(map(_is_never, schemas))
    impossible = {id(schema): schema for schema in schemas}  # until it shows that a finite value may follow
    unmet: dict[int, set[int]] = {}  # of each schema, the places of its demands that are not met yet
    waiting: dict[int, list[tuple[int, int]]] = {key: [] for key in impossible}  # which demands each schema may meet
    for key, schema in impossible.items():
        unmet[key] = set()
        for place, choices in enumerate(_demands(schema, root)):
            if all(id(each) in impossible for each in choices):  # any value follows what is no schema
                unmet[key].add(place)
                for each in choices:
                    waiting[id(each)].append((key, place))
    possible = [key for key, places in unmet.items() if not places]
    while possible:  # each schema comes once, whatever the order is in which references lead to schemas
        found = possible.pop()
        del impossible[found]
        for key, place in waiting[found]:
            if place in unmet[key]:
                unmet[key].remove(place)
                if not unmet[key]:
                    possible.append(key)
    if id(root) in impossible:
        raise ValueError("not: {}, which no value follows" if has_never else "$ref to what holds itself without end")
    for schema in impossible.values():
        schema.clear()
        schema["enum"] = []


def _is_never(schema: dict[str, Any]) -> bool:
    return "not" in schema and (schema["not"] == {} or schema["not"] is True)


def _demands(schema: dict[str, Any], root: dict[str, Any]) -> list[list[Any]]:
    """What a value of this schema must have: of each list, what one of its members describes."""

    def listed(key: str) -> list[Any]:
        return schema[key] if isinstance(schema.get(key), list) else []

    if _is_never(schema):
        return [[]]
    demanded = [_target(schema["$ref"], root)] if "$ref" in schema else []
    demanded += listed("allOf")
    kind = schema.get("type")
    if kind in ("object", ["object"]) and isinstance(schema.get("properties"), dict):
        demanded += [schema["properties"].get(name) for name in listed("required") if isinstance(name, str)]
    if kind in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        prefix = listed("prefixItems")
        demanded += prefix[: schema["minItems"]]
        if schema["minItems"] > len(prefix):
            demanded.append(schema.get("items"))
    choices = [listed(key) for key in ("anyOf", "oneOf") if listed(key)]
    return [[each] for each in demanded] + choices


def _rewrite(schema: dict[str, Any], root: dict[str, Any]) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(bound)
        if isinstance(value, float) and (value < -_LARGEST if "inimum" in bound else value > _LARGEST):
            del schema[bound]
    _rewrite_pattern(schema)
    _rewrite_format(schema)
    _rewrite_property_names(schema, root)


def _rewrite_pattern(schema: dict[str, Any]) -> None:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    if pattern in _PATTERNS:
        schema["pattern"] = _PATTERNS[pattern]
    elif pattern.startswith(r"^(?=.{1,253}\.?$)["):  # zod's hostname
        schema["pattern"] = "^" + pattern.removeprefix(r"^(?=.{1,253}\.?$)")
        schema.setdefault("maxLength", 253)
    else:
        for decimal in _DECIMALS:
            if match := decimal.fullmatch(pattern):
                schema["pattern"] = _decimal(**match.groupdict())


def _decimal(places: str | None, whole: str | None = None) -> str:
    """A digit at least comes before the point, and one at least after it, so that no look-ahead has to count."""
    if whole is not None and places is None:  # max_digits alone
        digits = int(whole)
        number = "|".join([rf"\d{{1,{digits}}}"] + [rf"\d{{1,{digits - i}}}\.\d{{1,{i}}}" for i in range(1, digits)])
        return f"^[+-]?(?:{number})$"
    before = r"\d+" if whole is None else rf"\d{{1,{whole}}}" if whole != "0" else "0"
    after = "" if places == "0" else r"(?:\.\d+)?" if places is None else rf"(?:\.\d{{1,{places}}})?"
    return f"^[+-]?{before}{after}$"


def _rewrite_format(schema: dict[str, Any]) -> None:
    name, pattern = schema.get("format"), schema.get("pattern")
    if not isinstance(name, str):
        return
    is_local_time = name == "time" and isinstance(pattern, str) and pattern.startswith(_LOCAL_TIME)
    if is_local_time or name in _FORMATS_OF_ANY_TEXT or (pattern is not None and name not in _KNOWN_FORMATS):
        del schema["format"]
    elif name in _FORMAT_PATTERNS:
        del schema["format"]
        schema["pattern"] = _FORMAT_PATTERNS[name]


def _rewrite_property_names(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """As properties, or as a pattern of the other properties."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        names = _target(names["$ref"], root)
    if names is True:
        names = {}
    if not isinstance(names, dict):
        return
    rules = {key: value for key, value in names.items() if key not in ("title", "description", "type")}
    if names.get("type", "string") != "string":
        return
    if not rules:
        del schema["propertyNames"]
        return
    if "properties" in schema or "patternProperties" in schema:
        return
    value = schema.get("additionalProperties", True)
    allowed = [rules["const"]] if "const" in rules else rules.get("enum")
    if isinstance(allowed, list) and len(rules) == 1:
        if len(allowed) * len(json.dumps(value)) > _MAX_REPEATED:
            raise ValueError(f"propertyNames with {len(allowed):,} names, for each of which the value is repeated")
        schema["properties"] = {name: value for name in allowed if isinstance(name, str)}
    elif isinstance(rules.get("pattern"), str) and rules.keys() <= {"pattern", "format"}:
        schema["patternProperties"] = {rules["pattern"]: value}
    elif rules == {"format": "uuid"}:
        schema["patternProperties"] = {_UUID: value}
    elif rules.keys() <= {"minLength", "maxLength"}:
        least, most = rules.get("minLength", 0), rules.get("maxLength", "")
        schema["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False
