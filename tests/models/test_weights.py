"""Loading checkpoints: errors name the file and the keys; sharding, dummy weights and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels import LLM
from fastkernels.core import parallel
from fastkernels.core.registry import UnknownName
from fastkernels.models.common.checkpoints.weights import CheckpointError, resolve
from fastkernels.models.common.descriptions.registry import model_class
from fastkernels.models.common.plans import build


@pytest.fixture()
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def load(folder, dtype=torch.float32, **settings):
    folder = resolve(str(folder))
    model = build.build(folder, build.load_config(folder), torch.device("cpu"), dtype, **settings)
    return dict(model.named_parameters())


def fails(folder, *parts, **settings):
    with pytest.raises(CheckpointError) as caught:
        load(folder, **settings)
    for part in parts:
        assert part in str(caught.value)


def split(folder):
    """Split the checkpoint into two files and an index, and return the index."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    keys = sorted(tensors)
    shards = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, part in shards.items():
        save_file({k: tensors[k] for k in part}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: name for name, part in shards.items() for k in part}}
    write_index(folder, index)
    return index


def write_index(folder, index):
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_keys(copy):
    edit(copy, lambda t: [t.pop(f"model.layers.1.self_attn.{n}_proj.weight") for n in "kv"])
    fails(copy, str(copy), "missing", "model.layers.1.self_attn.k_proj.weight", "self_attn.v_proj.weight")


def test_leftover_keys(copy):
    edit(copy, lambda t: t.update({"model.layers.7.mlp.extra.weight": t["model.norm.weight"].clone()}))
    fails(copy, "does not have", "model.layers.7.mlp.extra.weight (model.safetensors)")


def test_names_are_checked_before_values_are_read(copy):
    key = "model.embed_tokens.weight"
    edit(copy, lambda t: t.update({key: t[key].to(torch.float8_e4m3fn)}) or t.pop("model.norm.weight"))
    fails(copy, "keys missing from it: model.norm.weight")


def test_engine_names_leftover_key_and_missing_file(copy):
    split(copy)
    key = "model.layers.0.mlp.down_proj.bias"
    tensors = load_file(copy / "b.safetensors")
    save_file({**tensors, key: torch.zeros(128)}, copy / "b.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"keys that the model does not have: {key} \(b.safetensors\)"):
        LLM(str(copy), device="cpu", max_model_len=64)
    (copy / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index.json names files that are not in .*: b.safetensors"):
        LLM(str(copy), device="cpu", max_model_len=64)


def test_wrong_shape(copy):
    edit(copy, lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:100].clone()}))
    fails(copy, "model.norm.weight", "(100,)", "model.safetensors")


def test_wrong_dtype(copy):
    edit(copy, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))
    fails(copy, "model.safetensors: model.norm.weight", "float8_e4m3fn", "quantized")


def test_truncated_file(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max((v["data_offsets"][1], k) for k, v in header.items() if k != "__metadata__")[1]
    file.write_bytes(whole[:-1])
    fails(copy, "model.safetensors", f"truncated, {len(whole) - 1} bytes of {len(whole)}; incomplete: {last}")
    file.write_bytes(whole[:100])
    fails(copy, "model.safetensors", "truncated")
    file.write_bytes(b"")
    fails(copy, "model.safetensors", "truncated")
    file.write_bytes(whole[:8] + b"\x00" * 50 + whole[58:])
    fails(copy, "model.safetensors", "header is damaged")


def test_bytes_damaged_in_the_middle(copy):
    key = "model.layers.1.mlp.down_proj.weight"
    edit(copy, lambda t: t[key].view(-1)[777].fill_(float("nan")))
    fails(copy, "NaN", f"{key} (model.safetensors)")


def test_dtype_too_small_for_the_values(copy):
    key = "model.layers.0.self_attn.k_proj.weight"
    edit(copy, lambda t: t[key].view(-1)[7].fill_(1e6))
    fails(copy, "too large", f"{key} (model.safetensors; torch.float16)", dtype=torch.float16)
    assert load(copy)["model.layers.0.self_attn.qkv_proj.weight"].max() == 1e6


def test_shards_load_and_a_missing_shard_is_named(copy, tiny):
    split(copy)
    whole, sharded = load(tiny), load(copy)
    assert all(torch.equal(sharded[name], value) for name, value in whole.items())
    (copy / "b.safetensors").unlink()
    fails(copy, "b.safetensors")


def test_wrong_index_is_reported(copy):
    index = split(copy)
    places = index["weight_map"]
    write_index(copy, {"weight_map": {**places, "model.norm.bias": "a.safetensors"}})
    fails(copy, "index.json", "a.safetensors does not have", "model.norm.bias")
    once = json.dumps(index)
    key = sorted(places)[0]
    write_index(copy, once.replace('"weight_map": {', f'"weight_map": {{"{key}": "b.safetensors", '))
    fails(copy, "index.json", f"{key} twice: b.safetensors and a.safetensors")
    write_index(copy, {"weight_map": {**places, key: "../a.safetensors"}})
    fails(copy, "outside its folder", "../a.safetensors")
    write_index(copy, '{"weight_map": [1]}')
    fails(copy, "index.json is not an index of weights")
    write_index(copy, index)
    tensors = load_file(copy / "b.safetensors")
    tensors[key] = load_file(copy / "a.safetensors")[key]
    save_file(tensors, copy / "b.safetensors", metadata={"format": "pt"})
    fails(copy, f"{key} is in both a.safetensors and b.safetensors")


def test_no_weights_and_no_config(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    fails(copy, "model.safetensors", str(copy))
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.json")
    fails(tmp_path / "nowhere", "neither a folder nor a hub id")


def in_pytorch_format(folder, names):
    """Write the weights as files of these names, and remove those in safetensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    parts = {name: {k: t for i, (k, t) in enumerate(sorted(tensors.items())) if i % len(names) == n}
             for n, name in enumerate(names)}  # fmt: skip
    for name, part in parts.items():
        torch.save(part, folder / name)
    return {"weight_map": {key: name for name, part in parts.items() for key in part}}


def test_weights_in_pytorch_format_are_read(copy):
    wanted = load(copy)
    in_pytorch_format(copy, ["pytorch_model.bin"])
    found = load(copy)
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_weights_in_pytorch_format_may_be_split(copy):
    wanted = load(copy)
    index = in_pytorch_format(copy, ["pytorch_model-1.bin", "pytorch_model-2.bin"])
    (copy / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = load(copy)
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    (copy / "pytorch_model-2.bin").unlink()
    fails(copy, "pytorch_model.bin.index.json names files", "pytorch_model-2.bin")


def test_safetensors_are_read_where_both_exist(copy):
    (copy / "pytorch_model.bin").write_bytes(b"damaged")
    load(copy)


class Runs:
    """Code that a pickle would run."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("what", ["code", "no tensors", "damaged"])
def test_file_that_is_no_weights_is_refused_and_runs_nothing(copy, tmp_path, what):
    (copy / "model.safetensors").unlink()
    file, ran = copy / "pytorch_model.bin", tmp_path / "ran"
    if what == "damaged":
        file.write_bytes(b"PK\x03\x04 damaged")
    else:
        torch.save({"weight": Runs(ran) if what == "code" else "text"}, file)
    fails(copy, "pytorch_model.bin is not a file of tensors in PyTorch's format")
    assert not ran.exists()


def test_hub_id_while_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for model in ("owner/no-such-model", "owner/no-such-model@v2"):
        with pytest.raises(CheckpointError, match=f"{model}.*not in the local hub cache.*HF_HUB_OFFLINE"):
            resolve(model)
    with pytest.raises(CheckpointError, match="not a valid hub id"):
        resolve("some body/model")


def test_revision_from_the_hub_cache(monkeypatch, tmp_path, tiny):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--owner--tiny", "0" * 39 + "1"
    shutil.copytree(tiny, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(commit)
    assert resolve("owner/tiny@v2") == repository / "snapshots" / commit
    with pytest.raises(CheckpointError, match="owner/tiny"):
        resolve("owner/tiny")


def test_config_that_is_not_json(copy):
    (copy / "config.json").write_text('{"architectures": [')
    fails(copy, "config.json")


def test_config_without_architectures(copy):
    (copy / "config.json").write_text('{"model_type": "llama"}')
    fails(copy, "config.json has no `architectures`", "`fk-bench list models`")


def test_config_that_contradicts_itself(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    fails(copy, "config.json cannot be used", "hidden size (128) is not a multiple", "(6)")


def test_architecture_that_transformers_does_not_know(copy):
    """The message is about models here; transformers' advice to install another version is not."""
    (copy / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')
    with pytest.raises(
        CheckpointError, match=r"unknown architecture 'FooForCausalLM'.*`fk-bench list models`"
    ) as error:
        load(copy)
    assert "pip install" not in str(error.value)


def test_unknown_architecture(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalML"]}))
    with pytest.raises(UnknownName, match=r"LlamaForCausalML.*LlamaForCausalLM"):
        load(copy)
    with pytest.raises(UnknownName):
        model_class("GPT5")


def test_adapters_are_refused_or_left_out_with_a_warning(copy, tmp_path, caplog):
    own = tmp_path / "adapter"
    own.mkdir()
    (own / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for name in ("adapter_model.safetensors", "training_args.bin"):
        (own / name).touch()
    with pytest.raises(
        CheckpointError, match=r"an adapter \(.*\) of org/base and no whole weights: merge it"
    ):
        resolve(str(own))
    shutil.copy(own / "adapter_config.json", copy)
    with caplog.at_level("WARNING", "fastkernels"):
        assert resolve(str(copy)) == copy
    assert "of org/base: it is not applied, the other weights are used" in caplog.text
    (own / "model_index.json").touch()  # a pipeline has its weights in other folders
    assert resolve(str(own)) == own


def test_resolve_keeps_a_folder(tiny):
    assert resolve(str(tiny)) == tiny


def test_cache_too_small_for_max_model_len(tiny):
    with pytest.raises(ValueError, match="max_model_len 512 does not fit"):
        LLM(str(tiny), device="cpu", max_model_len=512, num_blocks=9)
    with pytest.raises(ValueError, match="more than the model's 2048"):
        LLM(str(tiny), device="cpu", max_model_len=4096)


def as_checkpoint(parameters, vocabulary):
    """Checkpoint tensors of these parameters: packed ones as parts, without padding."""
    found = {}
    for name, p in parameters.items():
        head = name.rpartition(".")[0]
        if name.endswith("qkv_proj.weight"):
            parts = zip("qkv", p.split([128, 64, 64]), strict=True)
            found |= {f"{head[:-8]}{n}_proj.weight": part for n, part in parts}
        elif name.endswith("gate_up_proj.weight"):
            found |= {
                f"{head[:-12]}{n}_proj.weight": part
                for n, part in zip(("gate", "up"), p.chunk(2), strict=True)
            }
        elif name.endswith("w13_weight"):
            found |= {f"{head}.{e}.{n}.weight": part for e, pair in enumerate(p)
                      for n, part in zip(("w1", "w3"), pair.chunk(2), strict=True)}  # fmt: skip
        elif name.endswith("w2_weight"):
            found |= {f"{head}.{e}.w2.weight": part for e, part in enumerate(p)}
        else:
            found[name] = p[:vocabulary] if "embed" in name or "lm_head" in name else p
    return {key: part.detach().contiguous() for key, part in found.items()}


@pytest.mark.parametrize(("kind", "size"), [("llama", 2), ("llama", 4), ("mixtral", 2)])
def test_dummy_weights_do_not_depend_on_ranks(tmp_path, kind, size):
    """A checkpoint of the whole model's dummy weights gives each rank the shard that it generates itself."""
    make_tiny(tmp_path, kind, "float32", vocab_size=500)
    whole = load(tmp_path, load_format="dummy", seed=3)
    matrices = [p for p in whole.values() if p.dim() > 1]
    embedding = whole["model.embed_tokens.weight"]
    assert all(0.018 < p[p != 0].std() < 0.022 for p in matrices if p.numel() > 1000 and p is not embedding)
    assert 9 < embedding[embedding != 0].std() < 11
    assert len({float(p.flatten()[0]) for p in matrices}) == len(matrices)
    assert not whole["lm_head.weight"][500:].any() and whole["lm_head.weight"][499].any()
    save_file(as_checkpoint(whole, 500), tmp_path / "model.safetensors")
    for rank in range(size):
        with parallel.build_as(rank, size):
            drawn, loaded = load(tmp_path, load_format="dummy", seed=3), load(tmp_path)
        assert all(torch.equal(drawn[name], loaded[name]) for name in whole)
        assert sum(p.numel() for p in drawn.values()) < 1.1 * sum(p.numel() for p in whole.values()) / size
    assert not torch.equal(
        load(tmp_path, load_format="dummy", seed=4)["lm_head.weight"], whole["lm_head.weight"]
    )


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (3, {}, "padded vocabulary of 512 cannot be divided over 3 ranks"),
        (8, {}, "query heads 4 cannot be divided over 8 ranks"),
        (
            2,
            {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3},
            "KV heads 3 cannot be divided over 2 ranks",
        ),
        (4, {"intermediate_size": 254}, "size 254 cannot be divided over 4 ranks"),
    ],
)
def test_sizes_that_cannot_be_sharded(tiny, tmp_path, size, change, message):
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with parallel.build_as(0, size), pytest.raises(ValueError, match=message):
        load(tmp_path, load_format="dummy")


def test_model_larger_than_memory_is_refused(tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    large = {"hidden_size": 65536, "intermediate_size": 1 << 20, "vocab_size": 1 << 20}
    (tmp_path / "config.json").write_text(json.dumps({**config, **large}))
    with pytest.raises(
        ValueError, match=r"weights need \d{4}\.\d GiB, and cpu has [\d.]+ GiB free.*tensor_parallel"
    ):
        load(tmp_path, load_format="dummy")


PEAK = """
import sys, torch
from pathlib import Path
from fastkernels.core import parallel
from fastkernels.models.common.plans import build
def load(folder):
    return build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
def resident(line):
    return int(next(l for l in open("/proc/self/status") if l.startswith(line)).split()[1])
load(Path(sys.argv[1]))
for rank, size in ((1, 4), (0, 1)):  # the larger peak last: a process has only one
    before = resident("VmRSS")
    with parallel.build_as(rank, size):
        model = load(Path(sys.argv[2]))
    print(resident("VmHWM") - before, build.weight_bytes(model) // 1024)
    del model
"""


def test_peak_memory_is_one_shard_plus_one_file(tiny, tmp_path):
    """Four files of 50 MB: the peak is the model plus one file; one of four ranks reads a quarter."""
    config = json.loads((tiny / "config.json").read_text())
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 16384,
             "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
    shutil.copytree(tiny, tmp_path / "small")
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **shape}))
    sizes = {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512), "self_attn.v_proj": (512, 512),
             "self_attn.o_proj": (512, 512), "mlp.gate_proj": (2048, 512), "mlp.up_proj": (2048, 512),
             "mlp.down_proj": (512, 2048), "input_layernorm": (512,), "post_attention_layernorm": (512,)}  # fmt: skip
    keys = {f"model.layers.{i}.{name}.weight": size for i in range(8) for name, size in sizes.items()}
    ends = {
        "model.embed_tokens.weight": (16384, 512),
        "lm_head.weight": (16384, 512),
        "model.norm.weight": (512,),
    }
    parts = [ends, *({k: v for k, v in keys.items() if int(k.split(".")[2]) // 3 == i} for i in range(3))]
    places = {}
    for i, part in enumerate(parts):
        save_file({k: torch.full(v, 0.01) for k, v in part.items()}, folder / f"{i}.safetensors")
        places |= dict.fromkeys(part, f"{i}.safetensors")
    write_index(folder, {"weight_map": places})
    largest = max(f.stat().st_size for f in folder.glob("*.safetensors")) // 1024
    total = sum(f.stat().st_size for f in folder.glob("*.safetensors")) // 1024

    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    quarter_growth, quarter, growth, model = map(int, out)
    assert model > 0.98 * total and total > 3 * largest
    assert growth < model + largest + 8 * 1024
    # Column shards (o_proj, down_proj) touch all pages of their tensor, row shards a quarter.
    assert quarter < 0.28 * total
    assert quarter_growth < quarter + 0.6 * largest + 8 * 1024


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    """DeepSeek-V3's checkpoints have one more layer, which only speculative decoding needs."""
    fields = {"num_nextn_predict_layers": 1, "n_shared_experts": 0}  # written as empty matrices
    folder = make_tiny(tmp_path / "model", "deepseek_v3", "float32", **fields)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    more = {"model.layers.2.eh_proj.weight": torch.ones(4, 4), "model.layers.2.enorm.weight": torch.ones(4)}
    save_file({**tensors, **more}, file, metadata={"format": "pt"})
    assert not any(name.startswith("model.layers.2.") for name in load(folder))
    save_file({**tensors, "model.layers.3.enorm.weight": torch.ones(4)}, file, metadata={"format": "pt"})
    fails(folder, "keys that the model does not have: model.layers.3.enorm.weight")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("size", "groups"), [(2, 2), (4, 2), (4, 4)])
def test_expert_parallel_shards_make_up_the_model(tmp_path, size, groups, load_format):
    folder = make_tiny(tmp_path / "model", "deepseek_v3", "float32")
    name = "model.layers.1.mlp.experts.w2_weight"
    whole = load(folder, load_format=load_format)[name]
    rows = []
    for first in range(0, size, size // groups):
        parts = []
        for rank in range(first, first + size // groups):
            with parallel.build_as(rank, size, groups):
                parts.append(load(folder, load_format=load_format)[name])
        rows.append(torch.cat(parts, dim=2))
    torch.testing.assert_close(torch.cat(rows), whole, atol=0, rtol=0)
