"""The registry of architectures: read from ARCH without imports, with errors that name the files."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastkernels.core import registry as ops
from fastkernels.core.registry import DuplicateName, UnknownName
from fastkernels.engine.http.parsing.reasoning import REASONING_PARSERS
from fastkernels.engine.http.parsing.tool_parsers import TOOL_PARSERS
from fastkernels.models.common.checkpoints import quantization
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.registry import InvalidModelFile, models, read_models
from fastkernels.models.common.plans.ops import ops_of_model

ARCH = "ARCH = Architecture(names=('{0}',), category='llm', model='A', runner='Generate', model_type='a')\n"


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_no_file_is_imported() -> None:
    code = (
        "import sys; from fastkernels.models.common.descriptions.registry import architectures as found_in;"
        "found = found_in();"
        "print(found, [m for m in ('torch', 'transformers', 'fastkernels.models.llm.llama') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{registry.architectures()} []\n"


@pytest.mark.parametrize("name", models())
def test_arch_as_read_equals_arch_as_imported(name: str) -> None:
    model = models()[name]
    assert model.arch == importlib.import_module(model.module).ARCH
    built_by = registry.model_class(model.arch.names[0]).__module__
    assert built_by == model.module or (
        built_by == "fastkernels.models.common.layers.decoder" and registry.load(f"{model.module}:describe")
    )
    assert model.about


@pytest.mark.parametrize("name", models())
def test_layers_are_the_level_3_ops_of_the_model(name: str) -> None:
    found = {op for op in ops_of_model(name) if ops.get(op).level == 3}
    assert set(models()[name].arch.layers) == found


def test_two_files_with_one_architecture_are_both_named(tmp_path: Path) -> None:
    first = write(tmp_path, "llm/first.py", ARCH.format("AForCausalLM"))
    second = write(tmp_path, "llm/second.py", ARCH.format("AForCausalLM"))
    with pytest.raises(DuplicateName) as error:
        read_models(tmp_path)
    assert str(first) in str(error.value) and str(second) in str(error.value)


def test_two_files_with_one_name_are_both_named(tmp_path: Path) -> None:
    first = write(tmp_path, "llm/a.py", ARCH.format("A"))
    second = write(tmp_path, "vision/a.py", ARCH.format("B").replace("'llm'", "'vision'"))
    with pytest.raises(DuplicateName) as error:
        read_models(tmp_path)
    assert str(first) in str(error.value) and str(second) in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class A: pass\n", "declares no model"),
        ("ARCH = 3\n", "declares no model"),
        (ARCH.format("A") * 2, "declares no model"),
        (ARCH.format("A").replace("'llm'", "'vision'"), "is not its folder"),
        (ARCH.format("A").replace("'Generate'", "runner()"), "runner of ARCH is not a literal"),
        (ARCH.format("A").replace("runner=", "runs="), "unknown argument 'runs'"),
        (ARCH.format("A").replace("runner='Generate', ", ""), "missing 1 required"),
        (ARCH.format("A").replace("names=", ""), "keyword arguments only"),
    ],
)
def test_a_file_without_usable_arch_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, "llm/a.py", text)
    with pytest.raises(InvalidModelFile, match=words) as error:
        read_models(tmp_path)
    assert str(file) in str(error.value)


def test_common_and_init_files_are_no_models(tmp_path: Path) -> None:
    write(tmp_path, "common/checkpoints/weights.py", "")
    write(tmp_path, "llm/__init__.py", "")
    model = write(tmp_path, "llm/a.py", '"""A model.\n\nMore."""\n' + ARCH.format("A"))
    (found,) = read_models(tmp_path, "pkg").values()
    assert (found.name, found.file, found.path, found.about) == ("a", model, "pkg.llm.a:A", "A model.")


def test_unknown_architecture_names_the_closest_or_all() -> None:
    with pytest.raises(
        UnknownName, match=r"Did you mean 'LlamaForCausalLM'\? .*fk-bench list models"
    ) as raised:
        registry.model_class("LlamaForCausalML")
    assert "MixtralForCausalLM" not in str(raised.value)
    with pytest.raises(UnknownName, match=r"Known: .*LlamaForCausalLM, .*MixtralForCausalLM.*list models"):
        registry.model_class("Nothing")


def code_words(file: Path) -> set[str]:
    """Identifiers and words of strings in a file, without its docstrings."""
    tree = ast.parse(file.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words |= set(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            words |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return words


def test_engine_and_common_code_names_no_model() -> None:
    names = {*models(), *registry.architectures()} - set(ops.op_names())  # RWKV-7's recurrence has its name
    package = registry.MODELS_ROOT.parent
    files = [*(package / "engine").rglob("*.py"), *(package / "models" / "common").rglob("*.py")]
    assert len(files) > 50
    formats = {
        *TOOL_PARSERS,
        *REASONING_PARSERS,
    }  # of answers; users choose them by vLLM's names, which are models'
    parsing = package / "engine" / "http" / "parsing"
    # `quant_method` in config.json names a number format, one of them after its model.
    allowed = {f: formats if f.parent == parsing else set() for f in files}
    allowed[package / "models" / "common" / "checkpoints" / "quantization.py"] = set(quantization.READERS)
    # The names of languages are in this module of transformers.
    allowed[package / "engine" / "speech" / "vocabulary.py"] = {"whisper"}
    # Files of scenes belong to one model each.
    allowed[package / "models" / "common" / "checkpoints" / "scenes.py"] = {
        "gaussian_splatting",
        "GaussianSplatting",
    }
    allowed[package / "models" / "common" / "checkpoints" / "snapshots.py"] = {"instant_ngp", "InstantNGP"}
    # The published folder of a model of speech is read by the name of its file.
    for file in ("checkpoints/checkpoint.py", "configs/speech_config.py"):
        allowed[package / "models" / "common" / file] = {"cosyvoice3", "CosyVoice3Model"}
    found = {str(f): names & code_words(f) - allowed[f] for f in files}
    assert {f: named for f, named in found.items() if named} == {}
    assert "granitemoe" in code_words(models()["granitemoeshared"].file)


def test_models_of_a_series_share_a_folder(tmp_path: Path) -> None:
    file = write(tmp_path, "llm/series/second.py", ARCH.format("B"))
    found = registry.read_models(tmp_path, "pkg")
    assert found["second"].module == "pkg.llm.series.second" and found["second"].file == file
    write(tmp_path, "vision/series/third.py", ARCH.format("C"))
    with pytest.raises(registry.InvalidModelFile, match="category 'llm' is not its folder 'vision'"):
        registry.read_models(tmp_path)


def test_ops_of_a_model_include_those_of_later_experts() -> None:
    """DeepSeek-V3's first three layers have no experts."""
    found = ops_of_model("deepseek_v3")
    assert {"mla_prefill", "mla_decode", "grouped_topk", "fused_experts"} <= set(found)
