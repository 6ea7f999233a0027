"""Every metric on synthetic outputs: equal ones are perfect, worse ones never look better, and known values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fk_bench.quality import families
from fk_bench.quality.metrics import metric as base
from fk_bench.quality.metrics import outputs as o

METRICS = base.metrics()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image_boxes(shift: float) -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[10.0, 10, 50, 50], [60, 60, 90, 100]])
    return [{"boxes": boxes + shift, "scores": torch.tensor([0.9, 0.8]), "labels": torch.tensor([1, 2])}]


def outputs(family: str, error: float) -> o.Sized:
    """Outputs of a family; `error` 0 are the reference's, larger ones are further away."""
    if family in ("text", "vision"):
        logits = 3 * noise(24, 63)
        return o.Scores(logits + error * noise(24, 63, seed=1), logits.argmax(-1), [8, 8, 8])
    if family == "embedding":
        documents, relevant = noise(12, 32), torch.arange(12)
        queries = documents + 0.5 * noise(12, 32, seed=2) + error * noise(12, 32, seed=3)
        return o.Embeddings(queries, documents, relevant)
    if family in ("image", "pixels"):
        made = [noise(2, 3, 24, 24).sigmoid() + 0.1 * error * noise(2, 3, 24, 24, seed=1), noise(2, 4, 8, 8)]
        return o.Images(made[0].clamp(0, 1), made[1] + error * noise(2, 4, 8, 8, seed=1))
    if family in ("detection", "objects"):
        return o.Detections(image_boxes(4 * error))
    if family in ("segmentation", "tracking"):
        classes = torch.arange(64).reshape(1, 8, 8) % 3
        return o.Masks(torch.where(noise(1, 8, 8) < error - 1, 0, classes), 5)
    if family == "speech":
        words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
        texts = [" ".join(w if i >= 2 * error else "cat" for i, w in enumerate(words))]
        return o.Transcripts(texts, torch.full((1, len(words)), -0.1 * error))
    if family == "audio":
        return o.Spectrograms(noise(2, 20, 30).abs() + error * noise(2, 20, 30, seed=1))
    if family == "policy":
        values = noise(2, 5, 7) + 0.2 * error
        return o.Actions(values, torch.full((7,), -2.0), torch.full((7,), 2.0))
    if family == "structure":
        return o.Structures(10 * noise(2, 40, 3) + error * noise(2, 40, 3, seed=1))
    labels = (noise(50) > 0).long()
    return o.Ratings(labels + 0.2 * noise(50, seed=1) + error * noise(50, seed=2), labels)


@pytest.mark.parametrize(("family", "name"), [(f, m.name) for m in METRICS.values() for f in m.families])
def test_more_error_gives_more_discrepancy(family: str, name: str) -> None:
    metric, reference = METRICS[name], outputs(family, 0.0)
    found = [metric.measure(outputs(family, error), reference) for error in (0.0, 0.5, 2.0)]
    assert found[0].discrepancy < 1e-6 and 0 < found[2].discrepancy <= 1
    assert found[0].discrepancy <= found[1].discrepancy + 1e-9 <= found[2].discrepancy + 2e-9
    better = (found[0].value > found[2].value) == (metric.direction == "higher")
    assert better and metric.formula and metric.unit and found[0].unit == metric.unit


def test_every_family_has_its_metric() -> None:
    for name, family in families.FAMILIES.items():
        assert name in METRICS[family.metric].families and 0 < family.bound <= 1
    assert {f for m in METRICS.values() for f in m.families} == set(families.FAMILIES)


def test_metric_files_are_short() -> None:
    for file in Path(base.__file__).parent.glob("*.py"):
        if file.stem not in ("metric", "outputs"):
            assert len(file.read_text().splitlines()) <= 50, file.name


def scores(*rows: list[float]) -> o.Scores:
    logits = torch.tensor(rows).log()
    return o.Scores(logits, torch.zeros(len(rows), dtype=torch.long), [len(rows)])


def value(name: str, output: o.Sized, reference: o.Sized) -> float:
    return METRICS[name].measure(output, reference).value


def test_text_metrics_equal_hand_computed_values() -> None:
    reference = scores([0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.7, 0.2, 0.1])
    other = scores([0.5, 0.3, 0.2], [0.4, 0.3, 0.3], [0.7, 0.2, 0.1])
    rows = [
        0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.2),
        0.2 * math.log(0.2 / 0.4) + 0.5 * math.log(0.5 / 0.3),
    ]
    assert value("kl", other, reference) == pytest.approx(sum(rows) / 3, abs=1e-6)
    assert METRICS["kl"].measure(other, reference).discrepancy == pytest.approx(
        (sum(rows) / 6) ** 0.5, abs=1e-6
    )
    assert value("top1", other, reference) == pytest.approx(2 / 3)
    assert value("matching_tokens", other, reference) == pytest.approx(1 / 3)  # the second step differs
    assert value("perplexity", other, reference) == pytest.approx(
        (0.6 * 0.2 / (0.5 * 0.4)) ** (1 / 3), abs=1e-6
    )
    swapped = scores([0.3, 0.6, 0.1], [0.2, 0.5, 0.3], [0.7, 0.2, 0.1])
    depths = [2 / 3, 1.0, 1.0]  # the first row's top 1 differs, its top 2 are the same set
    assert value("rank_overlap", swapped, reference) == pytest.approx(sum(depths) / 3)


def test_vector_metrics_equal_hand_computed_values() -> None:
    one = o.Spectrograms(torch.tensor([[[1.0, 0.0]]]))
    turned = o.Spectrograms(torch.tensor([[[3.0, 3.0]]]))
    assert METRICS["mel_cosine"].measure(turned, one).discrepancy == pytest.approx(0.5)  # 45 of 90 degrees
    gray = o.Images(torch.full((1, 3, 12, 12), 0.5), torch.ones(1, 4))
    lighter = replace(gray, pixels=gray.pixels + 0.1)
    found = METRICS["psnr"].measure(lighter, gray)
    assert found.value == pytest.approx(20.0, abs=1e-4) and found.discrepancy == pytest.approx(0.1, abs=1e-5)
    points = noise(1, 30, 3).double()
    turn, _ = torch.linalg.qr(noise(3, 3, seed=1).double())
    turn[:, 0] *= torch.det(turn).sign()
    moved = o.Structures(points @ turn + 7.0)
    assert value("rmsd", moved, o.Structures(points)) < 1e-6
    mirrored = o.Structures(points * torch.tensor([-1.0, 1.0, 1.0]))
    assert value("rmsd", mirrored, o.Structures(points)) > 0.1  # a mirror image is another molecule
    actions = o.Actions(torch.zeros(1, 1, 2), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))
    assert value(
        "action_error", replace(actions, values=torch.full((1, 1, 2), 0.4)), actions
    ) == pytest.approx(0.15)


def test_task_metrics_equal_hand_computed_values() -> None:
    ratings = o.Ratings(torch.tensor([5.0, 3.0, 4.0, -1.0]), torch.tensor([1, 1, 0, 0]))
    assert value("auc", ratings, ratings) == pytest.approx(0.75)  # one of four pairs is in the wrong order
    assert value("auc", replace(ratings, scores=torch.ones(4)), ratings) == pytest.approx(0.5)
    texts = o.Transcripts(["a b c d"])
    assert value("word_error_rate", o.Transcripts(["a x c"]), texts) == pytest.approx(0.5)
    masks = [o.Masks(torch.tensor([[row]]), 4) for row in ([0, 0, 1, 1], [0, 1, 1, 1])]
    assert value("mean_iou", masks[1], masks[0]) == pytest.approx(
        (1 / 2 + 2 / 3) / 2, abs=1e-6
    )  # 2 and 3 are absent
    documents = torch.eye(3)
    search = o.Embeddings(documents, documents, torch.arange(3))
    second = replace(search, queries=torch.tensor([[0.5, 1.0, 0], [0, 1.0, 0], [0, 0, 1.0]]))
    assert value("ndcg", second, search) == pytest.approx((1 / math.log2(3) + 2) / 3, abs=1e-6)
    assert value("mean_ap", o.Detections(image_boxes(100.0)), o.Detections(image_boxes(0.0))) == 0.0


def test_nan_and_other_sizes_are_never_right() -> None:
    reference = outputs("text", 0.0)
    assert isinstance(reference, o.Scores)
    broken = replace(reference, logits=reference.logits.index_fill(0, torch.tensor([3]), math.nan))
    assert math.isnan(METRICS["kl"].measure(broken, reference).discrepancy)
    with pytest.raises(ValueError, match="the outputs have sizes"):
        METRICS["kl"].measure(replace(reference, logits=reference.logits[:5]), reference)
