"""`scripts/large`: GPU calls of emitted files whose tensors have more than 2**31 elements.

The script repeats the tensors of a small call along the axes that grow with sequences or rows. Two
small calls show these axes. Every copy in the outputs and gradients must equal the result of the
small call. Sums over sequences or rows are not checked, because they have no copies. Chunks of
tokens are independent as well, so one long sequence is another large call.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from support.running import parts

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, KgenError
from kgen.spec.load import load
from kgen.verify.families import Example, problem_of
from kgen.verify.toolchain import describe, import_file
from on_gpu.by_spec import Report, emitted

ROOT = Path(__file__).resolve().parents[2]
REPORT = Report(Path(__file__).parent / "large.json")
LIMIT = 2**31 + 2**27
"""Minimum number of elements of the largest tensor of a call. Chunk states do not count: they are
larger than all tokens.
"""
STATES = ("h", "dh")
LONG = 4096
"""Keys per sequence at which one kernel computes all gradients."""
AT_ONCE = 2**27
"""Elements per comparison."""
FEW = 2
"""Sequences of the small call. Norms have 16 rows per sequence."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Tried:
    """Result of the large calls of a file. `wrong` lists differences and exceptions."""

    spec: str
    elements: int
    wrong: tuple[str, ...]


@app.command()
def large(
    specs: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(help="Spec files whose emitted Triton files run. Default: all."),
    ] = None,
    jobs: parts.Jobs = 1,
) -> None:
    """Call emitted files with more than 2**31 elements.

    Exit 1 if a result differs. It needs a GPU, with up to 80 GB per job.

    Correct results are recorded in tests/on_gpu/large.json.
    """

    def run() -> int:
        import torch

        if not torch.cuda.is_available():
            raise KgenError(Diagnostic("missing-device", "there is no GPU"))
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            tasks = []
            for path in specs or sorted(ROOT.glob("specs/*.yaml")):
                if emitted(load(path).spec.name).exists():
                    tasks.append(pool.submit(tried, path, "cuda"))
                else:
                    terminal.line(f"{path}: has no emitted Triton file")
            for future in as_completed(tasks):
                found = future.result()
                terminal.line(
                    f"{found.spec}: {'; '.join(found.wrong) or f'{found.elements} elements'}"
                )
                failed.extend(found.wrong)
                row = {"device": describe("cuda")["device"], "elements": found.elements}
                REPORT.enter(found.spec, None if found.wrong else row)
        return int(bool(failed))

    failed: list[str] = []
    raise SystemExit(terminal.guarded(run, Format.TEXT))


def tried(path: Path, device: str, limit: int = LIMIT) -> Tried:
    """Run the large calls of a spec's Triton file."""
    loaded = load(path)
    problem, file = problem_of(loaded), emitted(loaded.spec.name)
    function = getattr(import_file(file, f"kgen_large_{problem.name}"), problem.name)
    found = [
        repeated(problem, function, example, device, limit) for example in small_calls(problem)
    ]
    return Tried(
        problem.name,
        max(n for n, _ in found),
        tuple(message for _, wrong in found for message in wrong),
    )


def repeated(
    problem: Any,
    function: Any,
    example: Callable[[Any, int, str], Example],
    device: str,
    limit: int,
) -> tuple[int, list[str]]:
    """Run a large call. Return the number of elements of its largest input, and the failures."""
    small, more = (example(problem, number, device) for number in (FEW, FEW + 1))
    want, other = (_detached(one.run(function)) for one in (small, more))
    growing = {name: axis_of(x, other[name]) for name, x in want.items()}
    inputs = _tensors(small)
    axes = {name: axis_of(x, _tensors(more)[name]) for name, x in inputs.items()}
    grown = [(inputs, axes), (want, growing)]
    sizes = [
        x.numel()
        for tensors, along in grown
        for name, x in tensors.items()
        if along[name] is not None and name not in STATES
    ]
    times = limit // max(sizes) + 1
    big = {name: _repeated(name, x, axes[name], times) for name, x in inputs.items()}
    try:
        got = _detached(_with(small, big).run(function))
        wrong = [
            f"{name} differs by {found:.3g}"
            for name, axis in growing.items()
            if axis is not None and (found := difference(got[name], want[name], axis)) > 1e-2
        ]
    except Exception as error:
        wrong = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    return max(x.numel() for x in big.values()), wrong


def _attention(problem: Any, number: int, device: str, length: int = 64) -> Example:
    from kgen.kernels.attention.verify.inputs import Case, differentiable, draw, fit

    packed = ((length, length), (40, 40)) * number if problem.varlen else ()
    case = fit(problem, Case("large", length, length, batch=number, few=length > 64), 0)
    inputs = draw(problem, replace(case, packed=packed), device)
    wanted = differentiable(problem, inputs) if "backward" in problem.passes else {}
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens, strict=False))
    keywords = {
        "scale": inputs.case.scale,
        **starts,
        **inputs.cache,
        **inputs.buffers,
        **inputs.runtime,
    }
    return Example((inputs.q, inputs.k, inputs.v), keywords, wanted, (inputs.dout,))


def _long_attention(problem: Any, number: int, device: str) -> Example:
    return _attention(problem, number, device, LONG)


def _norm(problem: Any, number: int, device: str) -> Example:
    from kgen.kernels.norm.verify.inputs import arguments, cases, differentiable, draw

    (case,) = (c for c in cases(problem, quick=True) if c.name == "plain")
    inputs = draw(problem, replace(case, rows=(16 * number,)), device)
    wanted = differentiable(problem, inputs) if "backward" in problem.passes else {}
    args, keywords = arguments(problem, inputs)
    return Example(
        args, keywords, wanted, tuple(inputs.cotangents.get(name) for name in problem.outputs)
    )


def _chunks_of_sequences(problem: Any, number: int, device: str) -> Example:
    return _chunk_output(problem, (64, 40) * number if problem.varlen else (104,), number, device)


def _chunks_of_a_sequence(problem: Any, number: int, device: str) -> Example:
    """Return a call of one long sequence.

    Packed sequences do not need it, because they are consecutive anyway.
    """
    return _chunk_output(problem, (2 * problem.chunk_size * number,), 1, device)


def _chunk_output(problem: Any, lengths: tuple[int, ...], batch: int, device: str) -> Example:
    from kgen.kernels.chunk_output.verify.inputs import Case, differentiable, draw

    case = Case("large", lengths, batch=1 if problem.varlen else batch, heads=problem.heads or 2)
    inputs = draw(problem, case, device)
    wanted = differentiable(problem, inputs) if "backward" in problem.passes else {}
    return Example((), {**inputs.tensors, **inputs.keywords}, wanted, (inputs.do,))


def small_calls(problem: Any) -> tuple[Callable[[Any, int, str], Example], ...]:
    """Return functions that make calls of a number of sequences, rows or pieces of a sequence."""
    if problem.kernel == "chunk_output":
        return (
            (_chunks_of_sequences,)
            if problem.varlen
            else (_chunks_of_sequences, _chunks_of_a_sequence)
        )
    return {"attention": (_attention, _long_attention), "norm": (_norm,)}[problem.kernel]


def _detached(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.detach() for name, x in tensors.items()}


def axis_of(few: Any, more: Any) -> int | None:
    """Return the dimension that grows with the number of sequences, or None."""
    found = [i for i, (a, b) in enumerate(zip(few.shape, more.shape, strict=True)) if a != b]
    assert len(found) < 2
    return found[0] if found else None


def difference(got: Any, want: Any, axis: int) -> float:
    """Return the largest difference of a copy of `want` in `got`, relative to the largest element
    of `want`.

    It is infinite if one of the two is NaN.
    """
    import torch

    copies = got.unflatten(axis, (-1, want.shape[axis])).movedim(axis, 0)
    exact, most = want.double(), 0.0
    size = float(want.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
    for some in copies.split(max(1, AT_ONCE // max(1, want.numel()))):
        apart = torch.where(some == want, 0.0, (some.double() - exact).abs()).amax()
        most = max(most, float(apart.nan_to_num(math.inf)))
    return most / size


def _tensors(example: Example) -> dict[str, Any]:
    """Return the arguments and cotangents of an example by name."""
    import torch

    args = {f"argument {i}": x for i, x in enumerate(example.args)}
    grads = {f"cotangent {i}": x for i, x in enumerate(example.cotangents)}
    return {
        name: x
        for name, x in {**args, **example.kwargs, **grads}.items()
        if isinstance(x, torch.Tensor)
    }


def _repeated(name: str, x: Any, axis: int | None, times: int) -> Any:
    import torch

    x = x.detach()
    if axis is None:
        return x
    if name.startswith("cu_seqlens"):
        # Shift the offsets of each copy by the tokens of the copies before it.
        starts = x[:-1] + x[-1] * torch.arange(times, device=x.device)[:, None]
        return torch.cat([starts.flatten(), (x[-1] * times)[None]]).to(x.dtype)
    copies = x.unsqueeze(axis).expand(*x.shape[:axis], times, *x.shape[axis:])
    return copies.reshape(*x.shape[:axis], times * x.shape[axis], *x.shape[axis + 1 :])


def _with(example: Example, tensors: Mapping[str, Any]) -> Example:
    """Return the example with other tensors."""
    places = {id(x): tensors[name] for name, x in _tensors(example).items()}
    return Example(
        tuple(places.get(id(x), x) for x in example.args),
        {name: places.get(id(x), x) for name, x in example.kwargs.items()},
        {name: places[id(x)].requires_grad_() for name, x in example.wanted.items()},
        tuple(places.get(id(x), x) for x in example.cotangents),
    )


def rows() -> Iterator[tuple[str, str]]:
    """Yield the rows for the docs: files of the current text that passed."""
    for device, count in sorted(Counter(row["device"] for row in REPORT.current()).items()):
        yield f"calls of more than 2**31 elements on {device}", f"right in {count} files"


if __name__ == "__main__":
    app()
