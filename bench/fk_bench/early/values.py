"""Check the values in a command line, and the paths and names that need no table of ops, before torch is imported.

Raises ConfigError or UnknownName with the message of the command itself, which checks again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile, zip_longest
from pathlib import Path

from fk_bench.core.terminal.flags import ConfigError

# options whose value is a whole number from 1, or several with commas
NUMBERS = {
    "tune": ("--batch",),
    "explain": ("--batch", "--context"),
    "profile": ("--batch", "--context", "--repeats"),
    "serve": (
        "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--num-blocks", "--tensor-parallel-size",
        "--expert-parallel-size", "--data-parallel-size", "--max-waiting",
    ),
}  # fmt: skip
GPUS = ("explain", "profile")  # with --gpu
SETS = ("eval", "quality")  # with --set NAME=FOLDER
RUNS = ("board", "study", "agents-table", "track")  # their words are folders of runs, or files of rows
VERBS = ("show", "best", "diff")  # of track, in place of folders
LEVELS = range(1, 5)


def check(command: str, words: Sequence[str]) -> None:
    """Raise ConfigError or UnknownName for the first value that the command refuses."""
    first = list(takewhile(lambda word: not word.startswith("-"), words))
    for flag in NUMBERS.get(command, ()):
        for value in values(words, flag):
            _check_numbers(flag, value)
    if command in GPUS:
        _check_gpu(words)
    if command in SETS:
        _check_sets(words)
    if command in RUNS and not (command == "track" and first and first[0] in VERBS):
        _check_runs(first)
    match command:
        case "eval" | "study":
            _check_suite([*(first[:1] if command == "eval" else ()), *values(words, "--suite")])
        case "agent-loop" | "mcp":
            _check_agents(words)
        case "capture":
            _check_host(words)
        case "kernels":
            _check_candidate(words)
            _check_cases(first, words)
        case "profile":
            _check_cases(first, words)
        case "trace" if first[:1] == ["import"] and len(first) == 2:
            _check_definitions(Path(first[1]).expanduser())
        case "submit-check" if first and not Path(first[0]).expanduser().exists():
            raise ConfigError(
                f"there is no folder {first[0]}: give one with submission.toml, candidates/ and rows"
            )
        case "scaffold" if first:
            _check_architecture(first[0])
        case "coverage":
            _check_folders(values(words, "--arch"))
        case "tune":
            _check_shapes(values(words, "--shape"))


def values(words: Sequence[str], flag: str) -> Iterator[str]:
    """The values of an option: `--flag VALUE` and `--flag=VALUE`."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else following


def _check_numbers(flag: str, text: str) -> None:
    for part in text.split(","):
        if re.fullmatch(r"\s*-?\d+\s*", part) and int(part) < 1:
            raise ConfigError(f"{flag} {text}: {int(part)} is less than 1; give a number from 1")


def _check_gpu(words: Sequence[str]) -> None:
    from fk_bench.kernels.judge.clock import roofline

    for gpu in values(words, "--gpu"):
        if gpu and roofline.peaks(gpu) is None:
            raise ConfigError(f"--gpu {gpu!r}: unknown peaks; known GPUs: {', '.join(roofline.known())}")


def _check_sets(words: Sequence[str]) -> None:
    from fk_bench.evaluate.adapters.sets import LIBRARIES

    for text in values(words, "--set"):
        name, equals, folder = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]{1,64}", name) or name == "do-nothing":
            continue  # a folder without a name, or a name that the command refuses, such as that of --selftest
        if folder not in LIBRARIES and not Path(folder).expanduser().exists():
            libraries = ", ".join(LIBRARIES)
            raise ConfigError(f"set {name}: there is no folder {folder}, and it is no library ({libraries})")


def _check_runs(paths: Sequence[str]) -> None:
    from fk_bench.core.runs import missing

    for path in paths:
        if not Path(path).expanduser().exists():
            raise ConfigError(missing(Path(path)))


def _check_suite(names: Sequence[str]) -> None:
    from fastkernels.core.registry import UnknownName
    from fk_bench.evaluate import suites

    for name in names:
        if name not in suites.names() and not (name.endswith(".toml") and Path(name).is_file()):
            raise UnknownName("suite", name, [*suites.names(), "a path of a .toml file"])


def _check_agents(words: Sequence[str]) -> None:
    from fastkernels.core.registry import UnknownName
    from fk_bench.agents import adapters
    from fk_bench.agents.budget import seconds_of

    for agent in values(words, "--agent"):
        if agent not in adapters.NAMES:
            raise UnknownName("agent", agent, adapters.NAMES)
    for budget in values(words, "--budget"):
        try:
            seconds_of(budget)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    for level in values(words, "--level"):
        if level.isdecimal() and int(level) not in LEVELS:
            raise ConfigError(f"--level {level}: levels are {LEVELS[0]} to {LEVELS[-1]}")


def _check_host(words: Sequence[str]) -> None:
    from fastkernels.core.registry import UnknownName
    from fk_bench.offline.host import HOSTS

    for host in values(words, "--host"):
        if host not in HOSTS:
            raise UnknownName("host", host, HOSTS)


def _check_candidate(words: Sequence[str]) -> None:
    from fk_bench.evaluate.adapters.sets import LIBRARIES

    for path in values(words, "--candidate") if "--identity" not in words else ():
        if path not in LIBRARIES and not Path(path).expanduser().exists():
            raise ConfigError(f"--candidate {path}: no such file or folder; `fk-bench stubs` makes some")


def _check_cases(ops: Sequence[str], words: Sequence[str]) -> None:
    """Of one op with a file; captures in a folder and tasks have cases of their own."""
    from fastkernels.core.registry import op_modules
    from fk_bench.early import cases

    others = any(word.partition("=")[0] in ("--captures", "--task") for word in words)
    if len(ops) == 1 and ops[0] in op_modules() and not others:
        cases.check(ops[0], values(words, "--case"))


def _check_definitions(folder: Path) -> None:
    if not (folder / "definitions").is_dir():
        raise ConfigError(f"{folder} is no data set: it has no folder definitions/")


def _check_architecture(word: str) -> None:
    """Of a folder, an id of the hub, or a model type: a type that no table of transformers has."""
    from fastkernels.core.registry import UnknownName

    root = _transformers()
    if root is None or "/" in word or Path(word).expanduser().exists():
        return
    tables = [
        *(root / "models" / "auto").glob("*auto_mappings.py"),
        root / "models/auto/configuration_auto.py",
    ]
    known = {
        name for file in tables if file.is_file() for name in re.findall(r'"([\w.-]+)"', file.read_text())
    }
    if known and word not in known:
        folders = [name for name in known if name.islower() and (root / "models" / name).is_dir()]
        more = "Give a folder with config.json, a hub id OWNER/NAME, or a model type of transformers."
        raise UnknownName("architecture", word, folders, more)


def _check_folders(names: Iterator[str]) -> None:
    from fastkernels.core.registry import UnknownName

    root = _transformers()
    if root is None:
        return
    files = {file: file.parent.name for file in (root / "models").glob("*/modeling_*.py")}
    stems = {file.stem.removeprefix("modeling_") for file in files}
    for name in names:
        spelled = name.replace("-", "_")
        if "/" not in name and spelled not in files.values() and name not in stems and spelled not in stems:
            raise UnknownName("architecture of transformers", name, set(files.values()))


def _transformers() -> Path | None:
    """Its folder; None without it. It is not imported."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _check_shapes(shapes: Iterator[str]) -> None:
    for text in shapes:
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(
                    f"--shape {text!r}: give NAME=VALUE with commas, as in N=4096,K=4096,dtype=bfloat16"
                )
            if not name.endswith("dtype") and not value.isdigit() and value not in ("True", "False"):
                raise ConfigError(f"--shape {text!r}: {name} is {value!r}, not a number")
