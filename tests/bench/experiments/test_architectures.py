"""Plan, resumption and table of the times of architectures; the models themselves run in `--tiny`."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.core.rows import Row, Status, Subject, append, read
from fk_bench.evaluate.run.hosts.libraries import MODELS
from fk_bench.tables.architectures import OURS, PAPER, PATCHED, PLAIN, PREPARED
from support.h200_plan import ROOT

from fastkernels.core import registry

sys.path.insert(0, str(ROOT / "bench"))
from experiments.architectures import architectures, ours, patched, references, subjects
from experiments.architectures.subjects import LIBRARY
from experiments.architectures.times import Times


def row(name: str, lane: str, case: dict[str, int], ms: float | None) -> Row:
    metrics = {} if ms is None else {"call_ms_p50": ms}
    return Row(
        run_id="architectures", command="architectures.py", subject=Subject(model=name, provider=lane),
        case={"kind": "call", "dtype": "auto", **case}, metrics=metrics, status=Status.OK if ms else Status.FAILED,
    )  # fmt: skip


def options(out: Path, **more: Any) -> argparse.Namespace:
    given = {"out": out, "seconds": 500.0, "limit": 100.0, "only": None, "wave": 2, "tiny": False, **more}
    return argparse.Namespace(**given)


def test_models_and_lanes_are_known() -> None:
    known = subjects.subjects()
    assert len(known) > 30
    for name, subject in known.items():
        model = subjects.model_of(subject, tiny=False)
        assert model.config or model.public or model.files, name
        batches = [tuple(case.values()) for case in subject.cases]
        assert batches == sorted(batches), f"{name}: the smallest case is not the first"
        assert {lane.run for lane in subject.all_lanes} <= {*references.RUNS}, name
        assert len({lane.name for lane in subject.all_lanes}) == len(subject.all_lanes), name
        if subject.other:
            assert subjects.declared(subject.other).library in MODELS
    assert len(subjects.criteo()) == 26


@pytest.mark.parametrize("tiny", [False, True])
def test_case_names_the_medium_of_its_prompts(tiny: bool) -> None:
    """Qwen2.5-Omni reads images and sounds; each subject sends one of them."""
    for name, field in (
        ("qwen2.5-omni", "width"),
        ("qwen2.5-omni-audio", "seconds"),
        ("qwen3-vl-moe", "width"),
    ):
        subject = subjects.subjects()[name]
        sizes = subjects.sizes_of(subject, subject.cases[0], tiny)
        assert sizes.keys() & {"width", "seconds"} == {field}, name
        config = argparse.Namespace(vocab_size=100)
        made = ours.prompts(config, {"image": 90, "audio": 91}, sizes)(np.random.default_rng(0))
        kind = "image" if field == "width" else "audio"
        assert (
            made["multi_modal_data"].keys() == {kind}
            and made["prompt_token_ids"][0] == {"image": 90, "audio": 91}[kind]
        )


def test_provider_of_each_op_is_one_that_it_has() -> None:
    for pair in architectures.plain_ops().split(","):
        name, _, provider = pair.partition(":")
        assert provider in [p.name for p in registry.get(name).op.providers], pair


def test_lanes_run_in_waves_and_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "find_spec", lambda name: None if name == "gsplat" else object())
    found, absent = architectures.jobs(["gaussians", "lightgcn"], wave=2, tiny=False)
    assert [str(job) for job in found] == [
        "lightgcn, fastkernels", "lightgcn, library, compiled", "lightgcn, library, embeddings kept",
        "lightgcn, library, compiled, patched", "gaussians, fastkernels", "gaussians, engine with PyTorch's ops",
        "lightgcn, library", "lightgcn, library, patched", "lightgcn, engine with PyTorch's ops",
    ]  # fmt: skip
    assert absent == ["gaussians, library (no gsplat)", "gaussians, library, patched (no gsplat)"]
    assert len(architectures.jobs(["lightgcn"], wave=0, tiny=False)[0]) == 4


def test_summary_is_the_published_table_and_names_failed_lanes() -> None:
    case = {"batch": 1, "points": 100_000}
    rows = [
        row("ptv3", OURS, case, 4.0), row("ptv3", PLAIN, case, 9.0), row("ptv3", "library", case, 6.0),
        row("ptv3", "library, compiled", case, None),
    ]  # fmt: skip
    rows[-1].reason = "out of memory"
    *_, line, failed = architectures.summary(rows).splitlines()
    assert line.startswith("| ptv3 | batch 1, points 100000 | 4 | library | 6 | 1.50 |  | 1.00 |")
    assert failed == "failed: ptv3, library, compiled: out of memory"


def test_published_speedups_are_of_known_architectures() -> None:
    assert set(PAPER) <= set(subjects.subjects())


def test_full_sizes_without_a_gpu_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(architectures.machine, "machine", lambda: argparse.Namespace(gpus=[]))
    monkeypatch.setattr(architectures, "run_all", lambda options: 0)
    monkeypatch.setattr(sys, "argv", ["architectures", "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit):
        architectures.main()
    assert "there is no GPU" in capsys.readouterr().err


def test_lanes_end_on_their_own_and_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started, ended = tmp_path / "rows.jsonl", [], []

    class Child:
        def __init__(self, job: architectures.Job, options: Any) -> None:
            self.job = job

        def go(self, limit: float) -> int | None:
            name, lane = self.job.name, self.job.lane.name
            started.append(lane)
            if lane == PLAIN:
                return None
            if lane == OURS:
                append(out, [row(name, lane, case, 2.0) for case in self.job.subject.cases])
            return 0 if lane == OURS else 3

        def end(self) -> None:
            ended.append(self.job.lane.name)

    monkeypatch.setattr(architectures, "Child", Child)
    monkeypatch.setattr(subjects, "find_spec", lambda name: object())
    assert architectures.run_all(options(out, only="gaussians")) == 1
    assert started == [OURS, LIBRARY, LIBRARY + PATCHED, PLAIN]
    reasons = {str(r.subject.provider): r.reason for r in read(out)[0]}
    other = "its process ended with 3"
    assert reasons == {
        OURS: "", PLAIN: "not done within 100 s", LIBRARY: other, LIBRARY + PATCHED: other,
    }  # fmt: skip
    assert architectures.run_all(options(out, only="gaussians")) == 0 and len(started) == 4
    more = options(tmp_path / "more.jsonl", only="gaussians", seconds=5.0)
    assert architectures.run_all(more) == 0 and len(started) == 4 and ended == [OURS]
    assert (
        architectures.run_all(options(out, only="gaussians", limit=120.0)) == 1
    )  # it was ended sooner before
    assert started[4:] == [PLAIN]
    assert architectures.run_all(options(out, only="nothing")) == 2


def test_interrupted_lane_measures_prepared_requests_later(tmp_path: Path) -> None:
    (job, *_), _ = architectures.jobs(["dinov3"], wave=0, tiny=False)
    first, out = job.subject.cases[0], tmp_path / "rows.jsonl"
    append(out, [row("dinov3", OURS, first, 2.0)])
    assert [p for case, p in architectures.missing(out, job) if case == first] == [PREPARED]
    append(out, [row("dinov3", lane, case, 2.0) for case in job.subject.cases for lane in (OURS, PREPARED)])
    assert architectures.missing(out, job) == []


def test_lanes_of_known_length_have_their_own_limit() -> None:
    known = {
        (job.name, job.lane.name): job for job in architectures.jobs([*subjects.subjects()], 2, False)[0]
    }
    assert known["yolov10", OURS].seconds(75.0) == 1.5 * subjects.NEEDS["yolov10", OURS] > 300.0
    assert known["yolov10", OURS].seconds(600.0) == 600.0 and known["ptv3", OURS].seconds(75.0) == 75.0
    lanes = {(n, lane.name) for n, s in subjects.subjects().items() for lane in s.all_lanes}
    assert set(subjects.NEEDS) <= lanes


def test_hidden_first_error_is_in_the_row(tmp_path: Path) -> None:
    def capture() -> Any:
        try:
            raise RuntimeError("compiled in a capture")
        except RuntimeError:
            raise ValueError("the capture failed")  # noqa: B904 as the end of a capture does

    times = Times(tmp_path / "rows.jsonl", "colbertv2", "transformers, compiled")
    times.add({"batch": 1}, capture)
    assert (
        read(times.out)[0][0].reason
        == "RuntimeError: compiled in a capture; then ValueError: the capture failed"
    )


def test_encoders_of_texts_get_no_mask_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture, transformers 5.17 makes one, as here; a compiled block would be compiled anew."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *given: False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes)).eval()
    masks, ids = [], torch.arange(12).view(2, 6)
    model.encoder.layer[0].register_forward_pre_hook(lambda module, given: masks.append(given[1]))
    with torch.no_grad():
        stock = model(input_ids=ids).last_hidden_state
        references.without_masks(model)
        found = model(input_ids=ids).last_hidden_state
    assert masks[0] is not None and masks[1] is None
    torch.testing.assert_close(found, stock)


def test_patched_reference_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()
    more = patched.put_in(model, lambda: model(torch.arange(8)[None]).last_hidden_state, torch.float32)
    assert more["difference"] < 1e-5 and more["patched_modules"] >= 5
    draws = iter((1.0, 2.0))
    other = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()
    with pytest.raises(patched.Differs, match="outputs differ by 1 of their norm"):
        patched.put_in(other, lambda: next(draws) * other(torch.arange(8)[None])[0], torch.float32)
    third = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()
    with pytest.raises(patched.Differs, match="ran none of our kernels"):
        patched.put_in(third, lambda: torch.ones(3), torch.float32)


def test_patched_error_is_measured_against_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model in bfloat16 is far from its own outputs in float32: no fixed limit fits all depths."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 24, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, initializer_range=0.4, **sizes)
    ids = torch.arange(8)[None]

    def model() -> Any:
        return transformers.LlamaModel(config).eval().to(torch.bfloat16)

    def outputs(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(ids).last_hidden_state
        return found

    monkeypatch.setitem(patched.LIMITS, torch.bfloat16, 1e-6)  # is not used
    first = model()
    exact = copy.deepcopy(first).float()
    more = patched.put_in(first, lambda: outputs(first), torch.bfloat16, lambda: outputs(exact))
    assert 1e-3 < more["error"] <= 1.5 * more["stock_error"]
    second, calls = model(), iter((1.0, 1.2))
    exact_second = copy.deepcopy(second).float()
    with pytest.raises(patched.Differs, match=r"from float32, the reference's by .*; 1.5 times that"):
        patched.put_in(
            second, lambda: next(calls) * outputs(second), torch.bfloat16, lambda: outputs(exact_second)
        )


def test_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import sys, time\nsys.stdin.readline()\ntime.sleep(60)\n")
    monkeypatch.setattr(architectures, "__file__", str(script))
    (job, *_), _ = architectures.jobs(["dp3"], wave=0, tiny=False)
    made = architectures.Child(job, options(tmp_path / "rows.jsonl"))
    assert made.go(0.2) is None
    assert made._process.returncode == -9
