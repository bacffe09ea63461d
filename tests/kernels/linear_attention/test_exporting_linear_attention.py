"""Models with the operators of linear attention: exported, compiled in one graph, and loaded in
another folder and process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages.c_on_paper import packages_on_paper

from kgen.verify.interpreter import ENVIRONMENT

GENERATED = Path(__file__).parents[3] / "generated"
NAME = "gated_delta_net"
LAYER = f"""
import sys
import torch

sys.path.insert(0, sys.argv[1])
from {NAME} import {NAME} as whole, {NAME}_decode as stepped


class Layer(torch.nn.Module):
    def __init__(self, decodes):
        super().__init__()
        self.decodes = decodes
        for name, size in (("a_log", 2), ("dt_bias", 2), ("w", 128)):
            own = torch.linspace(0.5, 1, size)
            setattr(self, name, torch.nn.Buffer(own) if decodes else torch.nn.Parameter(own))

    def forward(self, q, k, v, a, b, z, state):
        more = dict(a_log=self.a_log, dt_bias=self.dt_bias, w=self.w, a=a, b=b, z=z)
        if self.decodes:
            return 2 * stepped(q + 1, k, v, state, **more),
        wanted = dict(initial_state=state, output_final_state=True, return_states=True)
        o, *states = whole(q + 1, k, v, **more, **wanted)
        return 2 * o, *states


def drawn(length):
    torch.manual_seed(length)
    sizes = ((1, 128), (1, 128), (2, 128), (2,), (2,), (2, 128))
    tokens = [torch.randn(1, length, *size, dtype=torch.bfloat16) for size in sizes]
    return *tokens, torch.randn(1, 2, 128, 128)


def agree(program, layer, length):
    given, other = drawn(length), drawn(length)
    pairs = zip([*program(*given), given[-1]], [*layer(*other), other[-1]], strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def exported(layer):
    # PyTorch treats sizes of 1 as special, also the number of chunks of 64 tokens.
    length = torch.export.Dim("length", min=1 if layer.decodes else 65, max=4096)
    shapes = (*[{{1: length}}] * 6, None)
    return torch.export.export(layer, drawn(LENGTHS[layer.decodes][0]), dynamic_shapes=shapes)


# A decoding kernel loops over tokens, which takes long in the interpreter.
LENGTHS = {{False: (70, 130), True: (5, 3)}}
"""
SAVES = """
for decodes in (False, True):
    torch.export.save(exported(Layer(decodes)), f"{sys.argv[2]}/{decodes}.pt2")
"""
LOADS = """
for decodes, lengths in LENGTHS.items():
    program = torch.export.load(f"{sys.argv[2]}/{decodes}.pt2").module()
    print(*(agree(program, Layer(decodes), length) for length in lengths))
"""
COMPILES_AHEAD = """
program = exported(Layer(sys.argv[3] == "decode"))
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
"""
LOADS_COMPILED = """
decodes = sys.argv[3] == "decode"
program = torch._inductor.aoti_load_package(sys.argv[2])
print(*(agree(program, Layer(decodes), length) for length in LENGTHS[decodes]))
"""
COMPILES = """
found = []
for compiles in (False, True):
    layer, given = Layer(False), [x.requires_grad_() for x in drawn(70)]
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    o, last, _ = call(*given)
    found.append([o, last, *torch.autograd.grad([o.float().sum() + last.sum()],
                                                [*given, *layer.parameters()])])
print(all(torch.equal(one, two) for one, two in zip(*found, strict=True)))
step = torch.compile(Layer(True), fullgraph=True, backend="aot_eager")
print(agree(step, Layer(True), 3))
"""


def ran(script: str, *arguments: Path | str) -> list[str]:
    """Run a script with the layer in another process. Return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", LAYER + script, *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package with fake machine code. On the CPU, its sources run."""
    folder = tmp_path_factory.mktemp("packages")
    packages_on_paper(folder, [NAME])
    return folder


def test_an_exported_program_runs_in_a_package_in_another_process(
    package: Path, tmp_path: Path
) -> None:
    """The layer, and a step that updates its state in place."""
    ran(SAVES, GENERATED, tmp_path)
    assert ran(LOADS, package, tmp_path) == ["True"] * 4


def test_gradients_in_one_compiled_graph() -> None:
    assert ran(COMPILES, GENERATED) == ["True", "True"]


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("c++"), reason="AOTInductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize(("here", "pass_"), [("file", "forward"), ("package", "decode")])
def test_a_program_compiled_ahead_runs_in_another_process(
    here: str, pass_: str, package: Path, tmp_path: Path
) -> None:
    origins = {"file": GENERATED, "package": package}
    ran(COMPILES_AHEAD, origins.pop(here), tmp_path / "model.pt2", pass_)
    (there,) = origins.values()
    assert ran(LOADS_COMPILED, there, tmp_path / "model.pt2", pass_) == ["True", "True"]
