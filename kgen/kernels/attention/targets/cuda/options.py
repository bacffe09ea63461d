"""The options of the CUDA target in an attention spec."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kgen.spec.problems import SpecModel, problem


class CudaOptions(SpecModel):
    """Options of the CUDA target: which passes it has."""

    passes: Annotated[tuple[Literal["delta"], ...], Field(strict=False, min_length=1, max_length=1)]
    """`[delta]`: rowsum(dO * O), the preprocess step of the backward pass."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if not value:
            message = "the target `cuda` needs `passes`, and supports only `delta` for attention"
            raise problem("missing-pass", message, "write `cuda: {passes: [delta]}`", key=True)
        return value
