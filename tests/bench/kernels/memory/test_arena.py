"""Memory of the two sides: equal values at different random places, and nothing that both can reach."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.arena import Arena, memory_file
from fk_bench.kernels.judge.memory.slots import Slots
from fk_bench.kernels.judge.processes import forkserver
from fk_bench.kernels.judge.processes.runner_process import RunnerProcess
from fk_bench.kernels.judge.processes.sides import WHO, Sides

from fastkernels.core import registry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is for Linux")

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads /proc of another user")


@pytest.fixture
def fds() -> Iterator[tuple[int, int]]:
    found = memory_file(), memory_file()
    yield found
    for fd in found:
        os.close(fd)


def make_slots(op: str = "rms_norm", case: str = "odd_63", count: int = 12) -> Slots:
    spec = registry.get(op)
    chosen = next(c for c in spec.cases if c.name == case)
    slots = Slots(spec, lambda g: spec.inputs(chosen, "cpu", g), "cpu", count, "op", True)
    slots.refresh()
    return slots


def equal(slots: Slots, arena: Arena, slot: int) -> bool:
    pairs = zip(layout.tensors(arena.args_of(slot)), layout.tensors(slots.args_of(slot)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("count", [None, 1])
def test_arguments_that_all_slots_share(
    fds: tuple[int, int], monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    """Inputs larger than the L2 cache are one memory for all slots: a slot then has no bytes of its own."""
    describe = layout.describe
    monkeypatch.setattr(layout, "describe", lambda args, least, written: describe(args, 16, written))
    slots = make_slots("silu_and_mul", "odd_1000", 3)
    assert slots.layout.stride == 0 < slots.layout.shared
    arena = Arena(slots, 2, fds[0])
    arena.publish(0, count)
    assert all(equal(slots, arena, s) for s in range(slots.count)) and not arena.changed()
    arena.bytes[0] += 1
    assert arena.changed() and arena.changed(1)


def test_sides_have_equal_values_in_memory_of_their_own(fds: tuple[int, int]) -> None:
    slots = make_slots()
    mine, theirs = (Arena(slots, 2, fd) for fd in fds)
    assert os.fstat(fds[0]).st_ino != os.fstat(fds[1]).st_ino
    for arena in (mine, theirs):
        arena.publish()
    assert all(equal(slots, a, s) for a in (mine, theirs) for s in range(slots.count))
    before = slots.private.clone()
    mine.bytes.fill_(77)
    assert not theirs.changed() and all(equal(slots, theirs, s) for s in range(slots.count))
    assert torch.equal(slots.private, before)
    assert mine.changed() and all(mine.changed(s) for s in range(slots.count))


def test_slots_lie_at_random_places(fds: tuple[int, int]) -> None:
    slots = make_slots(count=40)
    arenas = [Arena(slots, 0, fds[0]) for _ in range(3)]
    for arena in arenas:
        assert len(set(arena.cells)) == slots.count and max(arena.cells) < arena.place["cells"]
        assert arena.place["cells"] > slots.count  # with gaps
        steps = {b - a for a, b in zip(arena.cells, arena.cells[1:], strict=False)}
        assert len(steps) > 10  # no constant distance, as an as_strided over all slots would need
    assert len({tuple(a.cells) for a in arenas}) == 3


def test_publish_of_one_slot_leaves_the_others(fds: tuple[int, int]) -> None:
    slots = make_slots(count=5)
    arena = Arena(slots, 0, fds[0])
    arena.publish()
    slots.refresh()
    arena.publish(3, 1)
    assert [equal(slots, arena, s) for s in range(5)] == [False, False, False, True, False]
    assert not arena.changed(3) and arena.changed(2) and arena.changed()


def test_change_of_one_bit_is_seen(fds: tuple[int, int]) -> None:
    slots = make_slots(count=5)
    arena = Arena(slots, 1, fds[0])
    arena.publish()
    x = layout.tensors(arena.args_of(2))[0].view(torch.uint8)
    x.view(-1)[-1] ^= 1
    assert [arena.changed(s) for s in range(5)] == [False, False, True, False, False] and arena.changed()
    arena.publish(2, 1)
    arena.output_views(0)[0].fill_(1.0)  # outputs are for the process to write
    assert not arena.changed()


def test_written_arguments_may_change(fds: tuple[int, int]) -> None:
    slots = make_slots("store_kvcache", "odd_63", 3)
    arena = Arena(slots, 0, fds[0])
    arena.publish()
    for i in slots.may_change:
        for t in layout.tensors(arena.args_of(1)[i]):
            t.fill_(1)
    assert slots.may_change and not arena.changed()
    untouched = next(i for i in range(len(slots.masters[0])) if i not in slots.may_change)
    t = layout.tensors(arena.args_of(1)[untouched])[0]
    t[(0,) * t.dim()] += 1
    assert arena.changed(1) and not arena.changed(0)


def test_outputs_are_poisoned_apart(fds: tuple[int, int]) -> None:
    slots = make_slots()
    arena = Arena(slots, 3, fds[0])
    arena.publish()
    arena.poison()
    views = [arena.output_views(s)[0] for s in range(3)]
    assert all(v.isnan().all() for v in views) and not arena.changed()
    views[1].zero_()
    assert views[0].isnan().all() and views[2].isnan().all()


def test_memory_file_cannot_shrink(fds: tuple[int, int]) -> None:
    """A process that shrinks it would end the judge with SIGBUS."""
    os.ftruncate(fds[0], 1 << 16)
    os.ftruncate(fds[0], 1 << 17)
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0], 1 << 16)


def files_of(side: RunnerProcess) -> tuple[set[int], set[int]]:
    """(inodes of memfds that a side's processes have mapped, those that they have open)."""
    mapped, opened = set(), set()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    tree = [side.child.pid, *forkserver.descendants(side.child.pid, proc)]
    os.close(proc)
    for pid in tree:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:fk-judge" in line:
                mapped.add(int(line.split()[4]))
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:fk-judge" in os.readlink(fd):
                opened.add(fd.stat().st_ino)
    return mapped, opened


@pytest.mark.parametrize("caged", [False, pytest.param(True, marks=ROOT)])
def test_process_has_the_memory_of_its_side_only(tmp_path: Path, caged: bool) -> None:
    """A file of a user, and our own code; in a cage only root can read its /proc."""
    file = tmp_path / "relu2.py"
    file.write_text("import torch\n\n\ndef relu2(x):\n    return torch.relu(x).square()\n")
    sides = Sides("cpu", {}, caged, 60.0, None)
    try:
        slots = make_slots("relu2", count=3)
        outs = [o.to_json() for o in slots.outs]
        found = {}
        for who, fd in zip(WHO, sides.files, strict=True):
            files = [file] if who == "candidate" else []
            side = sides.spawn(who, files)
            arena = Arena(slots, 3, fd)
            arena.publish()
            side.ask(
                "load", op="relu2", device="cpu", candidates={"relu2": str(file)} if files else {},
                against=None if files else "reference", cls=None, threads=1,
            )  # fmt: skip
            side.ask("case", plan=slots.plan, cells=arena.cells, arena=arena.place, outs=outs)
            side.ask("call", slot=0, out=0)
            found[who] = files_of(side), {os.fstat(f).st_ino for f in (fd, sides._gates[who])}
            assert not arena.changed() and not arena.output_views(0)[0].isnan().any()
            side.close()
        for (mapped, opened), own in found.values():
            assert mapped == own and opened == own
        assert not found["candidate"][1] & found["baseline"][1]
    finally:
        sides.close()


@pytest.mark.gpu
def test_sides_have_different_memory_on_gpu() -> None:
    spec = registry.get("rms_norm")
    chosen = next(c for c in spec.cases if c.name == "odd_63")
    slots = Slots(spec, lambda g: spec.inputs(chosen, "cuda", g), "cuda", 4, "op", True)
    slots.refresh()
    arenas = [Arena(slots, 2, -1) for _ in range(2)]
    try:
        assert len({fd for a in arenas for fd in a.fds}) == 2
        spans = sorted((a.bytes.data_ptr(), a.bytes.data_ptr() + a.bytes.nbytes) for a in arenas)
        assert spans[0][1] <= spans[1][0]
    finally:
        for arena in arenas:
            arena.close()
