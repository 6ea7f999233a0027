"""The communicator of one group of ranks: process group, symmetric buffers, and where the ranks meet.

A collective starts with `arrive`: every rank announces its call, and waits for the others until a deadline. So ranks
that make different calls all raise, a rank that died or is late is named, and no collective starts without its peers.
On one machine the ranks meet in shared memory, which also holds a buffer of each rank. On GPUs the buffers are
PyTorch's symmetric memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import multicast

TIMEOUT_S = (
    600.0  # a rank may compile kernels for minutes while the others wait; one that died is found at once
)
BUFFER_BYTES = 16 << 20  # of a rank; a collective uses half of it in turn
MAX_RANKS = 64
LINE, TEXT = 512, 192  # bytes: the part of a rank in the header, and of a call's description in it
HEADER = mmap.PAGESIZE + MAX_RANKS * LINE
ALIGN = 4096
SPINS, LOOK_S, NAP_S = 400, 0.02, 5e-5
_LOCK = struct.Struct("hh4xqqi4x")  # struct flock
_ARRIVED, _LEFT = 0, 1  # words of a rank
_CLOSED, _FAILED = 1, 2  # values of _LEFT
_node: ContextVar[int] = ContextVar("node", default=0)


class CollectiveError(RuntimeError):
    """A collective failed in this rank. `rank` is the one that caused it; None if several or none did.

    fatal  the group cannot be used any longer; otherwise only this call failed
    """

    def __init__(self, reason: str, rank: int | None = None, fatal: bool = False):
        super().__init__(reason)
        self.rank, self.fatal = rank, fatal


class NotInAllRanks(RuntimeError):
    """A step of a setup failed in one rank, so that no rank goes on. The text names the rank and its reason."""


class Meeting:
    """The memory that ranks of one machine share: who has arrived at which call, and a buffer for each rank.

    fd  of a memory file. Each rank opens it anew, so that a lock on it ends with the rank's process
    """

    def __init__(self, fd: int, rank: int, size: int, buffer_bytes: int, timeout: float):
        if size > MAX_RANKS:
            raise ValueError(f"{size} ranks: shared memory is for at most {MAX_RANKS}")
        self.rank, self.size, self.timeout = rank, size, timeout
        self.half = buffer_bytes // 2 // ALIGN * ALIGN
        total = HEADER + size * 2 * self.half
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size < total:
            os.ftruncate(self._fd, total)
        self._map = mmap.mmap(self._fd, total)
        self._words = (ctypes.c_uint64 * (HEADER // 8)).from_buffer(self._map)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._count = 0
        self._failure: CollectiveError | None = None
        self._order = threading.Lock()
        self._others = [r for r in range(size) if r != rank]
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, rank))

    def buffer(self, rank: int, ahead: int = 1) -> torch.Tensor:
        """The half of a rank's buffer that the next call uses; ahead=0: that of the call that was made last.

        A rank may write to its own half until it arrives. It may read the others' from then on, until it arrives at
        the next call: a half is used again by every second call, when all ranks have arrived at the one between.
        """
        turn = (self._count + ahead) % 2
        at = HEADER + (2 * rank + turn) * self.half
        return self._bytes[at : at + self.half]

    def arrive(self, call: str) -> None:
        """Announce a call and wait until all ranks have announced the same one. Raises CollectiveError."""
        if self._failure is not None:
            raise CollectiveError(
                f"{call}: the group is closed since an earlier call failed: {self._failure}",
                self._failure.rank,
                True,
            )
        self._count += 1
        count, text = self._count, call.encode()[:TEXT].ljust(TEXT, b"\0")
        at = self._text_at(self.rank, count)
        self._map[at : at + TEXT] = text
        self._fence()
        self._words[self._word(self.rank, _ARRIVED)] = count
        for rank in self._others:
            if self._words[self._word(rank, _ARRIVED)] < count:
                self._wait(rank, count, call)
        for rank in self._others:  # one that gave up while it waited for this rank
            if (
                self._words[self._word(rank, _LEFT)] == _FAILED
                and self._words[self._word(rank, _ARRIVED)] == count
            ):
                raise self.fail(f"{call}: rank {rank} has left the group in this call", rank)
        self._fence()
        if any(self._text(r, count) != text for r in self._others):
            _compare([self._text(r, count).rstrip(bytes(1)).decode() for r in range(self.size)], self.rank)

    def _wait(self, rank: int, count: int, call: str) -> None:
        arrived, left = self._word(rank, _ARRIVED), self._word(rank, _LEFT)
        words, spins = self._words, 0
        start = look = time.monotonic()
        while words[arrived] < count:
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            if now - look > LOOK_S or spins == SPINS:
                look = now
                if words[left]:
                    raise self.fail(
                        f"{call}: rank {rank} has left the group after call {words[arrived]}", rank
                    )
                if not self.alive(rank) and words[arrived] < count:
                    raise self.fail(f"{call}: the process of rank {rank} has ended", rank)
                if now - start > self.timeout:
                    raise self.fail(
                        f"{call}: rank {rank} has not made this call in {self.timeout:g} s; it has made"
                        f" {words[arrived]} calls, this is call {count}", rank,
                    )  # fmt: skip
            if now - start > LOOK_S:
                time.sleep(NAP_S)
            else:
                os.sched_yield()

    def alive(self, rank: int) -> bool:
        """Whether the process of a rank still has this memory open."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, rank))
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK) or rank == self.rank

    def dead(self) -> int | None:
        """The first rank whose process has ended; one that left the group before, as after an error, comes last."""
        ended = [rank for rank in self._others if not self.alive(rank)]
        return min(ended, key=lambda rank: (bool(self._words[self._word(rank, _LEFT)]), rank), default=None)

    def fail(self, reason: str, rank: int | None) -> CollectiveError:
        """Leave the group, so that ranks that wait for this one raise too. Returns the error."""
        self._failure = CollectiveError(reason, rank, True)
        self._words[self._word(self.rank, _LEFT)] = _FAILED
        return self._failure

    def close(self) -> None:
        """Leave the group. Memory is freed when the last tensor of it is."""
        if self._fd >= 0:
            if self._failure is None:
                self.fail("it was closed in this rank", self.rank)
                self._words[self._word(self.rank, _LEFT)] = _CLOSED
            os.close(self._fd)
            self._fd = -1

    def _fence(self) -> None:
        """Order what was written before this before what is written after it, also on CPUs that reorder writes."""
        for _ in (0, 1):
            self._order.acquire()
            self._order.release()

    def _text(self, rank: int, count: int) -> bytes:
        at = self._text_at(rank, count)
        return self._map[at : at + TEXT]

    @staticmethod
    def _word(rank: int, word: int) -> int:
        return (mmap.PAGESIZE + rank * LINE) // 8 + word

    @staticmethod
    def _text_at(rank: int, count: int) -> int:
        return mmap.PAGESIZE + rank * LINE + 64 + count % 2 * TEXT


def _lock(kind: int, rank: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, rank, 1, 0)


class Communicator:
    """One rank's part of a group.

    name           by which functional ops find it (`parallel.communicator`)
    process_group  of torch.distributed; None for a single rank
    meeting        shared memory of ranks on one machine, or None
    symmetric      on GPUs: the buffers of all ranks in PyTorch's symmetric memory, or None
    machines       of each rank, if they are on several: a name of its machine
    nodes          the parts of such a group, if each machine has as many ranks; see parallel.join
    without        why there is no meeting, or no symmetric memory: {'meeting' | 'symmetric': reason}
    of_host        a host's own sum of a tensor into a new one, for messages for which ours is not faster; or None
    faster         {op: bytes up to which its kernels over symmetric memory were measured to be faster in this group}
    """

    def __init__(
        self,
        name: str,
        rank: int = 0,
        size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        device: str = "cpu",
        memory: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        timeout: float = TIMEOUT_S,
    ):
        """memory: fd of a memory file that all ranks have; None: rank 0 makes one if all are on this machine.

        buffer_bytes is of each rank. timeout: seconds that a rank may be late.
        """
        self.name, self.rank, self.size, self.timeout = name, rank, size, timeout
        self.process_group, self.device = process_group, torch.device(device)
        self.meeting: Meeting | None = None
        self.symmetric: Symmetric | None = None
        self.machines: list[str] = []
        self.nodes: Nodes | None = None
        self.without: dict[str, str] = {}
        self.faster: dict[str, int] = {}
        self.of_host: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._known: set[str] = set()
        self._buffer_bytes = buffer_bytes
        self._joined = self._steps = 0  # how often a group of this name was joined, and its steps: see _told
        self._left: CollectiveError | None = None
        if size == 1:
            return
        if memory is not None:
            self.meeting = Meeting(memory, rank, size, buffer_bytes, timeout)
        else:
            self._meet(buffer_bytes)

    def connect(self) -> str | None:
        """Set up symmetric memory at the first call, in all ranks of a group of GPUs; returns why there is none.

        A first call inside a graph capture finds none: a server warms up before it captures.
        """
        if self.symmetric is not None or "symmetric" in self.without:
            return self.without.get("symmetric")
        if self.device.type != "cuda" or self.size == 1:
            return "symmetric memory is for several GPUs"
        if len(set(self.machines)) > 1:
            return f"symmetric memory is for one machine: {self.without['meeting']}"
        if torch.cuda.is_current_stream_capturing():
            return "symmetric memory must be set up by a call outside of a graph capture"
        try:
            self.symmetric = Symmetric.rendezvous(self, self._buffer_bytes)
        except NotInAllRanks as error:
            self.without["symmetric"] = f"no symmetric memory: {error}"
        return self.without.get("symmetric")

    @contextlib.contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Leave the context when all ranks do: the next step begins in all of them, or in none.

        Raises NotInAllRanks in all ranks if one failed inside, and CollectiveError if one does not come.
        """
        failure = ""
        try:
            yield
        except (RuntimeError, ImportError) as error:  # no peer access, no NVLink, no memory, an old driver
            failure = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
        for rank, theirs in enumerate(self._told(step, failure)):
            if theirs:
                raise NotInAllRanks(f"rank {rank}: {theirs}")

    def _told(self, step: str, mine: str) -> list[str]:
        """The words of all ranks at this step, in order of rank, over the store. Raises CollectiveError.

        All ranks come to the same steps in the same order.
        """
        if self._left is not None:
            reason = f"{step}: the group is closed since an earlier call failed: {self._left}"
            raise CollectiveError(reason, self._left.rank, True)
        if not dist.is_initialized():  # a group without PyTorch's has no store
            return [mine] * self.size
        store = self._store()
        self._joined = self._joined or store.add(f"rank{self.rank}", 1)
        self._steps += 1
        keys = [f"step{self._joined}-{self._steps}-{rank}" for rank in range(self.size)]
        gone = f"gone{self._joined}-{self._steps}"
        store.set(keys[self.rank], mine)
        until = time.monotonic() + self.timeout
        for rank, key in enumerate(keys):
            while not store.check([key]):
                ended = self.meeting is not None and not self.meeting.alive(rank)
                if ended and store.check([key]):  # it came between the two looks, and went on to its end
                    break
                if ended or time.monotonic() > until:
                    why = "the process of rank {} has ended" if ended else "rank {} has not come in {:g} s"
                    store.set(gone, str(self.rank))
                    raise self._leave(f"{step}: {why.format(rank, self.timeout)}", rank)
                time.sleep(1e-3)
        if store.check([gone]):  # a rank that waited for this one
            rank = int(store.get(gone))
            raise self._leave(f"{step}: rank {rank} has left the group at this step", rank)
        if self._steps > 1:  # all ranks have read the step before, since they have come to this one
            store.delete_key(f"step{self._joined}-{self._steps - 1}-{self.rank}")
        return [store.get(key).decode() for key in keys]

    def _leave(self, reason: str, rank: int) -> CollectiveError:
        """Use the group no longer. Returns the error."""
        if self.meeting is not None:
            self.meeting.fail(reason, rank)
        self._left = CollectiveError(reason, rank, True)
        return self._left

    def _store(self) -> dist.Store:
        """The store of the process group, with names of this group's own."""
        # replicas have groups of the same name of ours
        group = getattr(self.process_group, "group_name", "world")
        return dist.PrefixStore(
            f"fastkernels/{group}/{self.name}", dist.distributed_c10d._get_default_store()
        )

    def _meet(self, buffer_bytes: int) -> None:
        """Share a memory file of rank 0, if all ranks are on its machine."""
        store = self._store()
        key, machine = secrets.token_hex(16), _machine()
        number = self._joined = store.add(f"rank{self.rank}", 1)  # the group may be bound again
        if self.rank == 0:
            fd = os.memfd_create("fastkernels", os.MFD_CLOEXEC)
            os.pwrite(fd, key.encode(), 0)
            store.set(f"memory{number}", "|".join((machine, f"/proc/{os.getpid()}/fd/{fd}", key)))
        else:
            theirs, path, key = store.get(f"memory{number}").decode().split("|", 2)
            fd = _opened(path, key) if theirs == machine else -1
        store.set(f"machine{number}-{self.rank}", machine)
        store.set(f"opened{number}-{self.rank}", "yes" if fd >= 0 else "no")
        apart = [r for r in range(self.size) if store.get(f"opened{number}-{r}") != b"yes"]
        if apart:
            self.without["meeting"] = f"rank {apart[0]} is on another machine than rank 0"
            self.machines = [store.get(f"machine{number}-{r}").decode() for r in range(self.size)]
        else:
            self.meeting = Meeting(fd, self.rank, self.size, buffer_bytes, self.timeout)
            store.add(f"there{number}", 1)
            until = time.monotonic() + self.timeout
            while store.add(f"there{number}", 0) < self.size:  # its locks say who is alive
                if time.monotonic() > until:
                    raise CollectiveError(
                        f"not all of {self.size} ranks joined in {self.timeout:g} s", None, True
                    )
                time.sleep(1e-3)
        if fd >= 0:
            os.close(fd)

    def arrive(self, op: str, *tensors: torch.Tensor) -> None:
        """Wait for all ranks to make this call. Raises CollectiveError if they do not, or make another.

        On a GPU, or in a group over several machines, only for the first call with these shapes: the host does not wait
        for the others at every call.
        """
        if self.size == 1:
            return
        call = f"{op}({', '.join(map(_described, tensors))})"
        if self.meeting is not None and self.device.type != "cuda":
            self.meeting.arrive(call)
        elif call not in self._known:
            if self.meeting is not None:
                self.meeting.arrive(call)
            else:
                _compare(self._told(call, call), self.rank)
            self._known.add(call)

    def exchange(self, op: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """CPU: the tensors that all ranks pass, in order of rank, in shared memory: valid until the next call.

        tensor: contiguous, at most `room` bytes. Raises CollectiveError.
        """
        meeting = self.meeting
        assert meeting is not None, "exchange needs shared memory"
        nbytes, shape = tensor.nbytes, tensor.shape
        if nbytes:
            meeting.buffer(self.rank)[:nbytes].view(tensor.dtype).view(shape).copy_(tensor)
        self.arrive(op, tensor)
        return [
            tensor
            if r == self.rank or not nbytes
            else meeting.buffer(r, 0)[:nbytes].view(tensor.dtype).view(shape)
            for r in range(self.size)
        ]

    @property
    def room(self) -> int:
        """CPU: bytes that a collective can pass through shared memory; 0 without any."""
        return self.meeting.half if self.meeting is not None and self.device.type == "cpu" else 0

    @contextlib.contextmanager
    def naming(self, op: str) -> Any:
        """Turn an error of the process group inside the context into one that names a rank whose process has ended."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CollectiveError) or self.meeting is None:
                raise
            until = time.monotonic() + 1.0  # a connection breaks a little before its process has ended
            while (rank := self.meeting.dead()) is None and time.monotonic() < until:
                time.sleep(NAP_S)
            text = str(error).splitlines()[0]
            what = f"{op}: the process of rank {rank} has ended" if rank is not None else f"{op} failed"
            raise self.meeting.fail(f"{what} ({text})", rank) from error

    def close(self) -> None:
        """Leave the group and free its buffers. Ranks that still wait for this one raise."""
        if self.meeting is not None:
            self.meeting.close()
        if self.nodes is not None:
            self.nodes.inside.close()
        self.meeting = self.symmetric = self.of_host = self.nodes = None


@dataclass(frozen=True)
class Nodes:
    """One rank's parts of a group over several machines.

    inside   the communicator of the ranks on its machine; between: the ranks with its number on all machines
    """

    inside: Communicator
    between: dist.ProcessGroup


class Symmetric:
    """Buffers of all ranks that each GPU can read and write.

    A buffer has BLOCKS regions of two halves, then the flags, then three parts of words for small messages. A kernel's
    program b uses region b alone, alternates its halves by a counter on the GPU, and signals the programs b of its
    peers. A word of a small message needs no flag, because empty words have a value that is never sent: see
    overrides/collective/exchange.py.

    pointers  addresses of the buffers of all ranks in this process, `bytes_for(room, size)` bytes each, after `clear`
    room      bytes that a call can pass: a multiple of UNIT
    table     [size] int64: the addresses
    counters  [BLOCKS] int32, of this rank alone
    calls     [3] int32: the part that the last small message used, its words, and programs of the current one that
              have begun
    failed    [1] int32: 1 + the rank that did not come; 0 if all did
    kept      objects that own the memory
    """

    BLOCKS = 128
    UNIT = BLOCKS * 512
    WORDS = 1 << 20  # of 32 bits in a part

    def __init__(
        self,
        pointers: list[int],
        rank: int,
        room: int,
        device: torch.device,
        timeout: float,
        kept: Any = None,
    ):
        self.rank, self.size, self.room, self.kept = rank, len(pointers), room, kept
        self.polls = max(1000, int(timeout * 1e6))  # of a flag, about a microsecond each
        self.table = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.counters = torch.zeros(self.BLOCKS, dtype=torch.int32, device=device)
        self.calls = torch.zeros(3, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._side: torch.cuda.Stream | None = None

    @classmethod
    def words_at(cls, room: int, size: int) -> int:
        """Where the words begin: behind two halves, and a flag for each block and peer."""
        return -(-(2 * room + 4 * cls.BLOCKS * size) // 512) * 512

    @classmethod
    def bytes_for(cls, room: int, size: int) -> int:
        """Bytes of a rank's buffer."""
        return cls.words_at(room, size) + 3 * size * cls.words(size) * 4

    @classmethod
    def words(cls, size: int) -> int:
        """The words of a small message: a part has room for one of each rank."""
        return cls.WORDS // size // 128 * 128

    @classmethod
    def clear(cls, buffer: torch.Tensor, room: int, size: int) -> None:
        """Make the flags of a buffer [bytes] zero, and its words empty."""
        buffer.zero_()[cls.words_at(room, size) :] = 255

    @classmethod
    def rendezvous(cls, communicator: Communicator, buffer_bytes: int) -> Symmetric:
        """Allocate PyTorch's symmetric memory in all ranks of a group of GPUs. Raises as Communicator.together."""
        multicast.turn_off()
        rank, size, device = communicator.rank, communicator.size, communicator.device
        room = buffer_bytes // 2 // cls.UNIT * cls.UNIT
        group: Any = communicator.process_group or dist.group.WORLD
        with communicator.together("allocation of symmetric memory"):
            import torch.distributed._symmetric_memory as symm_mem

            buffer = symm_mem.empty(cls.bytes_for(room, size), dtype=torch.uint8, device=device)
            cls.clear(buffer, room, size)
            torch.cuda.synchronize(device)  # when all ranks come out of this, all buffers are cleared
        with communicator.together("exchange of symmetric memory"):
            handle: Any = symm_mem.rendezvous(buffer, group.group_name)
            pointers = [handle.get_buffer(r, (1,), torch.uint8, 0).data_ptr() for r in range(size)]
            made = cls(pointers, rank, room, device, communicator.timeout, (buffer, handle))
            torch.cuda.synchronize(device)
        return made

    def release(self) -> None:
        """After the end of a rank: let the kernels that wait for it go on, with wrong sums.

        Each one empties a part again, so call it until none is left. It may be called in another thread.
        """
        if self.kept is None:
            return
        buffer: torch.Tensor = self.kept[0]
        if self._side is None:
            self._side = torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._side):
            buffer.fill_(127)  # flags that all calls have reached, and words that are not empty

    def check(self) -> None:
        """Raise CollectiveError if a kernel waited in vain. Synchronizes with the GPU."""
        if missing := int(self.failed):
            raise CollectiveError(
                f"rank {missing - 1} did not come to a collective in time", missing - 1, True
            )


def _compare(calls: list[str], rank: int) -> None:
    """Raise CollectiveError in this rank unless the calls of all ranks, in order of rank, are the same."""
    differing = [r for r, call in enumerate(calls) if call != calls[rank]]
    if differing:
        every = "; ".join(f"rank {r}: {call}" for r, call in enumerate(calls))
        raise CollectiveError(
            f"ranks make different calls, so none is made: {every}",
            differing[0] if len(differing) == 1 and len(calls) > 2 else None,
        )


def _opened(path: str, key: str) -> int:
    """The memory file of rank 0; -1 if this process cannot open it, or it is another file."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, len(key), 0) == key.encode():
            return fd
        os.close(fd)
    return -1


@contextlib.contextmanager
def on_node(number: int) -> Iterator[None]:
    """Join groups as a rank of this node of an engine. Ranks of two nodes share no memory, also on one machine."""
    token = _node.set(number)
    try:
        yield
    finally:
        _node.reset(token)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{_node.get()}"
    except OSError:
        return ""


def _described(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
