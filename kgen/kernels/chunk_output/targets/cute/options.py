"""Options of the CuTe DSL target in specs of chunk_output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kgen.spec.problems import SpecModel


class CuteOptions(SpecModel):
    """Options of the CuTe DSL target."""

    arch: Annotated[
        tuple[Literal["sm_90a", "sm_100a"], ...], Field(strict=False, examples=[["sm_90a"]])
    ] = (
        "sm_90a",
        "sm_100a",
    )
    """The architectures: sm_90a emits `cute_sm90.py`, sm_100a emits `cute_sm100.py`. Forward
    only.
    """
