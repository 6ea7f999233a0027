"""Encoders offline: the MiniLM embedder and tiny BERT models, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import EMBEDDINGS
from support.e5_small import e5_small_path
from support.minilm import minilm_path
from support.tiny import make_tiny_bert

import fastkernels
from fastkernels import LLM, SamplingParams
from fastkernels.core.dispatch import counters
from fastkernels.engine.engines.encode_engine import EncodeEngine
from fastkernels.engine.engines.llm_engine import LLMEngine
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.runners import encode
from fastkernels.engine.execution.runners.pooling import Pooling, read_pooling
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.runners import RUNNERS
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.engine.scheduling.encoding import BudgetScheduler, EncodeRequest
from fastkernels.engine.scheduling.scheduler import AGING, QueueFull
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.registry import load, models

TEXTS = [
    "A man is eating food.",
    "Someone is having a meal, slowly, in the shade of an old tree.",
    "Quarterly revenue fell by 3% (unaudited).",
    "Größe 東京 🙂",
    "a",
]


def reference(folder: Path, texts: list[str]) -> tuple[np.ndarray, list[np.ndarray]]:
    """(mean-pooled and normalized vectors, hidden states without padding) of transformers' own model."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(**inputs).last_hidden_state
    mask = inputs.attention_mask[..., None]
    pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    return pooled.numpy(), [h[m.bool()].numpy() for h, m in zip(hidden, inputs.attention_mask, strict=True)]


@pytest.fixture(scope="module")
def minilm() -> LLM:
    return LLM(str(minilm_path()), device="cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("bert") / "tiny")


def test_minilm_equals_transformers(minilm: LLM) -> None:
    before = counters()
    outputs = minilm.embed(TEXTS)
    vectors, hidden = reference(minilm_path(), TEXTS)
    np.testing.assert_allclose([o.outputs.data for o in outputs], vectors, atol=1e-5)
    for output, expected in zip(minilm.encode(TEXTS), hidden, strict=True):
        np.testing.assert_allclose(output.outputs.data, expected, atol=2e-5)
    for op in ("embedding", "layer_norm", "linear", "gelu"):
        assert counters()[op]["calls"] > before[op]["calls"], op


def test_minilm_finds_the_similar_sentence(minilm: LLM) -> None:
    vectors = np.array([o.outputs.embedding for o in minilm.embed(TEXTS)])
    similar = vectors @ vectors[0]
    assert similar[1] > similar[2] + 0.2
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@pytest.mark.slow
def test_e5_small_equals_transformers() -> None:
    llm, texts = LLM(str(e5_small_path()), device="cpu"), [f"query: {text}" for text in TEXTS]
    vectors, hidden = reference(e5_small_path(), texts)
    np.testing.assert_allclose([o.outputs.data for o in llm.embed(texts)], vectors, atol=1e-5)
    for output, expected in zip(llm.encode(texts), hidden, strict=True):
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)


@pytest.mark.slow
def test_e5_small_finds_translated_passages() -> None:
    """A corpus in three languages: each question's answer is in another language than the question."""
    llm = LLM(str(e5_small_path()), device="cpu")
    questions = [
        "How much protein should a woman eat?",
        "Wie kocht man Kürbis?",
        "Quelle est la capitale du Japon ?",
    ]
    passages = [
        "Für Frauen werden 46 Gramm Eiweiß am Tag empfohlen.",
        "Coupez la citrouille en morceaux et faites-la revenir à la poêle avec un peu d'ail.",
        "Tokyo has been the seat of the Japanese government since 1868.",
        "The stock fell by three percent on Monday.",
        "Die Katze schläft auf dem Sofa.",
    ]  # fmt: skip
    asked = np.array([o.outputs.data for o in llm.embed([f"query: {q}" for q in questions])])
    found = np.array([o.outputs.data for o in llm.embed([f"passage: {p}" for p in passages])])
    assert (asked @ found.T).argmax(1).tolist() == [0, 1, 2]


def test_a_batch_equals_single_requests(bert: Path) -> None:
    prompts = [[5, 6, 7], [9], list(range(4, 60)), [8, 8], [11] * 56]
    llm = LLM(str(bert), device="cpu")
    together = llm.embed(prompts)
    assert [o.prompt_token_ids for o in together] == prompts
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = LLM(str(bert), device="cpu").embed([prompt])
        np.testing.assert_allclose(alone.outputs.data, output.outputs.data, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7])
def test_short_texts_padded_for_a_graph_equal_plain_ones(
    bert: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    prompts = [[5, 6, 7], list(range(4, 60)), [9], list(range(4, 8)), *([7] * n for n in (2, 9, 1))]
    prompts, sizes, copies = prompts[:count], [], []
    llm = LLM(str(bert), device="cpu")
    expected = [o.outputs.data for o in llm.encode(prompts)]

    def at_once(key: tuple[Any, ...], function: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
        (joint,) = inputs
        sizes.append((key[2], (len(joint) - 16) // 2))
        return function(*inputs)

    def to_device(array: np.ndarray, device: torch.device, dtype: Any = None) -> torch.Tensor:
        copies.append(len(array))
        return torch.from_numpy(np.ascontiguousarray(array, dtype))

    monkeypatch.setattr(llm.llm_engine.runner, "graphs", at_once)
    monkeypatch.setattr(transfer, "to_device", to_device)
    for own, plain in zip(llm.encode(prompts), expected, strict=True):
        np.testing.assert_allclose(own.outputs.data, plain, atol=1e-5)
    tokens = {1: 16, 3: 64, 4: 64, 5: 80, 7: 80}[count]
    bounds = {1: 3, 3: 5, 4: 5, 5: 10, 7: 10}[count]  # of 8 texts and the zeros, for more than 4
    assert sizes == [(bounds, tokens)] and len(copies) == 1


def test_many_and_long_texts_are_not_padded(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(bert), device="cpu")
    monkeypatch.setattr(encode, "TEXT_TOKENS", (16, 32))
    monkeypatch.setattr(encode, "TEXT_ROWS", 4)
    monkeypatch.setattr(llm.llm_engine.runner, "graphs", lambda *given: pytest.fail("a graph"))
    assert len(llm.embed([[5, 6]] * 5)) == 5
    assert len(llm.embed([list(range(4, 20))] * 3)) == 3


@pytest.mark.gpu
def test_graph_of_texts_equals_plain_steps(bert: Path) -> None:
    prompts = [[5, 6, 7], list(range(4, 60)), [9]]
    with (
        LLM(str(bert), device="cuda", dtype="float32") as llm,
        LLM(str(bert), device="cuda", dtype="float32", enforce_eager=True) as plain,
    ):
        more = prompts * 3
        for given in (prompts, [p[::-1] for p in prompts], prompts[:1], prompts[:1], more, more[::-1]):
            found = [o.outputs.data for o in llm.embed(given)]
            np.testing.assert_allclose(found, [o.outputs.data for o in plain.embed(given)], atol=1e-4)
        assert llm.llm_engine.runner.graphs.replays == 3


@pytest.mark.slow
def test_two_ranks_equal_one(bert: Path) -> None:
    prompts = [[5, 6, 7], [9], list(range(4, 60))]
    one = LLM(str(bert), device="cpu").embed(prompts)
    with LLM(str(bert), device="cpu", tensor_parallel_size=2) as llm:
        two = llm.embed(prompts)
    np.testing.assert_allclose([o.outputs.data for o in two], [o.outputs.data for o in one], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02), ("float16", 3e-3)])
def test_minilm_on_the_gpu_equals_the_cpu(minilm: LLM, dtype: str, tolerance: float) -> None:
    llm = LLM(str(minilm_path()), device="cuda", dtype=dtype)
    expected = [o.outputs.data for o in minilm.embed(TEXTS)]
    np.testing.assert_allclose([o.outputs.data for o in llm.embed(TEXTS)], expected, atol=tolerance)
    for ours, theirs in zip(llm.encode(TEXTS), minilm.encode(TEXTS), strict=True):
        assert ours.outputs.data.shape == theirs.outputs.data.shape


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_tiny_bert_on_the_gpu_equals_the_cpu(bert: Path, dtype: str, tolerance: float) -> None:
    prompts = [[5, 6, 7], [9], list(range(4, 60))]
    expected = [o.outputs.data for o in LLM(str(bert), device="cpu").embed(prompts)]
    found = [o.outputs.data for o in LLM(str(bert), device="cuda", dtype=dtype).embed(prompts)]
    np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"layer_norm_eps": 0.1}, {"num_attention_heads": 2},
        {"cls": "XLMRobertaModel", "type_vocab_size": 1}, {"cls": "XLMRobertaModel", "pad_token_id": 0},
    ],
)  # fmt: skip
def test_tiny_bert_equals_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    from transformers import AutoModel

    folder = make_tiny_bert(tmp_path, **fields)
    ids = [[4, 5, 7, 9], [20, 21], list(range(10, 70))]
    model = AutoModel.from_pretrained(folder).eval()
    for prompt, output in zip(ids, LLM(str(folder), device="cpu").encode(ids), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(output.outputs.data, expected.numpy(), atol=EMBEDDINGS)


def test_unused_positions_shorten_inputs(tmp_path: Path) -> None:
    """The position table has 128 rows. Those of padding_idx, 3, and before it are never read."""
    llm = LLM(str(make_tiny_bert(tmp_path, cls="XLMRobertaModel")), device="cpu")
    assert llm.llm_engine.max_model_len == 124
    assert llm.embed([[5] * 124])[0].outputs.data.shape == (64,)
    with pytest.raises(ValueError, match="has 125 tokens, and the maximum input length is 124"):
        llm.embed([[5] * 125])
    with pytest.raises(ValueError, match="max_model_len 128 is more than the model's 124"):
        LLM(str(tmp_path), device="cpu", max_model_len=128)


def test_prefixed_keys_are_loaded(bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    save_file({f"bert.{k}": v for k, v in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    (a,), (b,) = (LLM(str(f), device="cpu").embed([[5, 6, 7]]) for f in (bert, copy))
    np.testing.assert_array_equal(a.outputs.data, b.outputs.data)


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "last"])
def test_pooling_modes(mode: str) -> None:
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    starts = torch.tensor([0, 1, 5, 7])
    found = Pooling(mode, normalize=False)(hidden, starts)
    for row, (start, end) in enumerate(((0, 1), (1, 5), (5, 7))):
        part = hidden[start:end].float()
        expected = {"mean": part.mean(0), "cls": part[0], "max": part.amax(0), "last": part[-1]}[mode]
        torch.testing.assert_close(found[row], expected)


def test_pooling_follows_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_pooling(minilm_path()) == Pooling("mean", True, 256)
    assert read_pooling(tmp_path) == Pooling("mean", True, None)
    folder = tmp_path / "cls"
    (folder / "1_Pooling").mkdir(parents=True)
    kinds = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in
             (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(kinds))
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    assert read_pooling(folder) == Pooling("cls", False, None)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**flags, "pooling_mode_mean_tokens": True}))
    with pytest.raises(CheckpointError, match=r"cls_token \+ mean_tokens is not supported"):
        read_pooling(folder)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": 1}')
    assert read_pooling(folder).mode == "cls"
    # As sentence-transformers 6 writes it
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with caplog.at_level("WARNING", "fastkernels"):
        assert read_pooling(folder) == Pooling("last", False, 100)
    assert "its default prompt 'query' is not put before texts" in caplog.text
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "64"}')
    with pytest.raises(CheckpointError, match="max_seq_length='64' is not supported"):
        read_pooling(folder)
    (folder / "sentence_bert_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"must hold an object, got \[\]"):
        read_pooling(folder)
    (folder / "sentence_bert_config.json").unlink()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["mean", "weightedmean"]}))
    with pytest.raises(CheckpointError, match=r"pooling mean \+ weightedmean is not supported"):
        read_pooling(folder)
    (folder / "modules.json").write_text(json.dumps([*kinds, {"type": "x.Dense", "path": "2_Dense"}]))
    with pytest.raises(CheckpointError, match=r"modules.json has Transformer, Pooling, Dense"):
        read_pooling(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_pooling(folder)


def test_texts_are_lower_cased_as_the_checkpoint_says(bert: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    (copy / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    as_is, lowered = (
        [o.prompt_token_ids for o in LLM(str(f), device="cpu").embed(["Ab Ä", "ab ä"])] for f in (bert, copy)
    )
    assert as_is[0] != as_is[1] and lowered == [as_is[1]] * 2


def test_an_input_that_is_too_long_is_refused(minilm: LLM) -> None:
    assert minilm.llm_engine.max_model_len == 256  # of sentence_bert_config.json
    with pytest.raises(ValueError, match="has 302 tokens, and the maximum input length is 256"):
        minilm.embed(["short", "word " * 300])
    assert len(minilm.embed(["short"])) == 1
    assert LLM(str(minilm_path()), device="cpu", max_model_len=512).embed(["word " * 300])[
        0
    ].outputs.data.shape == (384,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        ([30522], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([1.5], "integer"),
    ],
)
def test_bad_token_ids_are_refused(minilm: LLM, prompt: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minilm.embed([[101, 102], prompt])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_blocks": 9}, "num_blocks applies to models that generate"),
        ({"attention_backend": "triton"}, "attention_backend applies to models that generate"),
        (
            {"max_num_batched_tokens": 20, "max_num_seqs": 4},
            "max_num_batched_tokens 20 is less than max_model_len",
        ),
        ({"max_model_len": 1000}, "max_model_len 1000 is more than the model's"),
    ],
)
def test_unsupported_options_are_refused(bert: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(bert), device="cpu", **option)


def test_methods_of_the_other_runner_say_what_to_use(minilm: LLM, tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"generate: .* is for LLM.embed and /v1/embeddings"):
        minilm.generate("Hello")
    generator = LLM(str(tiny), device="cpu", num_blocks=20, max_model_len=64)
    with pytest.raises(ValueError, match=r"embed: .* is for LLM.generate"):
        generator.embed("Hello")
    with pytest.raises(ValueError, match=r"takes SamplingParams, got PoolingParams"):
        generator.llm_engine.make_request("a", [5], PoolingParams())
    with pytest.raises(ValueError, match=r"takes PoolingParams, got SamplingParams"):
        minilm.llm_engine.make_request("a", [5], SamplingParams())
    with pytest.raises(ValueError, match=r"cannot be used here: it is for LLM.embed"):
        LLMEngine(EngineConfig(str(minilm_path()), device="cpu"))
    with pytest.raises(ValueError, match="task 'rank' is not one of embed, token_embed"):
        minilm.encode("a", "rank")


GELU = """
import torch
def gelu(x, approximate="none"):
    return torch.zeros_like(x)
"""


def test_candidate_runs_in_an_encoder_until_undo(bert: Path, tmp_path: Path) -> None:
    llm = LLM(str(bert), device="cpu")
    (before,) = llm.embed([[5, 6, 7]])
    (tmp_path / "gelu.py").write_text(GELU)
    with fastkernels.patch(llm, candidates={"gelu": str(tmp_path / "gelu.py")}) as report:
        (patched,) = llm.embed([[5, 6, 7]])
        (row,) = [r for r in report.refresh().rows if r.op == "gelu"]
        assert row.calls == 2 and row.reason == "candidate"
    (after,) = llm.embed([[5, 6, 7]])
    assert np.abs(patched.outputs.data - before.outputs.data).max() > 0.01
    np.testing.assert_array_equal(after.outputs.data, before.outputs.data)


def test_every_model_names_a_known_runner() -> None:
    assert {m.arch.runner for m in models().values()} == set(RUNNERS)
    for name, kind in RUNNERS.items():
        if name == "Draft":  # its target's runner runs it
            continue
        assert load(kind.engine).kind == name
        assert load(kind.runner).__name__ == name.removesuffix("Video")  # which runs as images do


def test_a_failed_step_leaves_no_request(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EncodeEngine(EngineConfig(str(bert), device="cpu"))
    engine.add_request("a", [5, 6])
    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "launch", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_unfinished_requests() and engine.requests == {}
    engine.add_request("a", [5, 6])
    (output,) = engine.step()
    assert output.request_id == "a" and output.outputs.data.shape == (64,)
    assert engine.take_stats().prompt_tokens == 2


def request(name: str, tokens: int, priority: int = 0, arrival: float = 0.0) -> EncodeRequest:
    return EncodeRequest(name, None, [1] * tokens, PoolingParams(), priority, arrival)


def names(requests: list[EncodeRequest]) -> list[str]:
    return [r.request_id for r in requests]


def test_scheduler_fills_steps_with_whole_sequences() -> None:
    scheduler = BudgetScheduler(max_num_seqs=3, max_num_batched_tokens=10, max_waiting=8)
    for name, tokens in (("a", 4), ("b", 6), ("c", 1), ("d", 1), ("e", 1), ("f", 1)):
        scheduler.add(request(name, tokens))
    first = list(scheduler.schedule())
    assert names(first) == ["a", "b"] and scheduler.num_waiting == 4
    scheduler.remove(first)
    assert names(scheduler.schedule()) == ["c", "d", "e"] and len(scheduler) == 4
    scheduler.remove_all()
    assert len(scheduler) == 0 and scheduler.schedule() == []


def test_scheduler_orders_by_priority_with_aging() -> None:
    scheduler = BudgetScheduler(max_num_seqs=1, max_num_batched_tokens=10, max_waiting=3)
    old, new = request("old", 1, priority=1), request("new", 1, arrival=AGING + 1)
    urgent = request("urgent", 1, priority=-2, arrival=1.0)
    for r in (new, old, urgent):
        scheduler.add(r)
    with pytest.raises(QueueFull, match="the limit is 3"):
        scheduler.add(request("more", 1))
    order = []
    while found := list(scheduler.schedule()):
        order += names(found)
        scheduler.remove(found)
    assert order == ["urgent", "old", "new"]


def test_scheduler_drops_removed_requests() -> None:
    scheduler = BudgetScheduler(max_num_seqs=4, max_num_batched_tokens=10, max_waiting=8)
    a, b = request("a", 1), request("b", 1)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.remove([a])
    assert scheduler.num_waiting == 1 and names(scheduler.schedule()) == ["b"]
