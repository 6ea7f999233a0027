"""Blocks of a tiny random FLUX.1 with fused gated residuals, against diffusers' own blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fk_integrations.live import traced
from support.kernels import warm
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode

import fastkernels
from fastkernels.core import registry
from fastkernels.core.dispatch import OPS
from fastkernels.overrides.linear.modules import joined_linears

diffusers = pytest.importorskip("diffusers")
from diffusers.models.transformers import transformer_flux as host  # noqa: E402

from fastkernels.overrides.diffusion import diffusers_flux as ours  # noqa: E402

OP = "gated_residual"
SIZES = {"dim": 32, "num_attention_heads": 2, "attention_head_dim": 16}
DOUBLE, SINGLE = "FluxTransformerBlock", "FluxSingleTransformerBlock"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def filled(module: Any) -> Any:
    """With random parameters, so that no gate, scale or bias is zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(*((1.0, 0.3) if parameter.dim() == 1 else (0.0, 0.2)))
    return module.eval()


def model(dtype: torch.dtype = torch.float32) -> tuple[Any, Callable[[], torch.Tensor]]:
    made = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    given = [t.to(dtype) for t in (draw(2, 15, 16), draw(2, 7, 32), draw(2, 32), torch.tensor([0.5, 0.7]))]
    at = {"img_ids": torch.arange(45.0).view(15, 3), "txt_ids": torch.zeros(7, 3)}
    made = filled(made).to(dtype)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return made(*given, **at).sample

    return made, run


def block_inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    angles = draw(20, 16)
    return {
        "hidden_states": draw(2, 15, 32).to(dtype), "encoder_hidden_states": draw(2, 5, 32).to(dtype),
        "temb": draw(2, 32).to(dtype), "image_rotary_emb": (angles.cos(), angles.sin()),
    }  # fmt: skip


def rows(report: Any) -> dict[str, tuple[int, int]]:
    return {r.host_class: (r.modules, r.calls) for r in report.refresh().active if r.op == OP}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_blocks_give_the_hosts_outputs(dtype: torch.dtype, error: float) -> None:
    transformer, run = model(dtype)
    before, classes = run(), [type(m) for m in transformer.modules()]
    with fastkernels.patch(transformer, ops=OP) as report:
        after = run()
        # ten gated residuals in a call: four in each block of two streams, one in each block of one
        assert rows(report) == {DOUBLE: (2, 8), SINGLE: (2, 2)} and report.verified
        assert not any(r.fallbacks for r in report.active)
    assert float((after - before).norm() / before.norm()) < error
    assert [type(m) for m in transformer.modules()] == classes and torch.equal(run(), before)


@pytest.mark.parametrize("theta", [10000, 500.5])
def test_positions_are_one_op(theta: float) -> None:
    """Cosines and sines of all axes, in one kernel on a GPU; a base that is no whole number stays with the host."""
    transformer, run = model()
    transformer.pos_embed.theta = theta
    ids, before = torch.randint(0, 64, (9, 3)).float(), run()
    with fastkernels.patch(transformer, ops=[OP, "rope_axes"]) as report:
        found = transformer.pos_embed(ids)
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4)
        calls = [(r.modules, r.calls) for r in report.refresh().active if r.op == "rope_axes"]
        assert calls == [(1, 2)] * (theta == 10000)
    assert type(transformer.pos_embed) is host.FluxPosEmbed and torch.equal(run(), before)
    for a, b in zip(found, transformer.pos_embed(ids), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", [DOUBLE, SINGLE])
def test_standalone_block_has_the_hosts_state(name: str) -> None:
    theirs, mine = filled(getattr(host, name)(**SIZES)), getattr(ours, f"Diffusers{name}")(**SIZES).eval()
    mine.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for a, b in zip(mine(**block_inputs()), theirs(**block_inputs()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [DOUBLE, SINGLE])
def test_float16_is_clipped_like_the_hosts(name: str) -> None:
    block = filled(getattr(host, name)(**SIZES)).half()
    given = block_inputs(torch.float16)
    given["encoder_hidden_states"][0, 0, :3] = torch.tensor([65504.0, -65504.0, 65504.0])
    linear = (block.norm1_context if name == DOUBLE else block.norm).linear
    with torch.no_grad():
        if name == DOUBLE:  # the norm in between reads finite numbers
            linear.weight[2 * 32 : 3 * 32] = linear.bias[2 * 32 : 3 * 32] = 0
        linear.bias[-32:] = 300.0  # a gate that takes the text's residual beyond float16
        before = block(**given)
        with fastkernels.patch(torch.nn.Sequential(block), ops=OP):
            after = block(**given)
    assert bool((before[0].abs() == 65504).any()) and bool(after[0].isfinite().all())
    assert torch.equal(after[0].abs() == 65504, before[0].abs() == 65504)


def test_single_block_runs_without_a_concatenation() -> None:
    transformer, run = model()
    hidden = transformer.single_transformer_blocks[0].proj_out.in_features
    widths: list[int] = []

    class Widths(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = fn(*args, **(kwargs or {}))
            if fn is torch.cat and found.dim() == 3:
                widths.append(found.shape[-1])
            return found

    with Widths():
        run()
    assert widths.count(hidden) == 2
    with fastkernels.patch(transformer, ops=OP):
        widths.clear()
        with Widths():
            run()
    assert not widths


def lora(transformer: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    names = ["proj_out", "proj_mlp", "to_q", "ff.net.2", "norm.linear"]
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False), transformer
    )


def quantized(transformer: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(transformer, quantization.Int8WeightOnlyConfig())


def hooked(transformer: Any) -> None:
    for block in transformer.single_transformer_blocks:
        block.proj_out.register_forward_hook(lambda m, args, out: 1.5 * out)


@pytest.mark.parametrize("feature", [lora, quantized, hooked])
@pytest.mark.parametrize("first", ["feature", "patch"])
def test_changed_projections_stay_with_the_host(feature: Callable[[Any], None], first: str) -> None:
    transformer, run = model()
    plain = run()
    if first == "feature":
        feature(transformer)
    with fastkernels.patch(transformer, ops=OP) as report:
        if first == "patch":
            feature(transformer)
        after = run()
        assert rows(report)[SINGLE] == (2, 2)
    before = run()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    assert (before - plain).abs().max() > 1e-3 * plain.abs().max()


def doubled(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


class Doubled(torch.nn.LayerNorm):
    """A user's norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("ops", [[OP], [OP, "layer_norm"]], ids=["alone", "with_layer_norm"])
@pytest.mark.parametrize("change", ["hook", "class"])
def test_changed_norm_is_called(change: str, ops: list[str]) -> None:
    transformer, run = model()
    norm = transformer.transformer_blocks[0].norm2
    with fastkernels.patch(transformer, ops=ops) as report:
        run()
        assert not any(r.fallbacks for r in report.refresh().active if r.op == OP)
        if change == "hook":
            norm.register_forward_hook(doubled)
        else:
            transformer.transformer_blocks[0].norm2 = Doubled(32, eps=1e-6, elementwise_affine=False)
        after = run()
        reasons = [r.fallbacks for r in report.refresh().active if r.host_class == DOUBLE]
        assert [sum(found.values()) for found in reasons] == [1]
        why = (
            "other code was put around its norm" if change == "hook" else "its norm is Doubled, not LayerNorm"
        )
        assert all(why in text for text in reasons[0])
    torch.testing.assert_close(after, run(), rtol=1e-4, atol=1e-4)


def test_changed_modulation_of_text_and_image_is_called() -> None:
    """The norm of a block of one stream reads both where they are, unless a hook has to see them."""
    transformer, run = model()
    del transformer.transformer_blocks[:]
    hooked = transformer.single_transformer_blocks[0].norm
    hooked.register_forward_hook(lambda m, args, out: (2 * out[0], 3 * out[1]))
    before = run()
    with fastkernels.patch(transformer, ops=[OP, "ada_layer_norm"]) as report:
        OPS["ada_layer_norm"].reset()
        shapes: list[tuple[int, ...]] = []
        hooked.register_forward_hook(lambda m, args, out: shapes.append(tuple(args[0].shape)))
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
        # of the two blocks, and of the norm behind them
        assert shapes == [(2, 22, 32)] and OPS["ada_layer_norm"].calls == 3
        assert not any(r.fallbacks for r in report.refresh().active)


def test_adapter_of_images_is_added() -> None:
    block = filled(host.FluxTransformerBlock(**SIZES))
    block.attn.register_forward_hook(lambda m, args, out: (*out, 3 * out[0]))
    with torch.no_grad():
        before = block(**block_inputs())
        with fastkernels.patch(torch.nn.Sequential(block), ops=OP):
            after = block(**block_inputs())
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_residual_in_another_dtype_is_the_hosts() -> None:
    block, given = filled(host.FluxSingleTransformerBlock(**SIZES)).bfloat16(), block_inputs(torch.bfloat16)
    block.norm.linear.float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given["hidden_states"], given["encoder_hidden_states"] = (
            given[name].float() for name in ("hidden_states", "encoder_hidden_states")
        )
        before = block(**given)
        with fastkernels.patch(torch.nn.Sequential(block), ops=OP) as report:
            after = block(**given)
            (row,) = report.refresh().active
    assert row.fallbacks == {"the residual is torch.float32, not all other tensors": 1}
    for a, b in zip(after, before, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "fused"), [("", 2), ("hook", 1), ("erf", 1), ("hooked_act", 1), ("named", 0), ("off", 0)]
)
def test_gelu_is_in_the_product(change: str, fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers with a GELU, unless other code runs around one, it has erf, or `gelu` is explicitly requested."""
    transformer, run = model()
    block = transformer.single_transformer_blocks[0]
    del transformer.transformer_blocks[:]
    if change == "erf":
        block.act_mlp = torch.nn.GELU()
    elif change == "hooked_act":
        block.act_mlp.register_forward_hook(doubled)
    elif change == "hook":
        block.proj_mlp.register_forward_hook(doubled)
    elif change == "named":
        monkeypatch.setenv("FASTKERNELS_PROVIDER", "gelu:reference")
    elif change == "off":
        monkeypatch.setenv("FASTKERNELS_DISABLE", "linear_gelu")
    before = run()
    OPS["gelu"].reset()
    with fastkernels.patch(transformer, ops=[OP, "gelu"]) as report:
        OPS["linear_gelu"].reset()
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
        assert OPS["linear_gelu"].calls == fused and OPS["gelu"].calls == 2 - fused
        assert {r.calls for r in report.refresh().active if r.op == "gelu"} == {2 - fused or fused}


@pytest.mark.parametrize("kind", ["plain", "no_bias", "many", "hook", "float64"])
def test_values_of_text_and_image_are_one_tensor(kind: str) -> None:
    a, b = (torch.nn.Linear(8, 6, bias=kind != "no_bias") for _ in range(2))
    texts, image = (draw(5 if kind == "many" else 3, tokens, 8) for tokens in (2, 7))
    if kind == "hook":
        b.register_forward_hook(doubled)
    elif kind == "float64":
        a, b, texts, image = a.double(), b.double(), texts.double(), image.double()
    ran: list[str] = []

    class Ran(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Ran():
            found = joined_linears(a, texts, b, image)
        torch.testing.assert_close(found, torch.cat((a(texts), b(image)), dim=1))
    assert ("fastkernels.joined_linears.default" in ran) == (kind not in ("many", "hook"))


@pytest.mark.parametrize("name", [DOUBLE, SINGLE])
def test_blocks_compile_whole(name: str) -> None:
    block, seen = filled(getattr(host, name)(**SIZES)), set()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)

    with torch.no_grad():
        before = block(**block_inputs())
        with fastkernels.patch(torch.nn.Sequential(block), ops=OP):
            compiled = torch.compile(block, fullgraph=True, backend=backend)
            after = compiled(**block_inputs())
    torch._dynamo.reset()
    if name == SINGLE:
        assert {"fastkernels.linear_gelu.default", "fastkernels.linear_of_two.default"} <= seen
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


OF_BOTH = {
    "ada_layer_norm", "linear_of_few_rows", "qk_norm_rope_pair", "attention_dense", "gated_residual", "linear_gelu",
    "linear_products",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kept"),
    [(DOUBLE, True), (SINGLE, True), (SINGLE, False), pytest.param(DOUBLE, False, marks=pytest.mark.slow)],
)
def test_without_ops_compiled_blocks_are_ours_if_they_win(
    name: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "_how", lambda: ({}, "eager"))
    monkeypatch.setattr(traced, "decide", lambda *_: (kept, "slower"))
    block, seen = filled(getattr(host, name)(**SIZES)), set()
    whole = torch.nn.Sequential(block)
    classes = [type(m) for m in whole.modules()]

    def backend(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)

    with torch.no_grad():
        before = block(**block_inputs())
        with fastkernels.patch(whole):
            block.compile(fullgraph=True, backend=backend)
            after = block(**block_inputs())
        torch.compiler.reset()
        block._compiled_call_impl = None
        assert all(map(torch.equal, block(**block_inputs()), before))
    ops = {n.removeprefix("fastkernels.").partition(".")[0] for n in seen if n.startswith("fastkernels.")}
    own = "joined_linears" if name == DOUBLE else "linear_of_two"
    assert ops == (OF_BOTH | {own} if kept else set())
    assert not kept or not any(
        "gelu" in n or "rms_norm" in n for n in seen if not n.startswith("fastkernels.")
    )
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [type(m) for m in whole.modules()] == classes


PAIRS = """
import torch
from fastkernels.core.dispatch import OPS
from fastkernels.overrides.rope import qk_norm_rope_pair as pair
from fastkernels.overrides.rope.qk_norm_rope import reference

ran, launched = [], pair._launched
pair._launched = lambda *calls: ran.append(1) or launched(*calls)
torch.manual_seed(0)
for batch, tokens, texts, heads, size, dtype, launches in (
    (1, 9, 4, 3, 16, torch.float32, 1), (2, 7, 0, 5, 40, torch.bfloat16, 1), (2, 3, 5, 40, 128, torch.float16, 1),
    (1, 4, 2, 3, 6, torch.float32, 0),
):
    calls, angles = [], torch.randn(tokens + texts, size)
    for part in (0, 1):
        x, text = (torch.randn(batch, n, 3 * heads * size).to(dtype).chunk(3, -1)[part] for n in (tokens, texts))
        x, text = (t.unflatten(-1, (heads, size)) for t in (x, text))
        x = x.contiguous() if part and not launches else x
        w, text_w = (1 + 0.1 * torch.randn(size).to(dtype) for _ in range(2))
        more = (text, text_w) if texts else (None, None)
        calls.append((x, w, angles.cos(), angles.sin(), 1e-6, *more))
    ran.clear()
    before = OPS["qk_norm_rope"].calls
    for found, args in zip(pair.norm_rope_pair(*calls), calls):
        error = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, reference(*args), rtol=error, atol=error)
    assert len(ran) == launches and OPS["qk_norm_rope"].calls == before + 2
"""


def test_queries_and_keys_in_one_launch() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run(["-c", PAIRS], env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("approximate", "asked", "found"), [
    ("tanh", None, "linear_gelu"), ("none", None, ""), ("none", ["gelu"], "gelu"),
])  # fmt: skip
def test_compiled_gelu(
    approximate: str, asked: list[str] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "_how", lambda: ({}, "eager"))
    monkeypatch.setattr(traced, "decide", lambda *_: (approximate == "tanh", "slower"))
    layer, seen, x = filled(diffusers.models.activations.GELU(16, 24, approximate)), set(), draw(3, 16)

    def backend(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad(), fastkernels.patch(torch.nn.Sequential(layer), ops=asked):
        expected = torch.nn.functional.gelu(layer.proj(x), approximate=approximate)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=backend)(x), expected)
    torch.compiler.reset()
    ours = {name for name in seen if name.startswith("fastkernels.")}
    assert ours == ({f"fastkernels.{found}.default"} if found else set())


def test_without_ops_first_calls_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    transformer, run = model()
    before = run()
    with fastkernels.patch(transformer) as report:
        torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4)
        lines = [line for r in report.refresh().rows if r.op == OP for line in r.measured]
    assert {DOUBLE, SINGLE} == {line.split()[1] for line in lines}
    assert not any("our result" in line or "Error" in line for line in lines)
    assert torch.equal(run(), before)


def test_op_names_wrong_arguments() -> None:
    op, x, gate = OPS[OP], torch.ones(2, 3, 8), torch.ones(2, 8)
    for args, text in (
        (
            (x, x, gate, None, None, None, None, 1e-6, x),
            r"x \(2, 3, 8\) must be .* but for 3 tokens in front",
        ),
        (
            (x[:1], x[:1].repeat(1, 2, 1), gate[:1], None, None, None, None, 1e-6, x),
            r"front \(2, 3, 8\) is not",
        ),
        ((x, x[:, :2], gate), r"residual \(2, 3, 8\) and x \(2, 2, 8\)"),
        ((x, x, gate[:1]), r"gate \(1, 8\) is not \[B, H\]"),
        ((x, x, gate, gate), "pass both scale and shift, or neither"),
        ((x, x, gate, None, None, gate), r"weight \(2, 8\) is not \[H\]"),
    ):
        with pytest.raises(ValueError, match=text):
            op(*args)
    assert registry.get(OP).op is op


@pytest.mark.parametrize("patched", [False, True])
def test_classes_of_blocks_share_no_limit_of_recompilations(patched: bool) -> None:
    made, run = model()
    report = fastkernels.patch(made, ops=OP) if patched else None
    expected = run()
    for block in (*made.transformer_blocks, *made.single_transformer_blocks):
        block.compile(backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        torch.testing.assert_close(run(), expected)
    if report is not None:
        report.undo()
    torch.compiler.reset()
