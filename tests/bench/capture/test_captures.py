"""Reading captures: damage is reported, and a replayed call equals the recorded one."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench import cli
from fk_bench.capture import captures, replay
from fk_bench.kernels.judge.correctness.cases import Trial
from support.kernels.op_cases import call, mismatch, oracle

from fastkernels import capture
from fastkernels.capture.keep import rows_of
from fastkernels.core import registry

RECORDED = {name for each in captures.load_all()[0] for name in each.ops}
OPS = [name for name in registry.op_names() if name in RECORDED]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def look_up(*ids: int) -> None:
    registry.get("embedding").op(torch.tensor(ids), torch.randn(50, 4), 0, -1, 0, 0, 0)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A capture of two signatures of embedding, one of them with two sets of values, and one of silu_and_mul."""
    with capture.record() as recording:
        for ids in ([7, 8, 7], [1, 2, 3], [1, 2, 3], [9]):
            look_up(*ids)
        registry.get("silu_and_mul").op(torch.randn(2, 8))
    recording.save(tmp_path / "made", {"model": "m", "host": "here"})
    return tmp_path / "made"


def edit(folder: Path, change: Any) -> None:
    data = json.loads((folder / "capture.json").read_text())
    change(data)
    (folder / "capture.json").write_text(json.dumps(data))


def ids_of(folder: Path) -> list[list[int]]:
    cases = replay.captured_cases("embedding", folder)
    return sorted(c.recorded_args("cpu", generator())[0].tolist() for c in cases)


# Reading


def test_recorded_capture_is_read(made: Path) -> None:
    found = captures.load(made)
    assert (found.model, found.host, found.name, found.calls, found.problems) == ("m", "here", "made", 5, [])
    assert found.signatures == 3 and set(found.ops) == {"embedding", "silu_and_mul"}
    assert ids_of(made) == [[1, 2, 3], [7, 8, 7], [9]]
    weights = {c.case.name: c.case.weight for c in replay.captured_cases("embedding", made)}
    assert weights == {"made/0.1": 2, "made/0.0": 1, "made/1": 1}


def test_folder_of_captures(made: Path) -> None:
    assert captures.folders(made) == [made] and captures.folders(made.parent) == [made]
    with pytest.raises(captures.CaptureError, match="nowhere is not a folder"):
        captures.folders(made / "nowhere")
    (made / "empty").mkdir()
    with pytest.raises(captures.CaptureError, match="has no capture in it"):
        replay.captured_cases("rms_norm", made / "empty")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schema": "fastkern', r"capture.json is not JSON: "),
        ("[]", r"capture.json has schema None, but this version reads 'fastkernels.capture/1'"),
        ('{"schema": "fastkernels.capture/9", "ops": {}}', "has schema 'fastkernels.capture/9'"),
    ],
)
def test_unusable_capture_is_an_error(made: Path, text: str, why: str) -> None:
    other = made.parent / "other"
    other.mkdir()
    (other / "capture.json").write_text(text)
    with pytest.raises(captures.CaptureError, match=why):
        captures.load(other)
    assert len(replay.captured_cases("embedding", made.parent)) == 3  # the other is used
    (problem,) = replay.problems("embedding", made.parent)
    assert str(other / "capture.json") in problem
    with pytest.raises(captures.CaptureError, match=why):
        replay.captured_cases("embedding", other)


def test_truncated_values_file(made: Path) -> None:
    file = made / "values.safetensors"
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    file.write_bytes(data[:-3])
    (problem,) = replay.problems("embedding", made)
    assert (
        problem
        == f"{file}: tensor {last} is truncated: the file ends 3 bytes too early; calls that need it are left out"
    )
    assert len(ids_of(made)) == 2 and len(replay.captured_cases("silu_and_mul", made)) == 1
    # Of a signature that is left
    assert sum(c.case.weight for c in replay.captured_cases("embedding", made)) >= 3


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "is not a safetensors file"), (None, "No such file or directory")]
)
def test_no_file_of_values(made: Path, data: bytes | None, why: str) -> None:
    file = made / "values.safetensors"
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    (problem,) = replay.problems("embedding", made)
    assert str(file) in problem and why in problem
    assert replay.captured_cases("embedding", made) == []
    assert len(replay.captured_cases("silu_and_mul", made)) == 1


def test_compressed_values(made: Path) -> None:
    file, packed = made / "values.safetensors", made / "values.safetensors.xz"
    before = ids_of(made)
    packed.write_bytes(lzma.compress(file.read_bytes()))
    file.unlink()
    assert len(before) == 3 and ids_of(made) == before and replay.problems("embedding", made) == []
    packed.write_bytes(packed.read_bytes()[:-40])
    (problem,) = replay.problems("embedding", made)
    assert f"{packed} is not a safetensors file" in problem


def test_missing_or_changed_tensor(made: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(made / "values.safetensors")
    gone = next(n for n, t in tensors.items() if t.tolist() == [9])
    other = next(n for n, t in tensors.items() if t.tolist() == [7, 8, 7])
    del tensors[gone]
    tensors[other][0] = 6
    save_file(tensors, made / "values.safetensors")
    found = "\n".join(replay.problems("embedding", made))
    assert f"tensor {gone} is missing" in found and f"tensor {other} has other contents" in found
    assert ids_of(made) == [[1, 2, 3]]


def test_damaged_calls_are_reported_rest_is_used(made: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        calls = data["ops"]["embedding"]["calls"]
        calls[1]["count"] = "many"
        calls.append({"count": 1, "args": [{"name": "input_ids", "value": 3}], "values": []})
        data["ops"]["rms_norm"] = None
        data["modules"] = [{"cls": "a:B"}]

    edit(made, change)
    found = replay.problems("embedding", made)
    assert any("ops.embedding.calls.1: count: " in p for p in found)
    assert any("ops.rms_norm is NoneType" in p for p in found) and any("modules.0: args" in p for p in found)
    assert any("embedding made/1 is not a call of the op" in p for p in found)
    assert ids_of(made) == [[1, 2, 3], [7, 8, 7]]


def test_block_ids_beyond_cache_are_reported(tmp_path: Path) -> None:
    with capture.record() as recording:
        store(6, [3, 17])
    recording.save(tmp_path, {})
    edit(tmp_path, lambda d: d["ops"]["store_kvcache"]["calls"][0]["args"][2]["shape"].__setitem__(0, 4))
    assert replay.captured_cases("store_kvcache", tmp_path) == []
    (problem,) = replay.problems("store_kvcache", tmp_path)
    assert "block 4 is used, but the cache has 4" in problem


# Replaying


HUGE = 1 << 26  # values of a tensor: Mixtral's experts take minutes


@cache
def shipped(name: str) -> tuple[list[replay.CapturedCase], list[replay.CapturedCase]]:
    """An op's cases: all quick ones and one of the others, and the remaining ones."""
    spec = registry.get(name)
    small, large = [], []
    for case in replay.captured_cases(name):
        size = max(math.prod(a.shape or []) for a in case.arguments)
        if size < HUGE:
            slow = size > HUGE >> 4 or Trial("captured", case.case, case.make_args).gpu_only(spec)
            (large if slow else small).append(case)
    return small + large[:1], large[1:]


@pytest.mark.parametrize("name", OPS)
def test_shipped_calls_pass_the_oracle(name: str) -> None:
    """With the reference provider; the layout is the captured one."""
    cases = replay.captured_cases(name)
    assert replay.problems(name) == [] and len({c.case.name for c in cases}) == len(cases)
    spec = registry.get(name)
    for captured in cases:
        assert spec.bytes_moved(captured.case) > 0 and spec.flops(captured.case) >= 0
    passes_the_oracle(name, shipped(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_shipped_calls_with_large_weights_pass(name: str) -> None:
    if not shipped(name)[1]:
        pytest.skip("all cases are fast")
    passes_the_oracle(name, shipped(name)[1])


def passes_the_oracle(name: str, cases: list[replay.CapturedCase]) -> None:
    spec = registry.get(name)
    reference = next(p for p in spec.op.providers if p.name == "reference")
    assert cases
    for captured, renewed in itertools.product(cases, (False, True)):
        args = (captured.make_args if renewed else captured.recorded_args)("cpu", generator())
        assert len(args) >= len(captured.arguments)
        for argument, value in zip(captured.arguments, args, strict=False):
            if argument.shape is not None:
                found = list(value.shape), list(value.stride()), str(value.dtype)
                assert found == (argument.shape, argument.strides, f"torch.{argument.dtype}"), (
                    captured.case.name
                )
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            sampled = floats and "values" in captured.case.tags  # their rows are drawn
            if argument.name in captured.values and not renewed and not sampled:
                assert torch.equal(torch.as_tensor(captured.values[argument.name]), torch.as_tensor(value))
        assert spec.dims_of is not None and (renewed or spec.dims_of(*args) == captured.case.dims)
        want = oracle(spec, args)
        assert mismatch(spec, captured.case, call(spec.op, reference.fn, args), want) is None, (
            captured.case.name
        )


ROUTED = [name for name in registry.op_names() if name.startswith("fused_experts_")]


@pytest.mark.parametrize("name", ROUTED)
def test_captured_routing_reaches_other_experts(name: str) -> None:
    """Their weights are in the number format of one of the op's models, and their sizes fit it."""
    spec, recorded = registry.get(name), {c.case.name: c for c in replay.captured_cases("fused_experts")}
    cases = replay.captured_cases(name)
    assert len({c.case.dims["experts"] for c in cases}) == 2 and replay.problems(name) == []
    found = next(c for c in cases if c.case.dims["tokens"] == 8 and c.case.dims["hidden"] == 256)
    args = found.recorded_args("cpu", generator())
    for argument in replay.ROUTING:
        assert torch.equal(args[spec.position(argument)], recorded[found.case.name].values[argument])
    assert spec.dims_of is not None and spec.dims_of(*args) == found.case.dims
    want = spec.reference(*(a.double() if i == 0 else a for i, a in enumerate(args)))
    assert (spec.op(*args) - want).norm() < 0.05 * want.norm() and want.std() > 0.01


def test_arguments_newer_than_capture_are_made() -> None:
    captured = shipped("attention_prefill")[0][0]
    names = [a.name for a in registry.get("attention_prefill").op.overload._schema.arguments]
    assert "padded" in names and "padded" not in [a.name for a in captured.arguments]
    args = captured.recorded_args("cpu", generator())
    assert "padding" not in captured.case.dims and args[names.index("padded")] is False


def test_shipped_captures_are_small() -> None:
    """Small, of several ops, readable by everyone, with weights that match production."""
    found, wrong = captures.load_all()
    assert wrong == [] and len(OPS) >= 10 and "smollm2-135m-chat" in {c.name for c in found}
    files = list(captures.SHIPPED.glob("*/*"))
    assert sum(f.stat().st_size for f in files) < 512 << 10
    assert {f.name for f in files} == {"capture.json.xz", "values.safetensors.xz"}
    for each in found:
        assert each.commit and each.host and each.scenario
        assert each.modules or "what" in (each.model_extra or {})  # a routing says what it is
        for name, op in each.ops.items():
            weights = sum(c.case.weight for c in replay.captured_cases(name) if c.capture == each.name)
            assert weights == pytest.approx(op.count - op.dropped["calls"])


@pytest.mark.parametrize(("op", "gates"), [("gated_delta_rule", "g"), ("ssd", "dt")])
def test_gates_of_trained_hybrids_are_replayed(op: str, gates: str) -> None:
    """Their heads differ, as those of random inputs do not; each set of inputs has new numbers."""
    spec = registry.get(op)
    cases = [c for c in replay.captured_cases(op) if c.capture.startswith("small-trained-")]
    assert len(cases) >= 3 and all("values" in c.case.tags for c in cases)
    case = max(cases, key=lambda c: sum(c.case.dims["seq_lens"]))
    first, second = (case.make_args("cpu", generator(seed)) for seed in (1, 2))
    at = spec.position(gates)
    assert not torch.equal(first[at], second[at])
    heads = first[at].float().mean(0)
    assert heads.max() - heads.min() > 3 * first[at].float().std(0).mean() / len(first[at]) ** 0.5
    double = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in first]
    want, _ = spec.reference(*double)
    assert (spec.op(*first) - want).norm() < 0.05 * want.norm() and want.std() > 1e-5


def test_floats_are_new_and_integers_replayed() -> None:
    captured = replay.captured_cases("rotary_emb")[0]
    first, again, other = (captured.recorded_args("cpu", generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], other[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_replayed_views_share_memory() -> None:
    captured = replay.captured_cases("rotary_emb")[0]
    _, query, key, *_ = captured.make_args("cpu", generator())
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert key.data_ptr() - query.data_ptr() == query.shape[-1] * query.element_size()
    assert not query.is_contiguous() and query.std() > 0.5 and key.std() > 0.5


def test_expanded_tensor(tmp_path: Path) -> None:
    ids = torch.tensor([[3], [1]]).expand(2, 5)
    with capture.record() as recording:
        registry.get("embedding").op(ids, torch.randn(50, 4), 0, -1, 0, 0, 0)
    recording.save(tmp_path, {})
    (captured,) = replay.captured_cases("embedding", tmp_path)
    found = captured.recorded_args("cpu", generator())[0]
    assert torch.equal(found, ids) and found.stride() == ids.stride()


def store(blocks: int, slots: list[int], block_size: int = 4) -> list[torch.Tensor]:
    key, value = torch.randn(2, len(slots), 1, 2)
    caches = [torch.zeros(blocks, block_size, 1, 2) for _ in range(2)]
    registry.get("store_kvcache").op(key, value, *caches, torch.tensor(slots))
    return caches


def test_calls_without_values_are_reported(tmp_path: Path) -> None:
    with capture.record(tensor=16) as recording:
        look_up(1, 2)
        look_up(1, 2, 3)
    recording.save(tmp_path / "tensor", {})
    with capture.record(budget=1) as recording:
        look_up(1, 2)
    recording.save(tmp_path / "budget", {})
    assert [len(replay.captured_cases("embedding", tmp_path / f)) for f in ("tensor", "budget")] == [1, 0]
    (large,), (small,) = (replay.problems("embedding", tmp_path / f) for f in ("tensor", "budget"))
    assert "embedding tensor/1 has no values, input_ids was too large; left out" in large
    assert "embedding budget/0 has no values, the budget was used up; left out" in small


def test_large_cache_shrinks_to_used_blocks(tmp_path: Path, monkeypatch: Any) -> None:
    tables = torch.tensor([[90, 40, 7], [90, 12, 99]], dtype=torch.int32)  # 7 and 99 are not read
    with capture.record() as recording:
        store(100, [4 * 90 + 1, -1, 4 * 12, 4 * 90 + 3])
        registry.get("attention_decode").op(
            torch.randn(2, 1, 2), torch.randn(100, 4, 1, 2), torch.randn(100, 4, 1, 2),
            torch.tensor([7, 5], dtype=torch.int32), tables, 8, 1.0,
        )  # fmt: skip
    recording.save(tmp_path, {})

    def args(op: str) -> list[Any]:
        (captured,) = replay.captured_cases(op, tmp_path)
        return captured.recorded_args("cpu", generator())

    assert (
        args("store_kvcache")[2].shape[0] == 100 and args("attention_decode")[4].tolist() == tables.tolist()
    )
    monkeypatch.setattr(replay, "CACHE_BYTES", 100)
    stored, attended = args("store_kvcache"), args("attention_decode")
    assert stored[2].shape == stored[3].shape == (3, 4, 1, 2)  # 0, which padding uses, 12 and 90
    assert stored[4].tolist() == [4 * 2 + 1, -1, 4 * 1, 4 * 2 + 3]
    assert attended[1].shape == (4, 4, 1, 2) and attended[4].tolist() == [[3, 2, 0], [3, 1, 0]]
    assert attended[4].dtype == torch.int32


# The command


def command(capsys: Any, *args: object) -> tuple[int, str, str]:
    """fk-bench in this process: exit status, standard output and error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["capture", *map(str, args)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_capture_command(tmp_path: Path, capsys: Any) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    capsys.readouterr()
    status, out, err = command(capsys, model, "--out", tmp_path / "captures", "--dtype", "float32")
    assert status == 0, err
    answer, folder = json.loads(out.splitlines()[-1]), tmp_path / "captures" / "tiny-chat-fastkernels"
    found = captures.load(folder)
    assert answer["ok"] and Path(answer["out"]) == folder and answer["ops"] == len(found.ops) >= 10
    assert (answer["signatures"], answer["calls"]) == (found.signatures, found.calls)
    assert "wave 3 of 3: 3 requests, 120 tokens generated" in err and "attention_decode" in out
    (modules,) = [m for m in found.modules if m.cls.endswith(":VllmRMSNorm")]
    # Two in each of two layers, and the last
    assert modules.count == 5 and modules.args["hidden_size"] == 128
    # a step of the first wave: one sequence whose prompt is there and 31 tokens that are decoded, in two layers
    single = [c for c in found.ops["attention_decode"].calls if c.args[0].shape == [1, 4, 32]]
    assert sum(c.count for c in single) >= 2 * 31
    prefixes = [c.case.dims for c in replay.captured_cases("attention_prefill", folder)]
    # Of a prompt that begins like another
    assert any(sum(d["seq_lens"]) > sum(d["q_lens"]) for d in prefixes)
    tables = [
        c.recorded_args("cpu", generator())[4] for c in replay.captured_cases("attention_decode", folder)
    ]
    assert any(t.shape[0] > 1 and (t[:, 0] == t[0, 0]).all() for t in tables)  # whose first block is shared
    for name in found.ops:
        spec = registry.get(name)
        captured = replay.captured_cases(name, folder)[0]
        args = captured.recorded_args("cpu", generator())
        want = oracle(spec, args)
        assert mismatch(spec, captured.case, call(spec.op, spec.op, args), want) is None, name


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--python", os.path.relpath(sys.executable), "--scenario", "chats"], "unknown scenario 'chats'"),
        (["--scenario", "chats"], "unknown scenario 'chats'. Did you mean 'chat'?"),
        (["--host", "vlm"], "unknown host 'vlm'. Did you mean 'vllm'?"),
        (["--dtype", "bf17"], "unknown dtype 'bf17'. Known: auto, bfloat16"),
        (["--host", "vllm"], "vllm is not installed in"),
        (["--ops", "rms_nrom"], "unknown op 'rms_nrom'. Did you mean 'rms_norm'?"),
        (["--ops", "rms_norm"], "our engine records all its ops"),
        (["--engine-args", "{"], "--engine-args is not JSON"),
        (["--python", "/nowhere/python"], "no such interpreter: /nowhere/python"),
        (["--budget", "0"], "--budget, --signatures and --values must be at least 1"),
    ],
)
def test_mistakes(args: list[str], why: str, capsys: Any) -> None:
    status, _, error = command(capsys, *args)
    assert status == 2 and why in error


def test_dead_host_is_reported_with_its_log(tmp_path: Path, capsys: Any) -> None:
    status, _, error = command(
        capsys, "--out", tmp_path, "--name", "broken", "--engine-args", '{"block_size": 3}'
    )
    assert status == 1 and "block_size 3 is not a power of two" in error
    assert "Traceback" not in error.splitlines()[0]


# Values of float tensors


def outliers() -> torch.Tensor:
    """Rows [300, 64] with a channel that is 50 times as large as the others."""
    x = torch.randn(300, 64, generator=generator())
    x[:, 5] *= 50
    return x


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    norm, router = registry.get("rms_norm").op, registry.get("topk_softmax").op
    with capture.record(floats=2048) as recording:
        for i in range(3):
            norm(outliers() * (i + 1), torch.full((64,), 2.0), 1e-5)
        router(torch.randn(7, 8), 2, True)
    recording.save(tmp_path / "made", {"model": "m", "host": "here"})
    return tmp_path / "made"


def test_sampled_values_keep_outlier_channels(sampled: Path) -> None:
    cases = replay.captured_cases("rms_norm", sampled)
    assert len(cases) == 3 and all(c.case.name.endswith(":values") for c in cases)
    assert sum(c.case.weight for c in cases) == 3
    largest = []
    for case in cases:
        x, weight, *_ = case.make_args("cpu", generator(1))
        assert x.shape == (300, 64) and case.case.dims["hidden"] == 64
        scale = x.square().mean(0).sqrt()
        assert scale.argmax() == 5 and scale[5] > 20 * scale.median()
        assert (weight - 2).abs().max() <= 0.2001
        largest.append(float(scale[5]))
    assert max(largest) > 2 * min(largest)  # each call has values of its own


def test_sampled_values_are_fresh_in_every_batch(sampled: Path) -> None:
    case = replay.captured_cases("rms_norm", sampled)[0]
    a, b = (case.make_args("cpu", generator(seed))[0] for seed in (1, 2))
    assert not torch.equal(a, b) and torch.isin(a, outliers()).float().mean() < 0.1
    assert torch.equal(a, case.make_args("cpu", generator(1))[0])


def test_sampled_values_of_choices_are_not_replayed(sampled: Path) -> None:
    (case,) = replay.captured_cases("topk_softmax", sampled)
    assert "values" not in case.case.tags and not case.case.name.endswith(":values")


def test_sampled_rows_skip_zeros() -> None:
    x = torch.zeros(100, 16)
    x[40:44] = 1.0
    rows = rows_of(x, 3 * 64)
    assert rows.shape == (3, 16) and bool(rows.ne(0).all())


def test_unknown_kind_of_values_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["capture", "--values", "all"])
    assert "'all' is neither a number nor 'sample'" in capsys.readouterr().err


def test_capture_into_a_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        cli.main(["capture", "--scenario", "chat", "--out", str(tmp_path / "file")])
    assert "give a folder" in capsys.readouterr().err
