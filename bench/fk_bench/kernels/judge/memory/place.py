"""The place of an output in a side's memory, as the side names it; the judge checks it before use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, le=1 << 40)]


class Strict(BaseModel):
    """Data from a side; fields that the schema does not name are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Place(Strict):
    """The memory of an output: in the side's arena, in an allocation of the process, or empty."""

    nbytes: Count
    stride: list[Count] = Field(max_length=16)
    arena: Count | None = None
    handle: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    offset: Count | None = None
