"""Longer prompts in CUDA graphs: vLLM's own configuration, dispatcher, graph manager and attention builder, no GPU."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.core import reports
from fk_integrations.patching.apply import Patched
from fk_integrations.vllm import compiled, graphs
from fk_integrations.vllm import host as vllm

from fastkernels.patch import Request

OWN = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
MORE = [*range(576, 1024, 64), *range(1024, 2049, 128)]


def configuration(tokens: int = 8192, seqs: int = 1024, **options):
    """vLLM's configuration of the tiny model in a CUDA worker, with vLLM's sizes. options: of its compilation."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        os.environ["TINY_LLAMA"], dtype="bfloat16", max_num_batched_tokens=tokens, max_num_seqs=seqs
    ).create_engine_config()
    compilation = config.compilation_config
    config.device_config.device_type = "cuda"
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    compilation.splitting_ops = None
    compilation.set_splitting_ops_for_v1("", 1)
    for name, value in options.items():
        setattr(compilation, name, value)
    config._set_cudagraph_sizes()
    return config


class BareWorker(SimpleNamespace):
    """The attributes of a worker. Unlike SimpleNamespace itself, it can be referenced weakly."""


def worker(config, **runner):
    """A worker without a model, or with a runner that has these attributes."""
    runner = SimpleNamespace(**runner) if runner else None
    return BareWorker(vllm_config=config, rank=0, model_runner=runner)


def sizes(config) -> list[int]:
    compilation = config.compilation_config
    compilation.post_init_cudagraph_sizes()  # vLLM's own check: the last is the largest
    return compilation.cudagraph_capture_sizes


def dispatcher(config):
    """The V1 runner's dispatcher, with its graphs' keys."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1)
    return made


def manager(config, monkeypatch):
    """The V2 runner's graph manager."""
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(
        cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=1, is_last_rank=1)
    )
    monkeypatch.setattr(
        cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False
    )
    made = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), config.compilation_config.cudagraph_mode, 1
    )
    made._graphs_captured = True
    return made


@pytest.fixture(scope="module", autouse=True)
def imported_model():
    """To read about a kind of model that is not imported, vLLM starts a process, which takes 10 s."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("FASTKERNELS_GRAPH_TOKENS", raising=False)


def test_vllms_own_sizes_are_extended(caplog):
    config = configuration()
    assert sizes(config) == OWN
    with caplog.at_level(logging.INFO, "fastkernels"):
        graphs.extend(worker(config))
    assert sizes(config) == OWN + MORE and config.compilation_config.max_cudagraph_capture_size == 2048
    assert "up to 2048 tokens run in CUDA graphs, not 512: 16 more" in caplog.text
    assert "FASTKERNELS_GRAPH_TOKENS=0" in caplog.text


def test_no_size_is_over_what_a_step_may_have(monkeypatch):
    config = configuration(tokens=1000, seqs=256)
    graphs.extend(worker(config))
    assert sizes(config) == [*OWN, 576, 640, 704, 768, 832, 896, 960, 1000]
    monkeypatch.setenv("FASTKERNELS_GRAPH_TOKENS", "700")
    config = configuration()
    graphs.extend(worker(config))
    assert sizes(config) == [*OWN, 576, 640, 700]
    small = configuration(tokens=512, seqs=256)
    assert graphs.extend(worker(small)) is None and sizes(small) == OWN


def compressed(weights: int, activations: int | None):
    """compressed-tensors' configuration, read by vLLM from a checkpoint."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    kind = {8: "float", 4: "int"}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": weights, "type": kind[weights], "strategy": "channel"},
    }
    if activations:
        group["input_activations"] = {
            "num_bits": activations,
            "type": "float",
            "strategy": "token",
            "dynamic": True,
        }
    form = "float-quantized" if weights == 8 else "pack-quantized"
    return CompressedTensorsConfig.from_config(
        {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}
    )  # fmt: skip


def test_linear_layers_of_8_bits_have_longer_graphs():
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    def longest(quantization) -> int:
        config = configuration()
        config.quant_config = quantization
        graphs.extend(worker(config))
        assert sizes(config)[-1] == graphs.longest(config)
        return sizes(config)[-1]

    assert longest(None) == 2048
    assert longest(Fp8Config()) == longest(compressed(8, 8)) == 4096
    # Weights alone: the product is of 16-bit values.
    awq = AutoAWQConfig.from_config({"bits": 4, "group_size": 128, "zero_point": True, "quant_method": "awq"})
    assert longest(compressed(8, None)) == longest(compressed(4, None)) == longest(awq) == 2048


def test_larger_layers_have_shorter_graphs():
    config = configuration()
    text = config.model_config.hf_text_config
    text.hidden_size, text.intermediate_size = 8192, 28672  # Llama-3-70B's
    assert graphs.longest(config) == 512
    assert graphs.extend(worker(config)) is None and sizes(config) == OWN
    config.parallel_config.tensor_parallel_size = 4
    assert graphs.longest(config) == 2048
    config.parallel_config.tensor_parallel_size = 1
    text.hidden_size, text.intermediate_size = 5120, 13824  # Qwen2.5-14B's
    assert graphs.longest(config) == 1664  # of 1699
    differ = SimpleNamespace(hidden_size=5120, intermediate_size=[28672, 13824])  # layers, as Gemma3n's may
    config.model_config = SimpleNamespace(hf_text_config=differ)
    assert graphs.longest(config) == 768


def test_few_sequences_leave_no_gap():
    config = configuration(seqs=16)
    own = list(sizes(config))
    assert own[-1] == 32
    graphs.extend(worker(config))
    assert sizes(config)[: len(own)] == own and sizes(config)[-16:] == MORE
    assert sizes(config)[len(own) : len(own) + 8] == [48, 64, 80, 96, 112, 128, 144, 160]


def test_sizes_chosen_by_the_user_stay(monkeypatch):
    chosen = configuration(cudagraph_capture_sizes=[1, 2, 4, 512])
    assert graphs.extend(worker(chosen)) is None and sizes(chosen) == [1, 2, 4, 512]
    largest = configuration(max_cudagraph_capture_size=256)
    assert graphs.extend(worker(largest)) is None and sizes(largest)[-1] == 256
    monkeypatch.setenv("FASTKERNELS_GRAPH_TOKENS", "0")
    off = configuration()
    assert graphs.extend(worker(off)) is None and sizes(off) == OWN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: setattr(c.device_config, "device_type", "cpu"), "CUDA's"),
        (lambda c: setattr(c.compilation_config, "mode", type(c.compilation_config.mode)(0)), "not compiled in pieces"),
        (lambda c: mode(c, "FULL"), "cudagraph_mode FULL has"),
        (lambda c: mode(c, "FULL_DECODE_ONLY"), "cudagraph_mode FULL_DECODE_ONLY has"),
        (lambda c: mode(c, "NONE"), "cudagraph_mode NONE has"),
        (lambda c: setattr(c, "lora_config", object()), "LoRA"),
        (lambda c: setattr(c, "speculative_config", object()), "speculative"),
        (lambda c: setattr(c.parallel_config, "enable_dbo", True), "DBO"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context parallelism"),
        (lambda c: setattr(c, "model_config", SimpleNamespace(use_mla=True)), "MLA"),
    ],
)  # fmt: skip
def test_unsupported_configurations_keep_their_sizes(change, reason):
    config = configuration()
    assert graphs.refusal(config) is None
    change(config)
    assert reason in graphs.refusal(config)
    assert graphs.extend(worker(config)) is None and sizes(config) == OWN


def mode(config, name: str) -> None:
    config.compilation_config.cudagraph_mode = type(config.compilation_config.cudagraph_mode)[name]


def test_unknown_configuration_keeps_its_sizes():
    config = configuration()
    config.model_config = None
    assert graphs.extend(worker(config)) is None and sizes(config) == OWN


class Worker:
    """Like vLLM's: it makes a runner after __init__, and the KV cache after the model."""

    def __init__(self, config):
        self.vllm_config, self.rank, self.model_runner = config, 0, None
        self.device = torch.device("cpu")

    def init_device(self):
        pass

    def load_model(self):
        self.builder = SimpleNamespace(
            max_cudagraph_size=self.vllm_config.compilation_config.max_cudagraph_capture_size
        )
        self.model_runner = SimpleNamespace(initialize_kv_cache=self.initialize_kv_cache)

    def initialize_kv_cache(self, cache):
        self.model_runner.cudagraph_dispatcher = dispatcher(self.vllm_config)
        self.model_runner.attn_groups = [[SimpleNamespace(metadata_builders=[self.builder, object()])]]
        return cache

    def get_model(self):
        return torch.nn.Module()

    def execute_model(self, *args):
        return None


@pytest.fixture
def patching(monkeypatch):
    """A patch of vLLM without a model, compiled code and groups of ranks."""

    def apply(adapter, model, request, rank, begun):
        begun(patched := Patched(adapter, model, request, rank))
        return patched

    monkeypatch.setattr(vllm, "apply", apply)
    monkeypatch.setattr(vllm, "_rank", lambda worker: 0)
    monkeypatch.setattr(vllm.VllmAdapter, "communicators", lambda adapter: [])
    monkeypatch.setattr(compiled, "swap", lambda worker, change, unchanged, *_: change())
    monkeypatch.setattr(reports, "start", lambda *args: None)
    yield
    for key in list(compiled._KEYS):
        compiled.remove_key(key)


def test_worker_built_patched_uses_new_sizes_for_prompts_only(monkeypatch, patching):
    config = configuration()
    monkeypatch.setattr(Worker, "__init__", vllm._patched_after_loading(Worker.__init__))
    built = Worker(config)
    assert sizes(config) == OWN + MORE  # before a runner reads them
    built.load_model()
    assert built.builder.max_cudagraph_size == 2048
    assert built.model_runner.initialize_kv_cache("cache") == "cache"
    assert built.builder.max_cudagraph_size == 512
    check_v1(built.model_runner.cudagraph_dispatcher, longest=2048)
    vars(built)[vllm.STATE].journal.undo()  # the sizes stay: the runner's buffers have room for them
    check_v1(built.model_runner.cudagraph_dispatcher, longest=2048)


def test_a_live_engine_keeps_its_sizes(patching):
    """Its buffers are as long as its largest graph; on a GPU, capturing a longer one fails."""
    config = configuration()
    live = worker(config, cudagraph_dispatcher=dispatcher(config))
    live.get_model, live.device = torch.nn.Module, torch.device("cpu")
    live.execute_model = lambda *args: None
    vllm._patch(live, Request("patch"))
    assert sizes(config) == OWN
    check_v1(live.model_runner.cudagraph_dispatcher, longest=512)


def check_v1(made, longest: int) -> None:
    def graph(tokens: int, decode: bool = False):
        found, batch = made.dispatch(tokens, uniform_decode=decode)
        return found.name, batch.num_tokens

    assert graph(512, decode=True) == ("FULL", 512) and graph(500) == ("PIECEWISE", 512)
    assert graph(longest) == ("PIECEWISE", longest) and graph(longest + 1) == ("NONE", longest + 1)
    if longest > 512:
        assert graph(600) == ("PIECEWISE", 640) == graph(600, decode=True)
    captured = {m.name: {b.num_tokens for b in batches} for m, batches in made.get_capture_descs()}
    assert max(captured["FULL"]) == 512 and max(captured["PIECEWISE"]) == longest


def test_the_v2_runner_gives_the_sizes_to_prompts_only(monkeypatch):
    config = configuration()

    def graph(made, tokens: int, reqs: int = 1, each: int | None = None):
        found = made.dispatch(reqs, tokens, each, 0)
        return found.cg_mode.name, found.num_tokens

    assert graph(manager(config, monkeypatch), 600) == ("NONE", 600)
    added = graphs.extend(worker(config))
    made = manager(config, monkeypatch)
    added.worker.model_runner = SimpleNamespace(cudagraph_manager=made)
    added.settle()
    assert graph(made, 600) == ("PIECEWISE", 640) and graph(made, 2049) == ("NONE", 2049)
    assert graph(made, 512, 512, 1) == ("FULL", 512) and graph(made, 600, 600, 1) == ("PIECEWISE", 640)
    largest = {m.name: descs[0].num_tokens for m, descs in made._capture_descs.items()}
    assert largest == {"FULL": 512, "PIECEWISE": 2048}


def test_settle_sets_the_limit_that_flash_attention_reads():
    import vllm as host

    folder = Path(host.__file__).parent / "v1" / "attention" / "backends"
    for name in ("flash_attn", "flashinfer", "triton_attn"):
        text = (folder / f"{name}.py").read_text()
        assert ("num_actual_tokens <= self.max_cudagraph_size" in text) == (name == "flash_attn")
