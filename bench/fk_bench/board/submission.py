"""A submission: a folder with `submission.toml`, the candidates of a set, and the rows of its runs."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastkernels.core import candidate
from fastkernels.core.registry import UnknownName
from fk_bench.core import rows
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Row
from fk_bench.core.runs import missing
from fk_bench.core.terminal.text import NAME, NAME_RULE, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "submission.toml"
MOST_BYTES, MOST_FILES = 20 << 20, 2000
MOST_STATED, MOST_PATH = 1e15, 200
MOST_SHOWN = 256 << 10  # characters of a source on a page
MODES = ("independent", "sequential", "composed", "")
REQUIRED = ("name", "author", "licence")


class SubmissionError(ValueError):
    """A folder that is no submission; the message names the file and the field."""


@dataclass(frozen=True)
class About:
    """The fields of submission.toml; name, author and licence are required.

    licence    an SPDX expression, such as Apache-2.0
    agent, model, mode     who or what wrote the kernels, and how: one of MODES
    tokens, cost_usd, hours   as the author states them
    candidates  the folder of the set, relative to the file
    """

    name: str
    author: str = ""
    licence: str = ""
    agent: str = ""
    model: str = ""
    mode: str = ""
    about: str = ""
    url: str = ""
    tokens: int = 0
    cost_usd: float = 0.0
    hours: float = 0.0
    candidates: str = "candidates"


@dataclass(frozen=True)
class Source:
    """One file of a set, for its page."""

    name: str
    sha256: str
    text: str


@dataclass(frozen=True)
class Submitted:
    """A run or a submission: its rows, and what is known about it.

    about    None for a run without submission.toml
    refused  why it would be refused as a submission
    """

    path: Path
    about: About | None
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()
    sources: tuple[Source, ...] = field(default=(), repr=False)
    refused: tuple[str, ...] = ()


def about_of(folder: Path) -> About:
    """Read submission.toml. Raises SubmissionError."""
    file = folder / FILE
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SubmissionError(f"{folder} has no {FILE}: give name, author and licence there") from None
    except (OSError, ValueError) as error:  # also of a number with thousands of digits
        raise SubmissionError(f"{file}: {error}") from None
    except RecursionError:
        raise SubmissionError(f"{file}: its values are nested too deeply") from None
    known = {f.name: f for f in fields(About)}
    for key, value in data.items():
        if key not in known:
            raise SubmissionError(f"{file}: {UnknownName('field', key, known)}")
        kinds: tuple[type, ...] = {"int": (int,), "float": (int, float)}.get(str(known[key].type), (str,))
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise SubmissionError(f"{file}: {key} = {_shown(value)} is no {kinds[-1].__name__}")
    for key in REQUIRED:
        if not str(data.get(key, "")).strip():
            raise SubmissionError(f"{file}: there is no {key}: a submission states name, author and licence")
    found = About(**data)
    if not NAME.fullmatch(found.name):
        raise SubmissionError(f"{file}: name = {found.name!r}: {NAME_RULE}")
    if found.mode not in MODES:
        raise SubmissionError(f"{file}: {UnknownName('mode', found.mode, [m for m in MODES if m])}")
    if not _is_licence(found.licence):
        raise SubmissionError(
            f"{file}: licence = {found.licence!r} is no SPDX expression, such as Apache-2.0 or MIT OR BSD-3-Clause"
        )
    if found.url and not re.match(r"https?://", found.url):
        raise SubmissionError(f"{file}: url = {found.url!r} does not begin with https:// or http://")
    for key in ("tokens", "cost_usd", "hours"):
        if not 0 <= (value := getattr(found, key)) < MOST_STATED:  # NaN is neither
            raise SubmissionError(
                f"{file}: {key} = {_shown(value)}: give a number from 0 to {MOST_STATED:.0e}"
            )
    return found


def _shown(value: Any) -> str:
    """The beginning of a value of a file. Python writes no integer of more than 4300 digits."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "an integer of thousands of digits"


def _is_licence(text: str) -> bool:
    try:
        from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
    except ImportError:  # packaging before 24.2
        return True
    try:
        return bool(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        return False


def inside(folder: Path, relative: str) -> Path:
    """A path below the folder. Raises SubmissionError for one outside, also through a link."""
    if "\0" in relative or len(relative) > MOST_PATH:
        raise SubmissionError(f"{folder}: {relative[:40]!r} is no path of at most {MOST_PATH} characters")
    place = (folder / relative).resolve()
    if Path(relative).is_absolute() or not place.is_relative_to(folder.resolve()):
        raise SubmissionError(f"{folder}: {relative!r} is outside the submission")
    return place


def files_of(folder: Path) -> list[Path]:
    """All files of a submission. Raises SubmissionError for links, other kinds of files, and more than the limits."""
    found, size = [], 0
    for top, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(top) / name
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise SubmissionError(
                    f"{path.relative_to(folder)} is a link; a submission has regular files only"
                )
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise SubmissionError(f"{path.relative_to(folder)} is no regular file")
            size += path.lstat().st_size
            found.append(path)
    if size > MOST_BYTES:
        raise SubmissionError(f"{folder} has {size / 2**20:.1f} MB, more than {MOST_BYTES >> 20}")
    if len(found) > MOST_FILES:
        raise SubmissionError(f"{folder} has {len(found)} files, more than {MOST_FILES}")
    return found


def row_files(path: Path) -> list[Path]:
    """The row files of a run's folder, of a submission, or the file itself."""
    if path.is_file():
        return [path]
    found = [f for suffix in (rows.SUFFIX, rows.COMPRESSED) for f in path.rglob(f"*{suffix}") if f.is_file()]
    return sorted(f for f in found if "tasks" not in f.relative_to(path).parts)  # of an agent's attempts


def read(path: Path) -> Submitted:
    """Read a run or a submission; nothing of it is imported. Raises SubmissionError."""
    if not path.exists() or not (files := row_files(path)):
        raise SubmissionError(missing(path))
    about = None
    if path.is_dir() and (path / FILE).exists():
        files_of(path)
        about = about_of(path)
    found, warnings = [], []
    for file in files:
        more, said = rows.read(file)
        found += more
        warnings += said
    return Submitted(path, about, tuple(found), tuple(warnings), sources_of(path, about))


def read_all(paths: Iterable[Path], refused: bool = False) -> tuple[list[Submitted], list[str]]:
    """Read runs and submissions; returns them, and a warning for each submission that is left out.

    refused  also those that are refused, if they can be read and no other has their name
    Raises SubmissionError for a path that is no run, and if all are left out.
    """
    found: list[Submitted] = []
    warnings: list[str] = []
    names: dict[str, Path] = {}
    for path in paths:
        submitted = path.is_dir() and os.path.lexists(path / FILE)
        why = refusals(path) if submitted else []
        one: Submitted | None
        try:
            one = read(path)
        except SubmissionError:
            if not submitted:
                raise
            one = None
        if one is not None and (refused or not why):
            name = one.about.name if one.about is not None else ""
            first = names.setdefault(name, path) if name else path
            if first == path:
                found.append(replace(one, refused=tuple(why)))
                continue
            why.append(f"{first} is named {name}, too")
        warnings.append(f"{path} is refused and left out: {'; '.join(why)}")
    if warnings and not found:
        raise SubmissionError("; ".join(warnings))
    return found, warnings


def sources_of(path: Path, about: About | None) -> tuple[Source, ...]:
    """The sources of the set, where the folder has them: of a submission, an agent's run, or a run of the judge."""
    if not path.is_dir():
        return ()
    places = [inside(path, about.candidates)] if about is not None else [path / "set", path / "candidates"]
    folder = next((p for p in places if p.is_dir()), None)
    if folder is None:
        return ()
    files = [
        f
        for f in sorted(folder.rglob("*"))
        if f.is_file() and not f.is_symlink() and "__pycache__" not in f.parts
    ]
    return tuple(_source(f, folder) for f in files[:MOST_FILES])


def _source(file: Path, folder: Path) -> Source:
    data = file.read_bytes()
    text = data.decode(errors="replace") if b"\0" not in data[:4096] else "(not a text)"
    return Source(
        printable(str(file.relative_to(folder))),
        hashlib.sha256(data).hexdigest(),
        printable(text, MOST_SHOWN, lines=True),
    )


def refusals(folder: Path) -> list[str]:
    """All reasons why a board refuses a submission; none if it takes it."""
    from fk_bench.evaluate.adapters.sets import SetError, read_set
    from fk_bench.evaluate.run import results
    from fk_bench.kernels.judge.scan.scan import rejections, scan

    if not folder.is_dir():
        return [f"there is no folder {folder}"]
    try:
        files_of(folder)
        about = about_of(folder)
        place = inside(folder, about.candidates)
    except SubmissionError as error:
        return [str(error)]
    why: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fk-submission-") as out:  # of adapted files
        try:
            found = read_set(about.name, place, Path(out), blocks=True)
        except SetError as error:
            return [str(error)]
        why += [f"{d.path.relative_to(folder.resolve())}: {d.reason}" for d in found.declined]
        for one in found.candidates:
            own = [one.path, *(p for p in candidate.sources(one.path) if p.suffix == ".py")]
            for file in own:
                if rejected := rejections(scan(file, one.op, alone=len(own) == 1)):
                    why.append(f"{file.name}: the static scan rejects it: {rejected}")
        digest = results.digest_of(found.folder, found.files)
        digests = {c.op: digest_of(c.path) for c in found.candidates}
    if not row_files(folder):
        return [*why, f"{folder} has no rows: add rows.jsonl of `fk-bench eval` or `fk-bench kernels`"]
    try:
        given = read(folder)
    except SubmissionError as error:
        return [*why, str(error)]
    return [*why, *given.warnings, *_problems(given.rows, digest, digests)]


def _problems(found: tuple[Row, ...], digest: str, digests: Mapping[str, str]) -> list[str]:
    """Return the faults of a submission's rows. digest: of the set; digests: of the candidates, by their ops."""
    evaluated = [r for r in found if r.command == "eval"]
    judged = [r for r in found if r.command == "kernels" and r.kind == "case"]
    if not evaluated and not judged:
        return ["no row is of `fk-bench eval` or `fk-bench kernels`"]
    why = []
    if len({r.case.get("set") for r in evaluated}) > 1:
        names = ", ".join(sorted({str(r.case.get("set")) for r in evaluated}))
        why.append(f"the rows of eval are of several sets ({names}): submit one")
    if other := sorted({str(r.case.get("files")) for r in evaluated} - {digest}):
        why.append(
            f"the rows of eval are of other files (digest {other[0]}, the folder has {digest}): evaluate again"
        )
    if ours := sorted({str(r.subject.op) for r in judged if not r.subject.candidate}):
        why.append(f"the rows of {', '.join(ours)} are of no candidate: leave them out")
    for op in sorted({str(r.subject.op) for r in judged if r.subject.candidate}):
        seen = {str(r.case.get("digest", "")) for r in judged if r.subject.op == op and r.subject.candidate}
        if op not in digests:
            why.append(f"the rows judge a candidate for {op}, which the folder does not have")
        elif other := sorted(seen - {digests[op]}):
            told = f"digest {other[0]}" if other[0] else "without a digest"
            why.append(
                f"the rows of {op} are of another file ({told}, the folder's has {digests[op]}): judge it again"
            )
    if reason := rows.provisional(found):
        why.append(f"provisional rows are no scores: {reason}")
    if any(str(r.commit or "").endswith("+") for r in found):
        why.append("the rows are of a checkout with changes (its commit ends with +): measure with a commit")
    return why


def facts(about: About | None) -> Mapping[str, Any]:
    """The filled fields for a page."""
    if about is None:
        return {}
    named = {f.name: getattr(about, f.name) for f in fields(About) if f.name not in ("name", "candidates")}
    return {k: v for k, v in named.items() if v}
