"""Real timm models, patched in this process: tiny and random, float32 and bfloat16."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels.overrides.rope.rope_nd import rope_nd
from fastkernels.patch import PatchError

timm = pytest.importorskip("timm")
TINY = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
VIT = {**TINY, "patch_size": 16, "class_token": False, "global_pool": "map", "act_layer": "gelu_tanh"}
SWIN = {"img_size": 64, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 2), "window_size": 4}
HIERA = {"img_size": (64, 64), "embed_dim": 24, "num_heads": 1, "stages": (1, 1, 2, 1), "num_classes": 7}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}


def tiny(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **sizes).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # heads and layer scales are made of zeros and tiny numbers
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def runner(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(images.to(next(model.parameters()).dtype))

    return run


def modules(rows: list[Any]) -> dict[str, int]:
    """The replaced modules of each op, whatever their class."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.op] = found.get(row.op, 0) + row.modules
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        (
            "vit_base_patch16_siglip_224",
            VIT,
            {"layer_norm": 6, "gelu": 3, "attention_dense": 3, "patch_embedding": 1},
        ),
        (
            "vit_small_patch16_dinov3",
            TINY,
            {"layer_norm": 5, "gelu": 2, "attention_dense": 2, "patch_embedding": 1},
        ),
        (
            "vit_small_patch16_rope_224",
            TINY,
            {"layer_norm": 5, "gelu": 2, "attention_dense": 2, "patch_embedding": 1},
        ),
        (
            "swinv2_tiny_window8_256",
            SWIN,
            {"layer_norm": 9, "gelu": 3, "window_attention": 3, "patch_embedding": 1},
        ),
        (
            "vit_7b_patch16_dinov3",
            TINY,
            {"layer_norm": 5, "gated_mlp": 2, "attention_dense": 2, "patch_embedding": 1},
        ),
        (
            "eva02_tiny_patch14_224",
            {**TINY, "patch_size": 16},
            {"layer_norm": 5, "gated_mlp": 2, "attention_dense": 2, "patch_embedding": 1},
        ),
        ("convnextv2_atto", CONVNEXT, {"layer_norm": 9, "gelu": 4, "patch_embedding": 4}),
        (
            "beit_base_patch16_224",
            TINY,
            {"layer_norm": 5, "gelu": 2, "attention_dense": 2, "patch_embedding": 1},
        ),
        ("hiera_tiny_224", HIERA, {"layer_norm": 11, "gelu": 5, "attention_dense": 5}),
    ],
    ids=["siglip", "dinov3", "rope", "swinv2", "swiglu", "glu", "convnextv2", "beit", "hiera"],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_patched_models_give_the_hosts_outputs(
    name: str, sizes: dict, expected: dict[str, int], dtype: torch.dtype, atol: float
) -> None:
    model = tiny(name, dtype, **sizes)
    run, classes = runner(model), [type(m) for m in model.modules()]
    before = run()
    report = fastkernels.patch(
        model,
        ops=["attention_dense", "window_attention", "layer_norm", "gelu", "gated_mlp", "patch_embedding"],
    )
    after = run()
    assert modules(report.active) == expected and report.host.name == "timm"
    calls = {r.op: 0 for r in report.refresh().active}
    for row in report.active:  # attention of the blocks and of the pooling have a row each
        calls[row.op] += row.calls
    assert calls == expected and report.verified
    assert before.std() > 0.1, "the outputs are all alike"
    torch.testing.assert_close(after, before, atol=atol * float(before.abs().max()), rtol=0)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)


def test_pickled_and_copied_models_are_the_hosts() -> None:
    model = tiny("vit_small_patch16_rope_224", **TINY)
    classes, before = [type(m) for m in model.modules()], runner(model)()
    with fastkernels.patch(model, ops=["layer_norm", "gelu", "attention_dense"]):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for found in (copied, loaded):
        assert [type(m) for m in found.modules()] == classes and torch.equal(runner(found)(), before)
        fastkernels.patch(found, ops="gelu").undo()


def test_attention_stays_with_timm_unless_requested() -> None:
    model = tiny("vit_small_patch16_dinov3", **TINY)
    with fastkernels.patch(model) as report:
        assert {r.op for r in report.active} == {"layer_norm", "gelu"}


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_mlps_run_linear_and_gelu_as_one_op(dtype: torch.dtype, atol: float) -> None:
    """It counts as a call of both; a hook or autocast runs them one after the other."""
    model = tiny("vit_base_patch16_siglip_224", dtype, **VIT)
    run = runner(model)
    before = run()
    with fastkernels.patch(model, ops=["linear_gelu", "gelu"]) as report:
        after = run()
        assert {r.op: r.calls for r in report.refresh().active} == {"linear_gelu": 3, "gelu": 3}
        torch.testing.assert_close(after, before, atol=atol * float(before.abs().max()), rtol=0)
        hook = model.blocks[0].mlp.fc1.register_forward_hook(lambda module, args, out: out * 0)
        run()
        assert {r.op: r.calls for r in report.refresh().active} == {"linear_gelu": 5, "gelu": 1}
        hook.remove()
        with torch.autocast("cpu", torch.bfloat16):
            run()
        assert {r.op: r.calls for r in report.refresh().active} == {"linear_gelu": 5, "gelu": 4}
    assert torch.equal(run(), before)


def test_mlps_with_another_gelu_stay_timms() -> None:
    model = tiny("vit_small_patch16_dinov3", **TINY)  # with erf
    with pytest.raises(PatchError, match="nothing to patch: linear_gelu"):
        fastkernels.patch(model, ops="linear_gelu")


@pytest.mark.parametrize("dims", [2, 3])
def test_only_convolutions_without_overlap_are_patch_embeddings(dims: int) -> None:
    """Also channels last, with a rest at the edges, without a batch and under autocast."""
    kind = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2]
    others = [
        {"kernel_size": 3, "stride": 2}, {"kernel_size": 1}, {"kernel_size": 2, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2, "groups": 4}, {"kernel_size": 2, "stride": 2, "dilation": 2},
    ]  # fmt: skip
    embedding = kind(4, 12, 3, 3, "valid")
    model = torch.nn.Sequential(
        timm.layers.LayerNorm2d(4), embedding, *(kind(4, 4, **o) for o in others)
    ).eval()
    x = torch.randn(2, 4, *(7, 9, 11)[:dims])
    formats = torch.contiguous_format, (torch.channels_last, torch.channels_last_3d)[dims - 2]

    def run() -> list[torch.Tensor]:
        found = []
        for form in formats:
            embedding.weight.data = embedding.weight.data.contiguous(memory_format=form)
            found += [embedding(x.contiguous(memory_format=form)), embedding(x[0])]
            with torch.autocast("cpu", torch.bfloat16):
                found.append(embedding(x))
        return found

    with torch.no_grad():
        before = run()
        with fastkernels.patch(model, ops="patch_embedding", strict=True) as report:
            after = run()
            assert modules(report.active) == {"patch_embedding": 1} and report.refresh().active[0].calls == 6
            with pytest.raises(ValueError, match="expected an input of"):
                embedding(x[0, 0])
            with pytest.raises(ValueError, match="smaller than a patch"):
                embedding(x[..., :2])
    for a, b in zip(after, before, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=1e-5 if a.dtype == torch.float32 else 2e-2, rtol=1e-5)


def test_masks_and_causal_attention_are_timms() -> None:
    attention = timm.layers.Attention(48, num_heads=3, gated=True).eval()
    model = torch.nn.Sequential(attention)
    x, mask = torch.randn(2, 9, 48), torch.randn(9, 9)
    calls = ({"attn_mask": mask}, {"attn_mask": mask > 0}, {"is_causal": True})
    with torch.no_grad():
        before = [attention(x, **options) for options in calls]
        with fastkernels.patch(model, ops="attention_dense"):
            after = [attention(x, **options) for options in calls]
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b)


def test_candidate_runs_in_every_attention(tmp_path) -> None:
    path = tmp_path / "candidate.py"
    path.write_text("def attention_dense(q, k, v, scale, *rest):\n    return v.new_zeros(q.shape)\n")
    model = tiny("vit_small_patch16_dinov3", **TINY)
    run = runner(model)
    before = run()
    with fastkernels.patch(model, candidates={"attention_dense": str(path)}) as report:
        assert (run() - before).abs().max() > 1e-3
        assert report.refresh().candidates == {"attention_dense": 2}
    assert torch.equal(run(), before)


def test_models_built_later_are_patched_until_undo() -> None:
    theirs = timm.create_model
    with fastkernels.patch("timm", ops=["layer_norm", "gelu"]) as report:
        assert all(r.state == "planned" for r in report.rows)
        model = tiny("vit_small_patch16_dinov3", **TINY)
        run = runner(model)
        inside = run()
        assert {r.op: r.calls for r in report.refresh().active} == {"layer_norm": 5, "gelu": 2}
        plain = timm.create_model("mobilenetv4_conv_small")  # has nothing to replace
        with pytest.raises(PatchError, match="undo that patch first"):
            fastkernels.patch("timm")
    assert timm.create_model is theirs and "_fastkernels_patched" not in vars(model) | vars(plain)
    assert not any(hasattr(type(m), "fastkernels") for m in model.modules())
    torch.testing.assert_close(inside, run(), atol=1e-3, rtol=1e-3)


def test_model_without_our_ops_is_reported_unchanged() -> None:
    model = tiny("mobilenetv4_conv_small")
    run, classes = runner(model), [type(m) for m in model.modules()]
    before = run()
    with fastkernels.patch(model, strict=True) as report:
        assert not report.active and "everything was left to the host" in str(report)
        reason = next(r.reason for r in report.rows if r.host_class == "other modules")
        assert re.match(r"\d+ left to the host: no op replaces them \(Conv2d 46, ReLU \d+, ", reason)
        assert torch.equal(run(), before) and [type(m) for m in model.modules()] == classes
    assert "_fastkernels_patched" not in vars(model)
    with pytest.raises(PatchError, match="nothing to patch: layer_norm"):
        fastkernels.patch(model, ops="layer_norm")


def test_compiled_models_are_compiled_again() -> None:
    model = torch.compile(tiny("vit_small_patch16_dinov3", **{**TINY, "depth": 1}), backend="eager")
    run = runner(model)
    before = run()
    with fastkernels.patch(model, ops=["layer_norm", "attention_dense"]) as report:
        torch.testing.assert_close(run(), before, atol=1e-3, rtol=1e-3)
        assert report.refresh().verified
    assert torch.equal(run(), before)


def test_attention_built_anew_equals_timms() -> None:
    """Our classes with the host's constructor and weights, as in a fork; a window mask of two images."""
    from timm.layers import AttentionPoolLatent
    from timm.models import beit, hiera, metaformer
    from timm.models.swin_transformer_v2 import WindowAttention

    from fastkernels.overrides.dense_attention.timm import TimmAttentionPoolLatent, TimmWindowAttention
    from fastkernels.overrides.dense_attention.timm_models import (
        TimmBeitAttention,
        TimmMaskUnitAttention,
        TimmMetaFormerAttention,
    )

    shared = torch.randn(3, 15, 15)
    mask = torch.zeros(2, 15, 15).masked_fill(torch.rand(2, 15, 15) < 0.2, -100.0)
    for ours, theirs, args, options, size, more in (
        (TimmAttentionPoolLatent, AttentionPoolLatent, (24,), {"num_heads": 3, "norm_layer": torch.nn.LayerNorm},
         24, ()),
        (TimmAttentionPoolLatent, AttentionPoolLatent, (24, 12), {"latent_len": 3, "pool_type": "avg", "qk_norm": True,
         "num_heads": 2, "pos_embed": "abs", "feat_size": 15}, 24, ()),
        (TimmAttentionPoolLatent, AttentionPoolLatent, (24, 0), {"q_proj": False, "pool_type": "", "num_heads": 2},
         24, ()),
        (TimmWindowAttention, WindowAttention, (24, (3, 5), 2), {}, 24, (mask,)),
        (TimmWindowAttention, WindowAttention, (24, (3, 5), 3), {"qkv_bias_separate": True,
         "pretrained_window_size": (6, 4)}, 24, ()),
        (TimmWindowAttention, WindowAttention, (24, (5, 3), 1), {"qkv_bias": False}, 24, ()),
        (TimmBeitAttention, beit.Attention, (24, 3), {"window_size": (2, 7), "qkv_bias": True}, 24, (shared,)),
        (TimmBeitAttention, beit.Attention, (24, 2), {"window_size": (7, 2), "qkv_bias": True,
         "qkv_bias_separate": True}, 24, ()),
        (TimmBeitAttention, beit.Attention, (24, 3), {"attn_head_dim": 8}, 24, (shared,)),
        (TimmMaskUnitAttention, hiera.MaskUnitAttention, (24, 48, 3, 1, 3, True), {}, 24, ()),
        (TimmMaskUnitAttention, hiera.MaskUnitAttention, (24, 36, 2, 3, 1, True), {}, 24, ()),
        (TimmMaskUnitAttention, hiera.MaskUnitAttention, (24, 24, 3, 5), {}, 24, ()),
        (TimmMetaFormerAttention, metaformer.Attention, (24, 8), {"qkv_bias": True}, 24, ()),
    ):  # fmt: skip
        torch.manual_seed(0)
        host, mine = theirs(*args, **options).eval(), ours(*args, **options).eval()
        with torch.no_grad():
            for parameter in host.parameters():
                parameter.normal_(0.2, 0.5)
            mine.load_state_dict(host.state_dict())
            x = torch.randn(4, 15, size)
            torch.testing.assert_close(mine(x, *more), host(x, *more), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "sizes", "rotations"),
    [
        ("vit_small_patch16_dinov3", TINY, 2),
        ("vit_small_patch14_reg4_dinov2", {**TINY, "patch_size": 16}, 0),
        ("vit_base_patch16_siglip_224", VIT, 0),
        ("eva02_tiny_patch14_224", {**TINY, "patch_size": 16}, 2),
        ("eva02_tiny_patch14_224", {**TINY, "patch_size": 16, "qkv_fused": False}, 2),
        ("vit_pe_core_tiny_patch16_384", TINY, 2),
    ],
    ids=["dinov3", "dinov2", "siglip", "eva02", "eva02-unfused", "perception-encoder"],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_blocks_add_scale_and_norm_in_one_op(
    name: str, sizes: dict, rotations: int, dtype: torch.dtype, atol: float
) -> None:
    model = tiny(name, dtype, **sizes)
    run = runner(model)
    before, classes = run(), [type(m) for m in model.modules()]
    report = fastkernels.patch(model, ops=["gated_residual", "attention_dense", "layer_norm"])
    earlier = rope_nd.calls
    after = run()
    rows = {r.op: r for r in report.refresh().active}
    assert rows["gated_residual"].modules == 2 and rows["gated_residual"].calls == 4
    norms = modules(report.active)["layer_norm"]
    assert rows["layer_norm"].calls == norms - 2, "both second norms run inside the op"
    assert not any(r.fallbacks for r in rows.values()) and report.verified
    assert rope_nd.calls - earlier == rotations
    torch.testing.assert_close(after, before, atol=atol * float(before.abs().max()), rtol=0)
    hook = model.blocks[0].norm2.register_forward_hook(lambda module, given, out: 2 * out)
    hooked = run()
    report.undo()
    torch.testing.assert_close(hooked, run(), atol=atol * float(before.abs().max()), rtol=0)
    hook.remove()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("cait_xxs24_224", {"cait.TalkingHeadAttn": 2, "cait.ClassAttn": 2}),
        ("twins_pcpvt_small", {"twins.GlobalSubSampleAttn": 16}),
    ],
)
def test_other_attention_is_listed_once(name: str, classes: dict[str, int]) -> None:
    model = tiny(
        name, img_size=64, **({} if "twins" in name else {"embed_dim": 48, "depth": 2, "num_heads": 3})
    )
    run = runner(model)
    before = run()
    with fastkernels.patch(model, ops=["attention_dense", "layer_norm"]) as report:
        torch.testing.assert_close(run(), before, atol=1e-5 * float(before.abs().max()), rtol=0)
        found = [r for row in report.rows for r in row.reasons if r["kind"] == "other_class"]
    named = {r["text"].partition(",")[0].removeprefix("timm.models."): r["modules"] for r in found}
    assert named == classes and len(found) == len(classes)
    assert torch.equal(run(), before)
