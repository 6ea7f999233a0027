"""Families of our engine's runners: which models they have, and answers as the metrics read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fk_bench.cli import main
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Status, read
from fk_bench.evaluate import checkpoints, suites
from fk_bench.evaluate.run.hosts.libraries import MODELS
from fk_bench.quality import families, structured, text
from fk_bench.quality.calibration import THRESHOLD, correctness, fitted_bound
from fk_bench.quality.measure import Settings, of_suite
from fk_bench.quality.metrics.metric import metrics

SMALL = {e.item.model: e for e in suites.load("small").entries}
OF = {
    "dlrmv2": "recommendation", "lightgcn": "recommendation", "ptv3": "segmentation", "dp3": "policy", "pi0": "policy",
    "cosyvoice3": "audio", "whisper-large-v3": "speech", "openfold3": "structure", "yolov10-b": "detection",
    "rtdetrv2-r50": "detection", "llada-8b": "text", "qwen2-vl-7b": "text", "llama-eagle3": "text",
    "qwen3-vl-8b": "text", "qwen3-vl-30b": "text", "qwen2_5-omni-7b": "text",
    "sam3-ours": "objects", "sam3-video": "tracking", "gaussians": "pixels", "instant-ngp": "pixels",
    "flux-pipeline": "pixels", "sdxl-pipeline": "pixels", "hunyuan-video": "pixels", "oasis": "pixels",
    **dict.fromkeys((
        "bge-m3", "bge-reranker", "bert-base", "bert-classes", "colbertv2", "dinov3-l", "siglip2-so400m",
        "siglip2-whole", "siglip-b", "siglip-whole", "swinv2-b", "convnextv2-ours", "mobilenetv4-ours",
        "efficientnetv2-ours", "vjepa2-l",
    ), "encoding"),
}  # fmt: skip
# An answer of each family, and the same with an error
ANSWERS = {
    "detection": (5, 6), "segmentation": (30, 4), "speech": (12, 2), "audio": (20, 8), "policy": (6, 3),
    "structure": (9, 4), "recommendation": (7,), "encoding": (5, 8), "pixels": (3, 16, 12, 3), "objects": (5, 6),
    "tracking": (2, 9, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_every_small_model_has_the_family_of_its_runner(name: str) -> None:
    entry = SMALL[name]
    folder = checkpoints.folder(entry.model, entry.workload.kind)
    family = families.FAMILIES[families.family_of(str(folder), "fastkernels")]
    assert family is families.FAMILIES[OF[name]] and "fastkernels" in family.hosts
    if family.request is not None:  # its sizes are those that the suite sends
        sizes = {k for k, v in entry.model.request.items() if isinstance(v, (int, float))}
        assert sizes <= family.request.keys() or OF[name] in ("structure", "recommendation", "speech")


def test_encoder_of_texts_with_weights_is_an_embedder(tmp_path: Path) -> None:
    """Texts tell more than random tokens; a score or a vector of each token is no embedding of a text."""
    for name, family in (("bge-m3", "embedding"), ("bge-reranker", "encoding"), ("colbertv2", "encoding")):
        entry = SMALL[name]
        folder = tmp_path / name
        shutil.copytree(checkpoints.folder(entry.model, entry.workload.kind), folder)
        (folder / "model.safetensors").write_bytes(b"")
        assert families.family_of(str(folder), "fastkernels") == family


def test_model_that_no_metric_reads_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Sam3TrackerModel"], "model_type": "sam3_tracker"}'
    )
    with pytest.raises(ModelError, match="the runner Encode makes of images for sam3_tracker"):
        families.family_of(str(tmp_path), "fastkernels")
    with pytest.raises(ModelError, match="no vocab_size, so it is no model of text"):
        families.vocabulary(tmp_path)


def test_random_weights_of_images_with_text_are_refused(tmp_path: Path) -> None:
    entry = SMALL["qwen2-vl-7b"]
    folder = checkpoints.folder(entry.model, entry.workload.kind)
    with pytest.raises(ModelError, match="give a checkpoint with weights"):
        structured.checkpoint(Path(folder), tmp_path / "random")


def test_libraries_have_families_in_their_hosts() -> None:
    for name, family in families.LIBRARIES.items():
        assert MODELS[name][0] in families.FAMILIES[family].hosts


def answers(family: str, error: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(4, *ANSWERS[family], generator=draw)
    noise = error * torch.rand(rows.shape, generator=draw)
    if family in ("detection", "objects"):
        corners = rows[..., :2], rows[..., :2] + 0.1 + 0.2 * rows[..., 2:4]
        rows = torch.cat((*corners, rows[..., 4:5], torch.arange(5.0).expand(4, 5)[..., None]), -1)
        noise[..., 5] = 0.0
    if family == "tracking":
        return (3 * rows + 6 * noise).floor()
    if family == "speech":
        return torch.stack(((9 * rows[..., 0]).floor(), -rows[..., 1] - noise[..., 1]), -1)
    return rows + noise


@pytest.mark.parametrize("family", ANSWERS)
def test_answers_are_read_as_the_metric_s_outputs(family: str, tmp_path: Path) -> None:
    extent, found = text.Extent(sequences=4), []
    families.prepare(family, "", extent, tmp_path)
    for run, error in (("reference", 0.0), ("again", 0.0), ("wrong", 0.5)):
        rows = answers(family, error)
        (tmp_path / f"{run}.f32").write_bytes(rows.flatten(1).float().numpy().tobytes())
        (tmp_path / f"{run}.json").write_text(json.dumps(list(rows.shape[1:])))
        found.append(families.outputs(family, "", extent, tmp_path, run))
    metric = metrics()[families.FAMILIES[family].metric]
    same, other = (metric.measure(out, found[0]).discrepancy for out in found[1:])
    assert same < 1e-6 < other <= 1


def test_actions_without_a_range_are_compared() -> None:
    found = families._actions(torch.zeros(3, 4, 2))
    assert metrics()["action_error"].measure(found, found).discrepancy == 0


def test_fitted_bound_lets_the_smallest_fault_be_seen() -> None:
    assert fitted_bound(0.2, 0.01, {"scale": 0.1}) == 0.2
    small = fitted_bound(0.2, 0.01, {"scale": 0.012, "head": 0.5})
    assert 0.01 < small < 0.2 and correctness(0.012, 0.01, small) < THRESHOLD
    assert fitted_bound(0.2, 0.01, {"scale": 0.01}) == fitted_bound(0.2, 0.01, {}) == 0.2


def test_suite_model_has_its_sizes(tmp_path: Path) -> None:
    model, settings = of_suite("small/dp3", "fastkernels", Settings(request={"points": 9}))
    assert Path(model, "config.json").is_file() and settings.request["points"] == 9
    library, settings = of_suite("full/dlrmv2-torchrec", "torchrec", Settings())
    assert library == "dlrm_dcn" and "rows" in settings.arguments and settings.request["bag"] > 0
    assert of_suite("timm/vit", "timm", Settings()) == ("timm/vit", Settings())


def test_size_that_no_request_has_is_refused() -> None:
    families.check_request("detection", {"width": 64})
    with pytest.raises(ModelError, match="detection has no 'widht'; it has width, height"):
        families.check_request("detection", {"widht": 64})
    with pytest.raises(ModelError, match=r"text has no 'width'$"):
        families.check_request("text", {"width": 64})


WRONG = """
import torch.nn.functional as F

def linear(x, weight, bias=None):
    return F.linear(x, weight, bias) * FACTOR
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [
    "dlrmv2", "dp3", "rtdetrv2-r50", "whisper-large-v3", "dinov3-l", "oasis",
])  # fmt: skip
def test_small_model_accepts_a_right_set_and_finds_a_wrong_one(model: str, tmp_path: Path) -> None:
    sets: list[str] = []
    for name, factor in (("right", 1.0), ("wrong", 1.1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "linear.py").write_text(WRONG.replace("FACTOR", str(factor)))
        sets += ["--set", f"{name}={tmp_path / name}"]
    with pytest.raises(SystemExit):
        main([
            "quality", f"small/{model}", "--hosts", "fastkernels", *sets, "--out", str(tmp_path / "run"),
            "--sequences", "8", "--batch", "4", "--device", "cpu", "--json",
        ])  # fmt: skip
    right, wrong = read(tmp_path / "run/rows.jsonl")[0]
    assert [right.status, wrong.status] == [Status.OK, Status.WRONG], (right.reason, wrong.reason)
    assert right.case["sensitive"] and right.metrics["c"] > 0.99 and wrong.metrics["c"] < 0.9
