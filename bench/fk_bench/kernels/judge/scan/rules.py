"""Names that the static scan looks for: imports, uses, calls, attributes and strings, each with a reason."""

from __future__ import annotations

import re

REASONS = {
    "baseline-library": "{} is what a candidate is compared with, or a part of it",
    "capture-dependent": "{}: it may do something else in a CUDA graph than in an eager call",
    "clock": "{}: a kernel neither waits nor reads the clock (use triton.autotune to tune)",
    "device-settings": "{} changes or reads the device behind the judge's back",
    "dynamic-code": "{} can hide code from a reader of the file",
    "files": "{} is not among the tensors that the kernel was given",
    "module-reach": "{} reaches a module through another one, which hides what the file uses",
    "global-setting": "{} changes the results of other code in a server",
    "inspection": "{} looks at the process around the kernel, not at its inputs",
    "judge": "{} runs or judges kernels, which a kernel must not do",
    "lazy-tensor": "{} lets a tensor decide when and how it is computed",
    "library-call": "{} is the library's kernel, not the candidate's",
    "native-code": "{}: the C++ in it is not scanned",
    "native-library": "{} calls libraries that the judge cannot inspect",
    "network": "{} talks to other processes or machines",
    "own-op": "{} gives the op that the candidate replaces",
    "patching": "{} replaces code that others rely on",
    "process": "{} starts, ends or controls processes; a kernel runs in the one that calls it",
    "streams": "{}: the caller times and waits for its own stream only",
    "threads": "{} lets work go on outside the call, or on more cores than each side has",
    "value-cache": "{} fingerprints values: a kernel computes with values, it does not recognize them",
}


def _table(entries: dict[str, str]) -> dict[str, str]:
    """{name: pattern} from {pattern: names}."""
    return {name: pattern for pattern, names in entries.items() for name in names.split()}


# An entry also covers its members: 'torch.hub' covers 'torch.hub.load'. The longest matching entry counts.
IMPORTS = _table(
    {
        "inspection": "gc inspect traceback tracemalloc linecache dis pdb bdb faulthandler",
        "native-library": "ctypes cffi _ctypes pybind11 cppyy",
        "process": "subprocess multiprocessing torch.multiprocessing atexit signal pty resource psutil",
        "threads": "threading _thread concurrent asyncio trio anyio joblib greenlet",
        "network": """
            socket socketserver ssl http urllib urllib3 requests httpx aiohttp ftplib smtplib xmlrpc select selectors
            zmq grpc huggingface_hub""",
        "files": "io mmap shutil tempfile glob fileinput fcntl posix nt sqlite3 shelve",
        "dynamic-code": """
            importlib imp runpy pkgutil zipimport marshal pickle _pickle dill cloudpickle base64 binascii codecs zlib
            bz2 lzma code codeop builtins""",
        "value-cache": "hashlib xxhash _hashlib",
        "device-settings": "pynvml amdsmi",
        "baseline-library": """
            vllm sglang sgl_kernel flashinfer flash_attn flash_attn_interface flash_attn_2_cuda flash_mla deep_gemm
            deep_ep aiter fla xformers liger_kernel transformers transformer_engine apex flag_gems mamba_ssm
            causal_conv1d bitsandbytes kernels quack fastkernels.core.registry.baselines""",
        "patching": "unittest.mock fastkernels.patch",
        "judge": "fk_bench fk_integrations",
        "own-op": "fastkernels.core.dispatch.OPS",
        "lazy-tensor": "torch._lazy torch._subclasses torch.overrides torch.utils._python_dispatch",
    }
)
NAMES = _table(
    {
        "inspection": """
            sys._getframe sys._current_frames sys.settrace sys.setprofile sys.modules sys.meta_path sys.path
            sys.path_hooks sys.argv sys.addaudithook sys.monitoring globals locals""",
        "process": """
            os.fork os.forkpty os._exit os.kill os.killpg os.abort os.system os.popen os.execv os.execve os.execvp
            os.execl os.posix_spawn os.posix_spawnp os.spawnv os.spawnl os.register_at_fork os.nice os.setpriority
            os.sched_setaffinity os.sched_setscheduler os.getppid os.wait os.waitpid os.setsid sys.exit exit quit
            SystemExit KeyboardInterrupt""",
        "threads": "torch.set_num_threads torch.set_num_interop_threads torch.jit.fork torch.jit._fork",
        "files": """
            open breakpoint os.open os.read os.write os.pread os.pwrite os.pipe os.dup os.dup2 os.fdopen os.close
            os.closerange os.listdir os.scandir os.walk os.remove os.unlink os.rename os.replace os.mkdir os.makedirs
            os.chmod os.chdir os.getcwd os.memfd_create os.sendfile os.mkfifo os.symlink os.link os.readlink os.stat
            os.putenv torch.load torch.save torch.from_file numpy.load numpy.save numpy.fromfile numpy.memmap
            numpy.loadtxt numpy.savez sys.stdout sys.stderr sys.stdin sys.__stdout__ sys.__stderr__""",
        "dynamic-code": """
            eval exec compile __import__ __builtins__ __loader__ types.FunctionType types.CodeType torch.package
            torch.hub""",
        "native-library": "torch.ops.load_library torch.classes.load_library sys.setdlopenflags",
        "clock": """
            time.sleep time.time time.time_ns time.perf_counter time.perf_counter_ns time.monotonic time.monotonic_ns
            time.process_time time.process_time_ns time.thread_time datetime.datetime.now torch.cuda.Event torch.Event
            torch.cuda._sleep""",
        "lazy-tensor": "torch.Tensor._make_subclass torch.Tensor._make_wrapper_subclass torch.Tensor.as_subclass",
        "baseline-library": """
            torch.ops._C torch.ops._moe_C torch.ops._C_cache_ops torch.ops._vllm_fa2_C torch.ops._vllm_fa3_C
            torch.ops.vllm torch.ops.sglang torch.ops.sgl_kernel torch.ops.flashinfer
            fastkernels.core.registry.baselines""",
        "own-op": "fastkernels.core.dispatch.OPS",
        "patching": "fastkernels.patch",
    }
)
# Harmless as annotations.
CALLS = _table(
    {
        "streams": """
            torch.cuda.Stream torch.cuda.ExternalStream torch.Stream torch.cuda.stream torch.cuda.set_stream
            torch.cuda.streams.Stream""",
        "device-settings": """
            torch.cuda.cudart torch.cuda.memory.change_current_allocator torch.cuda.set_device
            torch.cuda.set_per_process_memory_fraction torch.cuda.caching_allocator_alloc""",
    }
)
# Of any object.
ATTRIBUTES = _table(
    {
        "inspection": """
            f_back f_locals f_globals f_builtins tb_frame tb_next gi_frame cr_frame ag_frame __traceback__ __globals__
            __subclasses__ __code__ __closure__ __self__ __getattribute__ get_objects get_referrers get_referents
            _getframe _current_frames""",
        "dynamic-code": "__builtins__ __loader__ __spec__",
        "files": "read_text read_bytes write_text write_bytes iterdir rglob",
        "lazy-tensor": "as_subclass",
        "value-cache": "tobytes",
        "native-library": "load_library dlopen CDLL",
        "streams": "record_stream wait_stream",
    }
)
# Modules that no kernel reaches as an attribute, an item or a named string of something else: torch.sys is sys.
REACHED = frozenset(
    (
        *(
            "sys",
            "os",
            "builtins",
            "gc",
            "inspect",
            "ctypes",
            "cffi",
            "subprocess",
            "multiprocessing",
            "threading",
        ),
        *(
            "_thread",
            "importlib",
            "pkgutil",
            "runpy",
            "marshal",
            "pickle",
            "mmap",
            "socket",
            "faulthandler",
            "posix",
        ),
        *("tracemalloc", "linecache", "traceback", "atexit", "shutil", "tempfile", "fcntl", "pty"),
    )
)
# Attributes that a string may name for a look-up; the other ATTRIBUTES are words that a text may contain.
HIDDEN = frozenset(name for name in ATTRIBUTES if "_" in name)
# Parts of strings and attributes, because a library's functions are looked up by name.
SUBSTRINGS = _table(
    {
        "device-settings": """
            cudaDeviceSetLimit cudaCtxResetPersistingL2Cache cuCtxSetLimit cuCtxResetPersistingL2Cache
            accessPolicyWindow cudaStreamSetAttribute cuStreamSetAttribute""",
        "native-library": "libcudart libcuda.so libc.so",
        "files": "/proc/ /dev/shm /dev/fd /sys/class /sys/fs",
    }
)
# Warnings, shown with the result.
WARN_CALLS = _table(
    {
        "library-call": """
            torch.matmul torch.mm torch.bmm torch.addmm torch.baddbmm torch.einsum torch.nn.functional""",
        "global-setting": """
            torch.set_default_dtype torch.set_default_device torch.set_float32_matmul_precision
            torch.use_deterministic_algorithms""",
        "native-code": """
            torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline torch.cuda._compile_kernel
            fastkernels.infra.cuda_ext.load_op fastkernels.infra.cuda_ext.lazy_op""",
        "capture-dependent": """
            torch.cuda.is_current_stream_capturing torch.compiler.is_compiling torch.compiler.is_dynamo_compiling
            torch.jit.is_tracing""",
    }
)

# Modules that only their owners may assign to; SETTINGS are flags, which give a warning.
PROTECTED = (
    *("torch", "time", "statistics", "numpy", "builtins", "triton", "sys", "os", "math", "functools"),
    *("fastkernels", "fk_bench", "fk_integrations"),
)
SETTINGS = ("torch.backends", "torch._inductor.config", "torch._dynamo.config", "triton.knobs")
LOW_PRECISION = ("float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8e4nv", "float8e5")
EMPTY = ("torch.empty", "torch.empty_like", "torch.empty_strided")
# Variables that a kernel may read, by their beginnings; those of a build, such as of load_inline, it may also set.
BUILD_ENVIRONMENT = (
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_NVCC_FLAGS",
    "CUDA_HOME",
    "MAX_JOBS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
ENVIRONMENT = ("TRITON_", "TORCHINDUCTOR_", "CUDA_VISIBLE_DEVICES", *BUILD_ENVIRONMENT)
# Variables that name a compiler, and the compilers: by name or in a folder of the system
COMPILERS = ("CC", "CXX", "NVCC", "CUDAHOSTCXX", "NVCC_CCBIN", "PYTORCH_NVCC")
COMPILER = re.compile(
    r"(/(usr|opt)/([\w+-][\w.+-]*/)*)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|icx|icpx|nvcc)(-\d+(\.\d+)?)?"
)
# Imports that a rule would reject, but that give nothing away: the loader of adapted files runs scanned sources only
ALLOWED_IMPORTS = ("inspect.signature", "fk_bench.evaluate.adapters.loading.foreign")
# Parts of rejected modules that give nothing away if they are called at once: {module: {function: what it may get}}.
# A build needs a name, a folder and a place for its output.
PARTS: dict[str, dict[str, str]] = {
    "hashlib": dict.fromkeys(("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s"), "text"),
    "tempfile": {"mkdtemp": "any", "gettempdir": "nothing", "TemporaryDirectory": "with"},
    "io": {"StringIO": "nothing"},
}
# Names of functions and attributes that look something up by a string. Elsewhere "gc" is only a word.
LOOK_UPS = frozenset(
    ("getattr", "attrgetter", "methodcaller", "vars", "globals", "locals", "__dict__", "__getattribute__",
     "__getattr__", "getattr_static", "import_module", "__import__", "modules")
)  # fmt: skip

_LONGEST = 6  # parts of an entry
# Entries that are no single word, which could also be the name of an attribute.
_DOTTED_IMPORTS = {name: pattern for name, pattern in IMPORTS.items() if "." in name}


def used(name: str) -> set[tuple[str, str]]:
    """(pattern, reason) for the use of a dotted name: of what it begins with, and of what it reaches on its way."""
    parts = name.split(".")
    hits = {find(NAMES, name), find(_DOTTED_IMPORTS, name)}
    for i, part in enumerate(parts[1:], 1):
        rest = ".".join(parts[i:])
        hits.add(find(ATTRIBUTES, part))
        if part in REACHED:
            hits.add(("module-reach", REASONS["module-reach"].format(name)))
            hits.add(find(IMPORTS, rest))
        named = find(NAMES, rest, 2)
        hits.add(named and (named[0], REASONS[named[0]].format(name)))
    return {hit for hit in hits if hit is not None}


def find(table: dict[str, str], name: str, least: int = 1) -> tuple[str, str] | None:
    """(pattern, reason) of the longest entry, of at least that many parts, that is `name` or contains it."""
    parts = name.split(".", _LONGEST)[:_LONGEST]
    for n in range(len(parts), least - 1, -1):
        pattern = table.get(".".join(parts[:n]))
        if pattern is not None:
            return pattern, REASONS[pattern].format(name)
    return None
