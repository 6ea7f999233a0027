"""Real diffusers pipelines and models, patched in this process: tiny and random."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import fastkernels
from fastkernels.core.dispatch import OPS
from fastkernels.overrides.dense_attention.attention_dense import reference
from fastkernels.patch import PatchError

diffusers = pytest.importorskip("diffusers")
from diffusers.models.attention_processor import AttnProcessor2_0  # noqa: E402

DIFFUSION = ["ada_layer_norm", "gated_residual", "geglu", "group_norm", "timestep_embedding", "upsample_conv"]
UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 64,
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4),
    "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2), "projection_class_embeddings_input_dim": 80,
}  # fmt: skip
VAE = {
    "block_out_channels": [16, 32], "down_block_types": ["DownEncoderBlock2D"] * 2, "norm_num_groups": 8,
    "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4,
}  # fmt: skip
CLIP = {
    "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "projection_dim": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
FLUX = {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
    "guidance_embeds": True,
}  # fmt: skip


def sdxl() -> Any:
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(**CLIP)
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=diffusers.AutoencoderKL(**VAE), unet=diffusers.UNet2DConditionModel(**UNET),
        text_encoder=transformers.CLIPTextModel(config), tokenizer=None, tokenizer_2=None,
        text_encoder_2=transformers.CLIPTextModelWithProjection(config),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_pipeline() -> Any:
    """FLUX.1 with all its parts: transformer, VAE, CLIP and T5."""
    torch.manual_seed(0)
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**CLIP))
    t5 = transformers.T5EncoderModel(transformers.T5Config(**T5))
    pipe = diffusers.FluxPipeline(
        vae=diffusers.AutoencoderKL(**VAE, shift_factor=0.1), transformer=flux(), text_encoder=text, tokenizer=None,
        text_encoder_2=t5, tokenizer_2=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_image(pipe: Any) -> torch.Tensor:
    """An image of a prompt of 8 tokens; the encoders run as encode_prompt would run them."""
    prompt = torch.arange(1, 9)[None]
    with torch.no_grad():
        pooled, texts = pipe.text_encoder(prompt).pooler_output, pipe.text_encoder_2(prompt)[0]
    return pipe(
        prompt_embeds=texts, pooled_prompt_embeds=pooled, num_inference_steps=2, height=32, width=32,
        output_type="pt", generator=torch.Generator().manual_seed(1),
    ).images  # fmt: skip


def image(pipe: Any, output_type: str = "latent") -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    texts, pooled, none, none_pooled = (torch.randn(1, *n, generator=draw) for n in ((7, 64), (32,)) * 2)
    return pipe(
        prompt_embeds=texts, pooled_prompt_embeds=pooled, negative_prompt_embeds=none,
        negative_pooled_prompt_embeds=none_pooled, num_inference_steps=2, height=32, width=32,
        output_type=output_type, generator=draw,
    ).images  # fmt: skip


def flux() -> Any:
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(**FLUX).eval()


def step(model: Any) -> Callable[[], torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, *n, generator=draw) for n in ((16, 16), (8, 32), (32,))]
    at = {"img_ids": torch.arange(48.0).view(16, 3), "txt_ids": torch.zeros(8, 3)}

    def run() -> torch.Tensor:
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            given = [t.to(dtype) for t in inputs]
            strength = {"guidance": torch.tensor([3.5], dtype=dtype)}
            return model(*given, torch.tensor([0.5], dtype=dtype), **at, **strength).sample

    return run


def test_pipeline_gives_the_hosts_latents_and_images() -> None:
    pipe = sdxl()
    before, picture = image(pipe), image(pipe, "pt")
    modules = [m for part in (pipe.unet, pipe.vae, pipe.text_encoder) for m in part.modules()]
    classes, processors = [type(m) for m in modules], list(pipe.unet.attn_processors.values())
    report = fastkernels.patch(pipe, ops=["attention_dense", "layer_norm", "quick_gelu", *DIFFUSION])
    # the UNet has 16 attention layers, the VAE two, each text encoder two, where quick_gelu is, too
    found = {(r.op, r.host_class): r.modules for r in report.active}
    assert found == {
        ("attention_dense", "AttnProcessor2_0"): 18, ("attention_dense", "CLIPAttention"): 4,
        ("layer_norm", "nn.LayerNorm"): 34, ("geglu", "GEGLU"): 8,
        ("quick_gelu", "QuickGELUActivation"): 4, ("timestep_embedding", "Timesteps"): 2,
        ("group_norm", "ResnetBlock2D"): 18, ("group_norm", "nn.GroupNorm"): 45, ("upsample_conv", "Upsample2D"): 2,
        ("gated_residual", "BasicTransformerBlock"): 8,
    }  # fmt: skip
    torch.testing.assert_close(image(pipe), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    calls = {r.host_class: (r.calls, r.proof) for r in report.refresh().active}
    assert calls["AttnProcessor2_0"] == (32, "calls")
    assert calls["CLIPAttention"] == calls["QuickGELUActivation"] == (0, "uncalled")  # given encoded
    assert calls["GEGLU"] == (16, "calls") and calls["Timesteps"] == (4, "calls")
    torch.testing.assert_close(image(pipe, "pt"), picture, rtol=1e-3, atol=1e-3)
    report.undo()
    assert [type(m) for m in modules] == classes
    assert all(a is b for a, b in zip(pipe.unet.attn_processors.values(), processors, strict=True))
    assert torch.equal(image(pipe), before) and "_fastkernels_patched" not in vars(pipe)


def test_flux_pipeline_gives_the_hosts_images() -> None:
    pipe = flux_pipeline()
    before = flux_image(pipe)
    classes = [
        type(m)
        for part in pipe.components.values()
        if isinstance(part, torch.nn.Module)
        for m in part.modules()
    ]
    with fastkernels.patch(
        pipe, ops=["attention_dense", "t5_layer_norm", "gelu", "quick_gelu", *DIFFUSION]
    ) as report:
        torch.testing.assert_close(flux_image(pipe), before, rtol=1e-3, atol=1e-3)
        rows = {(r.op, r.host_class): (r.modules, r.calls) for r in report.refresh().active}
        assert report.verified and not any(r.fallbacks for r in report.active)
    # two steps: 2 modulated norms of the first block, and 3 attention layers with queries and keys
    assert rows[("ada_layer_norm", "AdaLayerNormZero")] == (2, 4)
    assert rows[("attention_dense", "FluxAttnProcessor")] == (3, 6)
    # two steps: 4 gated residuals in the block of two streams, 1 in each of the two others
    assert rows[("gated_residual", "FluxTransformerBlock")] == (1, 8)
    assert rows[("gated_residual", "FluxSingleTransformerBlock")] == (2, 4)
    assert rows[("timestep_embedding", "Timesteps")] == (1, 4)
    assert {op for op, _ in rows} == {
        "attention_dense", "ada_layer_norm", "gated_residual", "timestep_embedding", "group_norm", "gelu", "quick_gelu",
        "t5_layer_norm", "upsample_conv",
    }  # fmt: skip
    after = [
        type(m)
        for part in pipe.components.values()
        if isinstance(part, torch.nn.Module)
        for m in part.modules()
    ]
    assert after == classes and torch.equal(flux_image(pipe), before)


def test_flux_fuses_norm_and_rope_of_heads() -> None:
    model = flux()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
            norm.weight.normal_(1.0, 0.3)
    run = step(model)
    before, fused = run(), OPS["qk_norm_rope"]
    for ops, calls in ((["attention_dense"], 6), (["attention_dense", "rms_norm"], 0)):
        with fastkernels.patch(model, ops=ops):
            fused.reset()
            torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4)
            assert fused.calls == calls, "explicitly requested norms run as such"
    hook = model.transformer_blocks[0].attn.norm_q.register_forward_hook(lambda m, a, y: 2 * y)
    doubled = run()
    with fastkernels.patch(model, ops="attention_dense"):
        fused.reset()
        torch.testing.assert_close(run(), doubled, rtol=1e-4, atol=1e-4)
        assert fused.calls == 5
    hook.remove()


@pytest.mark.parametrize("part", ["flux", pytest.param("unet", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_models_compile_whole_with_the_diffusion_ops(part: str) -> None:
    if part == "flux":
        model: Any = flux()
        run = step(model)
    else:
        model = sdxl().unet
        given = {"text_embeds": torch.ones(1, 32), "time_ids": torch.ones(1, 6)}
        latents, texts = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 64)

        def run() -> torch.Tensor:
            with torch.no_grad():
                return model(latents, torch.tensor(7.0), texts, added_cond_kwargs=given).sample

    before = run()
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(), before, rtol=1e-3, atol=1e-3)
    with fastkernels.patch(model, ops=["attention_dense", *DIFFUSION]) as report:
        torch.testing.assert_close(run(), before, rtol=1e-3, atol=1e-3)
        assert report.refresh().verified
    torch.testing.assert_close(run(), before, rtol=1e-3, atol=1e-3)


def test_modulation_in_a_wider_dtype_is_the_hosts() -> None:
    norm = diffusers.models.normalization.AdaLayerNormZeroSingle(16)
    x, emb = torch.randn(2, 5, 16), torch.randn(2, 16)
    model = torch.nn.Sequential(norm)
    with torch.no_grad():
        before = norm(x.bfloat16(), emb)
        with fastkernels.patch(model, ops="ada_layer_norm") as report:
            after = norm(x.bfloat16(), emb)
            (row,) = report.refresh().active
    assert row.fallbacks == {"x is torch.bfloat16, its scale torch.float32": 1} and row.calls == 0
    assert after[0].dtype == torch.float32 and all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_channels": 16},
        {"temb_channels": None},
        {"temb_channels": None, "time_embedding_norm": "group"},
        {"skip_time_act": True},
    ],
    ids=["same", "shortcut", "without_time", "group", "skip_time_act"],
)
def test_resnet_block_equals_the_hosts(options: dict[str, Any]) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    from fastkernels.overrides.diffusion.diffusers import DiffusersResnetBlock2D

    theirs = ResnetBlock2D(in_channels=8, groups=4, **{"temb_channels": 12, **options})
    ours = DiffusersResnetBlock2D(in_channels=8, groups=4, **{"temb_channels": 12, **options})
    ours.load_state_dict(theirs.state_dict())
    x, temb = torch.randn(2, 8, 6, 5), torch.randn(2, 12)
    with torch.no_grad():
        for image in (x, x.to(memory_format=torch.channels_last)):
            for given in (temb,) if theirs.time_emb_proj is not None else (None,):
                torch.testing.assert_close(ours(image, given), theirs(image, given))
    assert DiffusersResnetBlock2D.supports(theirs) is None


@pytest.mark.parametrize(
    "options",
    [
        {"cross_attention_dim": 40}, {}, {"double_self_attention": True}, {"attention_bias": True, "ff_inner_dim": 50},
        {"cross_attention_dim": 40, "only_cross_attention": True},
        {"cross_attention_dim": 40, "norm_elementwise_affine": False},
    ],
)  # fmt: skip
def test_transformer_block_equals_the_hosts(options: dict[str, Any]) -> None:
    from diffusers.models.attention import BasicTransformerBlock

    from fastkernels.overrides.diffusion.diffusers_unet import DiffusersBasicTransformerBlock

    theirs, ours = (
        cls(24, 3, 8, **options) for cls in (BasicTransformerBlock, DiffusersBasicTransformerBlock)
    )
    ours.load_state_dict(theirs.state_dict())
    text = torch.randn(2, 4, 40) if "cross_attention_dim" in options else None
    x, mask = torch.randn(2, 5, 24), torch.zeros(2, 1, 5).index_fill(2, torch.tensor([3]), -1e4)
    masks = {} if options.get("only_cross_attention") else {"attention_mask": mask}
    with torch.no_grad():
        given = {"encoder_hidden_states": text, **masks}
        torch.testing.assert_close(ours(x, **given), theirs(x, **given))
    assert DiffusersBasicTransformerBlock.supports(theirs) is None


def test_transformer_blocks_that_stay_with_the_host() -> None:
    from diffusers.models.attention import BasicTransformerBlock

    other = BasicTransformerBlock(24, 3, 8, norm_type="ada_norm_single")
    block = BasicTransformerBlock(24, 3, 8, cross_attention_dim=40)
    x, text = torch.randn(2, 6, 24), torch.randn(2, 4, 40)
    before = block(x, encoder_hidden_states=text)
    with fastkernels.patch(torch.nn.Sequential(block, other), ops="gated_residual") as report:
        row = next(r for r in report.rows if r.host_class == "BasicTransformerBlock")
        assert (row.modules, row.reason) == (
            1,
            "1 unsupported: its norms are ada_norm_single, not layer_norm",
        )
        block.set_chunk_feed_forward(3, 1)  # after the patch
        torch.testing.assert_close(block(x, encoder_hidden_states=text), before)


@pytest.mark.parametrize(("tokens", "inner"), [(150, 96), (20, 96), (150, 72)])
def test_compiled_geglu_is_in_the_kernel_of_its_product(tokens: int, inner: int) -> None:
    """Of many tokens, and halves that are whole blocks of columns."""
    from diffusers.models.attention import FeedForward

    from fastkernels.overrides.linear.modules import mlp

    ff, x, seen = FeedForward(64, inner_dim=inner).bfloat16(), torch.randn(2, tokens, 64).bfloat16(), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        after = torch.compile(lambda x: mlp(ff, x), backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(after, ff(x), rtol=2e-2, atol=1e-2)
    torch.compiler.reset()
    assert ("fastkernels.linear_geglu.default" in seen) == (tokens > 100 and inner == 96)


def test_wide_head_of_a_vae_reaches_the_op() -> None:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(**{**VAE, "block_out_channels": [16, 288]}).eval()
    latents, sizes, op = torch.randn(1, 4, 5, 3), [], OPS["attention_dense"]

    def attend(q: torch.Tensor, k: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append((q.shape, k.shape))
        return reference(q, k, *args)

    with torch.no_grad():
        for memory in (torch.contiguous_format, torch.channels_last):
            vae.to(memory_format=memory)
            before = vae.decode(latents).sample
            with fastkernels.patch(vae, ops=["attention_dense", *DIFFUSION]) as report:
                op.set_candidate(attend)
                torch.testing.assert_close(vae.decode(latents).sample, before, rtol=1e-4, atol=1e-4)
                op.set_candidate(None)
                rows = {r.host_class: (r.calls, r.fallbacks) for r in report.refresh().active}
            assert sizes.pop() == ((1, 15, 1, 288), (1, 15, 1, 288)) and not sizes
            assert rows["AttnProcessor2_0"] == rows["Upsample2D"] == (1, {})


def test_resampling_blocks_stay_with_the_host() -> None:
    block = diffusers.models.resnet.ResnetBlock2D(in_channels=8, groups=4, up=True)
    with fastkernels.patch(torch.nn.Sequential(block), ops="group_norm") as report:
        rows = {r.host_class: (r.modules, r.reason) for r in report.rows}
        assert rows["ResnetBlock2D"] == (0, "1 unsupported: it changes the image's size")
        assert rows["nn.GroupNorm"][0] == 2


def test_text_encoders_are_patched_as_in_transformers() -> None:
    pipe = sdxl()
    with fastkernels.patch(pipe) as report, torch.no_grad():
        pipe.text_encoder(torch.arange(1, 8)[None])
        rows = {r.op: r for r in report.refresh().active}
        assert rows["quick_gelu"].host_class == "QuickGELUActivation" and rows["quick_gelu"].calls == 2


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("fused", [False, True])
def test_flux_gives_the_hosts_outputs(dtype: torch.dtype, atol: float, fused: bool) -> None:
    model = flux().to(dtype)
    if fused:
        model.fuse_qkv_projections()
    run = step(model)
    before = run()
    with fastkernels.patch(model, ops=["attention_dense", "rms_norm", "layer_norm", "gelu"]) as report:
        torch.testing.assert_close(run(), before, atol=atol, rtol=atol)
        rows = {r.host_class: (r.op, r.modules) for r in report.refresh().active}
        assert rows["FluxAttnProcessor"] == ("attention_dense", 3) and report.verified
        assert rows["GELU"] == ("gelu", 2) and rows["nn.RMSNorm"] == ("rms_norm", 8)
    assert torch.equal(run(), before)


def test_another_attention_backend_is_the_hosts() -> None:
    model = flux()
    run = step(model)
    before = run()
    with fastkernels.patch(model, ops="attention_dense") as report:
        model.set_attention_backend("_native_math")
        torch.testing.assert_close(run(), before)
        (row,) = report.refresh().active
        assert row.calls == 0 and row.fallbacks == {"set_attention_backend('_native_math')": 3}
    model.set_attention_backend("_native_math")  # undo has put back the processors of before the patch
    with pytest.raises(PatchError, match=r"3 unsupported: set_attention_backend\('_native_math'\)"):
        fastkernels.patch(model, ops="attention_dense")


class Doubled(AttnProcessor2_0):
    """A user's processor."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().__call__(*args, **kwargs)


def test_processors_of_users_stay() -> None:
    pipe = sdxl()
    pipe.unet.set_attn_processor(Doubled())
    before = image(pipe)
    with fastkernels.patch(pipe, ops=["attention_dense", "layer_norm"]) as report:
        assert {r.modules for r in report.active if r.op == "attention_dense"} == {2, 4}  # VAE, text encoders
        assert any(str(Doubled.__qualname__) in r.reason for r in report.rows)
        torch.testing.assert_close(image(pipe), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


def test_processors_set_later_stay_and_those_of_our_class_go() -> None:
    """An IP-Adapter sets modules as processors, and makes the others again by calling their class."""
    model = sdxl().unet
    report = fastkernels.patch(model, ops=["attention_dense", "layer_norm"])
    adapter, made = torch.nn.Identity(), {}
    for name, processor in model.attn_processors.items():
        made[name] = type(processor)() if "attn1" in name else adapter
        assert type(pickle.loads(pickle.dumps(processor))) is AttnProcessor2_0 is not type(processor)
    model.set_attn_processor(made)
    report.undo()
    for name, processor in model.attn_processors.items():
        assert type(processor) is AttnProcessor2_0 if "attn1" in name else processor is adapter


def test_processors_put_back_after_undo_are_the_hosts() -> None:
    model = diffusers.UNet2DConditionModel(**UNET)
    report = fastkernels.patch(model, ops=["attention_dense"])
    model.fuse_qkv_projections()  # keeps the processors
    report.undo()
    model.unfuse_qkv_projections()
    assert {type(p) for p in model.attn_processors.values()} == {AttnProcessor2_0}
    with fastkernels.patch(model, ops=["attention_dense"]):
        for processor in model.attn_processors.values():
            processor.chosen = "later"
    assert {(type(p), p.chosen) for p in model.attn_processors.values()} == {(AttnProcessor2_0, "later")}


@pytest.mark.parametrize("first_calls", [False, True])
def test_layers_with_our_processor_compile_whole(first_calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' layers read the signature of their processor's __call__, also while they are traced."""
    monkeypatch.setenv("FASTKERNELS_VERIFY", str(int(first_calls)))
    layer = diffusers.models.attention_processor.Attention(query_dim=8, heads=2, dim_head=4)
    x = torch.randn(1, 5, 8)
    with torch.no_grad(), fastkernels.patch(layer, ops=None if first_calls else ["attention_dense"]):
        assert type(layer.processor) is not AttnProcessor2_0
        expected = AttnProcessor2_0()(layer, x)
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)


def test_parts_of_a_patched_pipeline_are_refused() -> None:
    pipe = sdxl()
    with fastkernels.patch(pipe, ops="layer_norm"):
        for other in (pipe.unet, diffusers.StableDiffusionXLImg2ImgPipeline(**pipe.components)):
            with pytest.raises(PatchError, match=r"modules \(.*norm1, .*\) are patched already"):
                fastkernels.patch(other, ops="layer_norm")


def test_pipelines_built_later_are_patched_until_undo() -> None:
    theirs = diffusers.DiffusionPipeline.register_modules
    with fastkernels.patch("diffusers", ops="attention_dense") as report:
        assert {r.state for r in report.rows} == {"planned"}
        pipe = sdxl()
        inside = image(pipe)
        assert {r.modules for r in report.refresh().active} == {18, 4}
    assert diffusers.DiffusionPipeline.register_modules is theirs
    assert torch.allclose(image(pipe), inside, rtol=1e-4, atol=0.1)
    assert not any(hasattr(type(p), "fastkernels") for p in pipe.unet.attn_processors.values())


def test_models_of_two_pipelines_are_patched_once_and_undone(caplog: pytest.LogCaptureFixture) -> None:
    """The second pipeline has a model of its own, and outlives the first."""

    def ours(model: Any) -> bool:
        return any(hasattr(type(p), "fastkernels") for p in model.attn_processors.values())

    with fastkernels.patch("diffusers", ops="attention_dense") as report:
        first = sdxl()
        second = diffusers.StableDiffusionXLPipeline.from_pipe(first)
        unet = diffusers.UNet2DConditionModel(**UNET)
        third = diffusers.StableDiffusionXLPipeline(**{**first.components, "unet": unet})
        assert ours(second.unet) and ours(third.unet) and "stays as it is" not in caplog.text
        del first
        gc.collect()
        assert [r.modules for r in report.refresh().active] == [16]  # the first one's rows are gone
    assert not ours(second.unet) and not ours(third.unet) and not ours(second.vae)
    assert not any(hasattr(type(m), "fastkernels") for m in second.text_encoder.modules())
