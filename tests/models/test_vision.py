"""Encoders of images and videos against transformers on tiny random checkpoints in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fk_bench.info.verified import ENCODINGS
from PIL import Image
from support.tiny import ENCODERS, make_tiny_encoder

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.core.registry import UnknownName
from fastkernels.engine.inputs.images import _shorter_side, decode
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import model_class, models
from fastkernels.models.common.interfaces.detector import Detector
from fastkernels.models.common.interfaces.segmenter import ImageSegmenter

SIZES = ((50, 40), (64, 24), (9, 70), (50, 40))  # width, height


def pictures(sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def theirs(folder: Path) -> Any:
    """transformers' class."""
    return getattr(transformers, architecture(folder))


def prompts_for(folder: Path) -> list[Any]:
    """Images of several sizes; for a model of videos, clips of several lengths and an image."""
    if not architecture(folder).startswith("VJEPA2"):
        return pictures()
    frames = pictures(((50, 40),) * 6 + ((33, 64),) * 2)
    return [frames[:4], frames[6:], frames[0], frames[4:6], frames[:4]]


@torch.no_grad()
def expected(folder: Path, given: Any, model: Any = None) -> dict[str, np.ndarray]:
    """Normalized vector, hidden states without padding and logits of transformers' own model, as far as it has them."""
    name = architecture(folder)
    model = model or theirs(folder).from_pretrained(folder).eval()
    if name.startswith("VJEPA2"):
        inputs = transformers.AutoVideoProcessor.from_pretrained(folder)(given, return_tensors="pt")
        base = getattr(model, "vjepa2", model)
        hidden = base(**inputs, skip_predictor=True).last_hidden_state
        vector = hidden.mean(1) if base is model else model.pooler(hidden)
    else:
        inputs = transformers.AutoImageProcessor.from_pretrained(folder)(images=given, return_tensors="pt")
        out = getattr(model, "vision_model", getattr(model, "swinv2", model))(**inputs)
        hidden, vector = out.last_hidden_state, out.pooler_output
    mask = inputs.get("pixel_attention_mask", torch.ones(hidden.shape[:2]))[0].bool()
    found = {"embed": torch.nn.functional.normalize(vector[0], dim=0), "token_embed": hidden[0, mask]}
    if name.endswith("Classification"):
        found["classify"] = model(**inputs).logits[0].softmax(-1)
    return {task: tensor.numpy() for task, tensor in found.items()}


@pytest.fixture(scope="module", params=ENCODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoders") / request.param, request.param)


def test_encoder_equals_transformers(folder: Path) -> None:
    """In a batch of several sizes, and one by one."""
    images, llm, before = prompts_for(folder), LLM(str(folder), device="cpu"), counters()
    wanted = [expected(folder, image) for image in images]
    for task in wanted[0]:
        together = llm.encode(images, task, use_tqdm=False)
        alone = [llm.encode([image], task, use_tqdm=False)[0] for image in images]
        for found in (together, alone):
            for output, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(output.outputs.data, want[task], atol=ENCODINGS)
                # SwinV2 merges its 13 x 10 patches twice
                patches = 13 * 10 if architecture(folder).startswith("Swinv2") else len(want["token_embed"])
                assert output.num_tokens == patches
    different = {tuple(np.round(w["embed"], 3)) for w in wanted[:-1]}
    assert len(different) == len(images) - 1
    attention = "window_attention" if architecture(folder).startswith("Swinv2") else "attention_dense"
    for op in (attention, "layer_norm", "linear"):
        assert counters()[op]["calls"] > before[op]["calls"], op


# Other values of fields that some architecture has
FIELDS: dict[str, Any] = {
    "apply_layernorm": False, "attention_bias": False, "attention_dropout": 0.3, "drop_path_rate": 0.5,
    "encoder_stride": 8, "frames_per_clip": 8, "head_dim": 8, "hidden_act": "relu",
    "hidden_activation": "relu", "hidden_dropout_prob": 0.3,
    "is_decoder": True, "key_bias": True, "layer_norm_eps": 0.1, "layerscale_value": 0.5, "mlp_bias": False,
    "mlp_ratio": 2.0, "num_attention_heads": 2, "num_key_value_heads": 1, "num_pooler_layers": 2,
    "num_register_tokens": 2, "pos_embed_jitter": 1.5, "pos_embed_rescale": 3.0, "pos_embed_shift": 0.2,
    "pred_num_hidden_layers": 1, "pretrained_window_sizes": [1, 1, 1, 1], "proj_bias": False, "qk_norm": True,
    "qkv_bias": False, "query_bias": False, "rms_norm_eps": 0.1, "rope_theta": 50.0, "sliding_window": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "tubelet_size": 1, "use_SiLU": True,
    "use_absolute_embeddings": True, "use_bidirectional_attention": True, "use_gated_mlp": True, "use_mask_token": True,
    "use_swiglu_ffn": True, "value_bias": False, "vision_use_head": False, "wide_SiLU": True, "window_size": 2,
}  # fmt: skip


def changed(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, the config with one field set) for the config and for those in it."""
    for name, value in FIELDS.items():
        if raw.get(name, name) != value:
            yield name, {**raw, name: value}
    for own in (name for name, value in raw.items() if name.endswith("_config") and isinstance(value, dict)):
        yield from ((name, {**raw, own: made}) for name, made in changed(raw[own]))


def built(folder: Path, state: dict[str, torch.Tensor]) -> Any:
    """transformers' model of config.json with these weights; None if it fails, or has other parameters."""
    try:
        model = theirs(folder)(transformers.AutoConfig.from_pretrained(folder)).eval()
        found = model.load_state_dict(state, strict=False)
    except Exception:  # of any kind: transformers has no common one
        return None
    return None if found.missing_keys or found.unexpected_keys else model


@pytest.mark.slow
def test_fields_mean_what_they_mean_in_transformers(folder: Path, tmp_path: Path) -> None:
    """Each is ignored as there, applied as there, or refused by its name."""
    work, given, compared = Path(shutil.copytree(folder, tmp_path / "work")), prompts_for(folder)[0], 0
    raw, state = (
        json.loads((folder / "config.json").read_text()),
        theirs(folder).from_pretrained(folder).state_dict(),
    )
    tasks = list(expected(folder, given))
    wrong: list[str] = []
    for name, made in changed(raw):
        (work / "config.json").write_text(json.dumps(made))
        model = built(work, state)
        try:
            with LLM(str(work), device="cpu") as llm:
                found = {task: llm.encode([given], task, use_tqdm=False)[0].outputs.data for task in tasks}
        except (CheckpointError, Unsupported) as error:
            wrong += [f"{name}: refused by {error}"] if name not in str(error) and model is not None else []
            continue
        want = None if model is None else expected(work, given, model)
        if want is not None:
            compared += 1
            same = (np.allclose(found[task], want[task], atol=ENCODINGS) for task in tasks)
            wrong += [] if all(same) else [f"{name}: other values than transformers"]
    assert wrong == [] and compared > 20


def test_every_image_encoder_is_tested() -> None:
    every = [m.arch for m in models().values() if m.arch.runner == "Encode"]
    encoders = [arch for arch in every if arch.inputs != "tokens" and not arch.timm]
    names = {
        name
        for arch in encoders
        for name in arch.names
        if not issubclass(model_class(name), (Detector, ImageSegmenter))
    }
    assert names == {name for name, _ in ENCODERS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dinov3", "swinv2", "vjepa2_classes"])
def test_two_ranks_equal_one(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_encoder(tmp_path, kind)
    images = prompts_for(folder)
    one = LLM(str(folder), device="cpu").embed(images, use_tqdm=False)
    with LLM(str(folder), device="cpu", tensor_parallel_size=2) as llm:
        two = llm.embed(images, use_tqdm=False)
    np.testing.assert_allclose([o.outputs.data for o in two], [o.outputs.data for o in one], atol=1e-5)


def test_multiple_labels_have_independent_probabilities(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "siglip2_classes", problem_type="multi_label_classification")
    (output,) = LLM(str(folder), device="cpu").classify(pictures()[:1], use_tqdm=False)
    softmax = expected(folder, pictures()[0])["classify"]
    ratio = np.log(output.outputs.data / (1 - output.outputs.data)) - np.log(
        softmax
    )  # the same for all classes
    np.testing.assert_allclose(ratio, ratio[0], atol=1e-3)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    for kind in ("dinov3", "siglip2_vision", "swinv2", "vjepa2"):
        folder = make_tiny_encoder(tmp_path / kind, kind)
        given = prompts_for(folder)[:1]
        (output,) = LLM(str(folder), device="cpu", dtype="bfloat16").embed(given, use_tqdm=False)
        assert output.outputs.data @ expected(folder, given[0])["embed"] > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999), ("float16", 0.9999)])
def test_gpu_equals_the_cpu(folder: Path, dtype: str, least: float) -> None:
    """Images of one size (a batch) and of several (concatenated sequences)."""
    given = prompts_for(folder)
    wanted = LLM(str(folder), device="cpu").embed(given, use_tqdm=False)
    llm = LLM(str(folder), device="cuda", dtype=dtype)
    for images in (given, [given[0]] * 3):
        found = llm.embed(images, use_tqdm=False)
        for output, want in zip(found, wanted if len(images) > 3 else wanted[:1] * 3, strict=True):
            assert output.outputs.data @ want.outputs.data > least


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("dinov3", {"hidden_size": 36, "num_attention_heads": 6}, "hidden_size=36 is not a multiple of four times"),
        ("dinov3", {"hidden_act": "tanh"}, "hidden_act='tanh' is not supported, only silu"),
        ("siglip2_vision", {"num_patches": 15}, "num_patches=15 is not a square"),
        ("swinv2", {"use_absolute_embeddings": True}, "use_absolute_embeddings=True is not supported"),
        ("swinv2", {"num_heads": [2, 4]}, r"num_heads=\[2, 4\] has fewer than 3 entries"),
        ("swinv2", {"num_heads": [2, 4, 5]}, "64 channels are no multiple of 5 heads"),
        ("swinv2", {"image_size": 8}, "image_size=8 leaves no token after 3 stages"),
        ("vjepa2", {"num_attention_heads": 8}, "hidden_size=56 is not a multiple of two times num_attention_heads=8"),
        ("vjepa2", {"patch_size": [8, 8]}, r"patch_size=\[8, 8\] is not supported"),
    ],
)  # fmt: skip
def test_unsupported_config_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    folder = make_tiny_encoder(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(Unsupported, match=message):
        LLM(str(folder), device="cpu", load_format="dummy")


def test_missing_bias_is_an_error_if_the_config_has_it(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "dinov3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "key_bias": True}))
    with pytest.raises(CheckpointError, match=r"keys missing from it: layer.0.attention.k_proj.bias"):
        LLM(str(folder), device="cpu")


def test_missing_processor_is_named(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "dinov3")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        LLM(str(folder), device="cpu")


def test_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "siglip_classes")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": {"height": 32, "width": 40}}))
    with pytest.raises(
        ValueError, match="has 40 x 32 pixels after the image processor, and this model takes 32 x 32"
    ):
        LLM(str(folder), device="cpu").embed(pictures()[:1], use_tqdm=False)


def test_bad_videos_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "vjepa2")
    llm, (frame, other, *_) = LLM(str(folder), device="cpu"), pictures()
    assert len(llm.embed({"prompt": "", "multi_modal_data": {"video": [frame] * 2}}, use_tqdm=False)) == 1
    for prompt, message in (
        ([frame] * 3, "the prompt has 3 frames, and this model takes one or a multiple of 2"),
        ([frame, other], r"frames of several sizes: \(50, 40\) and \(64, 24\)"),
        ([frame, "a"], "must be a list of PIL images or one such image, got list"),
        ("a text", "got str: this model takes videos"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed([prompt])
    with pytest.raises(ValueError, match="the prompt has 32 tokens, and the maximum input length is 31"):
        LLM(str(folder), device="cpu", max_model_len=31).embed([[frame] * 4])
    file = folder / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "crop_size": {"height": 40, "width": 40}}))
    with pytest.raises(ValueError, match=r"has frames of 40 x 40 pixels .* and this model takes 32 x 32"):
        LLM(str(folder), device="cpu").embed([[frame] * 2])
    file.unlink()
    with pytest.raises(
        CheckpointError, match=r"the video processor of .* \(video_preprocessor_config\.json\)"
    ):
        LLM(str(folder), device="cpu")


def test_bad_prompts_are_refused(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_encoder(tmp_path, "dinov3")), device="cpu", max_model_len=24)
    image = pictures()[0]
    assert len(llm.embed({"prompt": "", "multi_modal_data": {"image": image}}, use_tqdm=False)) == 1
    with pytest.raises(ValueError, match="must be a PIL image, got str: this model takes images"):
        llm.embed([image, "text"])
    with pytest.raises(ValueError, match="task 'classify' needs a model with a classifier"):
        llm.classify(image)
    with pytest.raises(ValueError, match="the prompt has 24 tokens, and the maximum input length is 23"):
        LLM(llm.llm_engine.config.model, device="cpu", max_model_len=23).embed(image)
    with pytest.raises(ValueError, match="not an image of a known format; accepted are PNG, JPEG, WEBP"):
        decode(b"no image")
    file = Path(llm.llm_engine.config.model) / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": {"shortest_edge": 32}}))
    with pytest.raises(
        ValueError, match="1 x 70000 pixels, which this model resizes to 32 x 2240000, and at most"
    ):
        (narrow := LLM(str(file.parent), device="cpu")).embed(Image.new("RGB", (1, 70_000)))
    with pytest.raises(ValueError, match="an image of 0 x 5 pixels, cannot be processed"):
        narrow.embed(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize(
    ("size", "edge"),
    [({"shortest_edge": 224}, 256), ({"shortest_edge": 384}, 0)],
)
def test_squares_have_no_shorter_side(size: dict[str, int], edge: int) -> None:
    assert _shorter_side(transformers.ConvNextImageProcessor(size=size)) == edge


def test_unknown_encoder_is_refused_by_name(tmp_path: Path) -> None:
    """Its sizes, one for each stage, are not looked at."""
    fields = {"architectures": ["SwinModel"], "model_type": "swin", "num_heads": [2, 4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnknownName, match="unknown architecture 'SwinModel'"):
        LLM(str(tmp_path), device="cpu")
