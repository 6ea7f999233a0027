"""The static scan: what it rejects and why, and that honest kernels pass."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fk_bench.kernels.judge.scan import tree
from fk_bench.kernels.judge.scan.ownership import PlaceKind, locate
from fk_bench.kernels.judge.scan.scan import REJECT, WARN, rejections, scan

from fastkernels.core import registry

# Baselines are not kernels of ours.
OVERRIDES = sorted(p for p in registry.OPS_ROOT.rglob("*.py") if p.stem != "production")
# Findings in our own files, which may load libraries and keep tables that depend on a configuration.
OWN = {
    # providers that load a library, by the names that its versions use
    "attention/fa3.py": {"dynamic-code", "fallback", "inspection", "patching"},
    "attention/flashinfer.py": {"baseline-library", "pointer-cache"},  # keeps plans for a batch of the host
    "linear/linear.py": {"pointer-cache"},  # finds the copy of a weight that oneDNN packed
    "linear/linear_fp8_libraries.py": {"baseline-library", "dynamic-code", "fallback"},
    "moe/expert_libraries.py": {"dynamic-code"},
    "kit/libraries.py": {"baseline-library"},
    # CUDA C++, read from the package and launched by the driver
    "kit/hopper.py": {"files"},
    # C++, compiled by the user's compiler
    "kit/cpp.py": {"clock", "files", "native-library", "process", "value-cache"},
    "recsys/jagged.py": {"inspection"},  # makes results of the class that torchrec's inputs belong with
    "kit/cpu.py": {"files"},  # Linux's list of the CPU's instructions
    "attention/attention_decode_cpp.py": {"native-library", "pointer-cache"},  # addresses are in a structure
    "activation/silu_and_mul_cpp.py": {"native-library"},
    "cache/store_kvcache_cpp.py": {"native-library", "pointer-cache"},  # the same
    "norm/rms_norm_cpp.py": {"native-library"},
    "rope/rotary_emb_cpp.py": {"native-library"},
    "collective/measure.py": {"clock", "own-op"},  # no kernel: times ours and the group's, at a model's start
    "expert_parallel/measure.py": {"own-op"},  # the same
    "kit/selection.py": {"files"},  # weights of the selection model
    "linear/kernels/int4_linear_cuda.py": {"native-library"},
    "linear/linear_ternary.py": {"native-library"},
    "linear/kernels/skinny_linear_cuda.py": {"native-library"},
    "attention/attention_decode_cuda.py": {"native-library"},
    "linear/kernels/wgmma_linear_cuda.py": {"native-library"},
    "linear/kernels/tiled_linear_cuda.py": {"native-library", "pointer-cache"},
    "dense_attention/attention_dense_cuda.py": {"native-library"},
    "latent_attention/mla_decode_cuda.py": {"native-library"},
    # cuBLASLt, through ctypes: its proposals are timed at a shape's first call, by one thread
    "kit/cublaslt.py": {"clock", "native-library", "threads"},
    "moe/mxfp4_gemm.py": {"native-library"},
    "linear/kernels/wgmma_linear_fp8_cuda.py": {"native-library"},
    "kit/launch.py": {"threads"},  # a lock: one stream at a time gets tickets
    "rope/rope_tables.py": {"value-cache"},  # one cos/sin table for all layers of a model
    "rope/rope_rounding.py": {"baseline-library"},  # to round as vLLM's CPU kernel does
}
HEAD = """import torch, time, os, sys, functools, statistics
import numpy as np
TABLE, CALLS, STATE = {}, 0, {"n": 0}

"""

REJECTED = [
    ("torch.cuda.synchronize = lambda: None", "patching"),
    ("setattr(torch.cuda.Event, 'elapsed_time', None)", "patching"),
    ("from torch.cuda import Event\nEvent.elapsed_time = None", "patching"),
    ("e = torch.cuda\ne.synchronize = None", "patching"),
    ("time.perf_counter = None", "patching"),
    ("statistics.median = None", "patching"),
    ("np.median = None", "patching"),
    ("del torch.allclose", "patching"),
    ("vars(torch)['allclose'] = None", "patching"),
    ("from fastkernels.core import spec\nspec.TOLERANCE['float32'] = None", "patching"),
    ("sys.modules['torch'] = None", "patching"),
    ("import gc\nx = gc.get_objects()", "inspection"),
    ("f = sys._getframe(1).f_locals", "inspection"),
    ("import inspect", "inspection"),
    ("sys.settrace(None)", "inspection"),
    ("import ctypes", "native-library"),
    ("torch.ops.load_library('x.so')", "native-library"),
    ("os.fork()", "process"),
    ("getattr(os, 'fork')()", "process"),
    ("getattr(os, 'fo' + 'rk')()", "dynamic-code"),
    ("raise SystemExit(0)", "process"),
    ("import subprocess", "process"),
    ("from atexit import register", "process"),
    ("import signal", "process"),
    ("from concurrent.futures import ThreadPoolExecutor", "threads"),
    ("torch.set_num_threads(64)", "threads"),
    ("import socket", "network"),
    ("open('/etc/passwd')", "files"),
    ("from pathlib import Path\nPath('seed').read_text()", "files"),
    ("seed = os.environ['SEED']", "files"),
    ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'", "files"),
    ("at = '/proc/self/maps'", "files"),
    ("torch.load('golden.pt')", "files"),
    ("class Lazy(torch.Tensor):\n    pass", "lazy-tensor"),
    ("class Lazy:\n    def __torch_function__(self, *args):\n        pass", "lazy-tensor"),
    ("def f(x):\n    return TABLE[x.data_ptr()]", "pointer-cache"),
    ("def f(x):\n    key = (x.data_ptr(), x.shape)\n    if key in TABLE:\n        return TABLE[key]", "pointer-cache"),
    ("def f(x):\n    return TABLE.get(id(x))", "pointer-cache"),
    ("def f(x):\n    return TABLE.setdefault((x._version, 1), x)", "pointer-cache"),
    ("@functools.lru_cache\ndef f(x: torch.Tensor):\n    return x", "pointer-cache"),
    ("def f(x):\n    return TABLE.get(x[0].item())", "value-cache"),
    ("import hashlib", "value-cache"),
    ("exec('1')", "dynamic-code"),
    ("run = eval\nrun('1')", "dynamic-code"),
    ("import base64", "dynamic-code"),
    ("__import__('os')", "dynamic-code"),
    ("s = torch.cuda.Stream()", "streams"),
    ("def f(s):\n    with torch.cuda.stream(s):\n        pass", "streams"),
    ("def f():\n    time.sleep(1)", "clock"),
    ("def f():\n    global CALLS\n    CALLS += 1\n    return 1 if CALLS > 3 else 2", "call-counting"),
    ("def f():\n    STATE['n'] += 1\n    if STATE['n'] > 3:\n        return 1", "call-counting"),
    ("class A:\n    def f(self):\n        self.n += 1\n        if self.n > 3:\n            return 1", "call-counting"),
    ("import flashinfer", "baseline-library"),
    ("def f():\n    from vllm import _custom_ops", "baseline-library"),
    ("torch.ops._C.rms_norm", "baseline-library"),
    ("torch.ops.fastkernels.rms_norm", "own-op"),
    ("from fastkernels.overrides.norm.rms_norm import _triton", "own-op"),
    ("from fastkernels.overrides.norm import rms_norm as mine\nmine._triton", "own-op"),
    ("import fastkernels\nfastkernels.overrides.norm.rms_norm.rms_norm", "own-op"),
    ("from fastkernels.core import registry\nregistry.get('rms_norm')", "own-op"),
    ("from fastkernels.overrides.norm.rms_norm import *", "own-op"),
    ("from fastkernels.overrides import norm\nvars(norm)", "own-op"),
    ("from fastkernels.overrides import norm\nNAME = 'rms_norm'\ngetattr(norm, NAME)", "own-op"),
    ("from fastkernels.core.dispatch import OPS", "own-op"),
    ("from fastkernels.overrides.norm.production import BASELINES", "baseline-library"),
    ("from fastkernels.overrides import norm\nnorm.production.BASELINES", "baseline-library"),
    ("import fastkernels.overrides.attention.production as theirs", "baseline-library"),
    ("from fastkernels.core import registry\nregistry.baselines('gelu')", "baseline-library"),
    ("from fastkernels.core.registry import baselines", "baseline-library"),
    ("from fastkernels.overrides.kit.libraries import vllm_ops", "baseline-library"),
    ("from fk_bench.kernels import judge", "judge"),
    ("def f(x):\n    try:\n        return g(x)\n    except Exception:\n        return torch.relu(x)", "fallback"),
    ("def f(x):\n    try:\n        return g(x)\n    except:\n        pass", "fallback"),
    ("name = 'cudaDeviceSetLimit'", "device-settings"),
    ("torch.sys.modules['fk_bench']", "module-reach"),
    ("torch.sys.modules['fk_bench']", "inspection"),
    ("s = torch.sys\nm = s.modules", "module-reach"),
    ("from torch import sys as s\ns.modules", "module-reach"),
    ("torch.os.fork()", "process"),
    ("import triton\ntriton.sys.modules", "module-reach"),
    ("torch._C._distributed_c10d.sys.modules", "module-reach"),
    ("torch.__dict__['sys']", "module-reach"),
    ("torch.__dict__.get('sys')", "module-reach"),
    ("getattr(torch, 'sys').modules", "module-reach"),
    ("import operator\noperator.attrgetter('sys.modules')(torch)", "module-reach"),
    ("def f(x):\n    return g(x).builtins.open", "module-reach"),
    ("torch.utils.benchmark.timer.time.perf_counter()", "clock"),
    ("torch.gc.get_objects()", "inspection"),
    ("def f(m):\n    return m.get_referrers(f)", "inspection"),
    ("def f(e):\n    return e.__traceback__", "inspection"),
    ("from torch import relu\nrelu.__globals__.get('a')", "inspection"),
    ("def f(m):\n    return getattr(m, '__globals__')", "inspection"),
    ("m = print.__self__", "inspection"),
    ("import os\nimport math as m\nvars()['m'] = os\nm.system('ls')", "inspection"),
    ("import os\nimport math as m\nv = vars\nv().update(m=os)", "inspection"),
    ("import os\nimport math as m\nlocals()['m'] = os", "inspection"),
    ("torch.__loader__", "dynamic-code"),
    ("torch.overrides.TorchFunctionMode", "lazy-tensor"),
    ("async def f(x):\n    return TABLE[x.data_ptr()]", "pointer-cache"),
    ("def f(x):\n    a = id(x)\n    b = a\n    c = b\n    return TABLE[c]", "pointer-cache"),
    ("import operator\nNAME = 'gc'\noperator.attrgetter(NAME)(torch)", "module-reach"),
    ("def f(m):\n    return vars(m)['sys']", "module-reach"),
    ("from operator import attrgetter as a\na('os')(torch)", "module-reach"),
    ("class M:\n  def __init__(self):\n    self.os = os\n  def f(self):\n    self.os.fork()", "module-reach"),
    ("class M:\n  def __init__(self):\n    self.os = 1\n  def f(self, m):\n    m.os.fork()", "module-reach"),
    ("TABLE[1] = 2\ndef f(n):\n    return TABLE.get(int(n.item()))", "value-cache"),
    ("IDS = {1: 2}\ndef f(x):\n    return IDS.get(int(x.sum().item()))", "value-cache"),
    ("IDS = {1: 2}\ndef f(x):\n    IDS[3] = x\n    return IDS.get(int(x.item()))", "value-cache"),
    ("def f(n):\n    return {LAST: OUT}.get(int(n.item()))", "value-cache"),
    ("def f(n):\n    return {1: OUT}.get(int(n.item()))", "value-cache"),
    ("def f(n):\n    return OUT if int(n.item()) in (LAST,) else g(n)", "value-cache"),
    ("os.environ.setdefault('CUDA_VISIBLE_DEVICES', '1')", "files"),
    ("del os.environ['TORCH_CUDA_ARCH_LIST']", "files"),
    ("os.environ.pop('CUDA_VISIBLE_DEVICES', None)", "files"),
    ("from fk_bench.evaluate.adapters.loading import sys", "judge"),
    ("x = 0x" + "f" * 9000 + "\nSTATE[x]: int\ndef f():\n    os.fork()", "process"),
]  # fmt: skip
MAIN = "\nif __name__ == '__main__':\n"
BENCH = "def bench():\n    time.sleep(1)\n    return time.perf_counter()\n"
# Each abuses something that honest files may do
REJECTED += [
    ("__name__ = '__main__'" + MAIN + "    time.sleep(1)", "clock"),
    ("for __name__ in ('__main__',): pass" + MAIN + "    time.sleep(1)", "clock"),
    ("import math as __name__" + MAIN + "    time.sleep(1)", "clock"),
    ("def f():\n    global __name__\n    __name__ = 1" + MAIN + "    time.sleep(1)", "clock"),
    ("from numpy import *" + MAIN + "    time.sleep(1)", "clock"),
    ("vars()['__na' + 'me__'] = '__main__'" + MAIN + "    time.sleep(1)", "clock"),
    ("import mine\nmine.__name__ = '__main__'" + MAIN + "    time.sleep(1)", "clock"),
    ("import mine\nsetattr(mine, '__na' + 'me__', 1)" + MAIN + "    time.sleep(1)", "clock"),
    ("if __name__ == '__main__' or True:\n    time.sleep(1)", "clock"),
    ("if __name__ != '__main__':\n    time.sleep(1)", "clock"),
    ("if __name__ == '__main__':\n    pass\nelse:\n    time.sleep(1)", "clock"),
    ("if __name__ == '__main__':\n    pass\nelif True:\n    time.sleep(1)", "clock"),
    ("def f():\n    if __name__ == '__main__':\n        time.sleep(1)", "clock"),
    ("if 'mine' in __name__:\n    time.sleep(1)", "clock"),
    (BENCH + "bench()" + MAIN + "    bench()", "clock"),
    (BENCH + "def f(x):\n    return bench" + MAIN + "    bench()", "clock"),
    (BENCH + "def f(x, at=bench):\n    return x" + MAIN + "    bench()", "clock"),
    ("@torch.no_grad\n" + BENCH + MAIN + "    bench()", "clock"),
    ("def bench(t=time.time()):\n    pass" + MAIN + "    bench()", "clock"),
    (BENCH + BENCH + MAIN + "    bench()", "clock"),
    (BENCH + "import mine\nmine.bench()" + MAIN + "    bench()", "clock"),
    (BENCH + "import mine\ngetattr(mine, 'be' + 'nch')()" + MAIN + "    bench()", "clock"),
    (BENCH + "import mine\nget = getattr\nget(mine, 'be' + 'nch')()" + MAIN + "    bench()", "clock"),
    (BENCH + "from mine import bench as b\nb()" + MAIN + "    bench()", "clock"),
    (BENCH + "SOURCE = 'm.attr(\"bench\")()'" + MAIN + "    bench()", "clock"),
    (BENCH, "clock"),
    (BENCH + MAIN + "    pass", "clock"),
    ("def rms_norm(x):\n    time.sleep(1)" + MAIN + "    rms_norm(1)", "clock"),
    ("def __getattr__(name):\n    time.sleep(1)" + MAIN + "    __getattr__('a')", "clock"),
    ("def a():\n    b()\n" + BENCH + "def b():\n    bench()\na()" + MAIN + "    a()", "clock"),
    ("import fastkernels_candidate_gelu_0123456789ab as other\nother.bench()", "module-reach"),
    ("class Bench:\n    time.sleep(1)" + MAIN + "    Bench()", "clock"),
    ("import hashlib\ndef f(x):\n    return hashlib.md5(x.numpy()).hexdigest()", "value-cache"),
    ("import hashlib\nS = 'a'\nh = hashlib.md5(S.encode())\ndef f(x):\n    h.update(x)", "value-cache"),
    ("import hashlib\nS = 'a'\ndef f(S):\n    return hashlib.md5(S).hexdigest()", "value-cache"),
    ("import hashlib\nS = 'a'\ndef f(x):\n    global S\n    S = x\n    hashlib.md5(S).hexdigest()", "value-cache"),
    ("import hashlib\nm = hashlib.md5", "value-cache"),
    ("import hashlib\nm = hashlib", "value-cache"),
    ("import hashlib\nhashlib.file_digest(1, 'md5')", "value-cache"),
    ("from hashlib import md5\nx = [md5]", "value-cache"),
    ("from hashlib import *", "value-cache"),
    ("import tempfile\ntempfile._os.fork()", "files"),
    ("import tempfile\nf = tempfile.NamedTemporaryFile()", "files"),
    ("import tempfile\nt = tempfile.TemporaryDirectory()\nt.name = 'a'\nt.cleanup()", "files"),
    ("import tempfile as t\nimport math as t\nt.mkdtemp()", "files"),
    ("import tempfile\ntempfile.tempdir = '/'", "files"),
    ("import tempfile\nclass tempfile: pass\ntempfile.mkdtemp()", "files"),
    ("import io\nio.open('a')", "files"),
    ("import io\nio.StringIO.mro()", "files"),
    ("from io import StringIO, FileIO", "files"),
    ("import io\ndef f(x):\n    s = io.StringIO()\n    print(x, file=s)\n    TABLE.get(s.getvalue())", "value-cache"),
    ("os.environ['CC'] = '/tmp/run.sh'", "files"),
    ("os.environ['CC'] = 'gcc -fplugin=/tmp/a.so'", "files"),
    ("os.environ['CC'] = '/usr/../tmp/gcc'", "files"),
    ("os.environ['CXX'] = TABLE['a']", "files"),
    ("os.environ.setdefault('CC')", "files"),
    ("os.environ['CC'], a = '/tmp/g', 'gcc'", "files"),
    ("os.environ['CC'] += 'x'", "files"),
    ("os.environ['LD_PRELOAD'] = 'gcc'", "files"),
]  # fmt: skip
# Each gives one name several meanings, by scope or by order
REJECTED += [
    ("import os as m\ndef f():\n    m.fork()\ndef g():\n    import math as m", "process"),
    ("def f():\n    import os as m\n    m.fork()\nimport math as m", "process"),
    ("import math as m\nif TABLE:\n    import os as m\nm.fork()", "process"),
    ("m = torch\ndef f():\n    m.fork()\nm = os", "process"),
    ("m = torch\ndef f():\n    global m\n    m = os\nm = torch\nm.fork()", "process"),
    ("def f():\n  m = 0\n  def g():\n    nonlocal m\n    m = os\n  m = 1\n  g()\n  m.fork()", "process"),
    ("def f():\n  def g():\n    def h():\n      nonlocal m\n      m = os\n    m = 1\n    h()\n    m.fork()", "process"),
    ("m = os if TABLE else torch\nm.fork()", "process"),
    ("(TABLE or os).fork()", "process"),
    ("(m := os).fork()", "process"),
    ("[(m := os) for _ in TABLE]\nm.fork()", "process"),
    ("later = ((m := os) for _ in (1,))\nm = torch\nnext(later)\nm.fork()", "process"),
    ("a, (b, c) = torch, (os, sys)\nb.fork()", "process"),
    ("for m in (torch, os):\n    m.fork()", "process"),
    ("[m.fork() for m in (os,)]", "process"),
    ("def f(m=os):\n    m.fork()", "process"),
    ("f = lambda *, m=os: m.fork()", "process"),
    ("from os import *\nfork()", "process"),
    ("def g(open): pass\ndef f():\n    return open('a')", "files"),
    ("class A:\n    def eval(self): pass\n    def f(self):\n        return eval('1')", "dynamic-code"),
    ("def f():\n    return eval('1')\nf()\ndef eval(x): pass", "dynamic-code"),
    ("def eval(x): pass\ndel eval\neval('1')", "dynamic-code"),
    ("eval = 1\ntry:\n    f()\nexcept TypeError as eval:\n    pass\nf = eval('1')", "dynamic-code"),
    ("@g\ndef eval(x=1):\n    return eval('1')", "dynamic-code"),
    ("if TABLE:\n    def eval(x): pass\neval('1')", "dynamic-code"),
    ("for eval in ():\n    pass\neval('1')", "dynamic-code"),
    ("def f(x):\n    [0 for open in x]\n    return open('a')", "files"),
    ("class A:\n    time = 1\n    def f(self):\n        return time.time()", "clock"),
    ("def f(torch):\n    pass\ntorch.cuda.synchronize = None", "patching"),
    ("m0 = os\n" + "".join(f"m{i + 1} = m{i}\n" for i in range(40)) + "m40.fork()", "process"),
    ("".join(f"m{i} = m{i + 1}\n" for i in range(40)) + "m40 = os\nm0.fork()", "unreadable"),
]  # fmt: skip
PASSED = [
    BENCH + MAIN + "    print(bench())",
    "def bench():\n    return inner()\ndef inner():\n    time.sleep(1)\n    open('a')" + MAIN + "    bench()",
    "def again(n):\n    time.sleep(n)\n    again(n - 1)" + MAIN + "    again(2)",
    "import logging\nLOG = logging.getLogger(__name__)" + MAIN + "    import subprocess\n    os.fork()",
    "if '__main__' == __name__:\n    triton.testing.do_bench(time.sleep)",
    "import hashlib\nSOURCE = 'int x;'\nNAME = 'k_' + hashlib.md5(SOURCE.encode()).hexdigest()[:8]",
    "from hashlib import sha256\nS = 'x' 'y'\ndef f():\n    return sha256((S + 'z').encode('utf-8')).hexdigest()",
    "import tempfile\nBUILD = tempfile.mkdtemp(prefix='mine_')",
    "import tempfile\ndef f():\n    with tempfile.TemporaryDirectory() as at:\n        return at",
    "import contextlib, io\ndef f():\n    with contextlib.redirect_stdout(io.StringIO()) as o:\n        o.getvalue()",
    "archs = os.environ.get('CXX', 'g++')",
    "from fastkernels.overrides.norm.rms_norm import reference\ndef rms_norm(*args):\n    return reference(*args)",
    "from fastkernels.overrides.activation.silu_and_mul import silu_and_mul",
    "@functools.lru_cache(maxsize=None)\ndef config(hidden: int, dtype: torch.dtype):\n    return hidden // 2",
    "import triton\n@triton.autotune([triton.Config({'BLOCK': 64})], key=['H'])\n@triton.jit\ndef k(x, H):\n    pass",
    "LIB = torch.library.Library('mine', 'DEF')\nLIB.define('f(Tensor x) -> Tensor')",
    "@torch.library.custom_op('mine::f', mutates_args=())\ndef f(x: torch.Tensor) -> torch.Tensor:\n    return x",
    "def f(x, input, compile):\n    return input(x) + compile(x)",
    "import re\nP = re.compile('a')\ng = torch.compile(torch.relu)",
    "def f(x):\n    assert x.data_ptr() % 16 == 0, x.data_ptr()",
    "def f(x, y):\n    return x.data_ptr() == y.data_ptr()",
    "def f():\n    global TABLE\n    if TABLE is None:\n        TABLE = 1",
    "def f(x, s: torch.cuda.Stream | None = None):\n    return torch.cuda.current_stream().cuda_stream",
    "def f(x):\n    try:\n        return g(x)\n    except Exception as error:\n        raise ValueError from error",
    "INTERPRET = os.environ.get('TRITON_INTERPRET') == '1'",
    "def f(x, case):\n    return x.to(getattr(torch, case.dtype))",
    "class M(torch.nn.Module):\n    def load(self):\n        self.weight = torch.nn.Parameter()",
    "def f(table, i):\n    return table[i[0].item()]",
    "def f():\n    '''Reads /proc/self/maps? No.'''",
    "n = 0\nfor i in range(3):\n    n += i",
    "def f(x):\n    return torch.special.expit(x).select(0, 1)",
    "code = 'int x;'\nn = code.count('x')",
    "class M(torch.nn.Module):\n  def __init__(self, n):\n    self.os = n\n  def f(self):\n    return self.os",
    "class M:\n  signal: int = 0\n  inspect: int\n  def f(self, gc):\n    self.gc = gc\n    return self.gc + 1",
    "META = {'gc': 1, 'os': 2}\ndef f(x):\n    return x * META['gc'], getattr(torch, 'float16')",
    "def f(x, meta):\n    return x * meta.get('threading', 1), 'uses gc.collect'",
    "SIZES = {1: 64, 2: 128}\ndef f(x, n):\n    return x * SIZES.get(int(n.item()), 256)",
    "def f(x, n):\n    return x * {1: 64, 2: 128}.get(int(n.item()), 256)",
    "def f(x, n):\n    return x if int(n.item()) in (1, 2) else -x",
    "archs = os.environ.get('TORCH_CUDA_ARCH_LIST', '9.0')",
    "os.environ.setdefault('TORCH_CUDA_ARCH_LIST', '9.0a')\nos.environ['MAX_JOBS'] = '2'",
]  # fmt: skip
# The honest twins: what has the name of a module or a builtin is a value there
PASSED += [
    "at = torch.nn\nwhile TABLE:\n    at = at.parent",
    "def f(x, time):\n    return x * time.time()",
    "def f(x):\n    os = x.stride(0)\n    return os.fork",
    "def f():\n    import time\n    return time\ndef g(time):\n    return time.sleep",
    "import math as m\ndef f():\n    import os as m\n    return m.sep\ndef g(x):\n    return m.fork(x)",
    "time = torch.arange(4)\ndef f():\n    return time.time()",
    "def f(x, flag):\n    if flag:\n        sys = x\n    else:\n        sys = -x\n    return sys.exit",
    "def f(xs):\n    return [time.time() for time in xs]",
    "f = lambda os: os.fork()",
    "def compile(x):\n    return compile(x[1:]) if x else x\ndef f(x):\n    return compile(x)",
    "def f(x):\n    with x as time:\n        return time.time()",
    "def outer(os):\n    def inner():\n        return os.fork()\n    return inner",
    "class A:\n    sys = 3\n    exit = sys.exit",
    "def f(out):\n" + "".join("    if out:\n        out = out.a\n" for _ in range(100)) + "    return out",
]  # fmt: skip
WARNED = [
    ("def rms_norm(x):\n    out = torch.empty_like(x)\n    return out", "uninitialized"),
    ("def f(x):\n    return x.to(torch.float16)", "downcast"),
    ("def f(x):\n    return x.half()", "downcast"),
    ("def f(x):\n    return torch.matmul(x, x)", "library-call"),
    ("import torch.nn.functional as F\ndef f(x):\n    return F.rms_norm(x, x.shape)", "library-call"),
    ("def f(x):\n    return 1 if x.shape == (32, 4096) else 2", "literal-shape"),
    ("def f(x):\n    return 1 if x.shape[-1] in (1000, 1128) else 2", "literal-shape"),
    (f"A = {list(range(300))}", "big-constant"),
    ("torch.backends.cuda.matmul.allow_tf32 = True", "global-setting"),
    ("def f():\n    return torch.cuda.is_current_stream_capturing()", "capture-dependent"),
    ("os.environ.setdefault('TORCH_CUDA_ARCH_LIST', '9.0')", "global-setting"),
    ("os.environ.pop('TORCH_CUDA_ARCH_LIST', None)", "global-setting"),
    ("os.environ.setdefault('CC', 'gcc')\nos.environ['CXX'] = '/usr/local/bin/g++-12'", "global-setting"),
    ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'", "global-setting"),
    ("try:\n    import helion\nexcept Exception:\n    helion = None", "fallback"),
]


def found(tmp_path: Path, text: str, severity: str) -> set[str]:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + text + "\n")
    return {f.pattern for f in scan(path, "rms_norm") if f.severity == severity}


@pytest.mark.parametrize(("text", "pattern"), REJECTED)
def test_rejected(tmp_path: Path, text: str, pattern: str) -> None:
    assert pattern in found(tmp_path, text, REJECT)


@pytest.mark.parametrize("text", PASSED)
def test_passed(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text, REJECT) == set()


def test_helpers_may_be_used_by_other_files_of_a_candidate(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import time\n" + BENCH + MAIN + "    print(bench(), time.time())\n")
    assert scan(path, "rms_norm") == []
    assert {f.line for f in scan(path, "rms_norm", alone=False) if f.severity == REJECT} == {3, 4}


@pytest.mark.parametrize(("text", "pattern"), WARNED)
def test_warned(tmp_path: Path, text: str, pattern: str) -> None:
    assert pattern in found(tmp_path, text, WARN)
    assert pattern not in found(tmp_path, text, REJECT)


@pytest.mark.parametrize("path", OVERRIDES, ids=lambda p: p.stem)
def test_our_own_kernels_pass(path: Path) -> None:
    patterns = {f.pattern for f in scan(path, path.stem) if f.severity == REJECT}
    assert patterns == OWN.get(path.relative_to(registry.OPS_ROOT).as_posix(), set())


@pytest.mark.parametrize(
    ("op", "text", "patterns"),
    [
        ("linear", "from fastkernels.overrides.linear.linear import linear", {"own-op"}),
        ("linear", "from fastkernels.overrides.linear import linear\nlinear.linear", {"own-op"}),
        ("linear", "from fastkernels.overrides.linear.linear_fp8 import linear_fp8", set()),
        ("linear", "from fastkernels.overrides.routing.topk_softmax import topk_softmax", set()),
        ("linear_fp8", "from fastkernels.overrides.linear.linear import linear", set()),
        ("linear_fp8", "from fastkernels.overrides.linear.linear_fp8 import linear_fp8", {"own-op"}),
        ("embedding", "import fastkernels.overrides.embedding.embedding as e\ne.embedding", {"own-op"}),
        ("logits_processor", "from fastkernels.overrides.embedding.embedding import embedding", set()),
        ("sampling", "from fastkernels.overrides.sampling.sampling import reference", set()),
        ("linear", "from fastkernels.overrides.kit import launch\nlaunch.next_power_of_2", set()),
        ("gated_mlp", "from fastkernels.overrides.linear.linear import linear", set()),
    ],
)
def test_own_op_is_found_by_module(tmp_path: Path, op: str, text: str, patterns: set[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{text}\n")
    assert {f.pattern for f in scan(path, op)} == patterns


def test_own_helper_is_a_warning(tmp_path: Path) -> None:
    helper = next(
        p
        for p in OVERRIDES
        if locate(f"{registry.OPS_PACKAGE}.{p.parent.name}.{p.stem}").kind is PlaceKind.HELPER
    )
    path = tmp_path / "mine.py"
    path.write_text(f"from fastkernels.overrides.{helper.parent.name} import {helper.stem}\n")
    assert [(f.pattern, f.severity) for f in scan(path, "silu_and_mul")] == [("own-helper", WARN)]


def test_text_of_a_rejection(tmp_path: Path) -> None:
    path = tmp_path / "rms_norm.py"
    path.write_text("import os\n\n\ndef rms_norm(x, *args):\n    os._exit(0)\n")
    findings = scan(path, "rms_norm")
    assert rejections(findings) == (
        "line 5: os._exit starts, ends or controls processes; a kernel runs in the one that calls it (process)"
    )
    assert rejections([f for f in findings if f.severity == WARN]) == ""


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\0'\n", "# coding: nothing\n"])
def test_file_that_is_not_python_has_no_findings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert scan(path, "rms_norm") == []


def test_deeply_nested_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = " + "-" * 20000 + "1\n")
    assert (
        rejections(scan(path, "rms_norm")) == "line 1: the file is nested too deeply to be read (unreadable)"
    )


SIZE = 250_000
WIDE = "y = [" + "x, " * 12_000 + "]"
HOSTILE = {
    "large": b"a = 1\n" * 200_000,
    "nul": b"\0" * SIZE,
    "escape": b"\x1b" * SIZE,
    "brackets": b"[" * 100_000,
    "closed": b"x = " + b"[" * 100_000 + b"]" * 100_000,
    "unary": b"x = " + b"-" * 100_000 + b"1",
    "attributes": b"x" + b".a" * 100_000,
    "import": b"import a" + b".a" * 60_000,
    "sum": b"x = a" + b"+a" * 100_000,
    "calls": b"f" + b"()" * 100_000,
    "indented": b"".join(b" " * i + b"if x:\n" for i in range(200)),
    "encoding": b"# coding: nothing\n",
    "names": b"x = [" + b"a," * 120_000 + b"]",
}
GROWING = {
    "constants": lambda n: "a = 1\n" * n,
    "chains": lambda n: ("f()" + ".a" * 100 + "\n") * (n // 100),
    "keys": lambda n: "def f(x):\n" + (" " + "a[" * 50 + "0" + "]" * 50 + "\n") * (n // 75),
    "empties": lambda n: "def f():\n" + " a = torch.empty(1)\n return a\n" * (n // 6),
    "counters": lambda n: "N = {}\ndef f():\n" + "".join(
        f" N[{i}] += 1\n if N[{i}] > 1: pass\n" for i in range(n // 8)
    ),
    "aliases": lambda n: "a0 = torch\n" + "".join(f"a{i + 1} = a{i}.b\n" for i in range(n // 4)),
    "meanings": lambda n: "".join(f"if x: m = torch.a{i}\n" for i in range(30)) + "m.b\n" * (n // 4),
    "reach": lambda n: "torch.sys.modules\n" * (n // 4),
}  # fmt: skip
NESTED = {
    "functions": "".join(" " * i + "def f(x):\n" for i in range(90)) + " " * 90 + WIDE,
    "comparisons": "def f(x):\n " + "a < (" * 60 + WIDE[4:] + ")" * 60,
    "handlers": "".join(
        " " * i + "try:\n" + " " * i + " pass\n" + " " * i + "except:\n" for i in range(15)
    ) + " " * 15 + WIDE,
}  # fmt: skip


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_source_is_scanned_in_two_seconds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(HOSTILE[name])
    start = time.thread_time()
    findings = scan(path, "rms_norm")
    assert time.thread_time() - start < 2.0
    assert len(rejections(findings)) < 10_000
    if name not in ("nul", "escape", "encoding"):  # those are not Python and cannot be loaded
        assert {f.pattern for f in findings} <= {"too-large", "unreadable"} and findings


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", NESTED)
def test_nested_source_is_scanned_in_two_seconds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(NESTED[name])
    start = time.thread_time()
    assert not {"too-large", "unreadable"} & {f.pattern for f in scan(path, "rms_norm")}
    assert time.thread_time() - start < 2.0


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "name",
    [n if n in ("keys", "aliases", "meanings") else pytest.param(n, marks=pytest.mark.slow) for n in GROWING],
)
def test_scan_time_grows_with_size(tmp_path: Path, name: str) -> None:
    seconds = []
    for nodes in (2_000, 8_000):
        path = tmp_path / f"of_{nodes}.py"
        path.write_text(GROWING[name](nodes))
        times = []
        for _ in range(3):
            start = time.thread_time()
            assert not {"too-large", "unreadable"} & {f.pattern for f in scan(path, "rms_norm")}
            times.append(time.thread_time() - start)
        seconds.append(min(times))
    assert seconds[1] < 8 * seconds[0]


def test_large_source_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree.ast, "parse", lambda *args: pytest.fail("parsed"))
    path = tmp_path / "mine.py"
    path.write_bytes(b"#" * (tree.MAX_BYTES + 1))
    assert [f.pattern for f in scan(path, "rms_norm")] == ["too-large"]


def test_name_too_long_for_files_is_outside() -> None:
    assert locate(f"{registry.OPS_PACKAGE}.{'a' * 300}").kind is PlaceKind.OUTSIDE


def test_many_rejections_give_a_short_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("os.fork()\n" * 1000)
    text = rejections(scan(path, "rms_norm"))
    assert text.endswith("; and 980 more") and len(text) < 4000
