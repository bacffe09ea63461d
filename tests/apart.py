"""Calls in a process of its own, where Triton is imported for its interpreter."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar
from unittest import mock

T = TypeVar("T")
# The processes are forked from one that has imported these: it takes seconds.
IMPORTED = ["torch", "triton", "kgen.render.rendering", "kgen.verify.attention.cases", "kgen.verify.families"]


def interpreted(function: Callable[..., T], *args: object) -> T:
    """`function(*args)`, in a process that ends with it; what it raises is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *args).result()
