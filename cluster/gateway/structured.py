"""How a request body says what its answer has to look like: OpenAI's ``response_format`` and vLLM's fields. Pure."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moonpool.cluster.gateway.fields import Body, refusal
from moonpool.core.request import Guide, GuideKind

MAX_GUIDE_BYTES = 65_536  # of a schema, an expression or a grammar
MAX_SCHEMA_TEXT = 4 * MAX_GUIDE_BYTES  # characters of a schema sent as text, white space included
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 1_024
MAX_MULTIPLES = 20_000  # significant digits of all multipleOf of a schema, as one number each: compiling grows faster than it

Text = Annotated[str, Field(min_length=1, max_length=MAX_GUIDE_BYTES)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = str | dict[str, Any]


class JsonSchema(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="none: any JSON object")
    strict: bool | None = Field(None, description="accepted; every schema is followed strictly")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("response_format", f"type {self.type!r} with{'out' if self.json_schema is None else ''} json_schema")
        return self


class StructuredOutputs(Body):
    """As vLLM calls them; one of them."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="Lark")
    json_object: bool | None = None


class Structured(Body):
    """The fields of both endpoints about the form of the answer: one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: json, regex, choice, grammar, json_object")
    guided_json: Schema | None = Field(None, description="as structured_outputs.json; a schema or its text")
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = Field(None, description="Lark")

    @property
    def guided(self) -> tuple[str, Guide] | None:
        """The field that says so, and the guide."""
        found = list(self._guides())
        return found[0] if found else None

    def _guides(self) -> list[tuple[str, Guide]]:
        outputs = self.structured_outputs or StructuredOutputs()
        found = [
            ("guided_json", _of_schema("guided_json", self.guided_json)),
            ("guided_regex", _of_text(GuideKind.REGEX, self.guided_regex)),
            ("guided_choice", _of_choices("guided_choice", self.guided_choice)),
            ("guided_grammar", _of_grammar("guided_grammar", self.guided_grammar)),
            ("structured_outputs.json", _of_schema("structured_outputs.json", outputs.json_)),
            ("structured_outputs.regex", _of_text(GuideKind.REGEX, outputs.regex)),
            ("structured_outputs.choice", _of_choices("structured_outputs.choice", outputs.choice)),
            ("structured_outputs.grammar", _of_grammar("structured_outputs.grammar", outputs.grammar)),
            ("structured_outputs.json_object", Guide(GuideKind.JSON_OBJECT) if outputs.json_object else None),
        ]
        if self.response_format is not None:
            found.insert(0, _of_format(self.response_format))
        return [(field, guide) for field, guide in found if guide is not None]

    @model_validator(mode="after")
    def _one_guide(self) -> Self:
        found = self._guides()
        if len(found) > 1:
            raise refusal(found[1][0], f"given beside {found[0][0]}; give one of them")
        return self


def _of_format(wanted: ResponseFormat) -> tuple[str, Guide | None]:
    if wanted.type == "json_object":
        return "response_format", Guide(GuideKind.JSON_OBJECT)
    if wanted.json_schema is None:
        return "response_format", None
    field = "response_format.json_schema.schema"
    schema = wanted.json_schema.schema_
    return field, Guide(GuideKind.JSON_OBJECT) if schema is None else _of_schema(field, schema)


def _of_text(kind: GuideKind, text: str | None) -> Guide | None:
    return None if text is None else Guide(kind, text)


def _of_grammar(field: str, text: str | None) -> Guide | None:
    """Lark, and nothing else that the library would read: schemas within it would go unchecked."""
    if text is None:
        return None
    if "%json" in text or text.lstrip().startswith("{"):
        raise refusal(field, "JSON schemas within grammars are not offered; give Lark rules alone, or use response_format")
    return Guide(GuideKind.GRAMMAR, text)


def _of_choices(field: str, choices: list[str] | None) -> Guide | None:
    if choices is None:
        return None
    if (size := sum(map(len, choices))) > MAX_GUIDE_BYTES:
        raise refusal(field, f"{size} characters in all; use at most {MAX_GUIDE_BYTES}")
    return Guide(GuideKind.GRAMMAR, "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _of_schema(field: str, schema: Schema | None) -> Guide | None:
    if schema is None:
        return None
    return Guide(GuideKind.JSON_SCHEMA, schema_text(field, schema))


def schema_text(field: str, schema: Schema) -> str:
    """Its JSON text. FieldRefusal where it is no object, too large or too deep.

    All on the event loop, so that nothing looks at every part of a schema before it is known to be small.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_TEXT:
            raise refusal(field, f"{len(schema)} characters; use at most {MAX_SCHEMA_TEXT}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise refusal(field, f"no JSON: {e}; give a schema") from None
    if not isinstance(schema, dict):
        raise refusal(field, "no JSON object; give a schema")
    if _larger(schema, MAX_GUIDE_BYTES):
        raise refusal(field, f"more than {MAX_GUIDE_BYTES} bytes; make it smaller")
    if _deeper(schema, MAX_SCHEMA_DEPTH):
        raise refusal(field, f"nested more than {MAX_SCHEMA_DEPTH} deep; make it flatter, by $ref where need be")
    if (multiples := _multiples(schema)) > MAX_MULTIPLES:
        raise refusal(field, f"multipleOf: {multiples} in all, without their powers of ten; use at most {MAX_MULTIPLES}")
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_GUIDE_BYTES:
        raise refusal(field, f"{len(text)} bytes; use at most {MAX_GUIDE_BYTES}")
    return text


def _larger(value: Any, limit: int) -> bool:
    """Whether ``value`` has more than ``limit`` parts, each of which takes a byte at least; looks at no more than that."""
    left, found = [value], 1
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            found += len(one)
            if found > limit:
                return True
            left += _within(one)
    return False


def _deeper(value: Any, limit: int) -> bool:
    """Whether ``value`` is nested more than ``limit`` levels deep; walks level by level, so that depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _within(one)]
        if not level:
            return False
    return True


def _multiples(schema: Any) -> int:
    """The sum of all ``multipleOf``, each without its power of ten."""
    found, level = 0, [schema]
    while level:
        for one in level:
            multiple = one.get("multipleOf") if isinstance(one, dict) else None
            if isinstance(multiple, int | float):
                found += int("".join(map(str, Decimal(str(abs(multiple))).normalize().as_tuple().digits)))
        level = [inner for one in level if isinstance(one, dict | list) for inner in _within(one)]
    return found


def _within(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
