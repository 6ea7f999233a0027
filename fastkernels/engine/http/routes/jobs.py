"""Routes of jobs: something is created, watched, listed, fetched and deleted, as OpenAI has it for videos."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.unserved import shown
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.stream import OutputStream

log = logging.getLogger("fastkernels")
Status = Literal["queued", "in_progress", "completed", "failed"]


class JobError(BaseModel):
    code: str
    message: str


@dataclass(eq=False)
class Job:
    """A request that is queued, runs, or is kept. made: its output is there; file: where it is once it is complete.

    facts: what the list says of it next to the request; see JobRoutes.write
    """

    request: Any
    stream: OutputStream
    created: int
    task: asyncio.Task[None] | None = None
    made: bool = False
    ended: float | None = None
    file: Path | None = None
    bytes: int = 0
    error: str | None = None
    facts: Any = None

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        if self.file is not None:
            return "completed"
        return "in_progress" if self.request.step else "queued"

    def progress(self, steps: int) -> int:
        """In percent, of a request of so many steps."""
        return 100 if self.status == "completed" else min(self.request.step * 100 // steps, 99)


class Times(TypedDict):
    """Fields of a job's description."""

    created_at: int
    completed_at: int | None
    expires_at: int | None
    error: JobError | None


class JobRoutes(ABC):
    """Jobs end with the server. A finished one is forgotten after `job_ttl` seconds, or earlier if the files need more
    than `max_job_bytes`; DELETE forgets any, and stops one that runs.

    noun    what a job makes, as messages and ids have it
    suffix  of its file
    """

    noun: ClassVar[str]
    suffix: ClassVar[str]

    def __init__(self, context: Context):
        self.context = context
        self._jobs: dict[str, Job] = {}
        self._opening = 0  # jobs that are about to be queued
        self._folder = Path(tempfile.mkdtemp(prefix=f"fastkernels-{self.noun}s-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @abstractmethod
    async def request(self, own: str, raw: Request) -> Any:
        """The engine's request of a body, which is checked. Raises ApiError and RequestValidationError."""

    @abstractmethod
    def write(self, path: Path, output: Any) -> Any:
        """Write the file of an output; in a thread. Returns Job.facts."""

    @abstractmethod
    def entry(self, own: str, job: Job) -> BaseModel:
        """The description of a job."""

    @abstractmethod
    def listed(self, data: list[Any], **more: Any) -> BaseModel:
        """The answer of `list`."""

    @abstractmethod
    def deleted(self, own: str) -> BaseModel:
        """The answer of `delete`."""

    async def create(self, raw: Request) -> Response:
        """Queue a job. The body is JSON."""
        own = f"{self.noun}_{uuid.uuid4().hex}"
        self._forget_old()
        request = await self.request(own, raw)
        config = self.context.config
        if (count := len(self._jobs) + self._opening) >= config.max_jobs:
            raise ApiError(
                429, f"there are {count} {self.noun}s, the most that this server keeps (--max-jobs); delete"
                f" some, or wait until they expire after {config.job_ttl:g} seconds",
                headers={"Retry-After": "10"},
            )  # fmt: skip
        self._opening += 1
        try:
            job = Job(request, await self.context.open([request]), int(time.time()))
        finally:
            self._opening -= 1
        self._jobs[own] = job
        job.task = asyncio.create_task(self._run(own, job))
        return self._answer(own, job)

    async def list(self, raw: Request) -> Response:
        """All jobs, the newest first; `limit`, `after` and `order` as OpenAI has them."""
        self._forget_old()
        asked = raw.query_params
        limit, order = asked.get("limit", "20"), asked.get("order", "desc")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise ApiError(400, f"limit must be a number from 1 to 100, got {shown(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be 'asc' or 'desc', got {shown(order)}", "order")
        ids = list(self._jobs) if order == "asc" else list(self._jobs)[::-1]
        if (after := asked.get("after")) is not None:
            self.job(after)
            ids = ids[ids.index(after) + 1 :]
        some = ids[: int(limit)]
        data = [self.entry(i, self._jobs[i]) for i in some]
        ends: dict[str, Any] = {"first_id": some[0], "last_id": some[-1]} if some else {}
        answer = self.listed(data, has_more=len(some) < len(ids), **ends)
        return Response(answer.model_dump_json(), media_type="application/json")

    def job(self, own: str) -> Job:
        """Raises ApiError 404."""
        self._forget_old()
        if own not in self._jobs:
            raise ApiError(
                404, f"the {self.noun} {own!r:.100} does not exist, or has expired", f"{self.noun}_id"
            )
        return self._jobs[own]

    def file(self, own: str) -> Path:
        """The file of a complete job. Raises ApiError."""
        job = self.job(own)
        if job.file is None:
            raise ApiError(
                400, f"the {self.noun} {own!r} has no content: it is {job.status}", f"{self.noun}_id"
            )
        return job.file

    def times(self, job: Job, code: str) -> Times:
        """code: of the error, if the job has one."""
        ended = None if job.ended is None else int(time.time() - (time.monotonic() - job.ended))
        return Times(
            created_at=job.created, completed_at=ended if job.status == "completed" else None,
            expires_at=None if ended is None else ended + int(self.context.config.job_ttl),
            error=None if job.error is None else JobError(code=code, message=job.error),
        )  # fmt: skip

    async def _run(self, own: str, job: Job) -> None:
        """Wait for the output, and write the file."""
        path = self._folder / f"{own}{self.suffix}"
        try:
            made: Any = await job.stream.rest()
            ((_, output),) = made
            job.made = True
            facts = await asyncio.to_thread(self.write, path, output)
            if own not in self._jobs:  # deleted while it was written
                return
            job.bytes, job.facts, job.file = path.stat().st_size, facts, path
        except asyncio.CancelledError:
            if own in self._jobs:  # not deleted: the server ends before the engine's running step
                log.warning("the %s %s failed: the server is shutting down", self.noun, own)
            raise
        except EngineError as error:  # a step failed, which the engine has logged, or the server ends
            log.warning("the %s %s failed: %s", self.noun, own, error)
            job.error = str(error)
        except Exception as error:
            log.exception("the %s %s failed", self.noun, own)
            job.error = f"{type(error).__name__}: {error}"
        finally:
            job.stream.close()
            job.ended = time.monotonic()
            if job.file is None:  # deleted, or half of it was written
                path.unlink(missing_ok=True)
        asyncio.get_running_loop().call_later(self.context.config.job_ttl + 1, self._forget_old)
        self._forget_old()

    def _forget_old(self) -> None:
        """Forget jobs that have expired, and the oldest files beyond the limit."""
        config, now = self.context.config, time.monotonic()
        for own, job in list(self._jobs.items()):
            if job.ended is not None and now - job.ended > config.job_ttl:
                self._forget(own, job)
        kept = [(own, job) for own, job in self._jobs.items() if job.file is not None]
        kept.sort(key=lambda item: item[1].ended or 0.0)
        total = sum(job.bytes for _, job in kept)
        for own, job in kept[:-1]:  # the newest stays
            if total > config.max_job_bytes:
                total -= job.bytes
                self._forget(own, job)

    def _forget(self, own: str, job: Job) -> None:
        del self._jobs[own]
        job.stream.close()
        if not job.made and job.task is not None:  # a file that is being written is removed behind that
            job.task.cancel()
        if job.file is not None:
            job.file.unlink(missing_ok=True)

    def _answer(self, own: str, job: Job) -> Response:
        return Response(self.entry(own, job).model_dump_json(), media_type="application/json")

    def _delete(self, own: str) -> Response:
        self._forget(own, self.job(own))
        return Response(self.deleted(own).model_dump_json(), media_type="application/json")


async def checked(model: type[BaseModel], read: Awaitable[Any]) -> Any:
    """The body that `read` gives as that model. Raises ApiError and RequestValidationError, as FastAPI does."""
    data: Any = None
    try:
        data = await read
        return model.model_validate(data)
    except ValidationError as error:
        wrong = error.errors()
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in wrong], body=data) from error
    except PydanticCustomError as error:
        raise ApiError(400, error.message(), (error.context or {}).get("param")) from error
