"""Candidates in the layout of the published benchmark: found, adapted, or declined with a reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from fk_bench.evaluate.adapters import published
from fk_bench.evaluate.adapters.native import EXTENSIONS
from fk_bench.evaluate.adapters.sets import SetError, read_set
from fk_bench.kernels.judge.scan.scan import rejections, scan

from fastkernels.core import candidate, registry

SILU = """
import torch.nn as nn
import torch.nn.functional as F

class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
"""
RMS_NORM = """
from __future__ import annotations
import torch
import torch.nn as nn
from .helpers import scaled

class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6, elementwise_affine=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None

    def forward(self, x, residual=None):
        if residual is None:
            return scaled(x, self.weight, self.eps)
        residual = x + residual
        x.copy_(scaled(residual, self.weight, self.eps))
        return x, residual
"""
HELPERS = """
def scaled(x, weight, eps):
    y = x.float()
    y = (y / (y.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return y if weight is None else y * weight
"""
LAYER_NORM = """
import torch
import torch.nn as nn

class LayerNorm(nn.Module):
    def __init__(self, size, eps=1e-5, elementwise_affine=True, create_scale=True, create_offset=True):
        super().__init__()
        self.eps, self.size = eps, (size,)
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.last = self.weight

    def forward(self, x):
        if self.last is not self.weight:
            self.last = self.weight  # only a parameter may be assigned here
        return nn.functional.layer_norm(x, self.size, self.last, self.bias, self.eps)
"""
ROTARY = """
import torch
import torch.nn as nn

class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, max_position_embeddings, rope_theta, is_neox_style=True):
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("cos_sin_cache", torch.zeros(max_position_embeddings, head_dim))

    def forward(self, positions, query, key):
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=-1)
        return self.turned(query, cos, sin), self.turned(key, cos, sin)

    def turned(self, x, cos, sin):
        a, b = x.view(x.shape[0], -1, self.head_dim).chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).view_as(x).to(x.dtype)
"""
TOPK = """
import torch
import torch.nn as nn

class TopKSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = None

    def forward(self, router_logits, top_k, renormalize=True):
        weights, ids = router_logits.float().softmax(-1).topk(top_k, dim=-1)
        if self.out is None:
            self.out = torch.empty_like(weights)
        self.out.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
        return self.out, ids.int()
"""
MOE_SUM = """
import torch.nn as nn

class MoeSum(nn.Module):
    def forward(self, input, topk):
        return input.view(-1, topk, input.shape[-1]).sum(1)
"""
NATIVE = """
import torch.nn as nn
from fastkernels.infra.cuda_ext import lazy_op

_C = lazy_op("twice", "twice.cpp")

class QuickGELU(nn.Module):
    def forward(self, x):
        return _C.quick_gelu(x)
"""
POOL = """
import torch.nn as nn
import torch.nn.functional as F

class MaxPool2d(nn.Module):
    def __init__(self, kernel_size, stride=None, padding=0, ceil_mode=False):
        super().__init__()
        assert (kernel_size, stride, padding) in ((3, 2, 1), ((3, 2), 1, 0)), (kernel_size, stride, padding)
        self.given = kernel_size, stride, padding, 1, ceil_mode

    def forward(self, x):
        return F.max_pool2d(x, *self.given)
"""
INTERPOLATE = """
import torch.nn as nn
import torch.nn.functional as F

class Interpolate(nn.Module):
    def forward(self, x, size=None, scale_factor=None, mode="nearest", align_corners=None):
        assert (size is None) == (scale_factor == 2.0)
        return F.interpolate(x, size, scale_factor, mode, align_corners)
"""
CHUNK_GLA = """
import torch
import torch.nn as nn

class ChunkGLA(nn.Module):
    def forward(self, q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        assert q.shape == g.shape and len(q) == 1 and output_final_state and cu_seqlens.dtype == torch.int64
        assert all(t.is_contiguous() for t in (q, k, v, g, initial_state))
        out, states = torch.zeros_like(v), []
        for i, s in enumerate(initial_state.float()):
            for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
                s = s * g[0, t].float().exp()[..., None] + k[0, t].float()[..., None] * v[0, t].float()[:, None]
                out[0, t] = ((s * q[0, t].float()[..., None]).sum(-2) * scale).to(v.dtype)
            states.append(s)
        return out, torch.stack(states)
"""
CPP = """
#include <torch/extension.h>
#include "factor.h"
at::Tensor quick_gelu(at::Tensor x) { return x * at::sigmoid(FACTOR * x); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("quick_gelu", &quick_gelu); }
"""


def make_set(folder: Path, **files: str) -> Path:
    """Write files of level 1; '__' in a name stands for '.'."""
    (folder / "L1").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        file = name.replace("__", ".") if "__" in name else f"{name}.py"
        (folder / "L1" / file).write_text(text)
    return folder


def function(tmp_path: Path, op: str, **files: str):
    found = read_set("theirs", make_set(tmp_path / "set", **files), tmp_path / "out")
    assert [c.op for c in found.candidates] == [op], found.declined
    loaded = candidate.load(op, found.files[op])
    assert loaded.function is not None
    candidate.fit(loaded.function, registry.get(op).op)
    return loaded.function


def test_board_has_132_targets_each_with_an_op_or_a_reason():
    targets = published.targets().values()
    assert Counter(t.level for t in targets) == {1: 47, 2: 64, 3: 21}
    assert all(bool(t.op) != bool(t.reason) and bool(t.op) == bool(t.cls) for t in targets)
    ops = [t.op for t in targets if t.op]
    assert sorted(ops) == sorted(set(ops)) == sorted(published.FUNCTIONS)
    registry.check_names(ops)


def test_files_without_an_op_are_declined_with_a_reason(tmp_path):
    folder = make_set(
        tmp_path / "set", silu_and_mul=SILU, relu="import torch\n", unheard_of="", gelu="class Other: pass\n",
        linear="from fastkernels.tasks.baseline.L1.linear import Linear\nclass Matmul: pass\n",
        quickgelu=NATIVE,
    )  # fmt: skip
    found = read_set("theirs", folder, tmp_path / "out")
    assert [(c.op, c.layout) for c in found.candidates] == [("silu_and_mul", "published")]
    reasons = {d.path.stem: d.reason for d in found.declined}
    assert "no op here" in reasons["relu"]
    assert "no target of the published board" in reasons["unheard_of"]
    assert reasons["gelu"] == "defines no class GELU"
    assert "fastkernels.tasks.baseline.L1.linear, which is not in the set" in reasons["linear"]
    assert reasons["quickgelu"] == "needs twice.cpp, which is not in the set"


def test_set_without_any_op_is_an_error(tmp_path):
    with pytest.raises(SetError, match=r"no file of .* corresponds to an op"):
        read_set("theirs", make_set(tmp_path, relu=""), tmp_path / "out")


def test_module_with_weights_becomes_the_function_of_the_op(tmp_path):
    rms_norm = function(tmp_path, "rms_norm", rms_norm=RMS_NORM, helpers=HELPERS)
    reference = sys.modules[registry.op_modules()["rms_norm"]].reference
    for weight in (torch.randn(63), torch.randn(63), None):
        x, residual = torch.randn(5, 63), torch.randn(5, 63)
        want, _ = reference(x, weight, 1e-5)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), want)
        want, total = reference(x, weight, 1e-5, residual)
        before = x.clone()
        torch.testing.assert_close(rms_norm(x, weight, 1e-5, residual), want)
        torch.testing.assert_close(residual, total)
        assert torch.equal(x, before)  # the published class writes its result into x
    with pytest.raises(NotImplementedError, match="var_hidden_size"):
        rms_norm(x, weight, 1e-5, None, 32)


def test_module_that_keeps_its_parameter_gets_a_parameter(tmp_path):
    layer_norm = function(tmp_path, "layer_norm", layer_norm=LAYER_NORM)
    x, bias = torch.randn(3, 8), torch.zeros(8)
    for weight in (torch.full((8,), 2.0), torch.full((8,), 3.0)):
        want = torch.nn.functional.layer_norm(x, (8,), weight, bias, 1e-5)
        assert torch.equal(layer_norm(x, weight, bias, 1e-5), want)


def test_parameter_under_another_name_sees_new_weights(tmp_path):
    text = LAYER_NORM.replace(
        "self.last = self.weight\n", 'object.__setattr__(self, "kept", self.weight)\n', 1
    )
    text = text[: text.index("        if self.last")] + (
        "        return nn.functional.layer_norm(x, self.size, self.kept, self.bias, self.eps)\n"
    )
    layer_norm = function(tmp_path, "layer_norm", layer_norm=text)
    x, bias = torch.randn(3, 8).bfloat16(), torch.zeros(8).bfloat16()
    for weight in (torch.full((8,), 2.0).bfloat16(), torch.full((8,), 3.0).bfloat16()):
        want = torch.nn.functional.layer_norm(x, (8,), weight, bias, 1e-5)
        assert torch.equal(layer_norm(x, weight, bias, 1e-5), want)


def test_result_in_place_of_one_row_is_not_copied_onto_itself(tmp_path):
    text = """
import torch.nn as nn

class RotaryEmbedding(nn.Module):
    def __init__(self, head_size, max_position, base, is_neox_style=True):
        super().__init__()
        self.register_buffer("cos_sin_cache", None, persistent=False)

    def forward(self, positions, query, key):
        for x in (query, key):
            x.mul_(2)
        return query, key
"""
    rotary = function(tmp_path, "rotary_emb", rotary_emb=text)
    packed = torch.ones(2, 96)[:1]  # rows of 96 numbers: queries of 64, keys of 32
    query, key = packed[:, :64].as_strided((1, 64), (96, 1)), packed[:, 64:].as_strided((1, 32), (7, 1))
    rotary(torch.zeros(1, dtype=torch.long), query, key, 32, torch.zeros(4, 32), True)
    assert (packed == 2).all()


def test_results_go_where_the_op_wants_them(tmp_path):
    rotary_emb = function(tmp_path, "rotary_emb", rotary_emb=ROTARY)
    reference = sys.modules[registry.op_modules()["rotary_emb"]].reference
    positions, cache = torch.tensor([3, 0, 7]), torch.randn(8, 16)
    query, key = torch.randn(3, 4 * 16), torch.randn(3, 2 * 16)
    want = reference(positions, query, key, 16, cache, True)
    rotary_emb(positions, query, key, 16, cache, True)
    torch.testing.assert_close((query, key), want)


def test_buffers_that_a_module_reuses_are_not_shared(tmp_path):
    topk_softmax = function(tmp_path, "topk_softmax", topk_softmax=TOPK)
    reference = sys.modules[registry.op_modules()["topk_softmax"]].reference
    first, second = torch.randn(7, 16), torch.randn(7, 16)
    results = [topk_softmax(logits, 3, True) for logits in (first, second)]
    for logits, result in zip((first, second), results, strict=True):
        torch.testing.assert_close(result, tuple(reference(logits, 3, True)))


def test_result_is_written_into_the_given_output(tmp_path):
    moe_sum = function(tmp_path, "moe_sum", moe_sum=MOE_SUM)
    parts, out = torch.randn(5, 3, 63), torch.full((5, 63), torch.nan)
    moe_sum(parts, out)
    torch.testing.assert_close(out, parts.sum(1))


def test_sizes_reach_a_class_as_published_models_write_them(tmp_path):
    pool = function(tmp_path / "pool", "pool", max_pool2d=POOL)
    interpolate = function(tmp_path / "interpolate", "interpolate", interpolate=INTERPOLATE)
    x = torch.randn(1, 3, 9, 7)
    for window, stride, padding in (((3, 3), (2,), (1, 1)), ((3, 2), (1, 1), (0,))):
        want = torch.nn.functional.max_pool2d(x, window, stride, padding)
        torch.testing.assert_close(pool(x, window, stride, padding, True), want)
    for size, mode in (((18, 14), "nearest"), ((18, 10), "linear")):
        reference = sys.modules[registry.op_modules()["interpolate"]].reference
        torch.testing.assert_close(interpolate(x, size, mode), reference(x, size, mode))


def test_returned_states_reach_their_slots(tmp_path):
    """Each kind of gate; sequences that begin, continue, or are padding, whose slot keeps its value."""
    gla, spec = (
        function(tmp_path, "gated_linear_attention", chunk_gla=CHUNK_GLA),
        registry.get("gated_linear_attention"),
    )
    q, k, v = torch.randn(6, 3, 5), torch.randn(6, 3, 5), torch.randn(6, 3, 7)
    starts, slots = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3, 5, 6, 6], [2, 4, 0, 0]))
    fresh = torch.tensor([False, True, False, False])
    for shape in ((6, 3, 5), (6, 3), (3,)):
        g, state = -torch.rand(shape), torch.randn(6, 3, 5, 7)
        state[[1, 3, 5]] = float("nan")  # of no sequence here
        expected, new = spec.reference(q, k, v, g, state, starts, slots, fresh, 0.3)
        out = gla(q, k, v, g, state, starts, slots, fresh, 0.3)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(state, new, equal_nan=True)


def documented() -> str:
    """The table of targets, as docs/foreign-candidates.md has it."""
    targets = list(published.targets().values())
    lines = ["| target | class | op |", "| --- | --- | --- |"]
    lines += [f"| L{t.level}/{t.name} | {t.cls} | {t.op} |" for t in targets if t.op]
    why: dict[str, list[str]] = {}
    for t in targets:
        if not t.op and "with weights of its own: not adapted" not in t.reason:
            why.setdefault(t.reason, []).append(f"L{t.level}/{t.name}")
    lines += ["", "| not adapted | why |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {reason} |" for reason, names in why.items())])


def test_docs_have_the_table_of_targets():
    page = Path(__file__).parents[4] / "docs" / "foreign-candidates.md"
    assert documented() in page.read_text(), f"the table must be:\n{documented()}"


@pytest.mark.slow  # builds an extension
def test_native_sources_are_built_for_this_candidate_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    native = {"quickgelu": NATIVE, "twice__cpp": CPP, "factor__h": "#define FACTOR 1.702\n"}
    quick_gelu = function(tmp_path, "quick_gelu", **native)
    x = torch.randn(63)
    before = EXTENSIONS[-1].calls
    torch.testing.assert_close(quick_gelu(x), x * torch.sigmoid(1.702 * x))
    assert EXTENSIONS[-1].calls == before + 1
    assert importlib.util.find_spec("fastkernels.infra") is None
    assert "fastkernels.infra.cuda_ext" not in sys.modules


def test_sources_of_an_adapted_file_are_scanned(tmp_path):
    bad = SILU.replace("import torch.nn as nn", "import subprocess\nimport torch.nn as nn")
    found = read_set("theirs", make_set(tmp_path / "set", silu_and_mul=bad), tmp_path / "out")
    file = Path(found.files["silu_and_mul"])
    assert not rejections(scan(file, "silu_and_mul"))
    (source,) = candidate.sources(file)
    assert "subprocess" in rejections(scan(source, "silu_and_mul"))


@pytest.mark.slow
def test_judge_takes_a_folder_of_the_published_layout(tmp_path):
    bad = SILU.replace("import torch.nn as nn", "import subprocess\nimport torch.nn as nn")
    for text, status in ((SILU, "ok"), (bad, "rejected")):
        folder = make_set(tmp_path / status, silu_and_mul=text, relu="")
        command = (
            f"{sys.executable} -m fk_bench.cli kernels silu_and_mul --candidate {folder} --cases random"
            f" --case decode_32 --no-time --device cpu --json --out {tmp_path / status / 'run'}"
        )
        done = subprocess.run(command.split(), capture_output=True, text=True, cwd=tmp_path)
        assert "relu" in done.stderr and "no op here" in done.stderr, done.stderr
        rows = [json.loads(line) for line in Path(json.loads(done.stdout)["rows"]).read_text().splitlines()]
        assert rows[0]["status"] == status, rows[0]["reason"]


def test_class_that_is_assigned_to_the_targets_name_is_adapted(tmp_path):
    folder = make_set(tmp_path / "set", silu_and_mul=SILU.replace("class SiluAndMul", "class ModelNew"))
    file = folder / "L1" / "silu_and_mul.py"
    file.write_text(file.read_text() + "\nSiluAndMul = ModelNew\n")
    (found,) = read_set("theirs", folder, tmp_path / "out").candidates
    x = torch.randn(5, 126)
    expected = torch.nn.functional.silu(x[:, :63]) * x[:, 63:]
    assert torch.allclose(candidate.load(found.op, str(found.path)).function(x), expected)
