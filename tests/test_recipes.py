"""The recipes of CONTRIBUTING.md: their blocks go into a copy of kgen, whose commands must then
work.

The first line of a block is its file, or `FILE: in NAME`. The text of the latter goes to the start
of that list.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.expr.algebra import call
from kgen.expr.nodes import Const, Type, Var
from kgen.spec.load import loads
from kgen.verify.evaluate import evaluate
from kgen.verify.families import Subject, family_of, problem_of
from kgen.verify.interpreter import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^( *)```\w+\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
PLACE = re.compile(r"(?:#|\{#) (?P<path>[\w./]+)(?:: in (?P<name>\w+))?(?: #\})?\n")
SECTIONS = dict(
    re.findall(r"^## (Add [^\n]+)\n(.*?)(?=^## |\Z)", CONTRIBUTING, re.DOTALL | re.MULTILINE)
)


@dataclass
class Copy:
    """Copy of kgen, with templates and specs."""

    root: Path

    def follow(self, recipe: str) -> list[str]:
        """Write the blocks of a recipe to their files. Return each changed file of kgen once."""
        touched = {}
        for _, text in BLOCK.findall(SECTIONS[recipe]):
            text = dedent(text)
            place = PLACE.match(text)
            assert place, f"a block of {recipe!r} does not say where it goes: {text[:40]!r}"
            path = self.root / place["path"]
            if place["name"]:
                before = path.read_text()
                opened = re.search(rf"^{place['name']}\b.* = [\[({{]\n", before, re.MULTILINE)
                assert opened, f"{place['path']} has no list {place['name']}"
                text = (
                    before[: opened.end()]
                    + indent(text[place.end() :], "    ")
                    + before[opened.end() :]
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            touched[place["path"]] = path.suffix != ".yaml"
        return [path for path, counts in touched.items() if counts]

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(self.root), "COLUMNS": "120"}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True
        )

    def interpret(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code with Triton's interpreter."""
        environment = os.environ | {**ENVIRONMENT, "PYTHONPATH": str(self.root)}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True
        )

    def kgen(self, *arguments: str) -> str:
        run = self.python("-m", "kgen", *arguments)
        assert run.returncode == 0, run.stderr + run.stdout
        return run.stdout

    def refuses(self, text: str) -> str:
        """Return the error message of a spec that does not render."""
        (self.root / "refused.yaml").write_text(text)
        there = {*self.root.glob("generated/*")}
        run = self.python("-m", "kgen", "render", "refused.yaml")
        assert run.returncode == 2, run.stderr
        assert {*self.root.glob("generated/*")} == there
        return run.stderr

    def render(self, *specs: str) -> dict[str, str]:
        """Render specs, each a path or a text. Return the files by `folder/name`."""
        paths = []
        for number, spec in enumerate(specs):
            paths.append(spec if "\n" not in spec else f"text{number}.yaml")
            if "\n" in spec:
                (self.root / paths[-1]).write_text(spec)
        self.kgen("render", *paths)
        files = self.root.glob("generated/*/*")
        return {
            path.relative_to(self.root / "generated").as_posix(): path.read_text() for path in files
        }


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    for folder in ("kgen", "templates", "specs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return Copy(tmp_path)


def imported(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_recipe_is_followed() -> None:
    own = Path(__file__).read_text()
    assert SECTIONS
    assert [recipe for recipe in SECTIONS if f'"{recipe}"' not in own] == []


# --- a function ------------------------

FUNCTION = "Add a function to the expressions"
POINTS = torch.linspace(-8, 8, 101, dtype=torch.float64)
NORM = """kernel: norm
name: sample
norm: rms
width: any
dtype: bf16
"""


def test_a_function_is_one_row(copy: Copy) -> None:
    assert copy.follow(FUNCTION) == ["kgen/expr/functions.py"]
    table = imported(copy.root / "kgen/expr/functions.py", "copied_functions").TABLE
    row, x = table["softsign"], POINTS.clone().requires_grad_()
    want = row.reference(torch, x)
    (slope,) = torch.autograd.grad(want.sum(), x)
    (derivative,) = row.derivative(lambda name, *args: table[name].reference(torch, *args), POINTS)
    torch.testing.assert_close(derivative, slope)
    want = want.detach()
    torch.testing.assert_close(
        torch.tensor([row.value(p.item()) for p in POINTS], dtype=want.dtype), want
    )

    tl = SimpleNamespace(abs=torch.abs)
    cutlass = SimpleNamespace(max=torch.maximum)
    names: dict[str, Any] = {
        "triton": SimpleNamespace(jit=lambda f: f),
        "tl": tl,
        "cutlass": cutlass,
        "torch": torch,
    }
    for language in ("torch", "triton", "gluon", "cute"):
        (spelling,) = row.spellings(language)
        exec(spelling.helper or "", names)
        torch.testing.assert_close(eval(spelling.form.format("x"), names | {"x": POINTS}), want)


def test_a_new_function_is_emitted_where_it_is_used(copy: Copy) -> None:
    copy.follow(FUNCTION)
    norm = f"{NORM}output_mod: softsign(y)\ntargets: {{triton: {{}}, cuda: {{}}}}\n"
    files = copy.render("softened.yaml", norm, "specs/rms_norm.yaml")
    assert files["softened/triton.py"].count("def _softsign(x):") == 1
    assert "ds * (1 / dscore_product)" in files["softened/triton.py"], "the derivative"
    assert files["sample/triton.py"].count("def _softsign(x):") == 1
    assert files["sample/cuda.cu"].count("float _softsign(float x) {") == 1
    assert "softsign" not in files["rms_norm/triton.py"] + files["rms_norm/cuda.cu"]


@pytest.mark.thorough
def test_a_new_function_is_right(copy: Copy) -> None:
    copy.follow(FUNCTION)
    copy.kgen("render", "softened.yaml")
    copy.kgen("verify", "softened.yaml", "--device", "cpu", "--quick", "--no-record")
    shutil.copytree(ROOT / "tests", copy.root / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy.root)
    chosen = (
        "tests/expr/test_functions.py",
        "-k",
        "softsign or spelling",
        "-p",
        "no:cacheprovider",
    )
    run = copy.python("-m", "pytest", "-q", "-n", "0", *chosen)
    assert run.returncode == 0, run.stdout[-3000:]


# --- a variant, and a pass ------------------------


def test_a_variant_is_a_spec(copy: Copy) -> None:
    assert copy.follow("Add a variant") == []
    assert (
        "def every_other(q, k, v, *"
        in copy.render("specs/every_other.yaml")["every_other/triton.py"]
    )


def test_a_pass_keeps_the_value(copy: Copy) -> None:
    assert copy.follow("Add a pass") == ["kgen/expr/ones.py"]
    without_ones = imported(copy.root / "kgen/expr/ones.py", "copied_ones").without_ones
    x, one = Var("x", Type.FLOAT), Const(1, Type.INT)
    tree = call("add", call("mul", one, call("tanh", call("mul", x, one))), call("mul", x, x))
    assert without_ones(tree) == call("add", call("tanh", x), call("mul", x, x))
    env = {"x": POINTS}
    assert torch.equal(evaluate(without_ones(tree), env, torch), evaluate(tree, env, torch))


# --- a Hopper feature, and a chip ------------------------


def test_a_stream_of_hopper_is_in_the_files_that_the_recipe_names() -> None:
    """The recipe names all files that know the existing stream, and a second stream needs the same
    files.

    Proofs are exempt, because they cover pairs of positions whatever kernels read for them.
    """
    steps = re.findall(r"^\d\. `([\w./]+)`", SECTIONS["Add a Hopper feature"], re.MULTILINE)
    of_hopper = [
        *(
            path
            for path in ROOT.glob("kgen/kernels/attention/schedules/hopper/*.py")
            if path.stem != "prove"
        ),
        *ROOT.glob("templates/attention/hopper/*.j2"),
    ]
    assert len(of_hopper) > 20
    name = re.compile(r"pair(?![a-z])", re.IGNORECASE)
    knowing = {
        path.relative_to(ROOT).as_posix() for path in of_hopper if name.search(path.read_text())
    }
    assert knowing == {*steps}
    assert len(steps) <= 4


def test_a_chip_is_its_numbers(copy: Copy) -> None:
    assert copy.follow("Add a chip") == ["kgen/sizes.py"]
    names = ("full", "retention_output", "rms_norm")
    files = copy.render(*(f"specs/{name}.yaml" for name in names))
    for spec in names:
        before = (ROOT / "generated" / spec / "triton.py").read_text().splitlines()
        after = files[f"{spec}/triton.py"].splitlines()
        assert any("(100," in line for line in before), spec
        # Only rows of tables, the stamp and the operator names change: each row for 100 also
        # has 103.
        rows = [
            line.replace("(100,)", "(103, 100)").replace("(100, ", "(103, 100, ") for line in before
        ]
        stamped = ("# inputs (", "# body (", "_LIBRARY = ")
        assert [x for x in after if not x.startswith(stamped)] == [
            x for x in rows if not x.startswith(stamped)
        ]
    run = copy.python("-c", "from kgen.verify.compiling import ARCHS; print(*ARCHS)")
    assert {"sm_103", "sm_103a", "sm_103f"} <= set(run.stdout.split())


# --- a schedule ------------------------

SCHEDULE = "Add a schedule"
SIMPLE = """kernel: attention
name: simple
dtype: fp16
head_dim: 32
"""
CALL = """
import torch
from kgen.verify import interpreter
interpreter.mend()
from generated.simple.triton import simple, simple_kernels

torch.manual_seed(0)
for queries, keys in ((1, 150), (1, 0), (5, 70)):
    half = dict(dtype=torch.float16, requires_grad=True)
    inputs = [torch.randn(2, 3, n, 32, **half) for n in (queries, keys, keys)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = simple(*inputs, return_lse=True)
    q, k, v = exact
    scores = q @ k.mT * 32**-0.5
    wanted = scores.softmax(-1) @ v, scores.logsumexp(-1)
    print(simple_kernels(*inputs))
    torch.testing.assert_close(results[0].double(), wanted[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(results[1].double(), wanted[1], atol=1e-4, rtol=1e-4)
    if keys:
        given = [torch.randn_like(x) for x in results]
        torch.autograd.backward(results, given)
        torch.autograd.backward(wanted, [x.double() for x in given])
        for x, y in zip(inputs, exact):
            torch.testing.assert_close(x.grad.double(), y.grad, atol=5e-3, rtol=2e-3)
"""
FOLDERS = {"kgen/kernels/attention/schedules/one_query", "templates/attention/one_query"}


def test_a_schedule_is_one_folder(copy: Copy) -> None:
    listed, *rest = copy.follow(SCHEDULE)
    assert listed == "kgen/kernels/attention/schedules/__init__.py"
    assert {path.rpartition("/")[0] for path in rest} == FOLDERS
    files = copy.render(SIMPLE, SIMPLE.replace("simple", "masked") + "mask_mod: kv_idx <= q_idx\n")
    assert "one_query" not in files["masked/triton.py"]
    assert "computes the plain softmax" in copy.kgen("explain", "text1.yaml")
    assert "One query takes a kernel of its own." in copy.kgen("explain", "text0.yaml")


def test_the_launcher_takes_the_first_schedule_that_serves(copy: Copy) -> None:
    """The same launcher has the branches of both schedules, in the order of the list."""
    copy.follow(SCHEDULE)
    files = copy.render(SIMPLE.replace("32", "128"))
    (after_delta,) = re.findall(
        r"^        if one_query:\n.*?^        else:\n", files["simple/triton.py"], re.M | re.S
    )
    lines = [line.strip().partition("(")[0] for line in after_delta.splitlines()]
    own = ["if one_query:", "_one_query_backward"]
    assert lines == [*own, "elif on_hopper:", "_hopper", "else:"]
    assert "one_query" not in files["simple/hopper.py"]


def test_the_kernels_of_a_new_schedule_are_right(copy: Copy) -> None:
    copy.follow(SCHEDULE)
    copy.render(SIMPLE)
    right = copy.interpret(CALL)
    assert right.returncode == 0, right.stderr
    one, none, several = right.stdout.splitlines()
    assert one == none == "{'forward': 'one_query', 'backward': 'one_query'}"
    assert several.startswith("{'forward': 'portable: ")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.where(live, tl.sum", "tl.where(kv_idx < SK - 1, tl.sum"),
        ("do[None, :], 1) - delta)", "do[None, :], 1))"),
    ],
    ids=["without the last key", "without delta"],
)
def test_a_wrong_kernel_of_a_new_schedule_is_found(copy: Copy, right: str, wrong: str) -> None:
    copy.follow(SCHEDULE)
    copy.render(SIMPLE)
    kernels = copy.root / "generated/simple/triton.py"
    text = kernels.read_text()
    assert text.count(right) == 1
    kernels.write_text(text.replace(right, wrong))
    assert "Mismatched elements" in copy.interpret(CALL).stderr


# --- a schedule for one chip ------------------------

ON_A_CHIP = "Add a schedule for one chip"
SECOND = SIMPLE.replace("simple", "second").replace("32", "128")
OWN = {
    "ampere.py": ("sm_80", "Triton's interpreter"),
    "hopper.py": ("sm_90a", "the Gluon interpreter"),
}


def verified(copy: Copy, *cases: str) -> subprocess.CompletedProcess[str]:
    """Verify some cases of a spec in interpreters."""
    asked = (part for case in cases for part in ("--case", case))
    command = ("-m", "kgen", "verify", "text0.yaml", "--device", "cpu", "--no-record")
    return copy.python(*command, "--as-is", *asked)


@pytest.mark.thorough
def test_a_second_chip_is_one_folder(copy: Copy) -> None:
    listed, *rest = copy.follow(ON_A_CHIP)
    assert listed == "kgen/kernels/attention/schedules/__init__.py"
    folders = {folder.replace("one_query", "ampere") for folder in FOLDERS}
    assert {path.rpartition("/")[0] for path in rest} == folders
    files = copy.render(SECOND)
    assert {f"second/{name}" for name in ("triton.py", *OWN)} <= set(files)
    explained = html.unescape(copy.kgen("explain", "text0.yaml", "--format", "html"))
    for arch, interpreter in OWN.values():
        assert f"{arch}; small cases in {interpreter}" in explained

    run = verified(copy, "one", "ampere-few", "hopper-one")
    assert run.returncode == 0, run.stderr + run.stdout
    for file, (_, interpreter) in OWN.items():
        assert f"{file}: 2 small cases in {interpreter}" in run.stdout + run.stderr

    kernels = copy.root / "generated/second/ampere.py"
    assert files["second/ampere.py"].count("m_i + tl.log2(l_i)") == 1
    kernels.write_text(files["second/ampere.py"].replace("m_i + tl.log2(l_i)", "m_i"))
    run = verified(copy, "ampere-few", "hopper-one")
    assert run.returncode == 1
    wrong = re.findall(r"^wrong: (.*?):", run.stderr, re.MULTILINE)
    assert {*wrong} == {f"second triton {group} ampere-few" for group in ("forward", "backward")}


# --- a target, and a family ------------------------


def test_a_target_is_one_folder(copy: Copy) -> None:
    touched = copy.follow("Add a target")
    own = ("kgen/kernels/norm/targets/eager/", "templates/norm/eager/")
    assert {path.rpartition("/")[0] + "/" for path in touched} == set(own)
    files = copy.render(f"{NORM}targets: {{triton: {{}}, eager: {{inference: true}}}}\n")
    assert {"sample/triton.py", "sample/eager.py", "sample/__init__.py"} < set(files)
    function = imported(copy.root / "generated/sample/eager.py", "copied_eager").sample
    make = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=make).bfloat16() for shape in ((5, 96), (96,)))
    want = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-6)
    torch.testing.assert_close(function(x, weight.requires_grad_()), want.bfloat16())
    assert not function(x, weight).requires_grad


def test_a_new_target_is_verified_as_others_are(copy: Copy) -> None:
    copy.follow("Add a target")
    copy.render(f"{NORM}targets: {{eager: {{}}}}\n")
    path = copy.root / "generated/sample/eager.py"
    subject = Subject(
        problem_of(loads(NORM, "x.yaml")), "eager", path, imported(path, "copied_case"), "cpu"
    )
    cases = family_of(subject.problem)
    groups = [
        (group, cases.case_names(subject.problem, group, True)[0])
        for group in ("forward", "backward")
    ]
    checks = [check for group, name in groups for check in cases.run_case(subject, group, name)]
    assert {check.name for check in checks} == {"out", "dx", "dweight"}
    assert all(check.ok for check in checks), checks


def test_a_new_target_is_part_of_the_language(copy: Copy) -> None:
    copy.follow("Add a target")
    said = copy.refuses(f"{NORM}targets: {{eager: {{inference: 1}}}}\n")
    assert "`targets.eager.inference` must be true or false" in said
    assert "the target `eager` is for plain norms" in copy.refuses(
        f"{NORM}output_mod: y * y\ntargets: {{eager: {{}}}}\n"
    )
    other = NORM.replace("norm\n", "attention\n", 1).replace(
        "norm: rms\nwidth: any", "head_dim: 64"
    )
    assert "`kernel: attention` does not support the target `eager`" in copy.refuses(
        f"{other}targets: {{eager: {{}}}}\n"
    )
    code = """
from pathlib import Path

from kgen.family import families
from kgen.spec.load import loads
from kgen.spec.schema import text
from kgen.verify.emitted import emitted_files

assert "One `eager.py`." in text()
(one,) = emitted_files(Path("generated"), loads({!r}, "sample.yaml"))
assert one.unable("cpu") is None and one.runtime.imports == ("torch",)
""".format(f"{NORM}targets: {{eager: {{}}}}\n")
    run = copy.python("-c", code)
    assert run.returncode == 0, run.stderr


def test_a_family_is_one_folder(copy: Copy) -> None:
    touched = copy.follow("Add a family")
    assert {path.split("/")[1 + path.startswith("kgen/")] for path in touched} == {"scaling"}
    copy.render("specs/halved.yaml")
    function = imported(copy.root / "generated/halved/eager.py", "copied_halved").halved
    assert torch.equal(function(POINTS), POINTS / 2)
    for form in ("text", "html"):
        assert "multiplied by 0.5" in copy.kgen("explain", "specs/halved.yaml", "--format", form)
    said = copy.refuses("kernel: scalin\nname: x\n")
    assert "did you mean `scaling`?" in said
    verified = copy.python("-m", "kgen", "verify", "specs/halved.yaml", "--device", "cpu")
    assert verified.returncode == 2
    assert "there is no reference for kernel `scaling` yet" in verified.stderr
    raced = copy.python("-m", "kgen", "bench", "specs/halved.yaml")
    assert raced.returncode == 2
    assert "kernel `scaling` has no benchmark" in raced.stderr
    assert math.isfinite(float(function(torch.ones(1))))
