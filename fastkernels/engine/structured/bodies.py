"""Structured outputs in bodies of HTTP requests: OpenAI's response_format, and the fields of vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from fastkernels.engine.structured.params import StructuredOutputsParams

# The field of a body: the kind in StructuredOutputsParams
PLAIN_FIELDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar",
}  # fmt: skip


def _text_or_object(value: Any) -> Any:
    if value is not None and not isinstance(value, (str, dict)):
        raise ValueError("must be a JSON object, or a text that contains one")
    return value


def _schema(value: Any) -> Any:
    return value if isinstance(value, bool) else _text_or_object(value)


def _one_of(*types: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": name} for name in (*types, "null")]})


# Checked by hand: the path of an error in a union contains the name of a type.
TextOrObject = Annotated[Any, PlainValidator(_text_or_object), _one_of("string", "object")]
_Schema = Annotated[Any, PlainValidator(_schema), _one_of("string", "object", "boolean")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class JsonSchemaFormat(_Strict):
    """The `json_schema` of a response_format. Outputs follow the schema with and without `strict`."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Default: any JSON object.")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's response_format, and vLLM's structural_tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it leaves the output free."""
        return self.type == "text"

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        tag = self._tag()
        for name, given, kind in (
            ("json_schema", self.json_schema is not None, "json_schema"),
            (next(iter(tag), "format"), bool(tag), "structural_tag"),
        ):
            if given != (self.type == kind):
                needs = f"type {kind!r} needs {name}" if not given else f"{name} is only for type {kind!r}"
                raise ValueError(needs)
        return self

    def _tag(self) -> dict[str, Any]:
        return {k: v for k in ("format", "structures", "triggers") if (v := getattr(self, k)) is not None}

    def params(self) -> StructuredOutputsParams:
        """Raises ValueError. Not for type 'text'."""
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag={"type": "structural_tag", **self._tag()})
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True)


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs: exactly one of the first six fields."""

    model_config = ConfigDict(protected_namespaces=())

    json_: _Schema = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TextOrObject = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        """Raises ValueError."""
        return StructuredOutputsParams(**self.model_dump(by_alias=True))


def structured_outputs(body: Any) -> StructuredOutputsParams | None:
    """The structured output of a body, None for a free one. Raises ValueError with the name of the field."""
    names = _given(body)
    if len(names) > 1:
        raise ValueError(f"{names[0]} and {names[1]} both constrain the output; use one of them")
    if not names:
        return None
    value = getattr(body, names[0])
    try:
        kind = PLAIN_FIELDS.get(names[0])
        return value.params() if kind is None else StructuredOutputsParams(**{kind: value})
    except ValueError as error:
        raise ValueError(renamed(str(error), body)) from error


def renamed(message: str, body: Any) -> str:
    """An error message about structured_outputs, with the name of the field that the body uses for them."""
    names = _given(body)
    prefix = "structured_outputs: "
    if not names or not message.startswith(prefix):
        return message
    return f"{names[0]}: {message.removeprefix(prefix)}"


def _given(body: Any) -> list[str]:
    """The fields of the body that give a structured output."""
    names = ("response_format", "structured_outputs", *PLAIN_FIELDS)
    given = [name for name in names if getattr(body, name, None) is not None]
    if "response_format" in given and body.response_format.is_text:
        given.remove("response_format")
    return given
