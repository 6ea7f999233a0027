"""Our engine as a host: candidates run, calls are counted, and undo restores everything."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from fk_bench.info import model_blocks, stubs

import fastkernels
from fastkernels import LLM, SamplingParams
from fastkernels.core import registry
from fastkernels.core.candidate import CandidateError
from fastkernels.engine.async_llm import AsyncLLM
from fastkernels.engine.http.report_file import ReportFile
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.sampling_params import RequestOutputKind
from fastkernels.models.common.plans.ops import ops_of_model
from fastkernels.patch import PatchError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FUNCTION = """
import torch
def silu_and_mul(x, *rest):
    gate, up = x.chunk(2, dim=-1)
    return {factor} * torch.nn.functional.silu(gate) * up
"""
CLASS = """
import torch
class VllmRMSNorm(torch.nn.Module):
    def forward(self, x, residual=None):
        if residual is not None:
            residual.add_(x)
            x = residual
        out = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon) {more}
        return out if residual is None else (out, residual)
"""
PREPARE = """
    def prepare(self):
        self.own = self.weight.clone()
"""


def run(llm):
    return [o.outputs[0].token_ids for o in llm.generate([[5, 6, 7], [90] * 30], GREEDY)]


@pytest.fixture()
def llm(tiny):
    return LLM(str(tiny), device="cpu", max_model_len=128, num_blocks=200)


def candidate(tmp_path, text, name="kernel.py"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_patch_without_candidates_counts_calls(llm):
    before = run(llm)
    with fastkernels.patch(llm) as report:
        assert run(llm) == before
        rows = {r.op: r for r in report.refresh().rows}
        assert rows["rms_norm"].modules == 5 and rows["rms_norm"].calls == 8 * 2 * 5 // 2
        assert rows["attention_decode"].calls == 7 * 2 and rows["attention_prefill"].calls == 2
        with pytest.raises(PatchError, match="already"):
            fastkernels.patch(llm)
    assert llm.llm_engine.patched is None


def test_candidate_function_runs_until_undo(llm, tmp_path):
    before = run(llm)
    right = candidate(tmp_path, FUNCTION.format(factor=1), "right.py")
    with fastkernels.patch(llm, candidates={"silu_and_mul": right}) as report:
        assert run(llm) == before
        assert report.refresh().patched_calls > 0
    wrong = candidate(tmp_path, FUNCTION.format(factor=3), "wrong.py")
    report = fastkernels.patch(llm, candidates={"silu_and_mul": wrong})
    assert run(llm) != before
    report.undo()
    assert run(llm) == before


def test_candidate_class_runs_until_undo(llm, tmp_path):
    before = run(llm)
    kinds = [type(m) for m in llm.llm_engine.executor.runner.model.modules()]
    off = candidate(tmp_path, CLASS.format(more="* 1.5 + 0.3"))
    report = fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": off})
    assert [r.op for r in report.rows] == ["rms_norm"] and report.rows[0].reason == "candidate"
    changed = run(llm)
    report.undo()
    assert changed != before == run(llm)
    assert [type(m) for m in llm.llm_engine.executor.runner.model.modules()] == kinds


def test_candidate_class_prepares_from_loaded_weights(llm, tmp_path):
    before, modules = run(llm), list(llm.llm_engine.executor.runner.model.modules())
    names = [set(vars(m)) for m in modules]
    text = CLASS.replace("self.weight,", "self.own,").format(more="") + PREPARE
    with fastkernels.patch(
        llm, ops=["rms_norm"], candidates={"rms_norm": candidate(tmp_path, text)}
    ) as report:
        assert sum(hasattr(m, "own") for m in modules) == sum(row.modules for row in report.active) > 0
        assert run(llm) == before
    assert [set(vars(m)) for m in modules] == names


def test_bad_candidate_changes_nothing(llm, tmp_path):
    before = run(llm)
    good = candidate(tmp_path, FUNCTION.format(factor=3), "good.py")
    bad = candidate(tmp_path, "import nothing_like_this", "bad.py")
    with pytest.raises(PatchError, match=r"bad\.py does not import"):
        fastkernels.patch(llm, candidates={"silu_and_mul": good, "rms_norm": bad})
    assert run(llm) == before and llm.llm_engine.patched is None


def stubs_in(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(stubs.source(name))
    return folder


def test_candidate_folder_is_live_at_every_level(llm, tmp_path):
    """Level-1 functions run inside modules of levels 2 and 3; the report lists them with their calls."""
    before = run(llm)
    folder = stubs_in(tmp_path / "candidates", "rms_norm", "silu_and_mul")
    with fastkernels.patch(llm, candidates=folder) as report:
        assert run(llm) == before
        rows = {r.op: r for r in report.refresh().rows}
        norm, layer, mlp = rows["rms_norm"], rows["llama_decoder_layer"], rows["gated_mlp"]
        steps = 8
        assert norm.candidate == f"function+class {folder / 'rms_norm.py'}" and norm.calls == steps * 5
        assert layer.inside == ["rms_norm"] and mlp.inside == ["silu_and_mul"] and not layer.candidate
        assert rows["silu_and_mul"].candidate == f"function+class {folder / 'silu_and_mul.py'}"
        assert report.candidates == {"rms_norm": steps * 5, "silu_and_mul": steps * 2}
        assert not rows["attention"].inside and not rows["linear"].candidate
        assert f"candidate function+class {folder / 'silu_and_mul.py'}" in str(report)
        assert "candidates inside: rms_norm" in str(report)
    assert run(llm) == before
    file = folder / "silu_and_mul.py"  # called only by the MLP
    file.write_text(
        file.read_text().replace("return ours_op.reference(x)", "return 3 * ours_op.reference(x)")
    )
    with fastkernels.patch(llm, candidates=str(folder)):
        assert run(llm) != before
    file = folder / "rms_norm.py"  # its class runs the final norm, its function those of the layers
    text = file.read_text().replace("    return out\n\n", "    return 1.5 * out + 0.2\n\n")
    changed = stubs_in(tmp_path / "other", "rms_norm")
    (changed / "rms_norm.py").write_text(text[: text.index("class VllmRMSNorm")])
    with fastkernels.patch(llm, candidates=changed):
        assert run(llm) != before
    assert run(llm) == before


def test_stubs_of_every_op_run_together(llm, tmp_path):
    """Ops that the model lacks are off with a reason; all others run, method objects included."""
    before = run(llm)
    kinds = [type(m) for m in llm.llm_engine.executor.runner.model.modules()]
    folder = stubs_in(tmp_path / "all", *registry.op_names())
    with fastkernels.patch(llm, candidates=folder) as report:
        assert run(llm) == before
        report.refresh()
    assert [type(m) for m in llm.llm_engine.executor.runner.model.modules()] == kinds
    rows = {r.op: r for r in report.rows}
    assert set(rows) == set(registry.op_names())
    assert "no module of VllmQwen3DecoderLayer" in rows["qwen3_decoder_layer"].reason
    live = {op for op, n in report.candidates.items() if n}
    assert set(ops_of_model("llama")) | {"sampling"} == live
    assert {r.op for r in report.rows if r.state == "off"} >= {"qwen3_decoder_layer", "sparse_moe", "gelu"}
    assert rows["linear"].candidate.startswith("function") and rows["gated_mlp"].candidate.startswith("class")
    assert report.verified
    with pytest.raises(PatchError, match=r"strict: .*no module of VllmQwen3DecoderLayer"):
        fastkernels.patch(llm, candidates=folder, strict=True)
    assert run(llm) == before


def test_candidate_for_a_fusion_replaces_the_calls_of_its_parts(llm, tmp_path):
    before = run(llm)
    with fastkernels.patch(llm, candidates=stubs_in(tmp_path / "one", "rope_store_kvcache")) as report:
        assert run(llm) == before
        rows = {r.op: r for r in report.refresh().rows}
        assert report.verified
    assert rows["rope_store_kvcache"].calls == 8 * 2 and rows["rope_store_kvcache"].state == "active"
    assert rows["rotary_emb"].calls == 8 * 2
    assert rows["rotary_emb"].reason == rows["store_kvcache"].reason == "rope_store_kvcache runs in its place"
    assert run(llm) == before


def test_unusable_folder_changes_nothing(llm, tmp_path):
    before = run(llm)
    with pytest.raises(CandidateError, match="no file OP"):
        fastkernels.patch(llm, candidates=tmp_path)
    only = stubs_in(tmp_path / "only", "qwen3_decoder_layer")
    with pytest.raises(PatchError, match="no module of VllmQwen3DecoderLayer"):
        fastkernels.patch(llm, candidates=only)
    assert run(llm) == before and llm.llm_engine.patched is None


def test_candidates_from_the_environment(tiny, tmp_path, monkeypatch, llm):
    before = run(llm)
    wrong = candidate(tmp_path, FUNCTION.format(factor=3))
    monkeypatch.setenv("FASTKERNELS_CANDIDATES", f"silu_and_mul={wrong}")
    other = LLM(str(tiny), device="cpu", max_model_len=128, num_blocks=200)
    try:
        assert run(other) != before
    finally:
        other.llm_engine.patched.undo()
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / "silu_and_mul.py").write_text(FUNCTION.format(factor=3))
    monkeypatch.setenv("FASTKERNELS_CANDIDATES", str(folder))
    other = LLM(str(tiny), device="cpu", max_model_len=128, num_blocks=200)
    try:
        assert run(other) != before
    finally:
        other.llm_engine.patched.undo()


def test_async_patch_survives_a_failed_step(tiny):
    llm = AsyncLLM(EngineConfig(model=str(tiny), device="cpu", max_model_len=128, num_blocks=200))

    delta = replace(GREEDY, output_kind=RequestOutputKind.DELTA)

    async def one(name, prompt):
        outputs = [o async for o in llm.generate(prompt, delta, name)]
        return [t for o in outputs for t in o.outputs[0].token_ids]

    async def main():
        first = await asyncio.gather(*(one(str(i), [5 + i]) for i in range(4)))
        report = await fastkernels.patch_async(llm)
        assert await one("p", [5]) == first[0]
        assert (await report.refresh_async()).patched_calls > 0
        await report.undo_async()
        llm.engine.executor.launch = None
        with pytest.raises(RuntimeError, match="engine failed"):
            await one("f", [5])
        del llm.engine.executor.launch
        assert llm.num_failed_steps == 1
        assert await one("g", [5]) == first[0] and llm.healthy
        leaving = llm.generate([9], GREEDY, "leaves")
        await anext(leaving)
        await leaving.aclose()
        with pytest.raises(ValueError, match="empty"):
            await one("e", [])

    asyncio.run(main())
    deadline = time.monotonic() + 30  # the engine's thread ends the remaining requests
    while llm.engine.has_unfinished_requests() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not llm.engine.has_unfinished_requests()
    llm.shutdown()


def test_prefix_cache_keeps_nothing_of_a_candidate(tiny, tmp_path):
    (tmp_path / "silu_and_mul.py").write_text(FUNCTION.format(factor=2.0))
    llm = LLM(str(tiny), device="cpu", num_blocks=40)
    prompt = [list(range(5, 60))]

    def answer():
        return llm.generate(prompt, GREEDY)[0]

    first = answer()
    report = fastkernels.patch(llm, candidates={"silu_and_mul": tmp_path / "silu_and_mul.py"})
    patched = answer()
    assert patched.num_cached_tokens == 0
    assert patched.outputs[0].token_ids != first.outputs[0].token_ids
    report.undo()
    assert answer().outputs[0].token_ids == first.outputs[0].token_ids


def test_unwritable_report_ends_no_request(tiny, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    llm = LLM(str(tiny), device="cpu", num_blocks=40)
    monkeypatch.setenv("FASTKERNELS_REPORT", str(tmp_path))
    report = ReportFile(llm.llm_engine)
    report.write()
    assert len(list(tmp_path.glob("fastkernels-0-*.json"))) == 1
    report.folder = str(tmp_path / "file")  # it became a file, while the server ran
    for _ in range(2):
        report.write(force=True)
    assert caplog.text.count("FASTKERNELS_REPORT") == 1


# Blocks of the model: level-2 and -3 candidates in the engine

BLOCK = """
from fastkernels.overrides.block import vllm
class {cls}(vllm.{cls}):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return {out}
"""
LAYER = BLOCK.format(cls="VllmLlamaDecoderLayer", out="out")


def mlp(factor):
    return BLOCK.format(cls="VllmLlamaMLP", out=f"out * {factor}")


def test_block_candidate_runs_until_undo(llm, tmp_path):
    before = run(llm)
    wrong = candidate(tmp_path, mlp(-1), "llama.mlp.py")
    report = fastkernels.patch(llm, candidates={"llama.mlp": wrong})
    assert run(llm) != before
    row = next(r for r in report.refresh().rows if r.op == "llama.mlp")
    assert (row.state, row.modules, row.proof) == ("active", 2, "calls")
    assert row.calls == 8 * 2 and row.candidate.startswith(
        "class "
    )  # steps of both requests together, layers
    report.undo()
    assert run(llm) == before
    assert not any(m._forward_pre_hooks for m in llm.llm_engine.executor.runner.model.modules())


def test_level_1_candidate_is_live_in_blocks_and_engine(llm, tmp_path):
    before = run(llm)
    folder = tmp_path / "set"
    folder.mkdir()
    candidate(folder, mlp(1), "llama.mlp.py")
    candidate(folder, LAYER, "llama.decoder_layer.py")
    candidate(folder, FUNCTION.format(factor=1), "silu_and_mul.py")
    with fastkernels.patch(llm, candidates=folder) as report:
        assert run(llm) == before
        calls = report.refresh().candidates
        assert calls == {"llama.decoder_layer": 16, "llama.mlp": 16, "silu_and_mul": 16}
    candidate(folder, FUNCTION.format(factor=-1), "silu_and_mul.py")
    with fastkernels.patch(llm, candidates=folder):
        assert run(llm) != before


@pytest.mark.parametrize("known", [False, True])
def test_block_of_another_model_changes_nothing(llm, tmp_path, known):
    before = run(llm)
    file = candidate(tmp_path, mlp(-1), "qwen3.mlp.py")
    if known:  # as after an engine with that model in the same process
        model_blocks.register("qwen3")
    with pytest.raises(registry.UnknownName, match=r"qwen3\.mlp"):
        fastkernels.patch(llm, candidates={"qwen3.mlp": file})
    assert run(llm) == before and llm.llm_engine.patched is None
