"""What a spec of chunk_output may say of the CuTe DSL target."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kgen.spec.problems import SpecModel


class CuteOptions(SpecModel):
    """Options of the CuTe DSL target."""

    arch: Annotated[tuple[Literal["sm_90a", "sm_100a"], ...], Field(strict=False, examples=[["sm_90a"]])] = (
        "sm_90a",
        "sm_100a",
    )
    """The architectures: `cute_sm90.py` for sm_90a, `cute_sm100.py` for sm_100a. Forward only."""
