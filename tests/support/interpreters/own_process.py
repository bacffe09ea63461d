"""Calls in a process of its own, where Triton is imported for its interpreter."""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from kgen.verify.events import Listener, ignore
from kgen.verify.interpreter import ENVIRONMENT
from kgen.verify.options import VerifyOptions
from kgen.verify.verifying import verify_specs
from kgen.verify.worker import Job

T = TypeVar("T")
LIMIT = 280.0
"""Seconds, less than pytest gives a test."""
# The processes are forked from one that has imported these, of which torch and its checks of operators take seconds.
IMPORTED = [
    "triton",
    "torch.testing._internal.optests",
    "kgen.render.rendering",
    "kgen.kernels.attention.verify.cases",
    "kgen.verify.worker",
]


def interpreted(function: Callable[..., T], *args: object, seconds: float = LIMIT) -> T:
    """`function(*args)`, in a process that ends with it; what it raises is raised here.

    Raises `multiprocessing.TimeoutError` after some seconds, also where the process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT), context.Pool(1) as pool:
        return pool.apply_async(function, args).get(seconds)


def verified(
    loaded: Sequence[Any], generated: Path, device: str = "auto", hear: Listener = ignore, **options: Any
) -> list[dict[str, Any]]:
    """`verify_specs`, whose workers run in such processes; `options` are those of `VerifyOptions`."""
    with mock.patch("kgen.verify.verifying.messages", _messages):
        return verify_specs(loaded, generated, VerifyOptions(device, **options), hear=hear)


def _messages(
    module: str, job: Job, timeout: float, environment: Mapping[str, str | None]
) -> Iterator[dict[str, Any]]:
    assert environment["TRITON_INTERPRET"] == "1"
    yield from interpreted(_said, module, job, seconds=min(timeout * len(job.cases), LIMIT))


def _said(module: str, job: object) -> list[dict[str, Any]]:
    """What a worker says, line by line."""
    lines = io.StringIO()
    importlib.import_module(module).main(job, lines)
    return [json.loads(line) for line in lines.getvalue().splitlines()]
