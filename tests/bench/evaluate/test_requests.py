"""Items of our engine's other runners: small models in this process, and one whole item in processes of its own."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.evaluate import checkpoints, suites
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import selftest
from fk_bench.evaluate.run.hosts import open_host, sent
from fk_bench.evaluate.run.hosts.sent import SENT
from fk_bench.evaluate.run.items import ItemRun, Work, calibrated, matched, mean_iou, options_of, vocab_of
from fk_bench.evaluate.run.side import Launcher, set_files
from fk_bench.info.stubs import source

from fastkernels.core import registry
from fastkernels.models.common.descriptions.registry import models

SMALL = {entry.name: entry for entry in suites.load("small").entries}
FAST = (
    "bge-m3/passages",
    "yolov10-b/boxes",
    "dlrmv2/ratings",
    "gaussians/views",
    "dp3/robots",
    "oasis/rollouts",
    "sam3-ours/objects",
)


class Here:
    """A host of this process in the place of a `Side`."""

    def __init__(self, entry: suites.Entry):
        self.host = open_host(options_of(entry, entry.model, suites.load("small"), "float32", False, 2))

    def call(self, do: str, **given: Any) -> dict[str, Any]:
        return getattr(self.host, do)(**given) or {}


def compared(side: Any, seed: int) -> np.ndarray:
    """The outputs of one call with two requests."""
    side.call("prepare", batch=2, seed=seed, calls=1)
    side.call("run")
    return np.frombuffer(b64decode(side.call("output", call=0)["output"]), np.float32)


def check(name: str) -> None:
    """The item sees all planted faults, equal requests give equal outputs, and others give others."""
    entry = SMALL[f"{name}/fastkernels"]
    side: Any = Here(entry)
    work = Work(entry, 7, vocab_of(entry))
    scale = calibrated(work, side)
    assert scale.sensitive, scale
    assert scale.noise < 1e-4 and {"residual", "scale"} <= set(scale.faults)
    if work.text:
        return
    outputs = []
    for seed in (3, 3, 4):
        side.call("prepare", batch=2, seed=seed, calls=2)
        side.call("run")
        outputs.append(
            [np.frombuffer(b64decode(side.call("output", call=i)["output"]), np.float32) for i in (0, 1)]
        )
    first, again, other = outputs
    assert work.apart(again[1], first[1], 2) <= scale.noise + 1e-6
    assert (
        work.apart(first[0], first[1], 2) > 10 * scale.noise
        and work.apart(other[0], first[0], 2) > 10 * scale.noise
    )
    assert np.isfinite(np.concatenate(first)).all()


@pytest.mark.parametrize("name", FAST)
def test_small_item_sees_planted_faults(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(n.removesuffix("/fastkernels") for n in SMALL if n[:-12] not in FAST))
def test_every_small_item_sees_planted_faults(name: str) -> None:
    check(name)


def test_video_pipeline_of_diffusers_sees_planted_faults() -> None:
    full = suites.load("full")
    entry = next(e for e in full.entries if e.item.model == "hunyuan-video-diffusers")
    side: Any = Here.__new__(Here)
    side.host = open_host(options_of(entry, entry.model.small, full, "float32", False, 2))
    videos = compared(side, 3).reshape(2, 5, 3, 32, 32)
    assert np.isfinite(videos).all() and videos.min() >= 0 and videos.max() <= 1 and videos.std() > 0.05
    scale = calibrated(Work(entry, 7, 0), side)
    assert scale.sensitive and set(scale.faults) == {"residual", "head", "scale"}, scale


@pytest.mark.parametrize("tied", [True, False])
def test_text_with_random_weights_of_the_host_sees_faults(tied: bool) -> None:
    """With the embeddings of load_format="dummy", the likeliest token of a tied head has all of the probability."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": tied,
    }  # fmt: skip
    suite = suites.read(
        {
            "workloads": {"w": {"kind": "text", "about": "", "throughput": 2, "lengths": [[9, 4], [5, 4]]}},
            "models": {"m": {"category": "text", "weights": "dummy", "config": config}},
            "items": [{"model": "m", "workload": "w", "host": "fastkernels"}],
        },
        "t",
    )
    entry = suite.entries[0]
    side: Any = Here.__new__(Here)
    side.host = open_host(options_of(entry, entry.model, suite, "float32", False, 2))
    scale = calibrated(Work(entry, 7, 128), side)
    assert scale.sensitive and min(scale.faults.values()) > 100 * scale.noise, scale


def test_every_runner_has_requests_or_generates_text() -> None:
    kinds = {
        (m.arch.runner, m.arch.inputs)
        for m in models().values()
        if m.arch.runner not in ("Generate", "Draft")
    }
    absent = suites.load("full").without
    left = (
        kinds
        - SENT.keys()
        - {(models()[n].arch.runner, models()[n].arch.inputs) for n in absent if n in models()}
    )
    assert not left, f"{left}: give each a line in SENT of run/hosts/sent.py"


def test_masks_are_compared_by_the_numbers_of_objects() -> None:
    wanted = np.array([[0, 1, 1, 2], [0, 0, 0, 0]], np.float32)
    assert mean_iou(wanted, wanted) == 1.0 and mean_iou(wanted[1:], wanted[1:]) == 1.0
    assert mean_iou(np.array([[0, 1, 2, 2], [0, 0, 0, 0]]), wanted) == 0.5  # 1/2 of each
    assert mean_iou(np.array([[0, 2, 2, 1], [0, 0, 0, 0]]), wanted) == 0.0  # exchanged
    assert mean_iou(np.array([[0, 1, 1, 2], [3, 0, 0, 0]]), wanted) == pytest.approx(2 / 3)  # one more
    assert mean_iou(np.array([[0, 1, 1, np.nan], [0, 0, 0, np.inf]]), wanted) == 0.5
    work = Work(SMALL["sam3-video/tracks/fastkernels"], 7, 0)
    assert work.kind == "masks" and work.apart(wanted.ravel(), wanted.ravel(), 2) == 0.0
    noise = np.arange(5000, dtype=np.float32)
    assert work.apart(noise, noise, 2) == work.apart(noise[1:], noise, 2) == np.inf


def test_better_objects_cover_others_in_the_labels_of_a_frame() -> None:
    left, right = np.zeros((2, 3, 100), bool)
    left[:, :60], right[:, 40:] = True, True
    frame = SimpleNamespace(
        size=(100, 3), scores=[0.9, 0.4], object_ids=[0, 4], masks=np.stack((left, right))
    )
    (labels,) = sent._labels([frame])
    assert labels.shape == (3, sent.SAMPLED) and set(labels[0]) == {1.0, 5.0}
    assert abs((labels == 1).mean() - 0.6) < 0.02


def test_boxes_are_matched_before_they_are_compared() -> None:
    wanted = np.random.default_rng(0).random((2, 5, 6)).astype(np.float32)
    found = wanted[:, [3, 0, 4, 1, 2]] + np.float32(1e-6)
    assert np.abs(matched(found, wanted) - wanted).max() < 2e-6
    found[1, 2] = np.nan
    assert np.isnan(matched(found, wanted)).any()
    lost = wanted.copy()
    lost[0, 1] = lost[0, 0]  # a box twice, and another one missing
    assert np.abs(matched(lost, wanted) - wanted).max() > 0.1


def test_mel_spectrogram_has_the_tone_and_zeros_behind_the_end() -> None:
    rate, seconds = 24000, 0.5
    tone = np.sin(2 * np.pi * 1000 * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    found = sent._mel(tone, rate, 100)
    end = -(-len(tone) // sent.HOP)
    assert found.shape == (100, sent.BANDS) and not found[end:].any() and found[: end - 4].any(1).all()
    mel = 2595 * np.log10(1 + np.array((1000, rate / 2)) / 700)
    assert abs(int(found[10].argmax()) - (mel[0] / mel[1] * (sent.BANDS + 1) - 1)) < 1.5
    assert sent._mel(np.tile(tone, 9), rate, 100).shape == found.shape  # the rest is cut


def test_files_of_a_pipeline_and_tokenizers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    model = suites.Model(
        "vision", files={"model_index.json": {"_class_name": "A"}, "unet/config.json": {"b": 1}},
        tokenizers={"tokenizer": 20, ".": {"longest": 30, "tokens": {"<image>": 300}}},
    )  # fmt: skip
    folder = checkpoints.folder(model, "requests")
    assert json.loads((folder / "unet" / "config.json").read_text()) == {"b": 1}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a<image>")["input_ids"][-1] == 300 and len(tokenizer("a<image>")["input_ids"]) == 2
    assert AutoTokenizer.from_pretrained(folder / "tokenizer").model_max_length == 20


def test_do_nothing_function_runs_the_shipped_providers(tmp_path: Path) -> None:
    from fastkernels.core import candidate

    files = selftest.write("fastkernels", tmp_path, "requests")
    assert {"embedding_bag", "conv_norm_act", "rasterize_gaussians"} <= set(files)
    found = candidate.load("gelu", files["gelu"])
    candidate.fit(found.function, registry.get("gelu").op)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert found.function is not None and torch.equal(found.function(x), torch.ops.fastkernels.gelu(x))


@pytest.mark.slow
def test_wrong_candidate_of_a_recommender_is_dropped(tmp_path: Path) -> None:
    entry = SMALL["dlrmv2/ratings/fastkernels"]
    good, wrong = tmp_path / "linear.py", tmp_path / "cross_low_rank.py"
    good.write_text(source("linear"))
    shipped = selftest.write("fastkernels", tmp_path, "requests")["cross_low_rank"]
    wrong.write_text(Path(shipped).read_text().replace("_shipped.run(", "1.02 * _shipped.run("))
    with Launcher({}, 3 << 30, threads=1, logs=tmp_path / "logs") as launcher:
        run = ItemRun(entry, suites.load("small"), launcher, "float32", 5, print)
        found = run.measure({p.stem: str(p) for p in (good, wrong)}, set_files([tmp_path]))
    assert found.found.kept == ("linear",)
    assert [(d.op, d.reason) for d in found.found.dropped] == [("cross_low_rank", Reason.INCORRECT)]
    assert (
        found.outcome is not None
        and found.outcome.correctness == pytest.approx(1.0, abs=1e-4)
        and found.live["linear"] > 0
    )
