"""Sizes of the growth of kernels' times, and the plot."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from fk_bench.core.rows import Row, Status, Subject, read
from support.h200_plan import ROOT

from fastkernels.core import registry

sys.path.insert(0, str(ROOT / "bench"))
from experiments.growth import growth


@pytest.mark.parametrize("op", growth.GROWN)
def test_last_point_has_ten_times_the_work(op: str) -> None:
    spec, of = registry.get(op), growth.GROWN[op]
    first, last = (growth.work(spec, growth.grown(spec, of, f)) for f in (1.0, growth.factors()[-1]))
    assert 9.5 < last / first < 10.5


def row(op: str, provider: str, work: float, us: float, status: Status = Status.OK) -> Row:
    return Row(
        run_id="growth", command="growth", status=status, subject=Subject(op=op, provider=provider),
        case={"kind": "growth", "factor": 1.0, "work": work}, metrics={"time_us_p50": us} if us else {},
    )  # fmt: skip


def test_plot_has_a_panel_for_each_op() -> None:
    rows = [
        row(op, p, w, w / 50) for op in ("fused_mlp", "a<b") for p in ("ours", "torch") for w in (1e6, 1e7)
    ]
    drawn = growth.plot([*rows, row("failed", "ours", 1e6, 0, Status.FAILED), row("one", "ours", 5.0, 3.0)])
    found = ElementTree.fromstring(drawn)
    texts = [e.text for e in found.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fused_mlp", "a<b", "one"} <= set(texts) and "failed" not in texts
    assert len(list(found.iter("{http://www.w3.org/2000/svg}circle"))) == 9


def test_plot_without_times_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    monkeypatch.setattr(
        sys, "argv", ["growth", "--plot", str(tmp_path / "a.svg"), str(tmp_path / "rows.jsonl")]
    )
    assert growth.main() == 2 and not (tmp_path / "a.svg").exists()


def test_missing_gpu_or_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth.torch.cuda, "is_available", lambda: False)
    for words in (["--out", str(tmp_path / "a")], ["--plot", str(tmp_path / "b"), str(tmp_path / "none")]):
        monkeypatch.setattr(sys, "argv", ["growth", *words])
        assert growth.main() == 2
    assert not list(tmp_path.iterdir())


def test_small_sizes_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier call are not measured again."""
    out = tmp_path / "rows.jsonl"
    words = ["growth", "--out", str(out), "--device", "cpu", "--tiny", "1e-4", "--ops", "fused_mlp"]
    monkeypatch.setattr(sys, "argv", words)
    assert growth.main() == 0
    first = out.read_text()
    assert len(first.splitlines()) == 2 * growth.STEPS and growth.main() == 0 and out.read_text() == first
    lines = first.splitlines(keepends=True)
    out.write_text("".join(lines[:3]))  # killed between ours and production's of the second size
    assert growth.main() == 0
    keys = [(r.subject.provider, r.case["factor"]) for r in read(out)[0]]
    assert len(keys) == len(set(keys)) == 2 * growth.STEPS
    monkeypatch.setattr(sys, "argv", [*words[:-1], "rms_norm"])
    assert growth.main() == 2


def test_rate_leaves_out_rows_that_a_mask_skips() -> None:
    spec, of = registry.get("spherical_harmonics"), growth.GROWN["spherical_harmonics"]
    case = growth.grown(spec, of, 1e-4)
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
    masks = args[[a.name for a in spec.declaration.arguments].index("masks")]
    rates = {}
    for share, rows in ((1.0, slice(None)), (0.0, slice(0))):
        masks.fill_(False)[rows] = True
        rates[share] = growth.bytes_of(spec, of, case, args)
    n = case.dims["gaussians"]
    assert rates[1.0] == spec.bytes_moved(case) and rates[0.0] == n * (1 + 3 * 4)  # masks and outputs
    assert growth.bytes_of(registry.get("march_rays"), growth.GROWN["march_rays"], case, args) is None


def test_op_without_a_baseline_is_not_asked_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(growth, "production", lambda *_: None)
    words = ["growth", "--out", str(out), "--device", "cpu", "--tiny", "1e-4", "--ops", "fused_mlp"]
    monkeypatch.setattr(sys, "argv", words)
    assert growth.main() == 0
    skipped = [r for r in read(out)[0] if r.status is Status.SKIPPED]
    first = out.read_text()
    assert len(skipped) == growth.STEPS and growth.main() == 0 and out.read_text() == first
