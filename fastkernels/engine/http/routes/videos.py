"""OpenAI's routes for videos from text: a job that is created, watched, fetched and deleted."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import FileResponse, Response
from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.requests.unserved import field_error, shown
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.jobs import Job, JobError, JobRoutes, Status, checked
from fastkernels.engine.http.routes.pictures import SIZE, SIZE_SCHEMA, check_size
from fastkernels.engine.http.routes.video_files import check_packages, write_mp4
from fastkernels.engine.scheduling.denoising import VideoParams

RATE = 24  # frames a second
MOST_FIELDS = 32  # of a form
# The fields of VideoParams by the names that clients know
_FIELDS = {"height": "size", "width": "size"}
_NUMBERS = (
    "seconds",
    "num_frames",
    "seed",
    "num_inference_steps",
    "guidance_scale",
    "step_cache",
    "priority",
)


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
    step_cache: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The threshold of steps that reuse the last output (default: none does).",
    )
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
            1, height, width, self.num_inference_steps, self.guidance_scale, self.negative_prompt, self.seed, frames,
            step_cache=self.step_cache,
        )  # fmt: skip


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
    steps_reused: int | None = None
    error: JobError | None = None


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


class Videos(JobRoutes):
    """PATHS, GET_PATHS, DELETE_PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/videos", "create", schema.answers(Video)),)
    GET_PATHS = (
        ("/v1/videos", "list", schema.answers(VideoList)),
        ("/v1/videos/{video_id}", "retrieve", schema.answers(Video)),
        ("/v1/videos/{video_id}/content", "content", schema.answers(Video)),
    )
    DELETE_PATHS = (("/v1/videos/{video_id}", "delete", schema.answers(DeletedVideo)),)
    noun, suffix = "video", ".mp4"

    def __init__(self, context: Context):
        check_packages()
        super().__init__(context)

    async def request(self, own: str, raw: Request) -> Any:
        """See JobRoutes. The body is JSON, or a form as OpenAI's client sends it."""
        kind = raw.headers.get("content-type", "").partition(";")[0].strip().lower()
        read = _form(raw) if kind == "multipart/form-data" else raw.json()
        body: VideoGenerationRequest = await checked(VideoGenerationRequest, read)
        self.context.check_model(body.model)
        engine = self.context.llm.engine
        try:
            params = body.video_params(engine.model.period, self.context.llm.config.max_frames)
            return engine.make_request(own, body.prompt, params, body.priority or 0)
        except ValueError as error:
            message = str(error)
            field = message.replace("the prompt", "prompt", 1).partition(" ")[0]
            raise ApiError(400, message, _FIELDS.get(field, field)) from error

    def write(self, path: Path, output: Any) -> None:
        """See JobRoutes."""
        write_mp4(path, output.arrays[0], RATE)

    async def retrieve(self, video_id: str) -> Response:
        """One video's job."""
        return self._answer(video_id, self.job(video_id))

    async def content(self, video_id: str, raw: Request) -> Response:
        """The MP4 file of a complete video."""
        self.job(video_id)
        if (variant := raw.query_params.get("variant", "video")) != "video":
            raise ApiError(400, f"variant must be 'video', got {shown(variant)}", "variant")
        return FileResponse(self.file(video_id), media_type="video/mp4", filename=f"{video_id}.mp4")

    async def delete(self, video_id: str) -> Response:
        """Forget a video, and stop it if it is not complete."""
        return self._delete(video_id)

    def entry(self, own: str, job: Job) -> Video:
        """See JobRoutes."""
        request = job.request
        height, width, frames = request.size
        return Video(
            id=own, model=self.context.model_name, prompt=request.prompt, progress=job.progress(request.steps),
            status=job.status, size=f"{width}x{height}", seconds=f"{frames / RATE:.2f}", num_frames=frames,
            seed=request.seed, steps_reused=None if request.params.step_cache is None else request.reused,
            **self.times(job, "generation_failed"),
        )  # fmt: skip

    def listed(self, data: list[Any], **more: Any) -> VideoList:
        """See JobRoutes."""
        return VideoList(data=data, **more)

    def deleted(self, own: str) -> DeletedVideo:
        """See JobRoutes."""
        return DeletedVideo(id=own)


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
