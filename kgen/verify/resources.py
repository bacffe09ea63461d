"""Resources of a compiled kernel, read from its cubin by a tool that comes with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread, for the only kernel in a cubin."""
    return usage(cubin)[:2]


def usage(cubin: bytes) -> tuple[int, int, int]:
    """Return `resources` and the bytes of declared shared memory."""
    ((_, found),) = usages(cubin).items()
    return found


def usage_of(code: Any, name: str) -> tuple[int, int, int]:
    """Return `usage` of one kernel in an NVRTC `ObjectCode`, by its name expression."""
    return usages(bytes(code.code))[code.symbol_mapping[name].decode()]


def parameters(cubin: bytes) -> list[tuple[int, int]]:
    """Return offset and bytes of each parameter, in order, for the only kernel in a cubin."""
    found = re.findall(
        r"Ordinal : (\w+)\s+Offset\s+: (\w+)\s+Size\s+: (\w+)", _said(cubin, "--dump-elf")
    )
    return [
        (offset, size)
        for _, offset, size in sorted(tuple(int(x, 16) for x in one) for one in found)
    ]


def usages(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Return `usage` of each kernel, by its mangled name."""
    text = _said(cubin, "--dump-resource-usage")
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[:200]}")
    return {
        name: (int(reg), int(stack) + int(local), int(shared))
        for name, reg, stack, shared, local in found
    }


def _said(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool) if tool.exists() else "cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
