"""An engine over two nodes, simulated here: two trees of processes with loopback addresses and no shared memory.

The slow tests give each node a network of its own, and run `fk-bench serve`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.serving.node_forks import NODE_0, Node, configs, free_port
from support.serving.rank_forks import Fork
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import parallel
from fastkernels.engine.engines.engine import make_engine
from fastkernels.engine.execution import follow, nodes, ranks, worker
from fastkernels.engine.execution.ranks import WorkerDied
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.checkpoints.weights import CheckpointError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90]]


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Fork}))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("nodes") / "qwen3_moe", "qwen3_moe", "float32")


def machines(runner: Any, name: str) -> tuple[str, list[str], bool]:
    """(the node of each rank of a group, whether this rank shares memory with others)"""
    comm = parallel.communicator(name)
    return comm.device.type, [m.rpartition("/")[2] for m in comm.machines], comm.meeting is not None


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def check_tokens(
    made: list[dict[str, Any]], folder: Path, greedy: Any, group: str = parallel.TP
) -> list[Any]:
    """Tokens of all nodes equal Transformers', and all end; returns what the ranks know of this group."""
    other = Node(EngineConfig(**made[1]))
    with LLM(**made[0]) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        groups = llm.llm_engine.executor.call(machines, group)
        pids = other.ranks()
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(folder, p, 8) for p in PROMPTS]
    assert other.said() == "" and gone(pids)
    return groups


def test_tensor_parallel_llama_equals_one_process(tiny: Path, greedy: Any) -> None:
    groups = check_tokens(configs(tiny, free_port(), tensor_parallel_size=2), tiny, greedy)
    assert groups == [("cpu", ["0", "1"], False)] * 2  # another machine: no shared memory


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2, "expert_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"data_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "data_parallel_size": 3}, marks=pytest.mark.slow),
    ],
    ids=["dp", "ep", "dp_of_tp", "groups_over_nodes"],
)
def test_mixture_over_nodes_equals_one_process(moe: Path, greedy: Any, settings: dict[str, int]) -> None:
    group = parallel.EP if "data_parallel_size" in settings else parallel.TP
    found = check_tokens(configs(moe, free_port(), **settings), moe, greedy, group)
    assert all(set(names) == {"0", "1"} and not shares for _, names, shares in found)


@pytest.mark.slow
def test_group_over_nodes_shares_no_memory(tiny: Path, greedy: Any) -> None:
    made = configs(tiny, free_port(), tensor_parallel_size=4, num_blocks=80)
    assert check_tokens(made, tiny, greedy) == [("cpu", ["0", "0", "1", "1"], False)] * 4


@pytest.mark.slow
def test_group_on_one_node_shares_memory(moe: Path, greedy: Any) -> None:
    made = configs(moe, free_port(), data_parallel_size=2, tensor_parallel_size=2)
    assert [shares for _, _, shares in check_tokens(made, moe, greedy, parallel.TP)] == [True] * 4


def test_node_that_dies_is_named_and_all_ends(tiny: Path) -> None:
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    other = Node(EngineConfig(**made[1]))
    with LLM(**made[0]) as llm:
        engine = llm.llm_engine
        engine.add_request("a", [7], SamplingParams(max_tokens=300, ignore_eos=True))
        for _ in range(3):
            engine.step()
        pids = other.ranks()
        other.kill()
        os.waitpid(other.pid, 0)
        with pytest.raises(WorkerDied, match=r"rank 1 is lost: node 1 \(127.0.0.1\) has ended"):
            while engine.has_unfinished_requests():
                engine.step()
    assert gone(pids)


def test_rank_that_dies_on_another_node_is_named(tiny: Path) -> None:
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    other = Node(EngineConfig(**made[1]))
    with LLM(**made[0]) as llm:
        engine = llm.llm_engine
        engine.add_request("a", [7], SamplingParams(max_tokens=300, ignore_eos=True))
        engine.step()
        (pid,) = other.ranks()
        os.kill(pid, signal.SIGKILL)
        what = rf"rank 1 of node 1 \(127.0.0.1\) \(pid {pid}\) was killed by SIGKILL"
        with pytest.raises(WorkerDied, match=what):
            while engine.has_unfinished_requests():
                engine.step()
    assert re.fullmatch(f"WorkerDied: rank 0 has ended the engine: {what}", other.said())


def refused(made: list[dict[str, Any]], **of_node_1: Any) -> tuple[str, str]:
    """The errors of node 0 and of node 1."""
    other = Node(EngineConfig(**made[1] | of_node_1))
    with pytest.raises((ValueError, OSError)) as caught:
        LLM(**made[0])
    return str(caught.value), other.said()


def test_other_options_on_a_node_are_refused(tiny: Path) -> None:
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    ours, theirs = refused(made, max_num_seqs=8)
    assert ours == (
        "node 1 (127.0.0.1) has max_num_seqs 8, and node 0 has 6: it must be the same on all nodes"
    )
    assert theirs == f"ValueError: node 0 refuses this node: {ours}"


def test_other_weights_on_a_node_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] += 1
    save_file(weights, file, metadata={"format": "pt"})
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    ours, theirs = refused(made, model=str(folder))
    assert "has a model whose fingerprint is" in ours and ours in theirs
    ours, theirs = refused(made, model=str(tmp_path / "none"))
    assert ours.startswith("node 1 (127.0.0.1): ") and "none" in ours and "none" in theirs


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        ({"fastkernels": "0.2"}, "node 1 has fastkernels 0.2, and node 0 has 0.1: it must be"),
        ({"torch": "2"}, "node 1 has torch 2, and node 0 has 1"),
        ({"device": "cpu"}, "node 1 has device cpu, and node 0 has cuda"),
        ({"options": {"a": 1, "b": 3}}, "node 1 has b 3, and node 0 has 2"),
        ({"options": None}, "node 1 has a None, and node 0 has 1; b None, and node 0 has 2: they must be"),
        ({"options": "x"}, "node 1 has a None, and node 0 has 1; b None, and node 0 has 2: they must be"),
        ({"torch": "2", "options": {}}, "node 1 has torch 2, and node 0 has 1; a None, and node 0 has 1"),
        ({}, ""),
    ],
)
def test_differences_are_named(theirs: dict[str, Any], what: str) -> None:
    ours = {"fastkernels": "0.1", "torch": "1", "device": "cuda", "options": {"a": 1, "b": 2}}
    assert nodes.difference(ours, ours | theirs, "node 1").startswith(what)
    assert bool(nodes.difference(ours, ours | theirs, "node 1")) is bool(what)


def test_node_that_does_not_come_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "FIRST_S", 0.1)
    made = configs(tiny, free_port(), tensor_parallel_size=2, dist_timeout=1.5)
    where = f"{NODE_0}:{made[0]['master_port']}"
    with pytest.raises(
        TimeoutError, match=rf"node 1 of 2 did not come to {where} in 1.5 s: start it .* --node-rank 1"
    ):
        LLM(**made[0])
    with pytest.raises(
        TimeoutError, match=rf"node 0 did not answer at {where} in 1.5 s .*correct --master-addr"
    ):
        LLM(**made[1])
    said, far = " ".join(caplog.messages), r"\d s so far, at most 1.5 s"
    assert re.search(rf"node 0 waits at {where} for node 1 of 2: {far}; start the same command", said)
    assert re.search(rf"node 1 waits for node 0 at {where} \(Connection refused\): {far}; check that", said)


def loopback() -> str:
    """The IPv6 address if this machine has one."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return NODE_0


def test_error_of_node_0_reaches_the_other_nodes(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also to one that comes later, over IPv6, and from before the engine is made."""
    monkeypatch.setattr(nodes, "TELL_S", 60.0)
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    other = Node(EngineConfig(**made[1]))
    with pytest.raises(CheckpointError, match="no-such-folder"):
        LLM(**made[0] | {"model": "no-such-folder/x"})
    assert re.match(
        "WorkerDied: rank 0 cannot start the engine: CheckpointError: .*no-such-folder", other.said()
    )
    made = configs(tiny, free_port(), nnodes=3, tensor_parallel_size=3, master_addr=loopback())
    early = Node(EngineConfig(**made[1]))
    with pytest.raises(OSError, match="port 8000"), nodes.listening(EngineConfig(**made[0])):
        late = Node(EngineConfig(**made[2]))
        raise OSError("port 8000 is in use")
    for node in (early, late):
        assert node.said() == "WorkerDied: rank 0 cannot start the engine: OSError: port 8000 is in use"
    assert "It waits 60 s to tell node 1, 2" in " ".join(caplog.messages)


def test_node_0_that_ends_before_a_greeting_is_named(tiny: Path) -> None:
    made = configs(tiny, free_port(), tensor_parallel_size=2)
    with socket.create_server((NODE_0, made[1]["master_port"])) as node_0:
        other = Node(EngineConfig(**made[1]))
        node_0.accept()[0].close()
    assert re.match(
        "ConnectionError: .* closed the connection before a greeting: node 0 has ended", other.said()
    )


def test_port_in_use_and_foreign_address_are_refused(tiny: Path) -> None:
    with socket.socket() as other:
        other.bind((NODE_0, 0))
        other.listen()
        made = configs(tiny, other.getsockname()[1], tensor_parallel_size=2)
        with pytest.raises(
            OSError, match=r"cannot listen on .*: Address already in use; choose another --master-port"
        ):
            LLM(**made[0])
    with pytest.raises(OSError, match=r"192.0.2.1.*it must be an address of node 0"):
        LLM(**made[0] | {"master_addr": "192.0.2.1"})
    for number in (0, 1):
        with pytest.raises(OSError, match=r"master_addr 'no.such.invalid' is not a known address"):
            LLM(**made[number] | {"master_addr": "no.such.invalid"})


def test_strangers_do_not_join(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, another protocol and a node with another key leave node 0 waiting."""
    made = configs(tiny, free_port(), tensor_parallel_size=2, dist_timeout=4.0)
    gathering = nodes.Gathering(EngineConfig(**made[0]))
    with socket.create_connection(gathering._sock.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        gathering._accept(1.0)
    socket.create_connection(gathering._sock.getsockname()).close()
    gathering._accept(1.0)
    monkeypatch.setenv(nodes.KEY, "theirs")
    other = Node(EngineConfig(**made[1]))
    monkeypatch.setenv(nodes.KEY, "ours")
    gathering._accept(2.0)
    assert "FASTKERNELS_NODE_KEY is not that of node 0" in other.said()
    with pytest.raises(TimeoutError, match="node 1 of 2 did not come"):
        gathering.workers({})
    gathering.close()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"nnodes": 2}, "nnodes 2 does not divide the 1 ranks"),
        (
            {"nnodes": 3, "tensor_parallel_size": 4},
            "nnodes 3 does not divide the 4 ranks of tensor_parallel_size 4",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2},
            "node_rank 2 .* nnodes 2: it must be 0 to 1",
        ),
        ({"node_rank": 1}, "node_rank 1 is not possible with nnodes 1: it must be 0"),
        ({"node_rank": -1}, "node_rank -1 is not possible"),
        ({"nnodes": 0}, "nnodes 0 is less than 1"),
        ({"master_port": 70000}, "master_port 70000 is not a port: it must be 1 to 65535"),
        ({"master_addr": ""}, "master_addr is empty"),
        ({"master_addr": "0.0.0.0"}, "master_addr 0.0.0.0 is every address"),
        ({"dist_timeout": 0.0}, "dist_timeout 0.0 is not a number of seconds above 0"),
    ],
)
def test_impossible_nodes_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        EngineConfig("model", **options)


def test_engine_of_another_node_is_refused(tiny: Path) -> None:
    config = EngineConfig(str(tiny), nnodes=2, node_rank=1, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="node_rank 1 has no engine of its own: use LLM"):
        make_engine(config)
    with pytest.raises(RuntimeError, match="node 1 has no engine: use that of node 0"):
        _ = follow.Followed(config).tokenizer


def test_invalid_variable_on_a_node_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "maybe")
    made = configs(tiny, free_port(), tensor_parallel_size=2, dist_timeout=0.1)
    with pytest.raises(ValueError, match="FASTKERNELS_VERIFY"):
        LLM(**made[1])


def test_too_few_gpus_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow.torch.cuda, "device_count", lambda: 1)
    config = EngineConfig("model", nnodes=2, node_rank=1, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="node 1 needs 2 GPUs, and there are 1"):
        follow._check_gpus(config)


def test_kinds_of_gpus_and_of_weights_are_compared(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(follow, "DRIVER", driver)
    monkeypatch.setattr(follow.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(follow.nccl, "version", lambda: (2, 27, 5))
    folder = shutil.copytree(tiny, tmp_path / "copy")
    config, found = EngineConfig(str(tiny), device="cuda"), []
    for kind, version, method in (("H200", "570.86.15", None), ("H100", "550.54", "fp8")):
        driver.write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        )
        monkeypatch.setattr(follow.torch.cuda, "get_device_name", lambda i: f"NVIDIA {kind}")  # noqa: B023
        raw = json.loads((folder / "config.json").read_text())
        raw |= {"quantization_config": {"quant_method": method}} if method else {}
        (folder / "config.json").write_text(json.dumps(raw))
        found.append(follow.about(config, folder))
    said = nodes.difference(*found, "node 1")
    assert (
        "node 1 has GPUs NVIDIA H100, and node 0 has NVIDIA H200; NVIDIA driver 550.54, and node 0 has"
        in said
    )
    assert "570.86.15; a model with the quantization fp8, and node 0 has None; a model whose fing" in said
    assert (
        found[0]["GPUs"]["NCCL"] == "2.27.5" and found[0]["checkpoint"]["a model in the dtype"] == "float32"
    )


def test_rank_uses_the_folders_of_its_node() -> None:
    """Also that of the draft model, whose path is none of the options that must be equal."""
    draft = {"method": "draft_model", "num_speculative_tokens": 2}
    of_0 = EngineConfig("/a", speculative_config={**draft, "model": "/a/draft"})
    made = worker.on_this_node(worker.Setup(of_0, Path("/a"), None, 1, None), "/b", "/b/draft")
    assert made.folder == Path("/b") and made.config.model == "/b" and made.rank == 1
    assert made.config.speculative_config == {**draft, "model": "/b/draft"}
    assert worker.on_this_node(made, "/c").config.speculative_config == made.config.speculative_config


def test_variables_of_nodes_are_compared(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(tiny))
    ours = follow.about(config, tiny)
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "all_reduce:reference")
    found = nodes.difference(ours, follow.about(config, tiny), "node 1")
    assert found.startswith("node 1 has FASTKERNELS_PROVIDER all_reduce:reference, and node 0 has None")


def test_other_layouts_of_weights_may_be_absent(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"the same weights")
        assert follow.fingerprint(folder) == follow.fingerprint(tiny)
    (folder / "head_linear.pt").write_bytes(b"more weights")
    assert follow.fingerprint(folder) != follow.fingerprint(tiny)


def test_signal_leaves_the_end_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 ends the engine after the drain timeout: a node that ended then would end it with an error."""
    monkeypatch.setattr(follow, "GRACE", 100.0)
    for number in (signal.SIGTERM, signal.SIGINT):
        with follow.ending_by_signals(0.0) as ends:
            os.kill(os.getpid(), number)
            assert not ends()
            os.kill(os.getpid(), number)
            assert ends()


def test_address_gives_its_interface() -> None:
    assert nodes.interface_of("127.0.0.2") == "lo" and nodes.interface_of("192.0.2.1") is None
    named = {
        a.address: name
        for name, each in psutil.net_if_addrs().items()
        for a in each
        if a.family == socket.AF_INET
    }
    for address, name in named.items():
        assert nodes.interface_of(address) == name


NETWORK = """
ip link set lo up
unshare -n sleep 600 & other=$!
sleep 1
ip link add here type veth peer name there netns $other
ip addr add 10.9.0.1/24 dev here && ip link set here up
nsenter -t $other -n sh -c "ip link set lo up; ip addr add 10.9.0.2/24 dev there; ip link set there up"
nsenter -t $other -n "$0" -c "$1" "$2" 1 & node=$!
"$0" -c "$1" "$2" 0
wait $node
kill $other
"""
NODE = """
import os, sys, threading
from fastkernels import LLM, SamplingParams
made = dict(device="cpu", dtype="float32", num_blocks=40, nnodes=2, node_rank=int(sys.argv[2]), tensor_parallel_size=2)
try:
    with LLM(sys.argv[1], master_addr="10.9.0.1", **made) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        print("tokens", llm.generate([[7]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
        threading.Timer(1, os.system, ["ip link set here down"]).start()
        while True:
            llm.generate([[7]], params, use_tqdm=False)
except RuntimeError as error:
    print("error", error, flush=True)
"""


def can_make_networks() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    return subprocess.run(["unshare", "-nm", "ip", "link"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_cut_cable_ends_both_nodes(tiny: Path, greedy: Any) -> None:
    """Each node has a network of its own; without the cable no connection is closed."""
    if not can_make_networks():
        pytest.skip("needs the right to make networks, and ip")
    command = ["unshare", "-nm", "bash", "-c", NETWORK, sys.executable, NODE, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert f"tokens {greedy(tiny, [7], 8)}" in done.stdout, done.stderr
    errors = sorted(line for line in done.stdout.splitlines() if line.startswith("error"))
    assert errors == [
        "error rank 0 has ended the engine: node 0 (10.9.0.1) has ended",
        "error rank 1 is lost: node 1 (10.9.0.2) has ended",
    ]


SERVE = "from fk_bench.cli import main; main()"


@pytest.mark.slow
def test_server_over_two_nodes_and_its_end(tiny: Path, greedy: Any) -> None:
    port, front = free_port(), free_port()
    options = [
        "serve", str(tiny), "--device", "cpu", "--dtype", "float32", "--num-blocks", "40", "--nnodes", "2",
        "--tensor-parallel-size", "2", "--master-addr", NODE_0, "--master-port", str(port), "--port", str(front),
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, *options, "--node-rank", str(rank)], stderr=subprocess.PIPE
        )
        for rank in (1, 0)
    ]
    request = {"model": str(tiny), "prompt": [7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        until = time.monotonic() + 300
        while True:
            try:
                answer = httpx.post(
                    f"http://127.0.0.1:{front}/v1/completions",
                    json=request | {"return_token_ids": True},
                    timeout=120,
                )
                break
            except httpx.ConnectError:
                assert time.monotonic() < until and processes[1].poll() is None
                time.sleep(0.2)
        assert answer.json()["choices"][0]["token_ids"] == greedy(tiny, [7], 8)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
