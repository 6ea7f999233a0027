"""`fk-bench coverage`: verdicts against architectures that were checked by hand, isolation, and counts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from fk_bench.coverage import run as runner
from fk_bench.coverage.audit import Coverage, Row, audit, judge, summary
from fk_bench.coverage.command import file_of, paper_files
from fk_integrations.transformers import architectures, switches
from fk_integrations.transformers.matching import Kind, Match, missing
from support.commands import fk_bench_here

from fastkernels.core import registry

transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
HAND = json.loads((HERE / "hand_checked.json").read_text())
# A reading is a verdict, or a verdict with what is not matched
VERDICTS = {file_of(name): read if isinstance(read, str) else read[0] for name, read in HAND["files"].items()}
# One of each verdict and kind of difference, cheap to build
QUICK = (
    "arcee",
    "cohere",
    "deepseek_v2",
    "deit",
    "encoder_decoder",
    "zaya",
    "minimax_m2",
    "poolformer",
    "qwen3",
)
needs_drawn_version = pytest.mark.skipif(
    transformers.__version__ != HAND["transformers"], reason="the sample was drawn from another version"
)


def _draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", HERE / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_drawn_version
def test_hand_checked_files_are_the_seeded_draw() -> None:
    drawn = _draw().draw(Path(transformers.__file__).parent / "models")
    assert sorted(VERDICTS) == drawn and len(drawn) == 40


@needs_drawn_version
@pytest.mark.parametrize("name", QUICK)
def test_verdict_agrees_with_hand_check(name: str) -> None:
    file = f"{name}/modeling_{name}.py"
    assert audit(file).verdict.value == VERDICTS[file]


@pytest.mark.parametrize(
    ("name", "part"), [("encoder_decoder", "BertLayer"), ("timm_backbone", "Bottleneck")]
)
def test_wrapper_is_built_from_its_documented_config(name: str, part: str) -> None:
    _, model = architectures.representative(file_of(name))
    assert part in {type(module).__name__ for module in model.modules()}


def _of_default(row: Row) -> str:
    """The verdict on the default config, which the readings are of: without what only switched configs need."""
    named = [name for names in row.differs.values() for name in names]
    only_switched = row.verdict is Coverage.PARTIAL and all(" with " in name for name in named)
    return (Coverage.COMPOSABLE if only_switched else row.verdict).value


@pytest.mark.slow
@needs_drawn_version
def test_audit_agrees_with_95_percent_of_hand_checks() -> None:
    rows = runner.run(sorted(VERDICTS), workers=2)
    wrong = {r.file: read for r in rows if (read := _of_default(r)) != VERDICTS[r.file]}
    assert len(wrong) <= 0.05 * len(rows), wrong


def test_missing_primitive_comes_before_difference() -> None:
    op, other = Match(Kind.OP, "linear"), Match(Kind.OP, "attention", by_probe=False, needs="a bias")
    row = judge(
        "x/modeling_x.py", "x", "X", False, {("Linear", op), ("A", other), ("C", missing("convolution"))}
    )
    assert row.verdict is Coverage.NEW_PRIMITIVE
    assert (row.missing, row.differs) == ({"convolution": ["C"]}, {"a bias": ["A"]})
    assert judge("x", "x", "X", False, {("A", other)}).verdict is Coverage.PARTIAL
    assert judge("x", "x", "X", False, {("Linear", op)}).verdict is Coverage.COMPOSABLE
    assert judge("x", "x", "X", True, {("A", other)}).verdict is Coverage.RUNS


def test_partly_served_file_does_not_run() -> None:
    """Of gemma3 the engine serves the causal language model; the class that stands for the file reads images."""
    row = audit("gemma3/modeling_gemma3.py")
    assert row.model == "Gemma3ForConditionalGeneration" and row.verdict is not Coverage.RUNS
    assert row.served == ("Gemma3ForCausalLM",)
    whole = audit("qwen3/modeling_qwen3.py")
    assert whole.verdict is Coverage.RUNS and whole.model in whole.served


def test_relative_attention_off_by_default_is_partial() -> None:
    row = audit(file_of("deberta_v2"))
    told = [name for names in row.differs.values() for name in names]
    assert row.verdict is Coverage.PARTIAL and not row.missing
    assert "DisentangledSelfAttention with relative_attention=True" in told
    assert any("pos_att_type=['c2p', 'p2c']" in name for name in told), "the members that the file looks for"


def test_position_embeddings_of_another_choice_are_partial() -> None:
    row = audit(file_of("wav2vec2_conformer"))
    told = [name for names in row.differs.values() for name in names]
    assert row.verdict is Coverage.PARTIAL
    assert "Wav2Vec2ConformerSelfAttention with position_embeddings_type='rotary'" in told


@pytest.mark.parametrize("name", ["cvt", "idefics", "sam_hq"])
def test_attention_or_linear_not_shown_equal_is_partial(name: str) -> None:
    row = audit(file_of(name))
    assert row.verdict is Coverage.PARTIAL and row.differs


@pytest.mark.parametrize("name", ["deit", "arcee"])
def test_covered_switches_stay_composable(name: str) -> None:
    """DeiT's biases and Arcee's are flags that the file reads; linear layers compute either value."""
    file = file_of(name)
    _, model = architectures.representative(file)
    found = list(switches.switched(model))
    assert found and all(m.strict for _, _, m in found), found
    assert audit(file).verdict is Coverage.COMPOSABLE


def test_part_that_the_default_leaves_out_is_built() -> None:
    class Config(transformers.BertConfig):
        sub_configs: ClassVar = {"vision_config": transformers.ViTConfig}
        vision_config = None

    config = Config()
    assert switches.set_in(config, switches.Switch("vision_config")) == "ViTConfig"
    assert isinstance(config.vision_config, transformers.ViTConfig)


def test_failed_audit_counts_as_not_covered() -> None:
    kinds = (Coverage.RUNS, Coverage.COMPOSABLE, Coverage.PARTIAL, Coverage.FAILED)
    counted = summary([Row(f"{kind}", kind) for kind in kinds])
    assert counted["strict"] == {"count": 2, "percent": 50.0}
    assert counted["loose"] == {"count": 3, "percent": 75.0}


def test_hanging_file_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START", 0.0)
    monkeypatch.setattr(runner, "LIMIT", 0.2)  # less than a process needs to import transformers
    rows = runner.run(["llama/modeling_llama.py", "qwen2/modeling_qwen2.py"], workers=2)
    assert [row.verdict for row in rows] == [Coverage.FAILED] * 2
    assert all("no answer" in row.error for row in rows)


def test_waiting_does_not_count_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine under load, or a stopped process, changes no verdict."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; input(); time.sleep(2); print('{}', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    monkeypatch.setattr(Row, "from_dict", staticmethod(lambda row: Row("x", Coverage.PARTIAL)))
    assert runner._answer(process, "x", limit=1.0) == Row("x", Coverage.PARTIAL)
    process.kill()
    process.wait()


def test_paper_list_has_425_files() -> None:
    files = paper_files()
    assert len(files) == len(set(files)) == 425 and "llama/modeling_llama.py" in files


def test_rows_survive_json() -> None:
    row = Row("x/modeling_x.py", Coverage.PARTIAL, ops=("linear",), differs={"a bias": ["A"]})
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_unknown_architecture_names_needs_and_command() -> None:
    import fastkernels

    config = transformers.AutoConfig.for_model("rwkv", num_hidden_layers=2)
    config.architectures = ["RwkvForCausalLM"]
    with pytest.raises(registry.UnknownName, match="recurrence: RwkvSelfAttention") as raised:
        fastkernels.plan(config)
    assert "fk-bench scaffold" in str(raised.value)


def test_command_refuses_unknown_architecture() -> None:
    done = fk_bench_here("coverage", "--arch", "lama")
    assert done.returncode == 2 and "Did you mean 'llama'" in done.stderr


@pytest.mark.slow
def test_command_ends_with_counts_as_json() -> None:
    done = fk_bench_here("coverage", "--json", "--arch", "llama", "--arch", "rwkv", "--workers", "1")
    data = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and data["verdicts"]["runs"] == 1
    assert data["missing"] == [{"name": "recurrence", "architectures": 1, "nothing_else": 1}]
