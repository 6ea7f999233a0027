"""Images in prompts: equal to transformers however a step is composed, and shared in the caches by content."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fk_bench.info.verified import LOGITS
from support.rerun import install
from support.tiny import IMAGE, VLMS, make_tiny_vlm
from support.vlm_oracle import VlmOracle, image, prompt

from fastkernels import LLM, SamplingParams
from fastkernels.core.dispatch import OPS
from fastkernels.engine.execution.forward.media_features import MediaFeatures
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CPU: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_blocks": 100}
WIDE, HIGH, SQUARE = image(0, 40, 24), image(1, 24, 56), image(2, 32, 32)  # 15, 21 and 16 tokens
PROMPTS: list[tuple[Any, ...]] = [
    (f"One {IMAGE} seen", WIDE),
    ("No image at all",),
    (f"{IMAGE}{IMAGE} both", HIGH, WIDE),
    (f"A {IMAGE} B {IMAGE} C {IMAGE}", SQUARE, SQUARE, HIGH),
]


def models_of(fast: Collection[str]) -> pytest.MarkDecorator:
    """All models, of which only these are fast."""
    params = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in VLMS]
    return pytest.mark.parametrize("oracle", params, indirect=True)


@pytest.fixture(scope="module", params=VLMS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VlmOracle:
    return VlmOracle(make_tiny_vlm(tmp_path_factory.mktemp("vlm") / request.param, request.param))


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> VlmOracle:
    return VlmOracle(make_tiny_vlm(tmp_path_factory.mktemp("media") / "qwen2_vl", "qwen2_vl"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """The grids of each step that encodes media."""
    grids: list[list[tuple[int, int, int]]] = []
    prepare = MediaFeatures.prepare

    def noted(self: MediaFeatures, step: Any) -> Any:
        if step.encodes:
            grids.append([item.grid for item in step.encodes])
        return prepare(self, step)

    monkeypatch.setattr(MediaFeatures, "prepare", noted)
    return grids


def generate(llm: LLM, prompts: list[tuple[Any, ...]], params: Any = GREEDY) -> list[Any]:
    return llm.generate([prompt(*p) for p in prompts], params, use_tqdm=False)


def check(oracle: VlmOracle, llm: LLM, prompts: list[tuple[Any, ...]] = PROMPTS, n: int = 12) -> list[Any]:
    outputs = generate(llm, prompts, replace(GREEDY, max_tokens=n))
    got = [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]
    assert got == [oracle.greedy(*p, n=n) for p in prompts]
    return outputs


@models_of({"qwen2_vl", "qwen3_vl"})
def test_prompts_with_images_equal_transformers(oracle: VlmOracle) -> None:
    """One request at a time, then requests with and without images in the same steps."""
    llm = LLM(str(oracle.folder), **CPU)
    for one in PROMPTS:
        check(oracle, llm, [one])
    llm.llm_engine.reset_prefix_cache()
    outputs = check(oracle, llm)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == len(outputs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@models_of({"qwen3_vl"})
def test_graphs_with_images_equal_transformers(oracle: VlmOracle, device: str) -> None:
    """Steps without media run as graphs, behind images and in chunks of text next to other requests."""
    more = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    llm = LLM(str(oracle.folder), **{**CPU, "device": device}, **more)
    runner: Any = llm.llm_engine.runner
    if device == "cpu":
        install(runner)
    check(oracle, llm)
    check(oracle, llm, [(f"{IMAGE} seen", WIDE), ("a text of more tokens than a step has, which are 32",)])
    assert runner.graphs.replays["decode"] > 20 and runner.graphs.replays["mixed"] > 0


def test_logits_with_images_equal_transformers(oracle: VlmOracle) -> None:
    """Log-probabilities of the prompt's tokens; those of other images differ."""
    llm = LLM(str(oracle.folder), **CPU)
    for text, *images in PROMPTS:
        output = generate(llm, [(text, *images)], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        want, ids = oracle.logprobs(text, *images), output.prompt_token_ids
        got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        assert got == pytest.approx(want[range(len(ids) - 1), ids[1:]].tolist(), abs=LOGITS, rel=LOGITS)
    other = oracle.logprobs(PROMPTS[0][0], image(9, 40, 24))
    assert (other[-1] - oracle.logprobs(*PROMPTS[0])[-1]).abs().max() > 0.01


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_small_steps_keep_tokens(qwen2_vl: VlmOracle, overlap: bool) -> None:
    """Images are cut by chunks, preempted and found in the prefix cache."""
    llm = LLM(
        str(qwen2_vl.folder), device="cpu", num_blocks=14, block_size=8, max_num_seqs=4, max_num_batched_tokens=11,
        max_model_len=96, async_scheduling=overlap,
    )  # fmt: skip
    for _ in range(2):
        check(qwen2_vl, llm, [(f"{i} {IMAGE} seen", WIDE) for i in range(3)], n=30)
        check(qwen2_vl, llm, PROMPTS[1:])
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0


@models_of({"qwen3_vl"})
def test_fused_rotation_takes_positions_of_axes(oracle: VlmOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where one launch rotates and stores keys."""
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "rope_store_kvcache:reference")
    op = OPS["rope_store_kvcache"]
    op.reset()
    calls = op.calls
    check(oracle, LLM(str(oracle.folder), **CPU), [PROMPTS[0], PROMPTS[2]])
    assert op.calls > calls
    monkeypatch.undo()
    op.reset()


@pytest.mark.parametrize("tokens", [1, 16])
def test_last_token_may_be_an_image(qwen2_vl: VlmOracle, tokens: int) -> None:
    """Its features may be of steps of their own. The text goes on behind the largest position of the image."""
    text = "x<|vision_start|><|image_pad|>"
    llm = LLM(
        str(qwen2_vl.folder),
        max_num_batched_tokens=tokens,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **CPU,
    )
    check(qwen2_vl, llm, [(text, HIGH)])


def test_equal_images_share_blocks_and_features(qwen2_vl: VlmOracle, encoded: list[Any]) -> None:
    llm = LLM(str(qwen2_vl.folder), block_size=4, **CPU)
    text = f"12345678{IMAGE} and then"
    first = check(qwen2_vl, llm, [(text, SQUARE)])[0]
    again = check(qwen2_vl, llm, [(text, SQUARE.copy())])[0]
    full = (len(first.prompt_token_ids) - 1) // 4 * 4
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, full)
    assert encoded == [[(1, 8, 8)]]
    other = check(qwen2_vl, llm, [(text, image(7, 32, 32))])[0]
    assert other.num_cached_tokens == 8  # the text before it
    # Behind other text, the features are known and the blocks are not
    moved = check(qwen2_vl, llm, [(f"1{IMAGE}", SQUARE)])[0]
    assert moved.num_cached_tokens == 0 and len(encoded) == 2
    shifted = check(qwen2_vl, llm, [(f"12345678{IMAGE} and then", SQUARE)])[0]
    assert shifted.num_cached_tokens == full


def test_salts_separate_equal_images(qwen2_vl: VlmOracle) -> None:
    engine = LLM(str(qwen2_vl.folder), block_size=4, **CPU).llm_engine
    for salt, cached in (("a", 0), ("a", 20), ("b", 0)):
        request = engine.make_request(salt, prompt(f"{IMAGE}abc", SQUARE), GREEDY, cache_salt=salt)
        engine.add_request(salt, request)
        while engine.has_unfinished_requests():
            engine.step()
        assert request.sequences[0].num_cached_tokens == cached


def test_images_of_a_step_are_encoded_together(qwen2_vl: VlmOracle, encoded: list[Any]) -> None:
    """Equal ones once, and no more than a step has tokens for."""
    llm = LLM(str(qwen2_vl.folder), **CPU)
    check(qwen2_vl, llm, [PROMPTS[0], PROMPTS[3], PROMPTS[2]])
    assert encoded == [[(1, 6, 10), (1, 8, 8), (1, 14, 6)]]
    encoded.clear()
    llm = LLM(str(qwen2_vl.folder), max_num_batched_tokens=32, max_num_seqs=8, **CPU)
    check(qwen2_vl, llm, [PROMPTS[0], PROMPTS[3], PROMPTS[2]])
    assert sorted(itertools.chain(*encoded)) == [(1, 6, 10), (1, 8, 8), (1, 14, 6)]
    assert all(len(step) == 1 or sum(r * c // 4 for _, r, c in step) <= 32 for step in encoded)


def test_features_make_room(qwen2_vl: VlmOracle, encoded: list[Any]) -> None:
    """With room for one image of two prompts, each prompt encodes its own; later ones encode them again."""
    llm = LLM(
        str(qwen2_vl.folder), enable_prefix_caching=False, max_num_batched_tokens=28, max_num_seqs=2,
        device="cpu", num_blocks=60, max_model_len=48,
    )  # fmt: skip
    engine = llm.llm_engine
    engine.scheduler.media.capacity = 21
    for _ in range(2):
        check(qwen2_vl, llm, [PROMPTS[0], (f"{IMAGE}", HIGH)])
    assert len(encoded) == 4
    assert engine.scheduler.media.used == 21 == sum(map(len, engine.runner.features._features.values()))
    engine.reset_prefix_cache()
    assert engine.scheduler.media.used == 0
    check(qwen2_vl, llm, [PROMPTS[0]])  # the step that encodes it drops what the reset has dropped
    assert sum(map(len, engine.runner.features._features.values())) == 15


def test_failed_step_leaves_no_features(qwen2_vl: VlmOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(qwen2_vl.folder), **CPU)
    model = llm.llm_engine.runner.model

    def fail(*_: Any) -> None:
        raise RuntimeError("broken encoder")

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "encode", fail)
        with pytest.raises(RuntimeError, match="broken encoder"):
            generate(llm, PROMPTS)
    check(qwen2_vl, llm)


def test_sequences_of_one_prompt_share_its_image(qwen2_vl: VlmOracle, encoded: list[Any]) -> None:
    llm = LLM(str(qwen2_vl.folder), **CPU)
    output = generate(llm, [PROMPTS[0]], SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8))[0]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1 and encoded == [[(1, 6, 10)]]


@pytest.mark.slow
def test_ranks_compute_the_same(qwen2_vl: VlmOracle) -> None:
    with LLM(str(qwen2_vl.folder), tensor_parallel_size=2, **CPU) as llm:
        check(qwen2_vl, llm)


def test_text_needs_no_work_for_media(qwen2_vl: VlmOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without images carry nothing, also behind requests that had some."""
    llm = LLM(str(qwen2_vl.folder), **CPU)
    check(qwen2_vl, llm, [PROMPTS[0]])
    engine = llm.llm_engine
    steps: list[Any] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda step: steps.append(step.media) or launch(step))
    for name in ("hold", "release", "take"):
        monkeypatch.setattr(engine.scheduler.media, name, None)
    check(qwen2_vl, llm, [PROMPTS[1], ("other",)])
    assert len(steps) == 12 and set(steps) == {None}
    assert not engine.runner.batch._shifted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (prompt("no place", WIDE), "0 placeholders of images, and 1 images are given"),
        (prompt(f"{IMAGE}{IMAGE}", WIDE), "2 placeholders of images, and 1 images are given"),
        (prompt(IMAGE, "cat.png"), "image 0 of the prompt cannot be read: 'cat.png': No such file or directory"),
        (prompt(IMAGE, 3), "image 0 of the prompt must be a PIL image, or the bytes or path of a file, got int"),
        (prompt(IMAGE * 4, *[WIDE] * 4), "the prompt has 4 images, and at most 3 are allowed"),
        ({"prompt": IMAGE, "multi_modal_data": {"audio": WIDE}}, "media of kind 'audio', and this model takes image"),
        ({"prompt": IMAGE, "multi_modal_data": WIDE}, "multi_modal_data must be a dict"),
        ({"multi_modal_data": {"image": WIDE}}, "or a dict with 'prompt' or 'prompt_token_ids'"),
        (prompt(IMAGE, image(0, 1, 300)), "image 0 of 1 x 300 pixels cannot be processed"),
        (prompt(IMAGE * 3, *[image(0, 64, 64)] * 3 + []), None),
    ],
)  # fmt: skip
def test_bad_media_are_refused(qwen2_vl: VlmOracle, given: Any, message: str | None) -> None:
    llm = LLM(str(qwen2_vl.folder), limit_mm_per_prompt={"image": 3}, **CPU)
    if message is None:
        assert len(llm.generate(given, GREEDY, use_tqdm=False)[0].prompt_token_ids) == 3 * 66
        return
    with pytest.raises(ValueError, match=message):
        llm.generate(given, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_processor_is_needed_for_weights_and_images(qwen2_vl: VlmOracle, tmp_path: Path) -> None:
    """Dummy weights run texts without one, as benchmarks do."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((qwen2_vl.folder / name).read_bytes())
    with pytest.raises(
        CheckpointError, match=r"the processor of .* \(preprocessor_config.json\) cannot be used"
    ):
        LLM(str(tmp_path), **CPU)
    llm = LLM(str(tmp_path), load_format="dummy", **CPU)
    assert len(llm.generate("text", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        generate(llm, [PROMPTS[0]])


def test_truncation_of_media_is_refused(qwen2_vl: VlmOracle) -> None:
    llm = LLM(str(qwen2_vl.folder), **CPU)
    with pytest.raises(ValueError, match="truncate_prompt_tokens is not possible for a prompt with media"):
        generate(llm, [PROMPTS[0]], SamplingParams(truncate_prompt_tokens=9))


def test_image_for_a_text_model_is_refused(tiny: Path) -> None:
    llm = LLM(str(tiny), device="cpu", max_model_len=64, num_blocks=10)
    with pytest.raises(ValueError, match=r"the prompt has media \(image\), and .* takes text only"):
        llm.generate(prompt("a", WIDE), GREEDY)
