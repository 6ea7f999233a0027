"""Structured outputs in the engine: valid in every mode, and equal whatever else runs."""

from __future__ import annotations

import json
import re
import threading

import pytest
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.engine.structured.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX, NESTED = "[a-c]{3,6}-[0-9]{2}", 'root ::= "(" root ")" | "x"'
MODES = {
    "at once": {},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "no room": {"num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 48, "max_model_len": 116},
    "one step": {"async_scheduling": False},
}


def check_json(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"] and len(value["name"]) <= 6 and 0 <= value["age"] <= 120
    assert 1 <= len(value["tags"]) <= 2 and set(value["tags"]) <= {"a", "b"}


def params(structured, **more):
    return SamplingParams(**{"max_tokens": 70, "seed": 1, "structured_outputs": structured, **more})


def structured(**kind):
    return StructuredOutputsParams(**kind)


ONE_LINE = structured(json=SCHEMA, disable_any_whitespace=True)
REQUESTS = [
    (params(ONE_LINE, logprobs=2), check_json),
    (SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), None),
    (params(structured(regex=REGEX), n=3), lambda text: re.fullmatch(REGEX, text)),
    (params(structured(choice=["yes", 'no "\\\n', "ja"]), temperature=0), ("yes", 'no "\\\n', "ja").__contains__),
    (SamplingParams(seed=5, max_tokens=40, ignore_eos=True, frequency_penalty=1.0), None),
    (params(structured(grammar=NESTED), temperature=0, ignore_eos=True), re.compile(r"\(*x\)*").fullmatch),
    (params(structured(regex="[ab]{12,}"), min_tokens=30), re.compile("[ab]{12,}").fullmatch),
    (params(ONE_LINE, repetition_penalty=1.3, prompt_logprobs=1), check_json),
]  # fmt: skip


def make(folder, **settings):
    return LLM(
        str(folder),
        device="cpu",
        **{"num_blocks": 200, "block_size": 8, "max_num_seqs": 16, "max_model_len": 256, **settings},
    )


@pytest.fixture(scope="module")
def llm(tiny):
    with make(tiny, async_scheduling=True) as llm:
        yield llm


def texts(llm):
    prompts = [[(i * 7 + j) % 500 + 4 for j in range(20)] for i in range(len(REQUESTS))]
    outputs = llm.generate(prompts, [p for p, _ in REQUESTS])
    for output, (given, check) in zip(outputs, REQUESTS, strict=True):
        for out in output.outputs:
            if check is not None and out.finish_reason != "length":
                assert out.finish_reason == "stop" and check(out.text) is not False, out.text
            if given.logprobs is not None:
                assert [next(iter(entry)) for entry in out.logprobs] == list(out.token_ids)
            assert out.finish_reason == "length" or len(out.token_ids) >= given.min_tokens
    return [[(o.text, o.finish_reason) for o in output.outputs] for output in outputs]


def test_outputs_are_valid_and_equal_in_all_modes(tiny):
    found = {}
    for name, mode in MODES.items():
        with make(tiny, **{"async_scheduling": True, **mode}) as llm:
            found[name] = texts(llm)
            assert texts(llm) == found[name], "the second round has prefix hits"
            scheduler = llm.llm_engine.scheduler
            assert (scheduler.num_preemptions > 0) is (name == "no room")
            assert scheduler.prefix_hits > 0
            assert llm.llm_engine.blocks.num_free == llm.llm_engine.blocks.num_usable
    assert all(outputs == found["at once"] for outputs in found.values())
    reasons = [reason for outputs in found["at once"] for _, reason in outputs]
    assert reasons.count("stop") >= 8  # otherwise the checks see little


FLAG = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def most_blank(llm, **kind):
    """A greedy output of a model that prefers newlines, then the end of the object."""
    newline, brace = llm.llm_engine.tokenizer.encode("\n}", add_special_tokens=False)
    likely = {newline: 80.0, brace: 40.0}
    (output,) = llm.generate(
        [[5]], params(structured(**kind), max_tokens=230, temperature=0, logit_bias=likely)
    )
    out = output.outputs[0]
    assert out.finish_reason == "stop" and json.loads(out.text) is not None
    return out.text


@pytest.mark.parametrize("kind", [{"json": FLAG}, {"json_object": True}])
def test_json_has_few_blanks_though_they_are_likely(llm, kind):
    """In one line; with any whitespace, after 4 tokens of it another one that the grammar allows follows."""
    assert "\n" not in most_blank(llm, **kind)
    text = most_blank(llm, **kind, disable_any_whitespace=False)
    assert "\n" * 4 in text and "\n" * 5 not in text


def test_engine_may_allow_any_whitespace(tiny):
    with make(tiny, json_any_whitespace=True) as llm:
        assert "\n" * 4 in most_blank(llm, json=FLAG)
        assert "\n" not in most_blank(llm, json=FLAG, disable_any_whitespace=True)


def test_eos_only_where_the_grammar_is_complete(llm):
    """EOS, here the most likely token, ends the output as soon as the grammar allows it."""
    eos = {1: 100.0}
    for regex, text in (("a{3,9}", "aaa"), ("(ab)+", "ab"), ("", "")):
        (output,) = llm.generate([[5]], params(structured(regex=regex), temperature=0, logit_bias=eos))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")


def test_complete_grammar_ends_without_eos(llm):
    """Without a token for EOS: ignore_eos and min_tokens do not keep a complete output from ending."""
    (output,) = llm.generate([[5]], params(structured(regex="abc"), ignore_eos=True, min_tokens=20))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", [68, 69, 70])
    assert output.outputs[0].finish_reason == "stop"


def test_special_and_control_tokens_stay_out(llm):
    biased = {0: 100.0, 2: 100.0, 3: 100.0, **dict.fromkeys(range(192, 225), 50.0)}  # bytes 0x00 to 0x20
    request = params(structured(json={"type": "string", "maxLength": 20}), temperature=0, logit_bias=biased)
    (output,) = llm.generate([[5]], request)
    assert isinstance(json.loads(output.outputs[0].text), str)
    assert not {0, 2, 3} & set(output.outputs[0].token_ids)


def test_grammar_without_a_possible_token_is_refused(tmp_path):
    folder = make_tiny(tmp_path / "small", "llama", "float32", vocab_size=80)  # bytes up to 'm' only
    with make(folder) as llm:
        with pytest.raises(ValueError, match="no token of this model can begin"):
            llm.generate([[5]], params(structured(choice=["zebra"])))
        (output,) = llm.generate([[5]], params(structured(choice=["az"])))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "abort")
        (output,) = llm.generate([[5]], params(structured(choice=["ab"])))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "stop")


def test_structural_tag_frees_the_text_around_it(llm):
    tag = {
        "triggers": ["<f="],
        "structures": [{"begin": "<f=g>", "schema": {"type": "integer", "maximum": 9}, "end": "</f>"}],
    }
    request = params(structured(structural_tag=tag), max_tokens=60, logit_bias={31: 6.0, 73: 6.0, 32: 6.0})
    outputs = llm.generate([[5]] * 4, request)
    found = [m for o in outputs for m in re.findall("<f=(.*?)(?:</f>|$)", o.outputs[0].text, re.S)]
    assert all(re.fullmatch(r"g>?-?\d*<?/?f?|g?", m) for m in found), found


def test_each_grammar_is_compiled_once(tiny):
    with make(tiny) as llm:
        grammars = llm.llm_engine.grammars
        for _ in range(2):
            llm.generate([[5]] * 6, params(structured(regex="[ab]{3}")))
        assert grammars.num_compiled == 1
        with pytest.raises(ValueError, match="structured_outputs: regex cannot be used: "):
            llm.generate([[5]], params(structured(regex="(")))
        assert grammars.num_compiled == 1 and not llm.llm_engine.requests


def test_cache_forgets_what_was_used_least_recently(llm, monkeypatch):
    engine = llm.llm_engine
    grammars = Grammars(engine.tokenizer, 512, engine.eos_token_ids)
    first, *others = (structured(choice=[letter, "b"]) for letter in "acdef")
    size = grammars.get(first).size
    monkeypatch.setattr("fastkernels.engine.structured.grammars.CACHE_BYTES", 3 * size)
    for other in others:
        grammars.get(other)
        grammars.get(first)
    assert grammars.num_compiled == 5
    grammars.get(others[0])
    assert grammars.num_compiled == 6
    grammars.close()


def test_steps_go_on_while_a_grammar_compiles(tiny, monkeypatch):
    """A request whose grammar takes long does not hold up the engine's thread nor the event loop."""
    import asyncio

    from fastkernels.engine.async_llm import AsyncLLM
    from fastkernels.engine.options.config import EngineConfig

    llm = AsyncLLM(EngineConfig(str(tiny), device="cpu", num_blocks=50, max_model_len=256))
    compiling, go = threading.Event(), threading.Event()
    compile_grammar = Grammars._compile

    def slow(self, *key):
        compiling.set()
        assert go.wait(20)
        return compile_grammar(self, *key)

    monkeypatch.setattr(Grammars, "_compile", slow)

    async def last(request_id, given):
        return [o async for o in llm.generate([5, 6], given, request_id)][-1].outputs[0]

    async def run():
        waiting = asyncio.create_task(last("a", params(structured(regex="ab"))))
        while not compiling.is_set():
            await asyncio.sleep(0.01)
        free = await last("b", SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(free.token_ids) == 30 and not waiting.done() and "a" not in llm.engine.requests
        go.set()
        return (await waiting).text

    try:
        assert asyncio.run(run()) == "ab"
    finally:
        go.set()
        llm.shutdown()
