"""Calls in a separate process, which imports Triton for its interpreter."""

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
"""Time limit in seconds. It is below the limit of pytest for a test."""
# All processes are forked from one that has imported these modules. torch and its operator checks
# take seconds.
IMPORTED = [
    "triton",
    "torch.testing._internal.optests",
    "kgen.render.rendering",
    "kgen.kernels.attention.verify.cases",
    "kgen.verify.worker",
]


def interpreted(function: Callable[..., T], *args: object, seconds: float = LIMIT) -> T:
    """Return `function(*args)`, computed in a separate process. Raise its exception here.

    Raise `multiprocessing.TimeoutError` after `seconds`, also if the process died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT), context.Pool(1) as pool:
        return pool.apply_async(function, args).get(seconds)


def verified(
    loaded: Sequence[Any],
    generated: Path,
    device: str = "auto",
    hear: Listener = ignore,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run `verify_specs` with workers in separate processes.

    `options` are fields of `VerifyOptions`.
    """
    with mock.patch("kgen.verify.verifying.messages", _messages):
        return verify_specs(loaded, generated, VerifyOptions(device, **options), hear=hear)


def _messages(
    module: str, job: Job, timeout: float, environment: Mapping[str, str | None]
) -> Iterator[dict[str, Any]]:
    assert environment["TRITON_INTERPRET"] == "1"
    yield from interpreted(_said, module, job, seconds=min(timeout * len(job.cases), LIMIT))


def _said(module: str, job: object) -> list[dict[str, Any]]:
    """Return the messages of a worker."""
    lines = io.StringIO()
    importlib.import_module(module).main(job, lines)
    return [json.loads(line) for line in lines.getvalue().splitlines()]
