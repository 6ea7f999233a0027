"""`fk-bench eval --model FOLDER`: a checkpoint has the items that the suite has for models of its kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fk_bench.cli import main
from fk_bench.core.small_model import small_model
from fk_bench.evaluate import checkpoints, own_model, suites
from fk_bench.evaluate.run import command
from fk_bench.evaluate.run.items import ItemRun, options_of, vocab_of
from fk_bench.evaluate.run.side import Launcher, set_files
from fk_bench.evaluate.suites import SuiteError
from fk_bench.info.stubs import source

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
UNSERVED = {**LLAMA, "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}
BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
DINO = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 3, "mlp_ratio": 4, "image_size": 70, "patch_size": 14,
}  # fmt: skip


def folder(root: Path, config: dict, weights: bool = True) -> Path:
    made = root / "my-model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(config))
    if weights:
        (made / "model.safetensors").write_bytes(b"0" * 64)
    return made


def hosts(suite: str, path: Path) -> list[str]:
    return [e.item.host for e in own_model.of_checkpoint(suites.load(suite), str(path)).entries]


def test_text_model_has_the_hosts_of_the_suite(tmp_path):
    path = folder(tmp_path, LLAMA)
    assert hosts("smoke", path) == ["fastkernels", "transformers"]
    assert hosts("default", path) == ["vllm", "sglang", "fastkernels"]
    suite = own_model.of_checkpoint(suites.load("smoke"), str(path))
    first = suites.load("smoke").entries[0]
    assert [e.name for e in suite.entries] == [
        "my-model/chat-tiny/fastkernels",
        "my-model/chat-tiny/transformers",
    ]
    assert suite.entries[0].workload == first.workload and suite.categories == (first.item.category,)
    assert (
        suite.entries[0].model.weights == "saved"
        and checkpoints.folder(suite.entries[0].model, "text") == path
    )
    assert vocab_of(suite.entries[0]) == 300


def test_unserved_text_model_runs_in_other_hosts(tmp_path):
    assert hosts("smoke", folder(tmp_path, UNSERVED)) == ["transformers"]


def test_encoders_have_items_of_their_kind(tmp_path):
    suite = own_model.of_checkpoint(suites.load("small"), str(folder(tmp_path, BERT)))
    (entry,) = suite.entries
    assert (entry.item.host, entry.workload.kind, entry.item.workload) == (
        "fastkernels",
        "requests",
        "passages",
    )
    assert entry.model.request["tokens"] > 0
    assert options_of(entry, entry.model, suite, "float32", False, 2)["load_format"] == "auto"
    assert hosts("smoke", folder(tmp_path, DINO)) == ["transformers"]


def test_folder_without_weights_gets_random_ones(tmp_path):
    suite = own_model.of_checkpoint(suites.load("smoke"), str(folder(tmp_path, LLAMA, weights=False)))
    assert {e.model.weights for e in suite.entries} == {"dummy"}


def test_probe_has_the_first_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "cache"))
    path = folder(tmp_path, {**LLAMA, "layer_types": ["full_attention"] * 5})
    small = own_model.of_checkpoint(suites.load("smoke"), str(path)).entries[0].model.small
    made = json.loads((checkpoints.folder(small, "text") / "config.json").read_text())
    assert made["num_hidden_layers"] == 2 and made["layer_types"] == ["full_attention"] * 2
    assert small.weights == "dummy"
    quantized = folder(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    model = own_model.of_checkpoint(suites.load("smoke"), str(quantized)).entries[0].model
    assert model.small == model


def test_digest_names_the_checkpoint(tmp_path):
    def digest() -> str:
        return own_model.of_checkpoint(suites.load("smoke"), str(tmp_path / "my-model")).digest

    path = folder(tmp_path, LLAMA)
    first = digest()
    assert first.startswith(suites.load("smoke").digest) and digest() == first
    (path / "model.safetensors").write_bytes(b"0" * 63 + b"1")
    assert digest() != first
    folder(tmp_path, {**LLAMA, "rms_norm_eps": 1e-5})
    assert digest() != first


def test_large_checkpoint_gets_more_memory(tmp_path):
    path = folder(tmp_path, LLAMA)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(3 << 30)  # has no blocks on the disk
    assert own_model.of_checkpoint(suites.load("smoke"), str(path)).memory_gib == 12


def test_kind_that_the_suite_lacks_names_suites_that_have_it(tmp_path):
    with pytest.raises(SuiteError, match="BertModel; these suites have one: default, full, small"):
        own_model.of_checkpoint(suites.load("smoke"), str(folder(tmp_path, BERT)))


def test_folder_without_a_config_is_an_error(tmp_path):
    with pytest.raises(SuiteError, match=r"has no config\.json"):
        own_model.of_checkpoint(suites.load("smoke"), str(tmp_path))


def run(capsys, *words) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, words)])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])


def test_command_takes_a_folder(capsys, tmp_path):
    path = folder(tmp_path, LLAMA)
    tmp_path.chmod(0o755)
    found = run(capsys, "smoke", "--model", path, "--estimate")[1]
    assert [*found["minutes"]] == ["my-model/chat-tiny/fastkernels", "my-model/chat-tiny/transformers"]
    found = run(capsys, "smoke", "--model", path, "--host", "transformers", "--estimate")[1]
    assert [*found["minutes"]] == ["my-model/chat-tiny/transformers"]


def test_process_elsewhere_gets_the_absolute_folder(tmp_path, monkeypatch):
    folder(tmp_path, LLAMA)
    monkeypatch.chdir(tmp_path)
    suite = own_model.of_checkpoint(suites.load("smoke"), "my-model")
    assert command._everywhere("my-model", suite) == str(tmp_path / "my-model")
    one = suites.of_model(suites.load("smoke"), "tiny-llama")
    (tmp_path / "tiny-llama").mkdir()
    assert command._everywhere("tiny-llama", one) == "tiny-llama"


def test_folder_that_a_cage_cannot_read_is_refused(capsys, tmp_path):
    path = folder(tmp_path, LLAMA)
    (path / "model.safetensors").chmod(0o600)
    status, found = run(capsys, "smoke", "--model", path, "--estimate")
    assert status == 2 and f"chmod -R o+rX {path}" in found["error"] and "model.safetensors" in found["error"]
    assert run(capsys, "smoke", "--model", path, "--estimate", "--no-cage")[0] == 0
    (path / "model.safetensors").chmod(0o644)
    (path / "old.json").symlink_to("nowhere")
    assert run(capsys, "smoke", "--model", path, "--estimate")[0] == 0


def test_model_of_another_suite_is_named(capsys):
    status, found = run(capsys, "smoke", "--model", "llama-3.1-8b", "--estimate")
    assert status == 2 and "fk-bench eval default --model llama-3_1-8b" in found["error"]
    assert "folder or hub id" in run(capsys, "smoke", "--model", "no-such-model", "--estimate")[1]["error"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("host", ["fastkernels", "transformers"])
def test_item_of_a_checkpoint_is_measured(tmp_path, host):
    """In a cage, with the weights of the folder."""
    own = shutil.copytree(
        small_model(), tmp_path / "own", copy_function=shutil.copyfile
    )  # readable for all users
    suite = own_model.of_checkpoint(suites.load("smoke"), str(own))
    (entry,) = [e for e in suite.entries if e.item.host == host]
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "rms_norm.py"
    file.write_text(source("rms_norm"))
    with Launcher({}, int(suite.memory_gib * 2**30), threads=1, logs=tmp_path / "logs") as launcher:
        found = ItemRun(entry, suite, launcher, "float32", 5, print).measure(
            {"rms_norm": str(file)}, set_files([file.parent])
        )
    assert found.outcome is not None, found.text
    assert found.found.kept == ("rms_norm",) and found.outcome.correctness >= 0.9
