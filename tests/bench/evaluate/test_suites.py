"""Suites: the shipped ones, and what is wrong with others."""

from __future__ import annotations

import copy

import pytest
from fk_bench.e2e.pictures.named import NAMED
from fk_bench.evaluate import suites
from fk_bench.evaluate.run import checkpoints
from fk_bench.evaluate.suites import SuiteError

from fastkernels.core.registry import UnknownName
from fastkernels.models.common.registry import models

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
        (("models", "m", "config"), {}, "config, public, timm or named"),
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
    served = {
        name for name, model in models().items()
        if model.arch.runner == "Generate" and model.arch.media != ("audio",)  # whose prompts need audio
    }  # fmt: skip
    assert all("fastkernels" in hosts[name] for name in served)
    assert hosts["llama"] == {"fastkernels", "vllm", "sglang"} and "vllm" not in hosts["bitnet"]
    assert all(hosts[name] == {"fastkernels"} for name in ("gla", "retnet", "rwkv7", "ttt_e2e"))
    empty = {*suite.categories} - {e.item.category for e in suite.entries}
    assert empty, "declared categories without a model lower coverage"


def test_served_items_follow_the_registry(monkeypatch):
    data = {**SMALL, "served": {"category": "text", "workload": "chat", "minutes": {"vllm": 2}, "layers": 3}}
    whole = suites.read(data, "a")
    left = {name: model for name, model in models().items() if name != "bitnet"}
    monkeypatch.setattr("fastkernels.models.common.registry.models", lambda: left)
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
