"""The launcher of a norm in CUDA: `cuda.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import Type
from kgen.kernels.norm.plan import planning
from kgen.kernels.norm.plan.planning import Gradient, Operand
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.arguments import (
    FP8,
    Check,
    meaning,
    norm_signature,
)
from kgen.kernels.norm.targets.cuda.backward import OF_ALL, OF_HEADS, Backward, Grid
from kgen.kernels.norm.targets.cuda.forward import Forward
from kgen.kernels.norm.targets.cuda.parts import Launch
from kgen.kernels.norm.targets.cuda.spelled import Spelled
from kgen.kernels.norm.targets.formula import formula
from kgen.kernels.norm.targets.function import (
    NormDocstring,
    NormFunction,
    norm_docstring,
    norm_function,
)
from kgen.targets import opening
from kgen.targets.cuda.loader import Loader
from kgen.targets.launching import ImportsLaunch
from kgen.targets.template import Template, filled
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Call:
    """A launch of the forward or backward kernel."""

    launch: Launch
    prepared: tuple[str, ...]
    """Lines that prepare tensors for the kernel."""
    elements: tuple[str, ...]
    """The tensors whose rows the kernel reads."""
    vectors: tuple[str, ...]
    """Other tensors that must be aligned."""
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class ForwardOperator(Template):
    """The operator of the forward pass."""

    template: ClassVar[str] = "norm/cuda/_forward_operator.j2"

    name: str
    params: str
    allocated: str
    """The arguments of `_outputs`."""
    names: tuple[str, ...]
    save_words: str
    outputs: tuple[str, ...]
    """Allocations."""
    sizes: str
    sizes_at: str
    call: Call

    def launch_functions(self) -> Iterable[str]:
        return ("_operator",)

    @property
    def types(self) -> str:
        """An operator with one output returns a tensor, not a tuple of one."""
        if len(self.names) == 1:
            return "Tensor"
        return f"tuple[{', '.join('Tensor' for _ in self.names)}]"

    @property
    def first(self) -> str:
        """The index `[0]` if there is only one output."""
        return "[0]" if len(self.names) == 1 else ""


@dataclass(frozen=True)
class ColumnsCall:
    """The launches of the kernels that sum over rows."""

    names: tuple[str, ...]
    """The partial sums."""
    any_width: bool
    grid: Grid
    scratch: int
    """The number of values per row that `columns_kernel` reads."""
    arguments: tuple[str, ...]
    finalize_arguments: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def heads(self) -> str:
        return self.grid.heads or "1"


@dataclass(frozen=True)
class BackwardOperator(Template):
    """The operator of the backward pass, and its registration with autograd."""

    template: ClassVar[str] = "norm/cuda/_backward_operator.j2"

    name: str
    params: str
    arguments: str
    """The arguments of the operator."""
    gradient_words: str
    names: tuple[str, ...]
    gradients: tuple[str, ...]
    """Allocations."""
    sums: tuple[str, ...]
    """The gradients that are sums over rows."""
    sizes: str
    sizes_at: str
    call: Call
    columns: ColumnsCall | None
    inputs: str
    """The arguments of the forward operator."""
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    """The tensors that autograd saves."""
    scalars: tuple[str, ...]
    """The numbers that autograd saves."""
    cotangents: tuple[str, ...]
    shape_source: str
    """A tensor with the shape of x."""
    out_dtype: str
    stores_h: bool
    returned: str

    def launch_functions(self) -> Iterable[str]:
        return ("_once", "_operator", "_register_autograd")

    @property
    def types(self) -> str:
        return f"tuple[{', '.join('Tensor' for _ in self.names)}]"

    @property
    def first(self) -> str:
        """The index `[0]` if there is only one gradient."""
        return "[0]" if len(self.names) == 1 else ""


@dataclass(frozen=True)
class Docstring(NormDocstring, Template):
    """The docstring of the spec's function without its first line."""

    template: ClassVar[str] = "norm/cuda/_docstring.j2"

    arguments: tuple[str, ...]
    returned: str


@dataclass(frozen=True)
class Checked:
    """A tensor whose dtype and shape are checked."""

    name: str
    dtype: str
    shape: str


@dataclass(frozen=True)
class Function(NormFunction, Template):
    """The spec's function."""

    template: ClassVar[str] = "norm/cuda/_function.j2"

    docstring: Docstring
    x_words: str
    checks: tuple[Check, ...]
    operands: tuple[Checked, ...]
    learned: tuple[str, ...]
    """The tensors whose gradients need statistics that forward saves."""
    outputs: tuple[str, ...]
    arguments: str
    """The arguments of the operator."""
    returned: str

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cast", "_dense", "_real")
        yield from self.numbers.launch_functions()
        yield from self.derivatives.launch_functions()
        if self.learned:
            yield "_transformed"


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """`cuda.py`."""

    template: ClassVar[str] = "norm/cuda/norm.py.j2"

    name: str
    summary: str
    formula: tuple[str, ...]
    x_words: str
    dtype: str
    """The dtype of x."""
    passes_words: tuple[str, ...]
    returned: str
    usage: str
    multiple: tuple[str, ...]
    """The parameter `multiple`, if the rows of a thread are a multiple of it apart."""
    apart_words: tuple[str, ...]
    vector: int
    launches: tuple[Launch, ...]
    loader: Loader
    forward: ForwardOperator
    backward: BackwardOperator | None
    function: Function

    def launch_functions(self) -> Iterable[str]:
        return ("_library",)


def module_of(
    spelled: Spelled, loader: Loader, forward: Forward, backward: Backward | None
) -> Module:
    """Return `cuda.py` of a plan."""
    return _Modules(spelled).module(loader, forward, backward)


class _Modules:
    """Print `cuda.py` of one plan."""

    def __init__(self, spelled: Spelled) -> None:
        self.spelled = spelled
        self.plan, self.spec, self.runtime = spelled.plan, spelled.spec, spelled.runtime
        self.heads = bool(self.spec.heads)
        quantize = self.spec.quantize.scale if self.spec.quantize else None
        # A scale for the whole output is an argument. Scales of rows are an output.
        self.scale = ["scale"] if quantize == "per_tensor" else []
        self.tensors = [*(o.name for o in self.plan.operands), *self.scale]
        self.returned = ["out"]
        if quantize == "per_row":
            self.returned.append("scale")
        if self.plan.stores_h:
            self.returned.append("h")
        self.outputs = (*self.returned, *self.plan.saves)
        self.kinds = {
            n: "int" if p.scalar is Type.INT else "float" for n, p in self.runtime.items()
        }
        self.save = ["save"] if self.plan.saves else []
        self.x_words = "[..., H, width]" if self.heads else "[..., width]"
        self.sizes = ("heads, width", "-2:") if self.heads else ("width", "-1")

    def module(self, loader: Loader, forward: Forward, backward: Backward | None) -> Module:
        spec, multiples = self.spec, self.spelled.multiples
        apart = "rows of one thread a multiple of `multiple` apart"
        return Module(
            name=spec.name,
            summary=opening(spec),
            formula=tuple(formula(self.plan)),
            x_words=self.x_words,
            dtype=TORCH_DTYPES[spec.dtypes["input"]],
            passes_words=passes_words(self.plan),
            returned=", ".join(self.returned),
            usage=norm_signature(self.plan).usage,
            multiple=("multiple",) if multiples else (),
            apart_words=(apart,) if multiples else (),
            vector=self.spelled.vector,
            launches=(forward.launch, backward.launch) if backward else (forward.launch,),
            loader=loader,
            forward=self._forward(forward),
            backward=self._backward(backward) if backward else None,
            function=self._function(),
        )

    # --- the function ---

    def _function(self) -> Function:
        plan = self.plan
        operands = [Checked(o.name, TORCH_DTYPES[o.dtype], self._shape(o)) for o in plan.operands]
        return filled(
            Function,
            norm_function(plan, self.tensors, self.runtime),
            docstring=self._docstring(),
            x_words=self.x_words,
            checks=tuple(self._checks()),
            operands=(*operands, *(Checked(n, "float32", "()") for n in self.scale)),
            learned=tuple(o.name for o in plan.operands if o.grad) if plan.saves else (),
            outputs=self.outputs,
            arguments=", ".join([*self.tensors, *self.runtime, "eps", *self.save]),
            returned=", ".join(self.returned),
        )

    def _docstring(self) -> Docstring:
        words = [
            f"{o.name}: {self._words(o)} {TORCH_DTYPES[o.dtype]}, {meaning(o)}."
            for o in self.plan.operands
        ]
        words += [f"{n}: one float32, by which the output is divided." for n in self.scale]
        words += [
            f"{n}: {p.type}, a parameter of the expressions." for n, p in self.runtime.items()
        ]
        return filled(
            Docstring,
            norm_docstring(self.plan),
            arguments=tuple(words),
            returned=self._returned(),
        )

    def _returned(self) -> str:
        said = {
            "out": "out, shaped as x",
            "scale": "scale [..., 1] float32, by which to multiply out",
            "h": "h, the normed sum, shaped as x",
        }
        words = [said[name] for name in self.returned]
        return words[0] if len(words) == 1 else f"({'; '.join(words)})"

    def _shape(self, operand: Operand) -> str:
        """Return the shape of an argument, in Python."""
        dims = 2 if self.heads else 1
        return {"element": "x.shape", "row": "x.shape[:-1]", "column": f"x.shape[-{dims}:]"}[
            operand.along
        ]

    def _words(self, operand: Operand) -> str:
        """Describe the shape of an argument."""
        heads = "H, " if self.heads else ""
        if operand.name == "x":
            return f"[..., {heads}width]"
        return {"element": "as x", "row": "[...]", "column": f"[{heads}width]"}[operand.along]

    def _checks(self) -> Iterator[Check]:
        """Yield the checks of the shape of x."""
        width, heads = self.spec.width, self.spec.heads
        if width == "any":
            wrong, words = f"not 1 <= x.shape[-1] <= {MAX_WIDTH}", f"1 to {MAX_WIDTH}"
        else:
            widths = [width] if isinstance(width, int) else width
            wrong, words = f"x.shape[-1] not in {tuple(widths)}", " or ".join(map(str, widths))
        yield Check(wrong, f"rows of x must have {words} elements, got {{x.shape[-1]}}")
        if isinstance(heads, int):
            yield Check(
                f"x.shape[-2] != {heads}", f"x must have {heads} heads, got {{x.shape[-2]}}"
            )

    # --- operators ---

    def _forward(self, forward: Forward) -> ForwardOperator:
        params = [f"{n}: Tensor" for n in self.tensors] + [
            f"{n}: {kind}" for n, kind in self.kinds.items()
        ]
        params += ["eps: float", *(f"{n}: bool" for n in self.save)]
        sizes, sizes_at = self.sizes
        words = "; without `save` no statistics, which backward alone needs"
        return ForwardOperator(
            name=self.spec.name,
            params=", ".join(params),
            allocated=", ".join(["x", *self.save]),
            names=self.outputs,
            save_words=words if self.save else "",
            outputs=tuple(self._allocated(name) for name in self.outputs),
            sizes=sizes,
            sizes_at=sizes_at,
            call=_call(forward, "out"),
        )

    def _allocated(self, output: str) -> str:
        dtypes, spec = TORCH_DTYPES | FP8, self.spec
        if output == "scale":
            return _empty("(*x.shape[:-1], 1)", "float32", "x")
        if output in self.plan.saves:
            return _empty("x.shape[:-1] if save else 0", "float32", "x")
        return _empty(
            "x.shape", dtypes[spec.dtypes["output" if output == "out" else "residual"]], "x"
        )

    def _backward(self, backward: Backward) -> BackwardOperator:
        plan, b = self.plan, self.plan.backward
        assert b is not None
        given = [o.name for o in backward.loads if o.name not in ("dout", "dh_out", "h")]
        saved = [*(["h"] if plan.stores_h else []), *plan.saves, *given]
        upstream = [o.name for o in plan.upstream]
        scalars = self.kinds if plan.saves else self.kinds | {"eps": "float"}
        types = dict.fromkeys([*upstream, *saved], "Tensor") | scalars
        results = (*b.elements, *b.rows, *b.columns)
        of_shape = (o.name for o in backward.loads if o.along == "element" and o.name != "dout")
        sizes, sizes_at = self.sizes
        return BackwardOperator(
            name=self.spec.name,
            params=", ".join(f"{n}: {of}" for n, of in types.items()),
            arguments=", ".join(types),
            gradient_words=", ".join(g.of for g in results),
            names=tuple(f"d_{g.of}" for g in results),
            gradients=tuple(map(self._gradient, results)),
            sums=tuple(f"d_{g.of}" for g in b.columns),
            sizes=sizes,
            sizes_at=sizes_at,
            call=_call(backward),
            columns=self._columns_call(b, backward),
            inputs=", ".join([*self.tensors, *self.runtime, "eps", *("_" for _ in self.save)]),
            outputs=self.outputs,
            saved=tuple(saved),
            scalars=tuple(scalars),
            cotangents=(*upstream, *(f"_{s}" for s in plan.saves)),
            shape_source="h" if plan.stores_h else next(of_shape),
            out_dtype=(TORCH_DTYPES | FP8)[self.spec.dtypes["output"]],
            stores_h=plan.stores_h,
            returned=self._gradients(b),
        )

    def _gradient(self, gradient: Gradient) -> str:
        """Return the allocations of gradients, with the shape of dout without the axes of their
        sums.
        """
        dims = 2 if self.heads else 1
        shapes = {
            "element": "dout.shape",
            "row": "dout.shape[:-1]",
            "column": f"dout.shape[-{dims}:]",
        }
        return _empty(shapes[gradient.along], TORCH_DTYPES[gradient.dtype], "dout")

    def _columns_call(self, b: planning.Backward, backward: Backward) -> ColumnsCall | None:
        if not b.columns:
            return None
        return ColumnsCall(
            names=tuple(f"d_{g.of}_part" for g in b.columns),
            any_width=self.spelled.any_width,
            grid=OF_HEADS if self.heads else OF_ALL,
            scratch=len(backward.kernel.scratch),
            arguments=backward.columns_arguments,
            finalize_arguments=backward.finalize_arguments,
        )

    def _gradients(self, b: planning.Backward) -> str:
        """Return the gradient of each argument of the forward operator."""
        found = {g.of: f"d_{g.of if g.same_as is None else g.same_as}" for g in b.gradients}
        numbers = [*self.runtime, "eps", *self.save]
        of_tensors = [found.get(o.name, "None") for o in self.plan.operands]
        return ", ".join([*of_tensors, *("None" for _ in numbers)])


def passes_words(plan: planning.NormPlan) -> tuple[str, ...]:
    """Describe the statistics that need two passes over a row."""
    return ("mean and variance in two passes",) if plan.layer else ()


def _call(kernel: Forward | Backward, *outputs: str) -> Call:
    loads = kernel.loads
    return Call(
        launch=kernel.launch,
        prepared=tuple(_prepared(loads)),
        elements=tuple(o.name for o in loads if o.along == "element"),
        vectors=(*outputs, *(o.name for o in loads if o.along == "column")),
        arguments=kernel.arguments,
    )


def _prepared(loads: Sequence[Operand]) -> Iterator[str]:
    """Yield lines that prepare tensors: [rows, width] for elements, contiguous for others."""
    for o in loads:
        yield (
            f"{o.name} = _flat({o.name})"
            if o.along == "element"
            else f"{o.name} = {o.name}.contiguous()"
        )


def _empty(shape: str, dtype: str, like: str) -> str:
    return f"torch.empty({shape}, dtype=torch.{dtype}, device={like}.device)"
