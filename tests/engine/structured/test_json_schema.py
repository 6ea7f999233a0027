"""Every output of a schema that is not refused follows it, by an independent validator."""

from __future__ import annotations

import functools
import json

import jsonschema_rs
import numpy as np
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny import byte_tokenizer

from fastkernels import StructuredOutputsParams
from fastkernels.engine.structured.constraint import Constraint
from fastkernels.engine.structured.grammars import Grammars

VOCAB, EOS = 512, 1
NAMES = st.sampled_from(["a", "b", "long name"])
LENGTHS = st.integers(0, 3)


@functools.cache
def pieces() -> list[bytes]:
    """The bytes of each token."""
    return xgrammar.TokenizerInfo.from_huggingface(byte_tokenizer(), vocab_size=VOCAB).decoded_vocab


@functools.cache
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(), VOCAB, [EOS])


def limits(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, int]]:
    """Neither, one or both of two limits, in order."""
    both = st.tuples(values, values).map(lambda pair: {low: min(pair), high: max(pair)})
    return st.one_of(st.just({}), values.map(lambda v: {low: v}), values.map(lambda v: {high: v}), both)


def merged(*parts: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


def typed(kind: str | list[str]) -> st.SearchStrategy[dict]:
    return st.just({"type": kind})


VALUES = st.sampled_from([None, True, 3, -2.5, 'x"\\\n\t', "é", ["a", 1], {"k": "v"}])
LEAVES = st.one_of(
    st.sampled_from([typed("null"), typed("boolean"), typed(["null", "integer"])]).flatmap(lambda s: s),
    merged(typed("integer"), limits("minimum", "maximum", st.integers(-20, 20))),
    merged(typed("integer"), st.integers(1, 12).map(lambda k: {"multipleOf": k})),
    merged(typed("number"), limits("exclusiveMinimum", "maximum", st.integers(-9, 9).map(float))).filter(
        lambda s: s.get("exclusiveMinimum", -99) < s.get("maximum", 99)
    ),
    merged(typed("string"), limits("minLength", "maxLength", LENGTHS)),
    st.sampled_from(["^[a-c]{1,3}$", "^(x|yy)z?$", '^"?$']).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["date", "ipv4", "uuid", "email"]).map(lambda f: {"type": "string", "format": f}),
    VALUES.map(lambda v: {"const": v}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda v: {"enum": v}),
)


def objects(children: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def complete(properties: dict) -> st.SearchStrategy[dict]:
        return st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
                "additionalProperties": st.one_of(st.just(False), children),
            }
        )

    return st.dictionaries(NAMES, children, min_size=1, max_size=3).flatmap(complete)


SCHEMAS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        merged(typed("array"), children.map(lambda c: {"items": c}), limits("minItems", "maxItems", LENGTHS)),
        st.lists(children, min_size=1, max_size=2).map(lambda c: {"type": "array", "prefixItems": c, "items": False}),
        objects(children),
        st.lists(children, min_size=1, max_size=3).map(lambda c: {"anyOf": c}),
        children.map(lambda c: {"allOf": [c], "title": "one"}),
        children.map(lambda c: {"$defs": {"x": c}, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}),
    ),
    max_leaves=4,
)  # fmt: skip


def sample(schema: object, seed: int, length: int = 400) -> str | None:
    """A random output, preferring to end; None if it is not complete after `length` tokens."""
    grammar = grammars().get(StructuredOutputsParams(json=schema))
    constraint, draw, found = Constraint(VOCAB, grammar), np.random.default_rng(seed), bytearray()
    while len(found) < length:
        bits = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")[:VOCAB]
        tokens = np.flatnonzero(bits)
        assert len(tokens), f"a dead end after {bytes(found)!r}"
        closing = [t for t in tokens if t == EOS or pieces()[t] in (b'"', b"}", b"]", b",", b":")]
        token = int(draw.choice(closing if closing and draw.random() < 0.5 else tokens))
        if token == EOS:
            return found.decode()
        assert constraint.matcher.accept_token(token)
        found += pieces()[token]
        words = np.zeros((1, VOCAB // 32), np.int32)
        constraint.matcher.fill_next_token_bitmask(words)
        if constraint.stops_only(words[0]):
            return found.decode()
        constraint.update(words[0], [token])
    return None


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_outputs_follow_their_schema(schema, seed):
    try:
        StructuredOutputsParams(json=schema)
        grammars().get(StructuredOutputsParams(json=schema))
    except ValueError as error:
        assert str(error).startswith("structured_outputs: json")
        return
    text = sample(schema, seed)
    if text is not None:
        validator = jsonschema_rs.validator_for(schema)
        problems = [str(problem) for problem in validator.iter_errors(json.loads(text))]
        assert problems == [], text
