"""`fk-bench stubs`: every op's file loads as a candidate, is exact, and computes the op's reference."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench import cli
from fk_bench.info import model_blocks, stub_source, stubs
from fk_bench.kernels.judge.scan import scan
from fk_integrations.signatures import diff as signature_diff
from support.commands import fk_bench, fk_bench_here, last_json
from support.kernels.op_cases import call, make_args, mutated
from torch import nn

from fastkernels.core import candidate, registry
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import models
from fastkernels.models.common.plans.ops import ops_of_model

NAMES = registry.op_names()
COLLECTIVES = registry.collective_names()
FUNCTIONS = [n for n in NAMES if registry.get(n).op is not None]
HOSTS = signature_diff.hosts()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("candidates")
    for name in (*NAMES, *COLLECTIVES):
        (folder / f"{name}.py").write_text(stubs.source(name))
    return folder


def load(folder: Path, name: str) -> candidate.Candidate:
    return candidate.load(name, str(folder / f"{name}.py"))


@pytest.mark.parametrize("name", [*NAMES, *COLLECTIVES])
def test_stub_offers_function_and_host_classes(name: str, written: Path) -> None:
    found, spec = load(written, name), registry.get(name)
    assert (found.function is not None) == (spec.op is not None)
    _, classes = stubs.host_classes(name)
    assert set(found.classes) == {c.__name__ for c in classes}
    assert classes or spec.op is not None, "the file offers nothing"
    for ours in classes:
        theirs = found.classes[ours.__name__]
        assert theirs is not ours and issubclass(theirs, ours)
        for method in ("__init__", "forward", *getattr(ours, "live_methods", ())):
            assert signature_diff.our_signature(theirs, method) == signature_diff.our_signature(ours, method)
        for method in stub_source._calls(ours):
            assert method in vars(theirs), f"{ours.__name__}.{method} is not in the file"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stub_function_matches_schema_and_reference(name: str, written: Path) -> None:
    spec, function = registry.get(name), load(written, name).function
    assert function is not None
    schema = spec.op.overload._schema
    given = (a.default_value for a in schema.arguments if a.has_default_value())
    defaults = tuple(tuple(value) if isinstance(value, list) else value for value in given)
    assert function.__code__.co_varnames[: function.__code__.co_argcount] == tuple(
        a.name for a in schema.arguments
    )
    assert (function.__defaults__ or ()) == defaults
    assert all(a.name in function.__doc__ for a in schema.arguments)
    provider = next(p for p in spec.op.providers if p.name == "reference")
    for case in [c for c in spec.cases if "odd" in c.tags][:3]:
        ours, theirs = make_args(spec, case), make_args(spec, case)
        want, got = call(spec.op, provider.fn, ours), call(spec.op, function, theirs)
        assert len(want) == len(got) > 0
        for a, b in zip(want, got, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
        for i, before in enumerate(make_args(spec, case)):
            if isinstance(before, torch.Tensor) and i not in mutated(spec.op):
                after, same = (
                    t.float() if t.itemsize == 1 and t.is_floating_point() else t for t in (theirs[i], before)
                )
                assert torch.equal(after.nan_to_num(), same.nan_to_num()), schema.arguments[i].name


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if mutated(registry.get(n).op)])
def test_stub_writes_mutated_arguments(name: str, written: Path) -> None:
    spec, function = registry.get(name), load(written, name).function
    assert function is not None
    case = next(c for c in spec.cases if all(make_args(spec, c)[i] is not None for i in mutated(spec.op)))
    args, before = make_args(spec, case), make_args(spec, case)
    memory = [args[i].data_ptr() for i in mutated(spec.op)]
    function(*args)
    for i, at in zip(mutated(spec.op), memory, strict=True):
        assert args[i].data_ptr() == at and not torch.equal(args[i], before[i])


@pytest.fixture
def counted(written: Path) -> Iterator[Any]:
    """Runs of a stub's function, counted through its reference."""
    runs: dict[str, int] = {}
    undo = []

    def count(name: str) -> dict[str, int]:
        module = sys.modules[load(written, name).function.__module__]  # type: ignore[union-attr]
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            runs[name] = runs.get(name, 0) + 1
            return function(*args, **kwargs)

        setattr(module, name, wrapped)
        undo.append((module, name, function))
        return runs

    yield count
    for module, name, function in undo:
        setattr(module, name, function)


@pytest.mark.parametrize(
    ("name", "cls", "sizes"),
    [
        ("rms_norm", "VllmRMSNorm", (24,)),
        ("gemma_rms_norm", "VllmGemmaRMSNorm", (24,)),
        ("layer_norm", "VllmLayerNorm", (24,)),
        ("silu_and_mul", "VllmSiluAndMul", ()),
        ("gelu_and_mul", "VllmGeluAndMul", ("tanh",)),
        ("gelu", "VllmGELUTanh", ()),
        ("quick_gelu", "VllmQuickGELU", ()),
        ("relu2", "VllmReLUSquaredActivation", ()),
        ("t5_layer_norm", "TransformersT5LayerNorm", (24,)),
    ],
)
def test_class_calls_function_of_its_file(
    name: str, cls: str, sizes: tuple, written: Path, counted: Any
) -> None:
    ours: nn.Module = registry.op_class(name, cls)(*sizes)
    theirs: nn.Module = load(written, name).classes[cls](*sizes)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    want, runs = ours(x), counted(name)
    # Ours may be C++ here, theirs is PyTorch: they differ by roundings.
    torch.testing.assert_close(theirs(x), want, rtol=1e-6, atol=1e-6)
    assert runs == {name: 1}


@pytest.mark.parametrize("name", [*NAMES, *COLLECTIVES])
def test_stub_passes_the_scan(name: str, written: Path) -> None:
    """The static scan finds nothing, so an author starts from a passing candidate."""
    assert not scan.rejections(scan.scan(written / f"{name}.py", name))


@pytest.mark.slow
@pytest.mark.parametrize("model", models())
def test_stubs_of_blocks_pass_the_scan(model: str, tmp_path: Path) -> None:
    try:
        _, blocks = model_blocks.register(model)
    except Unsupported:
        pytest.skip("no block of it can be judged")
    for block in blocks:
        file = tmp_path / f"{block}.py"
        file.write_text(stubs.source(block))
        assert not scan.rejections(scan.scan(file, block)), block


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ("    scale = 2\n", r"line 2: .*VllmRMSNorm is the op that the candidate replaces"),
        (
            "    def forward(self, x, residual=None):\n        return super().forward(x, residual)\n",
            "line 4: super",
        ),
        (
            "    def forward(self, x):\n        return ours.VllmRMSNorm.forward(self, x)\n",
            "line 4: .*VllmRMSNorm",
        ),
    ],
    ids=["as it is", "super", "by name"],
)
def test_subclass_that_inherits_the_call_is_rejected(body: str, pattern: str, tmp_path: Path) -> None:
    file = tmp_path / "rms_norm.py"
    module = next(t.module for t in registry.get("rms_norm").targets if t.cls == "VllmRMSNorm")
    head = f"import {module} as ours\nclass VllmRMSNorm(ours.VllmRMSNorm):\n"
    file.write_text(head + body)
    assert re.search(pattern, scan.rejections(scan.scan(file, "rms_norm")))


def test_live_method_of_the_op_is_not_inherited(tmp_path: Path) -> None:
    """A subclass of a communicator may have a sum of its own, and neither inherits nor calls ours."""
    file, head = (
        tmp_path / "all_reduce.py",
        "from fastkernels.overrides.collective import vllm as ours_vllm\n",
    )
    method = "    def all_reduce(self, x):\n        return {}\n"
    found = []
    for body in ("    pass\n", method.format("super().all_reduce(x)"), method.format("x.clone()")):
        file.write_text(f"{head}class VllmCudaCommunicator(ours_vllm.VllmCudaCommunicator):\n{body}")
        found.append(scan.rejections(scan.scan(file, "all_reduce")))
    assert re.match(r"line 2: \S+VllmCudaCommunicator is the op", found[0])
    assert found[1:] == ["line 4: super().all_reduce is what the candidate replaces (own-op)", ""]


@pytest.mark.parametrize("host", HOSTS)
def test_stubs_for_every_host(host: str, tmp_path: Path) -> None:
    some = 0
    for name in (*NAMES, *COLLECTIVES):
        chosen, classes = stubs.host_classes(name, host)
        if not classes:
            continue
        some += 1
        assert chosen == host
        (tmp_path / f"{name}.py").write_text(stubs.source(name, host))
        found = load(tmp_path, name)
        assert not scan.rejections(scan.scan(tmp_path / f"{name}.py", name)), name
        assert set(found.classes) == {c.__name__ for c in classes}
        for ours in classes:
            for method in ("__init__", "forward"):
                theirs = signature_diff.our_signature(found.classes[ours.__name__], method)
                assert theirs == signature_diff.our_signature(ours, method)
    least = {
        "torchrec": 2,
        "torch_geometric": 1,
        "diffusion_policy_3d": 1,
        "gsplat": 0,  # it has functions
        "ultralytics": 2,
    }
    assert some >= least.get(host, 3)


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_stub_omits_runners_of_experts(host: str) -> None:
    assert stubs.host_classes("fused_experts", host) == (host, [])
    assert "\nclass " not in stubs.source("fused_experts", host)


def test_stub_text_passes_ruff(written: Path) -> None:
    """Formatted, without unused or unbound names or long lines, and valid Python 3.10."""
    ruff = [sys.executable, "-m", "ruff"]
    if subprocess.run([*ruff, "--version"], capture_output=True).returncode:
        pytest.skip("ruff is not installed")
    for arguments in (
        ["format", "--check", "--line-length", "110"],
        ["check", "--select", "E,F,B", "--line-length", "120", "--target-version", "py310"],
    ):
        done = subprocess.run([*ruff, *arguments, "--isolated", str(written)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("model", "layer", "others"),
    [
        ("llama", "llama_decoder_layer", {"moe_align", "qwen3_decoder_layer", "gelu", "sparse_moe"}),
        ("qwen3", "qwen3_decoder_layer", {"moe_align", "llama_decoder_layer"}),
        ("mixtral", "mixtral_decoder_layer", {"gated_mlp", "layer_norm"}),
    ],
)
def test_ops_of_a_model(model: str, layer: str, others: set[str]) -> None:
    found = ops_of_model(model)
    assert {
        layer,
        "rms_norm",
        "silu_and_mul",
        "linear",
        "attention_decode",
        "rotary_emb",
        "embedding",
    } <= set(found)
    assert not others & set(found)
    assert ops_of_model(models()[model].arch.names[0]) == found
    if model == "mixtral":
        assert {"sparse_moe", "fused_experts", "moe_align", "topk_softmax"} <= set(found)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one `fk-bench stubs`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["stubs", *map(str, args)])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_command_never_overwrites_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "some" / "candidates"
    status, text, error = run(capsys, "--level", "1", "--model", "llama", "--out", out)
    assert status == 0, error
    files = {f.stem for f in out.glob("*.py")}
    assert files == {n for n in ops_of_model("llama") if registry.get(n).level == 1}
    line = {"command": "stubs", "ok": True, "files": len(files), "kept": 0, "out": str(out)}
    assert json.loads(text.splitlines()[-1]) == line
    mine = out / "rms_norm.py"
    mine.write_text("mine\n")
    _, text, _ = run(capsys, "--op", "rms_norm", "--op", "gelu", "--out", out)
    assert json.loads(text.splitlines()[-1]) == {**line, "files": 1, "kept": 1}
    assert mine.read_text() == "mine\n" and "1 existing file was kept" in text and (out / "gelu.py").is_file()
    _, text, _ = run(capsys, "--op", "rms_norm", "--out", out, "--force", "--json")
    assert json.loads(text)["files"] == 1 and "def rms_norm(" in mine.read_text()


def test_command_of_the_shell(tmp_path: Path) -> None:
    done = fk_bench("stubs", "--op", "relu2", "--out", tmp_path)
    assert done.returncode == 0 and last_json(done)["files"] == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "rmsnorm"], "unknown op 'rmsnorm'. Did you mean 'rms_norm'?"),
        (["--level", "7"], "unknown level '7'. Known: 1, 2, 3"),
        (["--model", "lama"], "unknown model 'lama'. Did you mean 'llama'?"),
        (["--host", "vlm"], "unknown host 'vlm'. Did you mean 'vllm'?"),
        (["--op", "gelu", "--model", "llama"], "no op matches"),
    ],
)
def test_unknown_names_are_one_line_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(capsys, *arguments, "--out", tmp_path / "out")
    assert status == 2 and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    status, _, error = run(capsys, "--op", "relu2", "--out", tmp_path / "file" / "out")
    assert status == 2 and error.startswith(f"error: --out {tmp_path}/file/out: ")


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    """Of every command: the error is caught where all of them begin."""
    (tmp_path / "rms_norm.py").symlink_to("/dev/full")
    result = fk_bench_here("stubs", "--op", "rms_norm", "--out", tmp_path, "--force")
    assert result.returncode == 1 and last_json(result)["ok"] is False
    assert re.fullmatch(
        r"error: fk-bench stubs: .*No space left on device; make room, or .*\n", result.stderr
    )
