"""Images, audio and embeddings in `fk-bench patch-compare` and `e2e`: options, refusals, processors, real engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Status, read
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import asked, patch_compare, sharing
from fk_bench.e2e.asked import Asked, graph_sizes
from fk_bench.e2e.comparison import Extent
from fk_bench.e2e.loads import EMBED, Kind, Load, parse_loads
from fk_bench.e2e.media import NO_MEDIA, Media, MediaPlace, placed
from fk_bench.e2e.model_configs import load_config, sizes_of
from fk_bench.e2e.ratios import COMMAND, over_loads, summary, undo_rows
from fk_bench.e2e.runs import Prompts, metrics_of
from fk_bench.e2e.startup import logged_parts
from fk_bench.offline.offline import drawn, requests_of
from support.commands import fk_bench, fk_bench_here, last_json
from support.tiny import make_tiny, make_tiny_bert, make_tiny_omni, make_tiny_vlm, make_tiny_whisper

ROOT = Path(__file__).resolve().parents[3]
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
# vLLM's attention on a CPU has no heads of 16 numbers
_QWEN2 = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _SECTIONS}
_QWEN3 = {"head_dim": 32, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
_BERT: dict[str, Any] = {"num_attention_heads": 2, "position_embedding_type": "absolute"}
TINY: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": lambda folder: make_tiny_vlm(folder, "qwen2_vl", **_QWEN2),
    "qwen3_vl": lambda folder: make_tiny_vlm(folder, "qwen3_vl", **_QWEN3),
    "whisper": lambda folder: make_tiny_whisper(folder, d_model=64, decoder_attention_heads=2),
    "xlm_roberta": lambda folder: make_tiny_bert(folder, cls="XLMRobertaModel", **_BERT),
    "bert": lambda folder: make_tiny_bert(folder, **_BERT),
    "mamba2": lambda folder: without_limit(
        make_tiny(folder, "mamba2", dtype="float32", intermediate_size=128)
    ),
    "qwen3_next": lambda folder: make_tiny(
        folder, "qwen3_next", linear_key_head_dim=128, linear_value_head_dim=128
    ),
}


def without_limit(folder: Path) -> Path:
    """A config as the public ones: without a limit of the context."""
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("max_position_embeddings")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def config_alone(kind: str, folder: Path) -> Path:
    """A folder with the config.json of a tiny model, and nothing else."""
    made = TINY[kind](folder / "whole")
    (folder / kind).mkdir()
    (folder / kind / "config.json").write_text((made / "config.json").read_text())
    return folder / kind


@pytest.mark.parametrize(
    ("images", "audio", "message"),
    [
        ("1x0", None, "at least 1 and 16"),
        ("0x64", None, "at least 1 and 16"),
        ("64", None, "IMAGESxPIXELS"),
        ("1x-5", None, "IMAGESxPIXELS"),
        ("200x64", None, "64 are the most"),
        ("", 0.0, "--audio 0: give seconds above 0"),
        ("", -1.0, "seconds above 0"),
        ("", float("nan"), "seconds above 0"),
        ("1x64", 1.0, "exclude each other"),
    ],
)
def test_impossible_media_are_refused(images: str, audio: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Media.parse(images, audio)


def test_media_are_read() -> None:
    assert Media.parse("2x1024", None) == Media(2, 1024) and Media.parse("2x1024", None).text == "2x1024"
    assert Media.parse("", 30) == Media(audio=30.0) and not Media.parse("", None)


def test_loads_of_embeddings_have_no_outputs() -> None:
    loads, preset = parse_loads("embed,3x20", EMBED)
    assert [str(load) for load in loads] == ["1x512", "32x512", "256x512", "3x20"] and len(preset) == 3
    assert all(load.kind is Kind.EMBED for load in loads) and Load.parse("3x20") == loads[-1]
    with pytest.raises(ConfigError, match=r"8x512 has no output tokens: give them as in 8x512[+]128"):
        parse_loads("8x512")
    with pytest.raises(ConfigError, match=r"8x512[+]8 has 8 output tokens.* as in 8x512"):
        parse_loads("8x512+8", EMBED)


def test_vectors_have_latency_and_throughput() -> None:
    metrics, problem = metrics_of([[0.1], [0.2]], Load(2, 50, 0))
    assert not problem and metrics["requests_per_s"] == pytest.approx(10)
    assert metrics["latency_ms"] == pytest.approx(150)
    assert metrics["input_tokens_per_s"] == pytest.approx(500) and "tpot_ms" not in metrics
    assert metrics_of([[0.1], []], Load(2, 50, 0))[1]


def test_features_of_images_count_as_input() -> None:
    metrics, _ = metrics_of([[0.5, 0.6], [1.0, 1.1]], Load(2, 100, 2), features=60)
    assert metrics["input_tokens_per_s"] == pytest.approx(320)


def test_requests_per_second_are_compared() -> None:
    from fk_bench.core.rows import Row, Subject
    from fk_bench.offline.host import make_row

    def run(block: int, number: int, rate: float) -> Row:
        case = {"load": "2x50", "block": block, "run": number, "state": ("stock", "patched")[block % 2]}
        metrics = {"requests_per_s": rate, "latency_ms": 1 / rate}
        return make_row("vllm", case, metrics, command=COMMAND, subject=Subject(model="m", host="vllm"))

    made = [run(b, n, 2.0 if b == 1 else 1.0) for b in range(3) for n in (-1, 0, 1)]
    (line,) = summary(made)
    assert line["requests_per_s_ratio"] == pytest.approx(2.0) == line["latency_ms_ratio"]
    assert over_loads([line])[0]["least"] == pytest.approx(2.0)
    of_load, of_all = undo_rows(made)
    assert of_load[0]["alternations"] == 1 and of_all[1]["requests_per_s_undo_ratio"] == pytest.approx(1.0)


def test_prompts_begin_with_marks_of_their_images() -> None:
    place, media = MediaPlace((7, 8, 9), 15, 0, 500), Media(1, 64)
    load = Load.parse("2x12+4/1x10+2")
    work = Prompts("m", [load], place, media).work(load, "a")
    prompts = [*work["prompts"], *work["later"]["prompts"]]
    assert [len(p) for p in prompts] == [12, 12, 10]
    assert all(p[:3] == [7, 8, 9] and max(p[3:]) < 500 for p in prompts)
    first, second, third = requests_of(work)
    assert [image.size for image in first.media["image"]] == [(64, 64)]
    pixels = [np.asarray(r.media["image"][0]) for r in (first, second, third)]
    assert not np.array_equal(pixels[0], pixels[1]) and not np.array_equal(pixels[0], pixels[2])
    again = np.asarray(drawn(work["media"], 0)["image"][0])
    assert np.array_equal(again, pixels[0])  # in every host
    samples, rate = drawn({**vars(Media(audio=0.5)), "seed": "a"}, 0)["audio"]
    assert len(samples) == 8000 and rate == 16000


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.mark.parametrize(
    ("model", "task", "media", "message"),
    [
        ("qwen2.5-0.5b", "generate", Media(1, 64), "reads text only, and takes no images"),
        ("qwen2-vl-2b", "generate", Media(audio=5), "reads image and video, and takes no audio"),
        (
            "qwen2-vl-2b",
            "generate",
            Media(1, 4000),
            "more than 12,845,056 pixels smaller: give at most 1x3584",
        ),
        ("whisper-base", "generate", Media(audio=31), "at most 30 s of audio with a prompt: give --audio 30"),
        ("whisper-base", "generate", NO_MEDIA, "give its seconds, as in --audio 30"),
        ("whisper-base", "generate", Media(1, 64), "reads audio, and takes no images"),
        ("bge-m3", "generate", NO_MEDIA, "is an encoder and generates no tokens: give --task embed"),
        (
            "qwen2.5-0.5b",
            "embed",
            NO_MEDIA,
            "no encoder of texts to vectors: --task embed measures BertModel",
        ),
    ],
)
def test_media_that_a_model_lacks_are_refused_by_name(
    model: str, task: str, media: Media, message: str, configs: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        placed(model, sizes_of(model, configs), configs, [Load(1, 64, 8)], task, media, True)


def test_image_has_the_tokens_of_the_models_processor(configs: Path) -> None:
    """1,024 pixels: 37 x 37 of 28 pixels, which round up, and 32 x 32 of 32 pixels."""
    marks = (151652, 151655, 151653)
    for model, features in (("qwen2-vl-7b", 37 * 37), ("qwen3-vl-8b", 32 * 32)):
        path, place = placed(model, sizes_of(model, configs), configs, [], "generate", Media(2, 1024), True)
        assert place == MediaPlace(2 * marks, 2 * (features - 1), 0, 151652)
        assert (Path(path) / "tokenizer.json").is_file()
    _, place = placed(
        "whisper-large-v3",
        sizes_of("whisper-large-v3", configs),
        configs,
        [],
        "generate",
        Media(audio=30),
        True,
    )
    assert place == MediaPlace(states=1500, texts=51866)


def test_prompt_without_room_for_text_is_refused(configs: Path) -> None:
    path = sizes_of("qwen2-vl-2b", configs)
    with pytest.raises(ValueError, match="a prompt of 6 tokens has no room for text next to 6 tokens"):
        placed("m", path, configs, [Load(1, 6, 8)], "generate", Media(2, 64), True)


def test_small_patches_keep_the_least_tokens_of_an_image(tmp_path: Path) -> None:
    """Qwen3-VL has 64 tokens at least, of 32 x 32 pixels; the tiny model's are of 8 x 8."""
    own = config_alone("qwen3_vl", tmp_path)
    _, place = placed("m", str(own), tmp_path / "run", [], "generate", Media(2, 40), True)
    assert place.features == 2 * 63


def test_processor_is_generated_next_to_a_copy(tmp_path: Path) -> None:
    """For random weights only; the folder of the user stays as it is."""
    own = config_alone("qwen2_vl", tmp_path)
    path, place = placed("m", str(own), tmp_path / "run", [], "generate", Media(1, 64), True)
    assert path != str(own) and [f.name for f in own.iterdir()] == ["config.json"]
    assert place.front == (512, 514, 513) and place.features == 63  # of 8 x 8 pixels each
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    assert processor.tokenizer.convert_tokens_to_ids("<|image_pad|>") == 514
    with pytest.raises(ValueError, match=r"has no preprocessor_config[.]json"):
        placed("m", str(own), tmp_path / "run", [], "generate", Media(1, 64), False)


def test_models_in_folders_of_one_name_stay_apart(tmp_path: Path) -> None:
    paths = []
    for folder, size in (("a", 56), ("b", 112)):
        own = config_alone("qwen2_vl", tmp_path / folder)
        fields = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(fields | {"note": size}))
        paths.append(placed("m", str(own), tmp_path / "run", [], "generate", Media(1, 64), True)[0])
    found = [json.loads((Path(path) / "config.json").read_text())["note"] for path in paths]
    assert found == [56, 112]


def test_configs_without_what_media_need_are_refused(tmp_path: Path) -> None:
    own = config_alone("qwen2_vl", tmp_path)
    fields = json.loads((own / "config.json").read_text())
    for changed, message in (
        ({"vision_start_token_id": 3}, "has a token of media at id 3: none is left for text"),
        ({"vision_config": {**fields["vision_config"], "patch_size": None}}, "has no patch_size, which"),
    ):
        made = {**fields, **changed}
        made["vision_config"] = {k: v for k, v in made["vision_config"].items() if v is not None}
        (own / "config.json").write_text(json.dumps(made))
        with pytest.raises(ValueError, match=message):
            placed("m", str(own), tmp_path / "run", [], "generate", Media(1, 64), True)


def test_audio_within_a_prompt_is_refused(tmp_path: Path) -> None:
    omni = make_tiny_omni(tmp_path / "omni")
    with pytest.raises(ValueError, match="m has audio within its prompt; only models whose encoder"):
        placed("m", str(omni), tmp_path, [], "generate", Media(audio=1), False)


def test_commands_refuse_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_compare, "_check_installed", lambda host, python: None)
    for args, message in (
        (["--images", "1x64", "--host", "sglang"], "--images is for --host vllm"),
        (["--images", "1x64", "--loads", "8x512@90+8"], "8x512@90+8 has cached prompts"),
        (["--task", "embed", "--images", "1x64"], "excludes --images and --audio"),
        (["--task", "embed", "--loads", "8x512+8"], "has 8 output tokens"),
        (["--task", "embed", "--kv-cache-dtype", "fp8"], "--task embed has no KV cache"),
        (["--task", "rank"], "'rank': give generate or embed"),
        (["--graph-sizes", "few"], "'few': give all or loads"),
        (["--loads", "8x512"], "8x512 has no output tokens"),
        (["--audio", "0"], "seconds above 0"),
        (["--graph-sizes", "loads", "--engine-args", '{"compilation_config": 3}'], "that is an object"),
    ):
        done = fk_bench_here(COMMAND, "qwen2.5-0.5b", *args, "--out", tmp_path / "run")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, args
    assert not (tmp_path / "run").exists()
    done = fk_bench_here(COMMAND, "qwen2.5-0.5b", "--images", "1x64", "--out", tmp_path / "run")
    assert done.returncode == 1 and "takes no images; models that do: " in done.stderr
    (row,) = read(tmp_path / "run" / "rows.jsonl")[0]
    assert row.status is Status.UNSUPPORTED and row.case["images"] == "1x64"


def test_e2e_refuses_them_by_name(tmp_path: Path) -> None:
    for args, message in (
        (["--images", "1x64", "--loads", "2x16+4"], "takes no images; models that do: "),
        (["--task", "embed", "--loads", "2x16"], "no encoder of texts to vectors"),
        (["--images", "1x64", "--loads", "2x16+4", "--hosts", "sglang"], "--images is for --host vllm"),
    ):
        done = fk_bench_here("e2e", *args, "--out", tmp_path / "run")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
        assert not list(tmp_path.glob("run/*.log"))


def test_e2e_makes_public_models_with_random_weights(tmp_path: Path) -> None:
    for model, message in (
        ("whisper-base", "give its seconds, as in --audio 30"),
        ("llama-3.1-8b:99", "the model has 32 layers"),
        ("llama-3.1-8b:x", "give a number of layers"),
        ("llama-3.1", "is neither a folder nor a hub id"),
    ):
        args = (
            model,
            "--load-format",
            "dummy",
            "--loads",
            "1x4+2",
            "--hosts",
            "fastkernels",
            "--out",
            tmp_path,
        )
        done = fk_bench_here("e2e", *args)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_first_layers_of_a_model_are_labelled(tmp_path: Path) -> None:
    found = json.loads(Path(sizes_of("qwen3-next-80b-a3b:16", tmp_path), "config.json").read_text())
    assert found["num_hidden_layers"] == 16 == len(found["layer_types"])
    assert found["layer_types"].count("full_attention") == 4
    kimi = json.loads(Path(sizes_of("kimi-linear-48b-a3b:8", tmp_path), "config.json").read_text())
    assert kimi["linear_attn_config"]["full_attn_layers"] == [4, 8] and len(kimi["mlp_layer_types"]) == 8
    text = json.loads(Path(sizes_of("qwen3-vl-8b:4", tmp_path), "config.json").read_text())["text_config"]
    assert text["num_hidden_layers"] == 4
    for name, message in (
        ("jamba-v0.1:99", "has 32 layers"),
        ("jamba-v0.1:0", "at least 1"),
        ("jamba-v0.1:x", "at least 1"),
    ):
        with pytest.raises(ModelError, match=message):
            sizes_of(name, tmp_path)
    name, config = load_config("llama-3.1-8b:3")
    assert name == "llama-3.1-8b:3" and config.num_hidden_layers == 3 and config.hidden_size == 4096
    assert sizes_of("no-model:4", tmp_path) == "no-model:4"


@pytest.mark.parametrize(
    "name", ["mamba-2.8b", "mamba2-2.7b", "jamba-v0.1:8", "qwen3-next-80b-a3b:16", "kimi-linear-48b-a3b:8"]
)
def test_recurrent_models_have_room_for_every_load(name: str, tmp_path: Path) -> None:
    """Two engines on an H200, with a state for each sequence; 64 of 1,024 tokens and 4 of 16,384."""
    loads, _ = parse_loads("1x2048+128,64x1024+128,4x16384+128")
    path = sizes_of(name, tmp_path)
    assert not any(asked.too_long(name, path, load, MediaPlace()) for load in loads)
    tokens = sharing.kv_tokens([(64, 1152), (4, 16512)], 16528)
    one = sharing.need(name, path, "bfloat16", tokens, True, None, 64)
    alone = sharing.need(name, path, "bfloat16", tokens, True, None, 1)
    assert one.states > 20 * alone.states > 0 and one.kv >= one.states
    assert 2 * one.total < 139 * sharing.GIB


def test_graphs_of_the_loads_are_the_same_in_all_states(tmp_path: Path) -> None:
    loads, presets = parse_loads("1x64+8,32x512+256/8x2048+8,4x1024+8")
    assert graph_sizes(loads) == [1, 4, 32, 40, 64, 512]
    assert graph_sizes(loads[:1], 63) == [1, 127]  # prompts have the features of their images
    extra = {"compilation_config": {"mode": 3}}
    one = Asked(
        "vllm", "python", tmp_path, 1.0, False, None, {}, "bfloat16", "auto", "dummy", 1, 0.0, extra, False, "",
        presets, Extent(loads), 0, graph_sizes="loads",
    )  # fmt: skip
    compilation = {"cudagraph_capture_sizes": [1, 4, 32, 40, 64, 512], "mode": 3}
    assert one._engine_args(loads, MediaPlace()) == {"compilation_config": compilation}
    assert one.case()["graph_sizes"] == "loads"
    again, _ = Asked.from_json(one.to_json(["m"]))
    assert again == one


def test_parts_of_a_start_are_read_from_the_log() -> None:
    log = "Model loading took 14.2 GiB memory and 3.5 seconds\ntorch.compile took 21.50 s in total\n" * 2
    log += "Graph capturing finished in 12 secs, took 0.6 GiB\n(W1) torch.compile took 25.00 s in total"
    assert logged_parts(log) == {"weights": 3.5, "compile": 25.0, "graphs": 12.0}


def measured(kind: str, tmp_path: Path, *args: str) -> tuple[list[Any], dict[str, Any]]:
    """The rows and the results of a run with real vLLM: stock, patched and undone, next to our engine."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    random = kind not in ("mamba2", "qwen3_next")
    model = config_alone(kind, tmp_path) if random else TINY[kind](tmp_path / kind)
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    out, dtype = (
        tmp_path / "run",
        "bfloat16" if kind == "qwen3_next" else "float32",
    )  # vLLM's GDN needs bfloat16
    done = fk_bench(
        COMMAND, model, "--python", python, *args, "--with-engine", "--cycles", "1", "--repeats", "2",
        "--load-seconds", "0", "--dtype", dtype, "--load-format", "dummy" if random else "auto", "--out", out,
        env=env, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made, _ = read(out / "rows.jsonl")
    assert all(row.status is Status.OK for row in made), [row.reason for row in made]
    assert [row.case["state"] for row in made if row.case["state"] == "end"]
    (changed,) = {row.case["block"] for row in made if row.case["state"] == "patched"}
    stocks = {row.case["block"] for row in made if row.case["state"] == "stock"}
    assert changed == 1 and stocks == {0, 2}  # before the patch, and undone
    return made, last_json(done)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("qwen2_vl", ("--images", "1x64", "--loads", "2x16+8", "--ops", "attention_dense,layer_norm")),
        ("qwen3_vl", ("--images", "2x40", "--loads", "2x16+8", "--ops", "attention_dense,layer_norm")),
        ("whisper", ("--audio", "0.9", "--loads", "2x4+8", "--ops", "attention_dense,layer_norm")),
    ],
)
def test_media_are_measured_next_to_our_engine(kind: str, args: tuple[str, ...], tmp_path: Path) -> None:
    made, found = measured(kind, tmp_path, *args)
    runs = [row for row in made if row.case.get("run", -1) >= 0]
    assert {row.case["state"] for row in runs} == {"stock", "patched", "fastkernels"}
    assert all(row.metrics["read_ms"] > 0 and row.metrics["tpot_ms"] > 0 for row in runs)
    (line,) = found["results"]
    assert line["output_tokens_per_s_ratio"] > 0 and line["ttft_ms_fastkernels_ratio"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", ["xlm_roberta", "bert"])
def test_embeddings_are_measured_next_to_our_engine(kind: str, tmp_path: Path) -> None:
    made, found = measured(
        kind, tmp_path, "--task", "embed", "--loads", "1x16,3x20", "--ops", "layer_norm,linear"
    )
    runs = [row for row in made if row.case.get("run", -1) >= 0]
    assert all(row.metrics["latency_ms"] > 0 and row.case["kind of load"] == Kind.EMBED for row in runs)
    assert [line["load"] for line in found["results"]] == ["1x16", "3x20"]
    assert all(line["requests_per_s_ratio"] > 0 for line in found["results"])
    assert found["undo"][0]["requests_per_s_undo_ratio"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_recurrent_models_are_measured_next_to_our_engine(kind: str, tmp_path: Path) -> None:
    """Jamba is not among them: an unpatched one does not run in vLLM's CPU build. Mamba-2's context has no limit."""
    ops, long = ("rms_norm", ",1x2100+4") if kind == "mamba2" else ("gemma_rms_norm", "")
    _, found = measured(kind, tmp_path, "--loads", f"1x16+4,3x20+4{long}", "--ops", ops)
    assert all(line["output_tokens_per_s_fastkernels_ratio"] > 0 for line in found["results"])
