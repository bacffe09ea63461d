"""The attention of a serving spec as a layer of a serving engine describes it.

Layers of vLLM and SGLang name a window, a score cap, ALiBi slopes and sinks. An emitted backend has
the values of its spec, and compares each layer with them. A mask or a score that no layer can name
replaces the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.nodes import Node, Type, Var, buffers_of, variables
from kgen.expr.softmax_form import Q_IDX, SCORE
from kgen.kernels.attention.adapt.covered import at_field, only, reach_of, slopes_of, width_of
from kgen.kernels.attention.adapt.derived import DISTANCE, Variant
from kgen.kernels.attention.fields import MOST
from kgen.kernels.attention.spec import AttentionSpec
from kgen.spec.load import Loaded
from kgen.spec.source import Document

KNOWN = frozenset({"q_idx", "kv_idx", "score", "inf"})
"""The names in expressions that an engine knows in each step, besides numbers."""


@dataclass(frozen=True)
class Engine:
    """A serving engine: the option of `kgen adapt`, its name, and the tensors that it passes."""

    option: str
    label: str
    slopes: bool
    """True if layers pass slopes of ALiBi."""
    two_widths: bool
    """True if keys and values may have different numbers of columns."""


VLLM = Engine("vllm", "vLLM", slopes=True, two_widths=False)
SGLANG = Engine("sglang", "SGLang", slopes=False, two_widths=True)
TAKEN = frozenset({"backend", "register"})
"""Names in the package of a backend, which a spec cannot have."""


@dataclass(frozen=True)
class Served:
    """A serving spec that an engine can call."""

    loaded: Loaded

    @property
    def spec(self) -> AttentionSpec:
        """The model of the spec."""
        spec: AttentionSpec = self.loaded.spec
        return spec

    @cached_property
    def variant(self) -> Variant:
        """The canonical trees of the spec."""
        return Variant(self.loaded)

    @cached_property
    def score(self) -> Node:
        """The score with the values of parameters."""
        return self.variant.with_numbers(self.variant.trees.get("score_mod", SCORE))

    @cached_property
    def softcap(self) -> float | None:
        """The cap of scores, or None."""
        return self.variant.softcap

    @cached_property
    def slopes(self) -> str | None:
        """The buffer [HQ] with the slopes of ALiBi, or None."""
        found = slopes_of(self.variant, Q_IDX, causal=True)
        return found if found and self.spec.buffers[found].shape == ("HQ",) else None

    @property
    def own_score(self) -> bool:
        """True if no layer can describe the score."""
        return self.score != SCORE and self.softcap is None and self.slopes is None

    @cached_property
    def causal(self) -> bool:
        """True if no query sees a later key."""
        return any(reach_of(one, Q_IDX) == 0 for one in self._conditions)

    @cached_property
    def rest(self) -> tuple[Node, ...]:
        """The conditions of the mask other than the causal one."""
        return tuple(one for one in self._conditions if reach_of(one, Q_IDX) != 0)

    @property
    def window(self) -> int | None:
        """The number of keys in a window of constant width, or None."""
        return width_of(self.rest[0], Q_IDX) if len(self.rest) == 1 else None

    @property
    def window_param(self) -> str | None:
        """The run-time parameter that is the number of keys in the window, or None."""
        for name, param in self.spec.params.items():
            whole = param.runtime and param.type == "int"
            if whole and self.rest == (only(call("lt", DISTANCE, Var(name, Type.INT))),):
                return name
        return None

    @property
    def own_mask(self) -> bool:
        """True if no layer can describe the mask."""
        return bool(self.rest) and self.window is None and self.window_param is None

    @property
    def _conditions(self) -> list[Node]:
        return [self.variant.with_numbers(one) for one in self.variant.conditions]

    @property
    def words(self) -> str:
        """A description of the layers that the kernels fit."""
        words = "causal layers"
        if self.window is not None:
            words = f"layers with a window of {self.window} keys"
        elif self.window_param is not None:
            words = "causal layers with any window or none"
        elif self.own_mask:
            words = "causal layers without a window, whose mask it replaces"
        words += f", scores capped at {self.softcap!r}" if self.softcap is not None else ""
        words += ", slopes of ALiBi" if self.slopes else ""
        words += ", scores of its own" if self.own_score else ""
        return words + (", attention sinks" if self.spec.sinks else "")


def served(variants: Sequence[Loaded], engine: Engine) -> Served:
    """Return a spec that the layers of an engine can call.

    Raise `KgenError` with all reasons why they cannot.
    """
    loaded = variants[0]
    if "serve" not in loaded.spec.passes:
        message = f"`--for {engine.option}` needs the pass `serve`"
        raise KgenError(at_field(loaded, "passes", message, "write `passes: [forward, serve]`"))
    found = Served(loaded)
    wrong = [*_wrong_fields(found, engine, len(variants)), *_wrong_names(found, engine)]
    wrong += _wrong_expressions(found, engine)
    if wrong:
        raise KgenError(dict.fromkeys(wrong))
    return found


def _wrong_fields(found: Served, engine: Engine, variants: int) -> Iterator[Diagnostic]:
    """Yield the fields of a spec that layers of an engine do not have."""
    spec, label = found.spec, engine.label
    wide = spec.head_dim.qk != spec.head_dim.v and not engine.two_widths
    fields = (
        (
            "dtype",
            variants > 1,
            f"a server of {label} runs one dtype and one head dim",
            "write one dtype and one head dim, and render a spec for each",
        ),
        ("name", spec.name in TAKEN, "the package already has this name", "choose another name"),
        ("head_dim", wide, f"{label} has one head dim for keys and values", "write one number"),
        (
            "kv_dtype",
            spec.kv_dtype == "int8",
            f"{label} has no cache in int8 with one scale",
            "write `kv_dtype: fp8_e4m3`",
        ),
        (
            "targets",
            spec.targets.triton is None,
            f"{label} calls the files of the target `triton`",
            "add the target `triton`",
        ),
    )
    for field, holds, message, hint in fields:
        if holds:
            yield at_field(found.loaded, field, message, hint)


def _wrong_names(found: Served, engine: Engine) -> Iterator[Diagnostic]:
    """Yield the buffers and run-time parameters that an engine has no value for."""
    spec, label = found.spec, engine.label
    document = Document(found.loaded.text, found.loaded.path.as_posix())
    for name in spec.buffers:
        if name == found.slopes and engine.slopes:
            continue
        message = f"layers of {label} have no value for the buffer `{name}`"
        hint = "write numbers into the expression"
        if engine.slopes:
            hint += ", or slopes of ALiBi: [HQ] fp32, `score + slopes[h] * (kv_idx - q_idx)`"
        yield document.key("no-adapter", f"`{spec.name}`: {message}", ("buffers", name), hint)
    for name, param in spec.params.items():
        if param.runtime and name != found.window_param:
            message = f"layers of {label} have no value for the parameter `{name}`"
            hint = f"write a number, or the mask `q_idx >= kv_idx and q_idx - kv_idx < {name}`"
            yield document.key("no-adapter", f"`{spec.name}`: {message}", ("params", name), hint)
        elif param.runtime and param.most < MOST:
            message = f"`within` of `{name}` excludes layers without a window"
            place = ("params", name, "within")
            yield document.value("no-adapter", f"`{spec.name}`: {message}", place, "remove it")


def _wrong_expressions(found: Served, engine: Engine) -> Iterator[Diagnostic]:
    """Yield the expressions whose values an engine cannot keep the same in each step."""
    loaded, label = found.loaded, engine.label
    if not found.causal:
        message = f"layers of {label} see no later keys, and this mask does not say so"
        yield at_field(loaded, "mask_mod", message, "add the condition `q_idx >= kv_idx`")
    known = KNOWN | {n for n, p in found.spec.params.items() if p.runtime}
    own = {"mask_mod": found.rest, "score_mod": (found.score,) if found.own_score else ()}
    for field, trees in own.items():
        names = {name for tree in trees for name in variables(tree)} - known
        if names and not any(buffers_of(tree) for tree in trees):
            message = f"`{', '.join(sorted(names))}` has other values in each step or rank"
            yield at_field(loaded, field, message, "use positions: q_idx and kv_idx")
