"""CUDA norms of rows that are not multiples of 16 bytes: the emitted source on a CPU with guarded
memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

INSTRUCTIONS = {
    r'asm\("cvt\.rn\.bf16x2\.f32 [^"]*"[^;]*;': (
        "for (int j : {i, i + 1}) y.at[j].bits = to_bf16(x[j]);"
    ),
    r'asm\("cvt\.rn\.bf16\.f32 %0, %1;"[^;]*;': "y.at[i].bits = to_bf16(x[i]);",
    r'asm\("cvt\.rn\.satfinite[^"]*"[^;]*;': (
        "two = to_eight_bits(x[next]) << 8 | to_eight_bits(x[i]);"
    ),
    r"const unsigned int address = .*\n    if constexpr \(KEEP\)(?:.|\n)*?(?=\n}\n)": (
        "copy_later(to, from, 16, live);"
    ),
    r'asm\("createpolicy[^"]*"[^;]*;': "policy = 0;",
    r'asm volatile\("cp\.async\.commit_group;"[^;]*;': "commit_copies();",
    r'asm volatile\("cp\.async\.wait_group %0;"[^;]*;': "wait_for_copies(PENDING);",
    r'asm volatile\("ld\.global\.nc[^"]*"(?:[^;]|\n)*;': ";",
    r"asm volatile\(__VA_ARGS__\)": "",
    r"#if __CUDA_ARCH__ >= 890\n((?:(?!#endif)(?:.|\n))*)#endif\n": r"\1",
    r"extern __shared__ __align__\(16\) char ring\[\];": "char* ring = dynamic_shared;",
}
"""Inline PTX, and its replacement from `tests/support/packages/fibers.h`."""


def test_rows_of_any_beginning_and_stride(tmp_path, verdict):
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed")
    probe = [compiler, "-fsanitize=address", "-x", "c++", "-", "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, input=b"int main() {}", capture_output=True).returncode:
        pytest.skip("g++ has no AddressSanitizer")
    program = Path(__file__).with_name("norm_rows.cpp")
    headers = [ROOT / "tests/support/packages/fibers.h"]
    for name in ("rms_norm", "rms_norm_fp8"):
        text = (ROOT / "generated" / name / "cuda.cu").read_text()
        text = text[text.index(f"namespace {name}_kernels {{") :]
        for pattern, ours in INSTRUCTIONS.items():
            text = re.sub(pattern, ours, text)
        assert "asm" not in text
        headers.append(tmp_path / f"{name}.h")
        headers[-1].write_text(text)
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True
    ).stdout
    verdict(None, version, program, *headers)
    options = [
        "-std=c++20",
        "-O1",
        "-w",
        "-fno-strict-aliasing",
        "-fsanitize=address",
        f"-I{ROOT / 'tests/support/packages'}",
        f"-I{tmp_path}",
    ]
    command = [
        compiler,
        *options,
        str(program),
        "-o",
        str(tmp_path / "rows"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    done = subprocess.run([tmp_path / "rows"], env=environment, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stdout + done.stderr[:4000]
