"""Simulated CUDA driver.

It reads a launch as a GPU would, and Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kgen.build.runtime.parameters import forms_of


class Driver:
    """Replacement of libcuda for tensors on the CPU.

    `launched` has the launches, in the form of manifests.
    """

    def __init__(self, runtime: ModuleType, package: Any) -> None:
        self.runtime, self.package = runtime, package
        self.launched: list[Any] = []
        self.tensors: dict[int, Any] = {}

    def cuLaunchKernelEx(self, config: Any, cubin: Any, parameters: Any, extra: Any) -> int:
        """Run the kernel with arguments from memory."""
        told, row, at, given = config._obj, cubin.row, iter(parameters), {}
        assert extra is None
        assert (told.grid_y, told.grid_z, told.block_y, told.block_z) == (1, 1, 1, 1)
        assert (told.block_x, told.shared) == (32 * row["warps"], row["shared"])
        sizes = iter(size for _, size in row["parameters"])
        for name, kind, value in row["arguments"]:
            if kind == "constexpr":
                given[name] = value
                continue
            (form,), size = forms_of(kind), next(sizes)
            assert struct.calcsize(form) == size
            (found,) = struct.unpack(f"<{form}", ctypes.string_at(next(at), size))
            given[name] = self.tensors[found] if kind.startswith("*") else found
        assert [ctypes.string_at(p, size) for p, size in zip(at, sizes, strict=True)] == [
            bytes(8)
        ] * 2
        self.launched.append(row)
        getattr(self.package.source("triton"), row["kernel"])[(told.grid_x,)](**given)
        return 0

    @contextlib.contextmanager
    def installed(self, launcher: ModuleType, arch: int) -> Iterator[None]:
        """Install the driver for the launches of a package on this chip."""

        launch = self.runtime.Cubin.launch

        def remembering(cubin: Any, grid: Any, args: Any) -> None:
            self.tensors |= {x.data_ptr(): x for x in args if isinstance(x, torch.Tensor)}
            launch(cubin, grid, args)

        instead = {
            "_driver": lambda: self,
            "_function": lambda device, cubin: cubin,
            "_stream": lambda device: 0,
            "_arch": lambda args: arch,
        }
        with contextlib.ExitStack() as stack:
            for name, value in instead.items():
                stack.enter_context(mock.patch.object(self.runtime, name, value))
            stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
            stack.enter_context(mock.patch.object(self.runtime.Cubin, "launch", remembering))
            stack.enter_context(mock.patch.object(launcher, "_arch", return_value=arch))
            yield
