"""Calls of linear attention from Python and from C with the same tensors, to compare their
launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kgen.build.runtime import triton as runtime
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.schedules import CHOICES
from kgen.kernels.linear_attention.targets.triton.native_tensors import arguments_of
from kgen.kernels.linear_attention.verify import inputs as layers
from kgen.verify.families import problem_of
from support.packages.c_calls import Case, Launches, Tensors
from support.packages.c_on_paper import Library, Paper

LAYER_CASES = (
    Case(heads=8, sq=133, sk=7),
    Case(batch=1, heads=8, sq=1, sk=1),
    Case(heads=8, sq=70, sk=0, layout="offset"),
    Case(heads=8, sq=0, sk=0),
    Case(batch=1, heads=8, sq=64, sk=64, spare=5),
)
"""Lengths are `sq`, but the last packed sequence has `sk` tokens, and `spare` tokens follow it."""
EACH = {"none": {}, "fp32": {"dtype": torch.float32}, "bf16": {"dtype": torch.bfloat16}}
"""States after each token of a step, by the name of their dtype."""


def layer_tensors(loaded: Any, case: Case) -> Tensors:
    """Return the inputs of a call by their names in Python, with all states and cotangents."""
    packed = loaded.spec.varlen
    lengths = (*[case.sq] * (case.batch - 1), case.sk) if packed else (case.sq,)
    layout = {"bhsd": "contiguous"}.get(case.layout, case.layout)
    drawn = layers.Case(
        name="paper",
        lengths=lengths,
        batch=1 if packed else case.batch,
        heads=loaded.spec.heads.qk or case.heads,
        layout="contiguous" if packed and case.spare else layout,
        tail=case.spare if packed else 0,
    )
    inputs = layers.draw(problem_of(loaded), drawn, "cpu")
    found: Tensors = dict(inputs.tensors)
    found["initial_state"] = found["initial_state"].contiguous()
    if packed:
        found["cu_seqlens"] = inputs.keywords["cu_seqlens"].int()
    found["do"] = inputs.cotangents["o"].contiguous()
    found["dfinal_state"] = inputs.cotangents["final_state"].contiguous()
    return {**found, "scale": 0.3}


def layer_launches(
    paper: Paper, library: Library, launcher: ModuleType, loaded: Any, case: Case, arch: int
) -> tuple[Launches, Launches]:
    """Return the launches of Python and of C: every combination of states in each pass."""
    calls = _Calls(paper, library, launcher, loaded, case, arch)
    for initial, final, ends in itertools.product((False, True), repeat=3):
        if ends and not case.sq + case.sk:  # there are no states within sequences
            continue
        calls.forward(initial=initial, final=final, ends=ends)
        if calls.backward and not ends:
            calls.back(initial=initial, final=final)
    if "decode" in loaded.spec.passes:
        for each in EACH:
            calls.decode(each)
    return calls.want, calls.got


class _Calls:
    """The calls of one case."""

    def __init__(
        self,
        paper: Paper,
        library: Library,
        launcher: ModuleType,
        loaded: Any,
        case: Case,
        arch: int,
    ) -> None:
        self.paper, self.library, self.launcher = paper, library, launcher
        self.loaded, self.case, self.arch = loaded, case, arch
        self.given = layer_tensors(loaded, case)
        self.backward = "backward" in loaded.spec.passes
        plan = plan_linear_attention(loaded)
        self.arguments = arguments_of(plan, loaded.called)
        self.want: Launches = {}
        self.got: Launches = {}
        self.saved = torch.empty(0, dtype=torch.uint8)
        self.results: tuple[torch.Tensor, ...] = ()
        paper.device(arch, case.multiprocessors)

    def inputs(self, *names: str) -> Tensors:
        """Return the inputs of C, with the tensors of some names."""
        own = [*self.arguments.inputs]
        own += [self.arguments.cu_seqlens] if self.arguments.cu_seqlens else []
        found = {one.member: self.given[one.name] for one in own}
        return found | {name: self.given[name] for name in names} | {"scale": 0.3}

    def python(self, name: str, operator: Any, more: Mapping[str, Any]) -> Any:
        """Call an operator in Python, and record its launches and the sizes of its tensors."""
        passed = self.given | more
        arguments = [passed[one.name] for one in operator._schema.arguments]
        self.paper.begin(self.known)
        chip = (self.launcher, self.arch, self.case.multiprocessors)
        # C launches the kernels for every chip.
        declined = {name: lambda *_: False for name in CHOICES if hasattr(self.launcher, name)}
        portable = mock.patch.dict(vars(self.launcher), declined)
        with self.paper.under_python(*chip), _kept(), portable:
            results = operator(*arguments)
        self.want[name], self.rooms = self.paper.launched, self.paper.rooms()
        return results

    @property
    def known(self) -> dict[str, torch.Tensor]:
        """The inputs."""
        return {n: x for n, x in self.given.items() if isinstance(x, torch.Tensor)}

    def c(self, name: str, pass_: str, given: Mapping[str, Any]) -> None:
        """Call C, and record its launches. No tensors in its memory overlap."""
        self.paper.begin(self.known)
        assert self.library.call(pass_, given) == 0, self.library.error()
        self.got[name] = self.paper.launched
        for memory in (self.library.workspace, self.saved):
            crowded = self.paper.crowded(self.rooms, memory)
            assert crowded == [], crowded

    def forward(self, *, initial: bool, final: bool, ends: bool) -> None:
        """Call forward."""
        given, name = self.given, f"forward {initial} {final} {ends}"
        state = given["initial_state"] if initial else None
        asked = {"initial_state": state, "final": final, "within": ends, "keep": True}
        self.results = self.python(name, self.launcher._forward_op, asked)
        o, last, each, *_ = self.results
        called = self.inputs() | {"o": o, "initial_state": state}
        called |= {"final_state": last if final else None, "chunk_states": None}
        if ends:
            own = each.shape[1:]
            packed = self.loaded.spec.varlen
            called["chunk_states"] = each if packed else each.view(len(given["q"]), -1, *own)
        if hasattr(self.library.arguments, "saved"):
            self.saved = torch.empty(self._bytes(called) + 16, dtype=torch.uint8)
            self.saved = self.saved[-self.saved.data_ptr() % 16 :][: self._bytes(called)]
            if final:  # otherwise, the workspace holds the tensors that backward would read
                called["saved"] = self.saved
        self.c(name, "forward", called)

    def _bytes(self, called: Mapping[str, Any]) -> int:
        function = getattr(self.library.library, f"{self.library.name}_saved")
        return int(function(ctypes.byref(self.library.made(called))))

    def back(self, *, initial: bool, final: bool) -> None:
        """Call backward after forward."""
        given, name = self.given, f"backward {initial} {final}"
        operator = self.launcher._backward_op
        kept = [one.name for one in operator._schema.arguments if one.name not in given]
        own = dict(zip(kept, self.results[3:], strict=True))
        own["initial_state"] = given["initial_state"] if initial else None
        own["dfinal_state"] = given["dfinal_state"] if final else None
        dq, dk, dv, *_, dinitial = self.python(name, operator, own)
        called = self.inputs() | {"do_": given["do"], "dq": dq, "dk": dk, "dv": dv}
        called |= {"initial_state": own["initial_state"], "dfinal_state": own["dfinal_state"]}
        called["dinitial_state"] = dinitial if initial else None
        for one in self.arguments.learned:
            called[one.argument.member] = self._learned(one.argument)
        if hasattr(self.library.arguments, "saved"):
            called["saved"] = self.saved
        self.c(name, "backward", called)

    def _learned(self, one: Any) -> torch.Tensor:
        """Return memory for the gradient of a buffer, filled with garbage."""
        q, v, chunk = self.given["q"], self.given["v"], self.loaded.spec.chunk_size
        (B, T, H, _), HV = q.shape, v.shape[2]
        slots = B * -(-T // chunk)
        if self.loaded.spec.varlen:
            slots = T // chunk + len(self.given["cu_seqlens"]) - 1
        numbers = {"B": B, "T": T, "H": H, "HV": HV, "slots": slots}
        sizes = [eval(str(one_).replace("/", "//"), {}, numbers) for one_ in one.extents]
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return torch.full(sizes, 7.0, dtype=dtype[one.element])

    def decode(self, each: str) -> None:
        """Call the function that steps states."""
        given, name = self.given, f"decode {each}"
        state, (B, T, HV, V) = given["initial_state"].clone(), given["v"].shape
        states = None
        if EACH[each] and T:
            states = torch.zeros(B, T, HV, given["q"].shape[3], V, **EACH[each])
        o = self.python(name, self.launcher._decode_op, {"state": state, "states": states})
        self.saved = self.saved[:0]
        called = self.inputs() | {"o": o, "state": state, "token_states": states}
        called["token_states_bf16"] = int(each == "bf16")
        self.c(name, "decode", called)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Keep the tensors of launches, so that no address is used twice in a call."""
    launch, kept = runtime.Cubin.launch, []

    def keeping(cubin: runtime.Cubin, grid: Any, args: Any) -> None:
        kept.append(args)
        launch(cubin, grid, args)

    with mock.patch.object(runtime.Cubin, "launch", keeping):
        yield
