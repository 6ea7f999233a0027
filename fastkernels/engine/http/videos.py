"""OpenAI's routes for videos from text: a job that is created, watched, fetched and deleted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
import uuid
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from pydantic import AfterValidator, BaseModel, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.http import schema
from fastkernels.engine.http.context import Context
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.pictures import SIZE, SIZE_SCHEMA, check_size
from fastkernels.engine.http.protocol import INT64, Body
from fastkernels.engine.http.unserved import field_error, shown
from fastkernels.engine.http.video_files import check_packages, write_mp4
from fastkernels.engine.scheduling.denoising import VideoParams
from fastkernels.engine.stream import OutputStream

log = logging.getLogger("fastkernels")
RATE = 24  # frames a second
MOST_FIELDS = 32  # of a form
Status = Literal["queued", "in_progress", "completed", "failed"]
# The fields of VideoParams by the names that clients know
_FIELDS = {"height": "size", "width": "size"}
_NUMBERS = ("seconds", "num_frames", "seed", "num_inference_steps", "guidance_scale", "priority")


class VideoGenerationRequest(Body):
    """OpenAI's video from text, with num_frames, seed, num_inference_steps, guidance_scale and negative_prompt."""

    prompt: str = Field(min_length=1, max_length=32000)
    size: Annotated[str | None, AfterValidator(check_size), WithJsonSchema(SIZE_SCHEMA)] = "auto"
    seconds: int | float | str | None = Field(None, description=f"At {RATE} frames a second.")
    num_frames: int | None = Field(None, ge=1, le=INT64, description="Instead of seconds.")
    seed: int | None = Field(None, ge=0, le=INT64)
    num_inference_steps: int | None = Field(None, ge=1, le=INT64)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    negative_prompt: str | None = Field(None, max_length=32000)
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    def video_params(self, period: int, most: int) -> VideoParams:
        """Raises ValueError, whose message begins with the field. period: see Pipeline; most: frames."""
        found = SIZE.fullmatch(self.size or "")
        width, height = (None, None) if found is None else map(int, found.groups())
        frames = self.num_frames
        if self.seconds is not None:
            if frames is not None:
                raise ValueError("seconds and num_frames exclude each other")
            try:
                seconds = float(self.seconds)
            except (ValueError, OverflowError):
                seconds = -1.0
            if not 0 < seconds <= most / RATE:
                raise ValueError(
                    f"seconds must be a number above 0, at most {most / RATE:.1f}, got {shown(self.seconds)}"
                )
            frames = int(seconds * RATE) // period * period + 1
            frames = frames if frames <= most else frames - period
        return VideoParams(
            1, height, width, self.num_inference_steps, self.guidance_scale, self.negative_prompt, self.seed, frames
        )  # fmt: skip


class VideoError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    """OpenAI's job, with the frames, the seed and the steps."""

    id: str
    object: Literal["video"] = "video"
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    model: str
    prompt: str
    progress: int
    status: Status
    size: str
    seconds: str
    num_frames: int
    seed: int
    error: VideoError | None = None


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedVideo(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


@dataclass(eq=False)
class Job:
    """A video that is queued, made, or kept. made: all its frames are; file: where it is once it is complete."""

    request: Any
    stream: OutputStream
    created: int
    task: asyncio.Task[None] | None = None
    made: bool = False
    ended: float | None = None
    file: Path | None = None
    bytes: int = 0
    error: str | None = None

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        if self.file is not None:
            return "completed"
        return "in_progress" if self.request.step else "queued"


class Videos:
    """PATHS, GET_PATHS, DELETE_PATHS: (path, method, schema) of the routes.

    Jobs end with the server. A finished one is forgotten after `job_ttl` seconds, or earlier if the files need more
    than `max_job_bytes`; DELETE forgets any, and stops one that runs.
    """

    PATHS = (("/v1/videos", "create", schema.answers(Video)),)
    GET_PATHS = (
        ("/v1/videos", "list", schema.answers(VideoList)),
        ("/v1/videos/{video_id}", "retrieve", schema.answers(Video)),
        ("/v1/videos/{video_id}/content", "content", schema.answers(Video)),
    )
    DELETE_PATHS = (("/v1/videos/{video_id}", "delete", schema.answers(DeletedVideo)),)

    def __init__(self, context: Context):
        check_packages()
        self.context = context
        self._jobs: dict[str, Job] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="fastkernels-videos-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    async def create(self, raw: Request) -> Response:
        """Queue a video. The body is JSON, or a form as OpenAI's client sends it."""
        body = await _body(raw)
        self.context.check_model(body.model)
        self._forget_old()
        config, engine = self.context.config, self.context.llm.engine
        if len(self._jobs) >= config.max_jobs:
            raise ApiError(
                429, f"there are {len(self._jobs)} videos, the most that this server keeps (--max-jobs); delete some,"
                f" or wait until they expire after {config.job_ttl:g} seconds",
                headers={"Retry-After": "10"},
            )  # fmt: skip
        own = f"video_{uuid.uuid4().hex}"
        try:
            params = body.video_params(engine.model.period, self.context.llm.config.max_frames)
            request = engine.make_request(own, body.prompt, params, body.priority or 0)
        except ValueError as error:
            message = str(error)
            field = message.replace("the prompt", "prompt", 1).partition(" ")[0]
            raise ApiError(400, message, _FIELDS.get(field, field)) from error
        job = Job(request, await self.context.open([request]), int(time.time()))
        self._jobs[own] = job
        job.task = asyncio.create_task(self._run(own, job))
        return self._answer(own, job)

    async def list(self, raw: Request) -> Response:
        """All videos, the newest first; `limit`, `after` and `order` as OpenAI has them."""
        self._forget_old()
        asked = raw.query_params
        limit, order = asked.get("limit", "20"), asked.get("order", "desc")
        if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
            raise ApiError(400, f"limit must be a number from 1 to 100, got {shown(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be 'asc' or 'desc', got {shown(order)}", "order")
        ids = list(self._jobs) if order == "asc" else list(self._jobs)[::-1]
        if (after := asked.get("after")) is not None:
            self._job(after)
            ids = ids[ids.index(after) + 1 :]
        some = ids[: int(limit)]
        data = [self._video(i, self._jobs[i]) for i in some]
        ends: dict[str, Any] = {"first_id": some[0], "last_id": some[-1]} if some else {}
        answer = VideoList(data=data, has_more=len(some) < len(ids), **ends)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def retrieve(self, video_id: str) -> Response:
        """One video's job."""
        return self._answer(video_id, self._job(video_id))

    async def content(self, video_id: str, raw: Request) -> Response:
        """The MP4 file of a complete video."""
        job = self._job(video_id)
        if (variant := raw.query_params.get("variant", "video")) != "video":
            raise ApiError(400, f"variant must be 'video', got {shown(variant)}", "variant")
        if job.file is None:
            raise ApiError(400, f"the video {video_id!r} has no content: it is {job.status}", "video_id")
        return FileResponse(job.file, media_type="video/mp4", filename=f"{video_id}.mp4")

    async def delete(self, video_id: str) -> Response:
        """Forget a video, and stop it if it is not complete."""
        self._forget(video_id, self._job(video_id))
        return Response(DeletedVideo(id=video_id).model_dump_json(), media_type="application/json")

    async def _run(self, own: str, job: Job) -> None:
        """Wait for the frames, and write the file."""
        try:
            made: Any = await job.stream.rest()
            ((_, output),) = made
            path, job.made = self._folder / f"{own}.mp4", True
            await asyncio.to_thread(write_mp4, path, output.arrays[0], RATE)
            if own not in self._jobs:  # deleted while it was written
                path.unlink(missing_ok=True)
                return
            job.bytes, job.file = path.stat().st_size, path
        except asyncio.CancelledError:
            if own in self._jobs:  # not deleted: the server ends before the engine's running step
                log.warning("the video %s failed: the server is shutting down", own)
            raise
        except EngineError as error:  # a step failed, which the engine has logged, or the server ends
            log.warning("the video %s failed: %s", own, error)
            job.error = str(error)
        except Exception as error:
            log.exception("the video %s failed", own)
            job.error = f"{type(error).__name__}: {error}"
        finally:
            job.stream.close()
            job.ended = time.monotonic()
        asyncio.get_running_loop().call_later(self.context.config.job_ttl + 1, self._forget_old)
        self._forget_old()

    def _job(self, video_id: str) -> Job:
        """Raises ApiError 404."""
        self._forget_old()
        if video_id not in self._jobs:
            raise ApiError(404, f"the video {video_id!r:.100} does not exist, or has expired", "video_id")
        return self._jobs[video_id]

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

    def _video(self, own: str, job: Job) -> Video:
        request, status = job.request, job.status
        height, width, frames = request.size
        ended = None if job.ended is None else int(time.time() - (time.monotonic() - job.ended))
        done = 100 if status == "completed" else min(request.step * 100 // request.steps, 99)
        return Video(
            id=own, created_at=job.created, completed_at=ended if status == "completed" else None,
            expires_at=None if ended is None else ended + int(self.context.config.job_ttl),
            model=self.context.model_name, prompt=request.prompt, progress=done, status=status,
            size=f"{width}x{height}", seconds=f"{frames / RATE:.2f}", num_frames=frames, seed=request.seed,
            error=None if job.error is None else VideoError(code="generation_failed", message=job.error),
        )  # fmt: skip

    def _answer(self, own: str, job: Job) -> Response:
        return Response(self._video(own, job).model_dump_json(), media_type="application/json")


async def _body(raw: Request) -> VideoGenerationRequest:
    """The checked body. Raises ApiError and RequestValidationError."""
    kind = raw.headers.get("content-type", "").partition(";")[0].strip().lower()
    data: Any = None
    try:
        data = await _form(raw) if kind == "multipart/form-data" else await raw.json()
        return VideoGenerationRequest.model_validate(data)
    except ValidationError as error:
        wrong = error.errors()
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in wrong], body=data) from error
    except PydanticCustomError as error:
        raise ApiError(400, error.message(), (error.context or {}).get("param")) from error


async def _form(raw: Request) -> dict[str, Any]:
    """The fields of a form; those that are numbers as such."""
    if find_spec("python_multipart") is None:
        raise ApiError(
            501, "this server cannot read forms: they need the package python-multipart"
            " (pip install 'fastkernels[audio]'); send JSON",
        )  # fmt: skip
    found: dict[str, Any] = {}
    async with raw.form(max_files=1, max_fields=MOST_FIELDS) as form:
        for name, value in form.multi_items():
            if not isinstance(value, str):
                raise field_error(name, f"{name} is a file, and videos are made from text only")
            found[name] = value
            if name in _NUMBERS and name != "seconds":
                with contextlib.suppress(ValueError):  # refused by the check of its type
                    found[name] = float(value) if name == "guidance_scale" else int(value)
    return found
