"""Structured outputs of a real model, whose 49,152 tokens have several bytes: valid, and still sensible."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from support.smollm2 import smollm2_path

from fastkernels import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "landmarks": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["city", "country", "landmarks"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CAPITAL = "What is the capital of France?"


def params(**structured):
    return SamplingParams(
        temperature=0, max_tokens=150, structured_outputs=StructuredOutputsParams(**structured)
    )


@pytest.mark.slow
def test_real_model_follows_forms_and_answers():
    requests = [
        ("Describe Paris as JSON with its city, country and landmarks.", params(json=SCHEMA)),
        (
            CAPITAL,
            params(choice=[f"The capital of France is {c}." for c in ("Berlin", "London", "Paris", "Rome")]),
        ),
        ("When was the first moon landing? Answer with a date.", params(regex=DATE)),
        ("Give me any JSON object about a cat.", params(json_object=True)),
        (CAPITAL, SamplingParams(temperature=0, max_tokens=20)),
        ("Compute (1 + 2) * 3.", params(grammar='root ::= term (" + " term)*\nterm ::= [0-9]+')),
    ]
    with LLM(str(smollm2_path()), device="cpu", max_model_len=512) as llm:
        chats = [[{"role": "user", "content": text}] for text, _ in requests]
        outputs = [o.outputs[0] for o in llm.chat(chats, [p for _, p in requests])]
        free = llm.chat(chats[4], requests[4][1])[0].outputs[0]
    city, capital, date, cat, plain, total = (o.text for o in outputs)
    jsonschema_rs.validate(SCHEMA, json.loads(city))
    assert "Paris" in city and json.loads(city)["country"] == "France" and capital.endswith("Paris.")
    assert re.fullmatch(DATE, date) and re.fullmatch(r"\d+( \+ \d+)*", total)
    assert outputs[3].finish_reason == "length" or isinstance(json.loads(cat), dict)
    assert plain == free.text and "Paris" in plain
    assert {o.finish_reason for o in outputs[:3]} == {"stop"}
