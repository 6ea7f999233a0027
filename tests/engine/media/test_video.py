"""Videos in prompts: equal to transformers, from frames and from files, and refused by their headers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fk_bench.info.verified import LOGITS
from support.media_oracle import MediaOracle, clip, prompt, smooth, tone, video_file, wav
from support.tiny import IMAGE, OMNI, VLMS, make_tiny_omni, make_tiny_vlm, small_videos
from support.vlm_oracle import image

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.forward.media_features import MediaFeatures
from fastkernels.engine.inputs import videos
from fastkernels.models.common.layers.media import grid_offsets, mrope_positions

CPU: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_blocks": 100}
VIDEO = IMAGE.replace("image", "video")
WIDE = image(0, 40, 24)
CLIP, TALL = (
    clip(3, 6, 32, 80),
    clip(4, 3, 16, 56),
)  # 3 and 2 steps, the last one of a single frame. As high as long:
# behind a video, transformers goes on at its height or width, and its own description at the largest position
PROMPTS = [
    prompt(f"See {VIDEO} move", video=[CLIP]),
    prompt(f"{IMAGE} and {VIDEO}{VIDEO}", image=[WIDE], video=[TALL, CLIP]),
    prompt("nothing"),
]


def models_of(fast: set[str]) -> pytest.MarkDecorator:
    """All models, of which only these are fast."""
    params = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in VLMS]
    return pytest.mark.parametrize("kind", params)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The oracle of a kind of model."""
    made: dict[str, MediaOracle] = {}

    def find(kind: str) -> MediaOracle:
        if kind not in made:
            made[kind] = MediaOracle(make_tiny_vlm(tmp_path_factory.mktemp("video") / kind, kind))
        return made[kind]

    return find


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaOracle]:
    with small_videos():
        yield MediaOracle(make_tiny_omni(tmp_path_factory.mktemp("video") / "omni"))


def check(oracle: MediaOracle, llm: LLM, given: list[dict[str, Any]], n: int = 4) -> list[Any]:
    """Log-probabilities of the prompts' tokens and of greedy ones."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0)
    outputs = llm.generate(given, params, use_tqdm=False)
    for one, output in zip(given, outputs, strict=True):
        assert output.prompt_token_ids == oracle.prompt_ids(one)
        ids = output.outputs[0].token_ids
        want = oracle.logprobs(one, ids)[-n - 1 : -1]
        got = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        assert got == pytest.approx(want[range(n), ids].tolist(), abs=LOGITS, rel=LOGITS)
        assert got == pytest.approx(want.amax(-1).tolist(), abs=LOGITS, rel=LOGITS)
    return outputs


@models_of({"qwen2_5_vl", "qwen3_vl"})
def test_prompts_with_videos_equal_transformers(oracles: Any, kind: str) -> None:
    """In one batch, and again from the prefix cache in small steps."""
    oracle = oracles(kind)
    check(oracle, LLM(str(oracle.folder), **CPU), PROMPTS)
    llm = LLM(str(oracle.folder), max_num_batched_tokens=9, max_num_seqs=2, block_size=8, **CPU)
    check(oracle, llm, PROMPTS)
    again = check(oracle, llm, PROMPTS)
    assert all(o.num_cached_tokens for o in again[:2])


def test_steps_of_a_video_are_encoded_apart(oracles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With timestamps each step, whose features other videos share; otherwise up to 1,024 features at once."""
    found: list[Any] = []
    prepare = MediaFeatures.prepare

    def noted(self: MediaFeatures, step: Any) -> Any:
        found.extend((item.kind, item.grid) for item in step.encodes)
        return prepare(self, step)

    monkeypatch.setattr(MediaFeatures, "prepare", noted)
    for kind, grids in (("qwen3_vl", [(1, 10, 4)] * 3), ("qwen2_5_vl", [(3, 20, 8)])):
        oracle = oracles(kind)
        llm = LLM(str(oracle.folder), enable_prefix_caching=False, **CPU)
        check(oracle, llm, [PROMPTS[0]])
        assert found == [("video", grid) for grid in grids]
        check(oracle, llm, [prompt(f"again {VIDEO}", video=[np.concatenate([CLIP[:4], CLIP[:2]])])])
        assert len(found) == (3 if kind == "qwen3_vl" else 2)
        found.clear()


def test_long_videos_are_encoded_in_parts(omni: MediaOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same features as of all steps at once."""
    monkeypatch.setattr("fastkernels.engine.inputs.media.PART", 13)
    llm = LLM(str(omni.folder), **CPU)
    given = prompt(f"{OMNI['video']} end", video=[CLIP[:, :24]])
    items = llm.llm_engine.media.read(None, [514 + 1], given["multi_modal_data"]).items
    assert [item.grid for item in items] == [(1, 6, 8)] * 3 and [item.start for item in items] == [0, 12, 24]
    check(omni, llm, [given])


@models_of({"qwen3_vl"})
def test_files_are_sampled_as_the_processor_does(oracles: Any, kind: str) -> None:
    """17 frames at 8 a second, of which those near to 2 a second are read."""
    oracle = oracles(kind)
    frames = smooth(17, 48, 32)
    file = video_file(frames)
    own = decoded(file)
    assert len(own) == 17 and np.abs(own.astype(int) - frames).mean() < 8
    reader = LLM(str(oracle.folder), **CPU).llm_engine.media
    ids = oracle.processor.tokenizer(f"{VIDEO}")["input_ids"]
    read = reader.read(None, ids, {"video": file})
    from transformers.video_utils import VideoMetadata

    process = oracle.processor.video_processor
    kept = process.sample_frames(VideoMetadata(17, fps=8.0), fps=2.0)
    want = process(
        videos=[list(own[np.array(kept)])], do_sample_frames=False, return_tensors="pt", return_metadata=False
    )["pixel_values_videos"]
    got = np.concatenate([item.values.numpy() for item in read.items])
    assert np.array_equal(got, want.numpy())
    if kind.startswith("qwen3"):
        stamps = oracle.processor.tokenizer.decode(read.token_ids)
        times = [(kept[i] + kept[i + 1]) / 16 for i in range(0, len(kept), 2)]
        assert all(f"<{time:.1f} seconds>" in stamps for time in times)


def decoded(file: bytes) -> np.ndarray:
    """All frames of a file."""
    import io

    import av

    with av.open(io.BytesIO(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_video_of_a_turned_phone_is_upright() -> None:
    """The matrix in the file's header shows it a quarter to the right."""
    made = bytearray(video_file(smooth(4, 48, 32)))
    at = made.index(b"tkhd") + 44
    made[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30)
    found = videos.video(bytes(made), lambda source: [0, source.frames - 1]).frames
    assert np.array_equal(found, np.rot90(decoded(bytes(made))[[0, 3]], -1, axes=(1, 2)))


def test_frames_of_other_kinds_are_read(omni: MediaOracle) -> None:
    """PIL images, tensors, and frames of another rate, whose positions differ."""
    import torch
    from PIL import Image

    reader = LLM(str(omni.folder), **CPU).llm_engine.media
    frames = CLIP[:, :24]
    ids = [7, 515, 8]
    found = [
        reader.read(None, ids, {"video": given})
        for given in (
            frames,
            [Image.fromarray(f) for f in frames],
            torch.from_numpy(frames),
            [(frames, {"fps": 1})],
        )
    ]
    assert len({read.items[0].digest for read in found}) == 2
    assert all(np.array_equal(found[0].positions, read.positions) for read in found[:3])
    assert found[0].positions[0].max() == 1 + 2 * 4 and found[3].positions[0].max() == 1 + 2 * 8


def test_text_goes_on_behind_the_largest_position() -> None:
    """Of three steps with 50 positions each, as vLLM and transformers' description of Qwen2.5-VL have it."""
    positions, shift = mrope_positions([(2, grid_offsets((3, 2, 2), 50.0)), (15, grid_offsets((1, 2, 3)))])
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:14].tolist() == [2] * 4 + [52] * 4 + [102] * 4
    assert positions[1, 2:14].tolist() == [2, 2, 3, 3] * 3 and positions[2, 2:14].tolist() == [2, 3] * 6
    assert positions[:, 14].tolist() == [103] * 3 and positions[:, 15].tolist() == [104] * 3
    assert positions[2, 15:].tolist() == [104, 105, 106] * 2 and 21 + shift == 107


def long_file(seconds: int) -> bytes:
    """A file of one frame in ten seconds."""
    import io
    from fractions import Fraction

    import av

    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(1, 10))
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        for frame in np.zeros((seconds // 10, 16, 16, 3), np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    return made.getvalue()


BAD: list[tuple[Any, str]] = [
    (b"no video", "video 0 of the prompt is one that is damaged, or no file of a known format: use mov, mp4"),
    (lambda: video_file(smooth(9, 48, 32))[:700], "video 0 of the prompt is one"),
    (lambda: wav(tone(0, 0.2)), "one that is damaged, or no file of a known format"),
    (lambda: long_file(4000), "one of 4000 s, and at most 3600 s are possible"),
    (
        lambda: video_file(smooth(33, 64, 64)),
        "tokens up to video 0, and the maximum context length is 256 tokens",
    ),
    (np.zeros((0, 8, 8, 3), np.uint8), "video 0 of the prompt is one without frames"),
    (np.zeros((2, 8, 8), np.uint8), r"one of shape \[2, 8, 8\] and uint8, which must be \[n, H, W, 3\]"),
    ([WIDE, image(1, 8, 8)], "frames of several sizes"),
    ([(CLIP, 5)], "which must be a dict such as"),
    ("cat.mp4", "cannot be read: 'cat.mp4'"),
    (np.zeros((2, 1, 900, 3), np.uint8), "cannot be processed: absolute aspect ratio"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_video_is_refused(omni: MediaOracle, given: Any, message: str) -> None:
    given = given() if callable(given) else given
    if not hasattr(omni, "llm"):
        omni.llm = LLM(str(omni.folder), **CPU)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        omni.llm.generate(prompt(OMNI["video"], video=given), SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[attr-defined]


def test_limits_hold_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame of a file with too many pixels is decoded."""
    file = video_file(smooth(4, 48, 32))
    monkeypatch.setattr(videos, "_decoded", None)
    for name, most, words in (
        ("MAX_PIXELS", 1535, "48 x 32 pixels, and at most 1535 pixels in a frame"),
        ("MAX_SAMPLED", 3071, "2 sampled frames of 48 x 32 pixels, and at most 3071 pixels in all"),
        ("MAX_DECODED", 3, "of 4 frames, and at most 3 are possible"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(videos, name, most)
            with pytest.raises(videos.VideoError, match=words):
                videos.video(file, lambda source: [0, source.frames - 1])


def test_size_of_the_whole_processor_counts(omni: MediaOracle, tmp_path: Path) -> None:
    """Frames have the limits of Qwen2.5-Omni's processor, 128 to 768 times 28 x 28 pixels, not the checkpoint's."""
    from transformers import Qwen2_5OmniProcessor

    reader = LLM(str(omni.folder), **{**CPU, "max_model_len": 2048, "num_blocks": 200}).llm_engine.media
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Qwen2_5OmniProcessor, "videos_kwargs", {"size": {"shortest_edge": 100352, "longest_edge": 602112}}
        )
        given = prompt(OMNI["video"], video=[CLIP[:2, :24]])
        ids = omni.processor.tokenizer(given["prompt"])["input_ids"]
        assert reader.read(None, ids, given["multi_modal_data"]).token_ids == omni.prompt_ids(given)
