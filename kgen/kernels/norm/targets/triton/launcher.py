"""The launcher of a norm in Triton, from argument checks to gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kgen.kernels.norm.plan.planning import Backward, NormPlan, Operand
from kgen.kernels.norm.targets.arguments import (
    FP8,
    HEADS_WIDTH,
    Check,
    meaning,
)
from kgen.kernels.norm.targets.function import norm_docstring, norm_function
from kgen.kernels.norm.targets.triton.kernels import stored
from kgen.kernels.norm.targets.triton.launcher_templates import (
    BackwardOperator,
    Call,
    Docstring,
    ForwardOperator,
    Function,
    HeadSchedule,
    Launcher,
    Output,
    RowSchedule,
)
from kgen.targets.code import Assign, Statement, op, text
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import filled
from kgen.targets.triton.text import TORCH_DTYPES, other_dtype


class Launchers:
    """Print the launcher of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.heads = self.spec.heads is not None
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.scale = bool(self.spec.quantize and self.spec.quantize.scale == "per_tensor")
        scale = ["scale"] if self.scale else []
        self.tensors = [*(o.name for o in plan.operands), *scale]
        self.numbers = {"eps": "float"} | {n: str(p.type) for n, p in self.runtime.items()}
        self.outputs = self._outputs()

    def launcher(self, launching: LaunchFunctions | None) -> Launcher:
        name, backward = self.spec.name, self._backward()
        written = (*self.outputs, *(backward.gradients if backward else ()))
        reshaped = "math.prod(x.shape[:-1]), x.shape[-1]"
        if self.heads:
            reshaped = "math.prod(x.shape[:-2]), *x.shape[-2:]"
        return Launcher(
            name=name,
            launching=launching,
            fp8=self.spec.quantize is not None,
            shared=not self.heads,
            schedule=HeadSchedule() if self.heads else RowSchedule(name),
            rows="[positions, heads, width]" if self.heads else "[rows, width]",
            reshaped=reshaped,
            rounds=any(o.narrow for o in written),
            forward=self._forward(),
            backward=backward,
            function=self._function(),
        )

    @property
    def returned(self) -> str:
        """Return the names of the results."""
        return ", ".join(o.name for o in self.outputs if o.name not in self.plan.saves)

    # --- the function ---

    def _function(self) -> Function:
        spec, plan = self.spec, self.plan
        learned = " or ".join(f"{o.name}.requires_grad" for o in plan.operands if o.grad)
        needs_grad = op("torch.is_grad_enabled() and ({0}() or {1})", "_transformed", learned)
        return filled(
            Function,
            norm_function(plan, self.tensors, self.runtime),
            docstring=self._docstring(),
            x_words="[..., H, D]" if self.heads else "[..., D]",
            dtype=TORCH_DTYPES[spec.dtypes["input"]],
            checks=tuple(self._checks()),
            save=needs_grad if plan.saves else text("False"),
            outputs=tuple(o.name for o in self.outputs),
            arguments=", ".join([*self.tensors, *self.numbers]),
            returned=self.returned,
        )

    def _docstring(self) -> Docstring:
        return filled(
            Docstring,
            norm_docstring(self.plan),
            arguments=tuple(self._words()),
            returned=self._returned(),
        )

    def _returned(self) -> str:
        """Describe the results of the function."""
        spec = self.spec
        shape = "[..., H, D]" if self.heads else "[..., D]"
        dtypes = TORCH_DTYPES | FP8
        words = [f"out {shape} {dtypes[spec.dtypes['output']]}"]
        if spec.quantize and spec.quantize.scale == "per_row":
            words.append("scale [..., 1] float32, by which to multiply out")
        if self.plan.stores_h:
            words.append(f"the sum x + residual {shape} {dtypes[spec.dtypes['residual']]}")
            if spec.input_mod:
                words[-1] = f"h {shape} {dtypes[spec.dtypes['residual']]}"
        return words[0] if len(words) == 1 else f"({'; '.join(words)})"

    def _shape(self, operand: Operand) -> tuple[str, str]:
        """Return the shape of an argument other than x, in Python and in words."""
        if operand.along == "column":
            return ("x.shape[-2:]", "[H, D]") if self.heads else ("x.shape[-1:]", "[D]")
        if operand.along == "row":
            return "x.shape[:-1]", "[..., H]" if self.heads else "[...]"
        return "x.shape", "[..., H, D]" if self.heads else "[..., D]"

    def _words(self) -> list[str]:
        words = [
            f"{o.name}: {self._shape(o)[1]} {TORCH_DTYPES[o.dtype]}, {meaning(o)}."
            for o in self.plan.operands
        ]
        words[0] = f"{words[0][:-1]}, {self._width_words()}."
        if self.scale:
            words.append("scale: one float32, by which the output is divided.")
        return words + [
            f"{n}: {p.type}, a parameter of the expressions." for n, p in self.runtime.items()
        ]

    def _width_words(self) -> str:
        width = self.spec.width
        if width == "any":
            return f"D at most {HEADS_WIDTH if self.heads else 2**18}"
        return f"D {width}" if isinstance(width, int) else f"D one of {', '.join(map(str, width))}"

    def _checks(self) -> Iterator[Check]:
        spec, width = self.spec, self.spec.width
        if width == "any":
            most = HEADS_WIDTH if self.heads else 2**18
            yield Check(
                f"not 1 <= x.shape[-1] <= {most}",
                f"rows of x must have 1 to {most} elements, got {{x.shape[-1]}}",
            )
        else:
            widths = (width,) if isinstance(width, int) else width
            words = " or ".join(map(str, widths))
            wrong = (
                f"x.shape[-1] != {width}"
                if isinstance(width, int)
                else f"x.shape[-1] not in {widths}"
            )
            yield Check(wrong, f"rows of x must have {words} elements, got {{x.shape[-1]}}")
        if isinstance(spec.heads, int):
            yield Check(
                f"x.shape[-2] != {spec.heads}",
                f"x must have {spec.heads} heads, got {{x.shape[-2]}}",
            )
        for o in self.plan.operands[1:]:
            shape, words = self._shape(o)
            yield self._dtype(o.name, o.dtype)
            got = f"got {{list({o.name}.shape)}} on {{{o.name}.device}}"
            yield Check(
                f"{o.name}.shape != {shape} or {o.name}.device != x.device",
                f"{o.name} must be {{list({shape})}} on {{x.device}}, {got}",
            )
        if self.scale:
            yield self._dtype("scale", "fp32")
            yield Check(
                "scale.numel() != 1 or scale.device != x.device",
                (
                    "scale must have one element on {x.device}, got {list(scale.shape)} on "
                    "{scale.device}"
                ),
            )

    def _dtype(self, name: str, dtype: str) -> Check:
        words = f"{name} must be a tensor of {TORCH_DTYPES[dtype]}, got {{_dtype({name})}}"
        return Check(other_dtype(name, [dtype]), words, "TypeError")

    # --- operators ---

    def _outputs(self) -> tuple[Output, ...]:
        """Return the tensors that the operator returns; `save` is true if backward needs the
        statistics.
        """
        spec, plan = self.spec, self.plan
        found = [Output("out", "x.shape", (TORCH_DTYPES | FP8)[spec.dtypes["output"]], "x")]
        if spec.quantize and spec.quantize.scale == "per_row":
            found.append(Output("scale", "(*x.shape[:-1], 1)", "float32", "x"))
        if plan.stores_h:
            found.append(Output("h", "x.shape", TORCH_DTYPES[spec.dtypes["residual"]], "x"))
        saved = (Output(n, "x.shape[:-1] if save else (0,)", "float32", "x") for n in plan.saves)
        return (*found, *saved)

    def _forward(self) -> ForwardOperator:
        plan = self.plan
        # In the kernel, h comes before the scale.
        others = [
            n for n in ("h", "scale") if n in (*self.tensors, *(o.name for o in self.outputs))
        ]
        pointers = [*(o.name for o in plan.forward.loads), "out", *others, *plan.saves]
        types = [f"{n}: Tensor" for n in self.tensors] + [
            f"{n}: {kind}" for n, kind in self.numbers.items()
        ]
        return ForwardOperator(
            name=self.spec.name,
            params=", ".join(types),
            outputs=self.outputs,
            rows=tuple(self._rows(plan.forward.loads)),
            scheduled="_, programs, constants" if self.heads else "groups, programs, constants",
            call=self._call(plan.forward.loads, pointers, "x", ["eps"]),
            flags=("SAVE=save",) if plan.saves else (),
        )

    def _backward(self) -> BackwardOperator | None:
        plan, backward = self.plan, self.plan.backward
        if backward is None:
            return None
        first = next(o.name for o in backward.loads if o.along == "element")
        loads = (*backward.loads, *plan.upstream)
        pointers = [*(o.name for o in loads), *plan.saves, *stored(backward)]
        saved = [*(o.name for o in backward.loads), *plan.saves]
        upstream = [o.name for o in plan.upstream]
        # Backward needs eps only if it computes the statistics again.
        kept = {n: kind for n, kind in self.numbers.items() if n != "eps" or not plan.saves}
        params = ["dout: Tensor", "dh_out: Optional[Tensor]"] if plan.stores_h else ["dout: Tensor"]
        params += [f"{n}: Tensor" for n in saved] + [f"{n}: {kind}" for n, kind in kept.items()]
        return BackwardOperator(
            name=self.spec.name,
            params=", ".join(params),
            first=first,
            gradients=self._gradients(backward, first),
            rows=tuple(self._rows(loads)),
            programs=self._programs(first),
            call=self._call(loads, pointers, first, [] if plan.saves else ["eps"]),
            sums=tuple(g.name for g in backward.columns),
            inputs=", ".join([*self.tensors, *self.numbers]),
            outputs=tuple(o.name for o in self.outputs),
            saved=tuple(saved),
            scalars=", ".join(kept),
            upstream=", ".join([*upstream, "*_"] if plan.saves else upstream),
            arguments=", ".join([*upstream, *saved, *kept]),
            out_dtype=TORCH_DTYPES[self.spec.dtypes["output"]],
            returned=self._given(backward),
        )

    def _programs(self, first: str) -> Statement:
        least, note = text('constants["PARTS"]'), "no rows: sums of nothing are zeros"
        if self.heads:
            least, note = op('{0}({1}.shape[1], constants["ROWS"])', "_cdiv", first), ""
        values = (op("max({0}, 1)", "groups"), op("max({0}, {1})", "programs", least))
        return Assign(("groups", "programs"), values, note=note)

    def _gradients(self, backward: Backward, first: str) -> tuple[Output, ...]:
        shapes = {
            "element": "shape",
            "row": "shape[:-1]",
            "column": "shape[-2:]" if self.heads else "shape[-1:]",
        }
        grads = (*backward.elements, *backward.rows, *backward.columns)
        return tuple(Output(g.name, shapes[g.along], TORCH_DTYPES[g.dtype], first) for g in grads)

    def _given(self, backward: Backward) -> str:
        """Return the gradient of each argument of the forward operator."""
        given = {g.of: g.name if g.same_as is None else f"d{g.same_as}" for g in backward.gradients}
        return ", ".join(given.get(n, "None") for n in (*self.tensors, *self.numbers))

    # --- calls of kernels ---

    def _rows(self, loads: Iterable[Operand]) -> Iterator[str]:
        """Yield lines that prepare tensors: [rows, width] for elements, contiguous for others."""
        there = [o for o in loads if o.name != "dh_out"]
        yield from (f"{o.name} = _rows({o.name})" for o in there if o.along == "element")
        yield from (f"{o.name} = {o.name}.contiguous()" for o in there if o.along != "element")
        yield from (
            f"{o.name} = None if {o.name} is None else _rows({o.name})"
            for o in loads
            if o.name == "dh_out"
        )

    def _call(
        self, loads: Iterable[Operand], pointers: list[str], first: str, scalars: list[str]
    ) -> Call:
        """Return the launch arguments of a kernel; `first` is a tensor [rows, width]."""
        dims = 2 if self.heads else 1
        # The kernel does not read the strides of a missing gradient.
        there = {"dh_out": "(dout if dh_out is None else dh_out)"}
        strides = [
            f"*{there.get(o.name, o.name)}.stride()[:{dims}]" for o in loads if o.along == "element"
        ]
        sizes = [f"{first}.shape[0]", f"_slots(groups, constants, {first}.device)"]
        if self.heads:
            sizes = [f"*{first}.shape[:2]"]
        return Call(
            ", ".join(pointers), ", ".join(strides), ", ".join([*self.runtime, *scalars, *sizes])
        )
