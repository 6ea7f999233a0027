"""Routes of structure prediction: a job that is created, watched, fetched and deleted, as for videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.requests.unserved import shown
from fastkernels.engine.http.routes.jobs import Job, JobError, JobRoutes, Status, checked
from fastkernels.engine.scheduling.folding import FoldParams, Structures
from fastkernels.models.common.folding import structure_text

MEDIA = {"cif": "chemical/x-mmcif", "pdb": "chemical/x-pdb", "json": "application/json"}


class StructureRequest(Body):
    """Chains, or the features that the reference makes of them; see models/common/folding/features.py."""

    chains: list[dict[str, Any]] | None = Field(
        None, description="Each with sequence, kind ('protein', 'rna' or 'dna'), and optionally id and count."
    )
    features: dict[str, Any] | None = Field(None, description="Arrays by the names of the model's reference.")
    num_samples: int | None = Field(None, ge=1, le=INT64)
    num_recycles: int | None = Field(None, ge=0, le=INT64)
    num_steps: int | None = Field(None, ge=1, le=INT64)
    seed: int | None = Field(None, ge=0, le=INT64)
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    def given(self) -> dict[str, Any]:
        """The input as LLM.fold has it."""
        both = {"chains": self.chains, "features": self.features}
        return {name: value for name, value in both.items() if value is not None}


class SampleScores(BaseModel):
    """plddt: the mean of the atoms, 0 to 100; ptm, iptm: 0 to 1, null where there is none."""

    plddt: float
    ptm: float | None = None
    iptm: float | None = None


class Structure(BaseModel):
    """A job. samples: the most confident one first, once it is complete."""

    id: str
    object: Literal["structure"] = "structure"
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    model: str
    progress: int
    status: Status
    num_residues: int
    num_atoms: int
    num_samples: int
    num_recycles: int
    num_steps: int
    seed: int
    samples: list[SampleScores] | None = None
    error: JobError | None = None


class StructureList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Structure]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedStructure(BaseModel):
    id: str
    object: Literal["structure.deleted"] = "structure.deleted"
    deleted: bool = True


class StructureRoutes(JobRoutes):
    """PATHS, GET_PATHS, DELETE_PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/structures", "create", schema.answers(Structure)),)
    GET_PATHS = (
        ("/v1/structures", "list", schema.answers(StructureList)),
        ("/v1/structures/{structure_id}", "retrieve", schema.answers(Structure)),
        ("/v1/structures/{structure_id}/content", "content", schema.answers(Structure)),
    )
    DELETE_PATHS = (("/v1/structures/{structure_id}", "delete", schema.answers(DeletedStructure)),)
    noun, suffix = "structure", ".npz"

    async def request(self, own: str, raw: Request) -> Any:
        """See JobRoutes."""
        body: StructureRequest = await checked(StructureRequest, raw.json())
        self.context.check_model(body.model)
        try:
            params = FoldParams(body.num_samples, body.num_recycles, body.num_steps, body.seed)
            return self.context.llm.engine.make_request(own, body.given(), params, body.priority or 0)
        except ValueError as error:
            message = str(error)
            about_input = "features" if body.features is not None else "chains"
            raise ApiError(
                400, message, about_input if message.startswith("the input") else message.partition(" ")[0]
            ) from error

    def write(self, path: Path, output: Any) -> Structures:
        """See JobRoutes: the arrays, from which `content` makes text. The scores stay in memory."""
        found: Structures = output.structures
        if not (np.isfinite(found.positions).all() and np.isfinite(found.plddt).all()):
            raise EngineError("the structure is NaN: numbers of the input are too large for the model")
        arrays = {"positions": found.positions, "plddt": found.plddt}
        if found.pae is not None:
            arrays["pae"] = found.pae.astype(np.float16)
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return Structures(np.empty(0), found.plddt.mean(1), None, found.ptm, found.iptm)

    async def retrieve(self, structure_id: str) -> Response:
        """One structure's job."""
        return self._answer(structure_id, self.job(structure_id))

    async def content(self, structure_id: str, raw: Request) -> Response:
        """A sample of a complete structure: ?sample=0&format=cif, pdb, or json with positions, plddt and pae."""
        job = self.job(structure_id)
        kind, asked = (raw.query_params.get(*pair) for pair in (("format", "cif"), ("sample", "0")))
        if kind not in MEDIA:
            raise ApiError(400, f"format must be one of {', '.join(MEDIA)}, got {shown(kind)}", "format")
        if not asked.isdecimal() or len(asked) > 4 or int(asked) >= job.request.samples:
            most = job.request.samples - 1
            raise ApiError(400, f"sample must be a number from 0 to {most}, got {shown(asked)}", "sample")
        sample = int(asked)
        with np.load(self.file(structure_id)) as found:
            arrays = {name: found[name][sample] for name in found.files}
        if kind == "json":
            text = json.dumps(
                {name: np.round(array.astype(float), 3).tolist() for name, array in arrays.items()}
            )
        else:
            try:
                places = job.request.features.places
                text = structure_text.write(kind, places, arrays["positions"], arrays["plddt"])
            except ValueError as error:
                raise ApiError(400, str(error), "format") from error
        headers = {"Content-Disposition": f'attachment; filename="{structure_id}_{sample}.{kind}"'}
        return Response(text, media_type=MEDIA[kind], headers=headers)

    async def delete(self, structure_id: str) -> Response:
        """Forget a structure, and stop it if it is not complete."""
        return self._delete(structure_id)

    def entry(self, own: str, job: Job) -> Structure:
        """See JobRoutes."""
        request, scores = job.request, job.facts
        samples = None
        if scores is not None:
            some = [
                scores.plddt.tolist(),
                *((one or [None] * request.samples) for one in (scores.ptm, scores.iptm)),
            ]
            samples = [SampleScores(plddt=p, ptm=t, iptm=i) for p, t, i in zip(*some, strict=True)]
        return Structure(
            id=own, model=self.context.model_name, progress=job.progress(request.turns), status=job.status,
            num_residues=request.features.tokens, num_atoms=request.features.atoms, num_samples=request.samples,
            num_recycles=request.recycles, num_steps=request.steps, seed=request.seed, samples=samples,
            **self.times(job, "prediction_failed"),
        )  # fmt: skip

    def listed(self, data: list[Any], **more: Any) -> StructureList:
        """See JobRoutes."""
        return StructureList(data=data, **more)

    def deleted(self, own: str) -> DeletedStructure:
        """See JobRoutes."""
        return DeletedStructure(id=own)
