"""Suites: the shipped ones, and what is wrong with others."""

from __future__ import annotations

import copy

import pytest
from fk_bench.e2e.pictures.named import NAMED
from fk_bench.evaluate import checkpoints, suites
from fk_bench.evaluate.suites import SuiteError

from fastkernels.core.registry import UnknownName
from fastkernels.models.common.descriptions.registry import models
from fastkernels.models.common.plans import build

SMALL = {
    "workloads": {"chat": {"kind": "text", "about": "", "throughput": 2, "lengths": [[4, 4]]}},
    "models": {"m": {"category": "text", "config": {"model_type": "llama"}}},
    "items": [{"model": "m", "workload": "chat", "host": "transformers"}],
}


@pytest.mark.parametrize("name", suites.names())
def test_shipped_suite_is_valid(name):
    suite = suites.load(name)
    assert suite.entries and all(0 < e.minutes <= 10 for e in suite.entries)
    assert {e.item.category for e in suite.entries} <= set(suite.categories)


def test_digest_follows_every_field():
    changed = copy.deepcopy(SMALL)
    changed["workloads"]["chat"]["lengths"] = [[4, 5]]
    assert suites.read(SMALL, "a").digest == suites.read(SMALL, "b").digest
    assert suites.read(SMALL, "a").digest != suites.read(changed, "a").digest


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("items", 0, "host"), "vlm", "vllm"),
        (("items", 0, "model"), "n", "m"),
        (("items", 0, "workload"), "talk", "chat"),
        (("items", 0, "speed"), 1, "speed"),
        (("items", 0, "host"), "timm", "timm has no workload of text"),
        (("models", "m", "config"), {"model_type": "lama"}, "llama"),
        (("models", "m", "config"), {}, "config, public, files, timm, named or library"),
        (("workloads", "chat", "kind"), "video", "video"),
        (("workloads", "chat", "lengths"), [], "lengths"),
        (("workloads", "chat", "rounds"), 2, "rounds at least 3"),
        (("categories",), ["image"], "'text' is not one of its categories"),
        (("categories",), "text", "categories = 'text'"),
        (("memory_gb",), 8, "Did you mean 'memory_gib'"),
        (("memory_gib",), "lots", "memory_gib = 'lots'"),
        (("memory_gib",), 0, "memory_gib is above 0"),
        (("device",), "gpu", "unknown device 'gpu'"),
        (("dtype",), "bf16", "Did you mean 'bfloat16'"),
        (("kernels",), {"round": 5}, "Did you mean 'rounds'"),
        (("kernels",), {"sources": ["randm"]}, "Did you mean 'random'"),
        (("items",), 3, "needs tables"),
        (("items", 0), "chat", "item 1: a table of fields is needed"),
        (("items", 0, "timeout"), "300", "timeout = '300'"),
        (("items", 0, "timeout"), 0, "timeout = 0"),
        (("items", 0, "minutes"), -1.0, "minutes = -1"),
        (("items", 0, "minutes"), float("nan"), "minutes = nan"),
        (("models", "m"), {"category": "text", "named": "sdlx"}, "Did you mean 'sdxl'"),
        (("models", "m"), {"category": "text", "public": "lama"}, "Did you mean 'llama'"),
        (("models", "m"), {"category": "text", "library": "dlrm"}, "Did you mean 'dlrm_dcn'"),
        (("models", "m", "steps"), 0, "steps is at least 1"),
        (("items", 0, "host"), "diffusers", "diffusers has no workload of text"),
        (("served",), {"category": "text", "workload": "chat", "minutes": {"vlm": 1}}, "Did you mean 'vllm'"),
        (
            ("served",),
            {"category": "text", "workload": "chat", "minutes": {}, "lacks": {"vllm": ["lama"]}},
            "'llama'",
        ),
        (("items", 0, "ranks"), "2", "ranks = '2'"),
        (("workloads", "chat", "throughput"), "8", "throughput = '8'"),
        (("workloads", "chat", "round"), 5, "Did you mean 'rounds'"),
        (("workloads", "chat", "lengths"), [[1, 2, 3]], "prompt, output"),
        (("workloads", "chat"), 3, "a table of fields is needed, got 3"),
        (("workloads", "chat", "compare"), "boxs", "Did you mean 'boxes'"),
        (("workloads", "chat", "media"), "smell", "'smell' is none of image"),
        (("models", "m", "files"), {"../a.json": {}}, "'../a.json'"),
        (("small",), {"of": "full"}, "minutes"),
        (("models", "m", "category"), 3, "category = 3"),
    ],
)
def test_wrong_suite_names_the_entry(where, value, told):
    data = copy.deepcopy(SMALL)
    place = data
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(SuiteError, match=told):
        suites.read(data, "s")


def test_item_declared_twice_is_refused():
    with pytest.raises(SuiteError, match="m/chat/transformers is declared twice"):
        suites.read({**SMALL, "items": SMALL["items"] * 2}, "s")


def test_unknown_suite_and_model_are_named():
    with pytest.raises(UnknownName, match="smoke"):
        suites.load("smok")
    with pytest.raises(UnknownName, match="tiny-llama"):
        suites.of_model(suites.load("smoke"), "tiny-lama")


def test_full_suite_has_every_served_architecture():
    suite = suites.load("full")
    hosts: dict[str, set[str]] = {}
    for entry in suite.entries:
        hosts.setdefault(entry.item.model, set()).add(entry.item.host)
    assert hosts["llama"] == {"fastkernels", "vllm", "sglang"} and "vllm" not in hosts["bitnet"]
    assert all(hosts[name] == {"fastkernels", "fla"} for name in ("gla", "retnet", "rwkv7"))
    assert hosts["ttt_e2e"] == {"fastkernels"}
    libraries = {e.item.host for e in suite.entries if e.model.library}
    assert libraries == {*suites.LIBRARIES.values()} and "diffusers" in hosts["hunyuan-video-diffusers"]
    ours = {suites.architecture_of(e.model) for e in suite.entries if e.item.host == "fastkernels"}
    lacking = models().keys() - ours - suite.without.keys()
    assert not lacking, (
        f"{sorted(lacking)}: give each an item of full.toml in our engine, or a reason in its [without.NAME]"
    )
    assert all(absent.reason for absent in suite.without.values())


def test_configs_of_requests_open_in_our_engine(tmp_path, monkeypatch):
    """A size that transformers has a default for must be given, too."""
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    entries = [e for e in suites.load("full").entries if e.item.host == "fastkernels"]
    found = {e.item.model: e.model for e in entries if e.workload.kind == "requests"}
    assert {"bert-base", "bert-classes", "colbertv2"} <= found.keys()
    for model in found.values():
        build.load_config(checkpoints.folder(model, "requests"))


INVENTORY = {  # the architectures that the project covers, by category
    "llm": ("llama", "deepseek_v32", "mixtral", "bitnet", "gpt_oss", "llama_eagle3", "gemma4", "glm_moe_dsa"),
    "linear_attn": (
        "mamba", "mamba2", "rwkv7", "gla", "retnet", "qwen3_next", "kimi_linear", "ttt_e2e", "jamba",
    ),
    "vision": ("flux", "hunyuan_video", "sdxl", "sam3", "whisper", "cosyvoice3"),
    "multimodal": ("qwen2_vl", "qwen3_vl", "qwen2_5_omni", "siglip2_vision", "dinov3", "swinv2"),
    "edge": ("mobilenetv4", "convnextv2", "efficientnetv2", "yolov10", "rtdetrv2"),
    "3d_robotics": ("gaussian_splatting", "instant_ngp", "ptv3", "openfold3", "pi0", "dp3"),
    "recsys": ("dlrm_v2", "lightgcn", "xlm_roberta", "colbert", "llada"),
    "world_models": ("oasis", "vjepa2"),
}  # fmt: skip


def test_declared_categories_cover_the_inventory():
    suite = suites.load("full")
    declared: dict[str, set[str]] = {name: {a.category} for name, a in suite.without.items()}
    for entry in suite.entries:
        declared.setdefault(suites.architecture_of(entry.model), set()).add(entry.item.category)
    assert set(INVENTORY) == {*suite.categories}
    assert sum(map(len, INVENTORY.values())) == 47
    for category, names in INVENTORY.items():
        assert all(category in declared.get(name, ()) for name in names), category


def test_default_suite_has_all_categories_within_four_hours():
    """A score of record over fewer categories than are declared elsewhere would look complete."""
    default, full = suites.load("default"), suites.load("full")
    assert default.categories == full.categories == tuple(INVENTORY)
    assert {e.item.category for e in default.entries} == {*INVENTORY}
    assert sum(e.minutes for e in default.entries) < 240 and max(e.minutes for e in default.entries) < 10
    of_full = {e.item.model: e.item.category for e in full.entries}
    for entry in default.entries:
        assert of_full.get(entry.item.model, entry.item.category) == entry.item.category


def test_architecture_without_an_item_lowers_coverage():
    data = copy.deepcopy(SMALL)
    data["without"] = {"openfold3": {"category": "science", "reason": "none yet"}}
    data["categories"] = ["text", "science"]
    suite = suites.read(data, "s")
    assert [i.model for i in suite.declared] == ["m", "openfold3"] and len(suite.entries) == 1
    assert [i.model for i in suites.of_model(suite, "m").declared] == ["m"]
    with pytest.raises(SuiteError, match="'reason'"):
        suites.read({**data, "without": {"openfold3": {"category": "science"}}}, "s")


def test_small_suite_has_every_runner_with_small_models():
    small, full = suites.load("small"), suites.load("full")
    runners = {models()[suites.architecture_of(e.model)].arch.runner for e in small.entries}
    assert runners == {m.arch.runner for m in models().values()}
    sizes = {e.item: e.model for e in full.entries}
    assert all(e.model.probe and e.model == sizes[e.item].small for e in small.entries)
    assert all(e.workload.rounds == 3 and e.workload.throughput <= 3 for e in small.entries)


def test_served_items_follow_the_registry(monkeypatch):
    data = {**SMALL, "served": {"category": "text", "workload": "chat", "minutes": {"vllm": 2}, "layers": 3}}
    whole = suites.read(data, "a")
    left = {name: model for name, model in models().items() if name != "bitnet"}
    monkeypatch.setattr("fastkernels.models.common.descriptions.registry.models", lambda: left)
    assert suites.read(data, "a").digest != whole.digest
    first = whole.entries[0]
    assert (first.item.host, first.minutes, first.model.layers) == ("vllm", 2, 3)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3", "gemma4", "cohere2"])
def test_model_with_fewer_layers_is_a_valid_config(name):
    from transformers import AutoConfig

    config = checkpoints.config_of(next(e.model for e in suites.load("full").entries if e.item.model == name))
    assert config["num_hidden_layers"] <= 8
    made = AutoConfig.for_model(**config)
    assert made.num_hidden_layers == config["num_hidden_layers"] and config["architectures"]


def test_names_of_a_pipeline_are_those_that_open():
    small = next(e.model for e in suites.load("default").entries if e.item.host == "diffusers").small
    assert NAMED[small.named][0] == "diffusers" and small.image_size == 256


@pytest.mark.parametrize(
    ("library", "host", "told"),
    [
        ("lightgcn", "torchrec", "library = 'lightgcn' is for torch_geometric"),
        ("lightgcn", "fastkernels", "library = 'lightgcn' is for torch_geometric"),
        ("", "torchrec", "it needs a model with `library`"),
    ],
)
def test_library_model_runs_in_its_library_alone(library, host, told):
    data = copy.deepcopy(SMALL)
    data["workloads"]["chat"] = {"kind": "requests", "about": "", "throughput": 2}
    data["models"]["m"] = {"category": "text", **({"library": library} if library else {"public": "llama"})}
    data["items"][0]["host"] = host
    with pytest.raises(SuiteError, match=told):
        suites.read(data, "a")


def test_probe_of_a_library_model_is_small():
    whole = next(e.model for e in suites.load("full").entries if e.item.model == "dlrmv2-torchrec")
    assert whole.small.arguments["rows"] == [50, 7, 300] and whole.small.request == {"bag": 3}
    assert whole.small.arguments["dtype"] == "float32" and whole.arguments["dim"] == 128
    video = next(e.model for e in suites.load("full").entries if e.item.model == "hunyuan-video-diffusers")
    assert (video.small.image_size, video.small.request, video.image_size) == (32, {"frames": 5}, 480)
