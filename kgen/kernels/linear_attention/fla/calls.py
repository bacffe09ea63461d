"""Calls of flash-linear-attention and of mamba-ssm, computed by the kernels of a package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

STEPS = 16
"""The largest number of tokens for which kernels step the state token by token."""


@dataclass(frozen=True)
class Layer:
    """The kernels of a package. `packed` are the kernels for packed sequences.

    The decode functions are None if the spec has no such pass. `normed` is True if the kernels
    normalize q and k.
    """

    name: str
    kernels: Callable[..., Any]
    packed: Callable[..., Any]
    decode: Callable[..., Any] | None
    packed_decode: Callable[..., Any] | None
    state_dtype: torch.dtype
    normed: bool

    def refuse(self, function: str, **values: Any) -> None:
        """Raise `ValueError` for options that kernels do not support, unless they are off."""
        given = [name for name, value in values.items() if value is not None and value is not False]
        if given:
            text = ", ".join(f"{name}={_shown(values[name])}" for name in given)
            raise ValueError(
                f"{self.name}: {function} does not support {text}. "
                "Leave it out, or use the original library"
            )

    def delta(self, function: str, tensors: Mapping[str, Tensor], options: Delta) -> Any:
        """Return (o, final state) of a delta rule, in the layout of the call."""
        tensors, final = self._given(function, dict(tensors), options)
        o, state = self._run(tensors, options, steps=options.steps)
        if options.head_first:
            o = o.transpose(1, 2)
        return o, _flipped(state, options.state_v_first) if final else None

    def _given(
        self, function: str, x: dict[str, Tensor], options: Delta
    ) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors in the form of the kernels, with computed gates and norms."""
        self.refuse(function, **options.refused)
        if options.unknown:
            raise ValueError(f"{self.name}: {function} does not know {', '.join(options.unknown)}")
        if options.head_first:
            x = {name: tensor.transpose(1, 2) for name, tensor in x.items()}
        if self.normed and not options.normed:
            raise ValueError(
                f"{self.name}: {function} needs use_qk_l2norm_in_kernel=True, because the spec has "
                "`qk_norm: l2`"
            )
        if options.normed and not self.normed:
            x["q"], x["k"] = _unit(x["q"]), _unit(x["k"])
        if options.gated:
            x["g"] = _gate(f"{self.name}: {function}", x["g"], options.a_log, options.dt_bias)
        beta = x["beta"].float()
        if options.sigmoid:
            beta = beta.sigmoid() * (2 if options.negative else 1)
        elif options.negative:
            raise ValueError(
                f"{self.name}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"
            )
        return {**x, "g": x["g"].float(), "beta": beta}, bool(options.final)

    def _run(self, x: dict[str, Tensor], options: Delta, *, steps: bool) -> tuple[Tensor, Any]:
        """Return o and the final state [N, HV, K, V]."""
        initial = _flipped(options.initial_state, options.state_v_first)
        packing = {} if options.cu_seqlens is None else {"cu_seqlens": options.cu_seqlens}
        if initial is not None:
            initial = initial.to(self.state_dtype)
        q, k, v = (x.pop(name) for name in "qkv")
        keywords = {**x, **packing, "scale": options.scale}
        decode = self.packed_decode if packing else self.decode
        learned = (q, k, v, *x.values(), initial)
        if steps and decode and q.shape[1] <= STEPS and not _needs_gradients(*learned):
            count = len(options.cu_seqlens) - 1 if options.cu_seqlens is not None else q.shape[0]
            if initial is None:
                shape = (count, v.shape[2], k.shape[3], v.shape[3])
                state = q.new_zeros(shape, dtype=self.state_dtype)
            else:
                state = initial.detach().clone(memory_format=torch.contiguous_format)
            return decode(q, k, v, state, **keywords), state
        kernels = self.packed if packing else self.kernels
        o, final = kernels(q, k, v, **keywords, initial_state=initial, output_final_state=True)
        return o, final

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, options: Scan) -> Any:
        """Return the output of Mamba 2, or (output, final states)."""
        dt = dt.float()
        if options.dt_bias is not None:
            dt = dt + options.dt_bias.float()
        if options.dt_softplus:
            dt = softplus(dt)
        low, high = options.dt_limit
        if low > 0 or high < float("inf"):
            dt = dt.clamp(low, high)
        by_head = options.d is not None and options.d.dim() == 1
        d = options.d.float() if by_head else dt.new_zeros(dt.shape[2])  # type: ignore[union-attr]
        initial = _flipped(options.initial_states, True)
        o, final = self.kernels(
            c,
            b,
            x,
            g=dt * a.float(),
            beta=dt,
            d=d,
            initial_state=None if initial is None else initial.to(self.state_dtype),
            output_final_state=True,
        )
        if options.d is not None and not by_head:
            o = (o + x * options.d).to(o.dtype)
        if options.z is not None:
            o = o * torch.nn.functional.silu(options.z)
        return (o, _flipped(final, True)) if options.final else o


@dataclass(frozen=True)
class Delta:
    """The options of a call of a delta rule."""

    scale: float | None
    initial_state: Tensor | None
    final: bool
    normed: bool
    cu_seqlens: Tensor | None = None
    gated: bool = False
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    sigmoid: bool = False
    negative: bool = False
    state_v_first: bool = False
    head_first: bool = False
    steps: bool = False
    """True for functions without gradients, which may step the state."""
    refused: Mapping[str, Any] = field(default_factory=dict)
    """Options that must be off."""
    unknown: tuple[str, ...] = ()
    """Names of options that no version of the library has."""


@dataclass(frozen=True)
class Scan:
    """The options of a call of Mamba 2's scan."""

    d: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    final: bool


class Replacements:
    """The functions of other modules that were replaced, and by which names."""

    def __init__(self, name: str, names: Mapping[str, Callable[..., Any]]) -> None:
        self.name, self.names = name, names
        self.before: list[tuple[ModuleType, str, Any]] = []

    def register(self, *modules: ModuleType) -> None:
        """Replace the functions that modules import or define. Raise `ValueError` for a module that
        has none.
        """
        for module in modules:
            found = [name for name in self.names if hasattr(module, name)]
            if not found:
                wanted = ", ".join(self.names)
                raise ValueError(
                    f"{self.name}: {module.__name__} has none of the functions {wanted}"
                )
            for name in found:
                self.before.append((module, name, getattr(module, name)))
                setattr(module, name, _for_models(self.names[name]))

    def unregister(self) -> None:
        """Restore the replaced functions."""
        while self.before:
            module, name, function = self.before.pop()
            setattr(module, name, function)


def _for_models(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without the arguments that it does not name.

    transformers passes all keywords of a model to each layer, and drops them before the functions
    of other libraries.
    """
    known = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{n: value for n, value in keywords.items() if n in known})

    return call


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _flipped(state: Tensor | None, flipped: bool) -> Tensor | None:
    """Return a state [N, HV, K, V] as [N, HV, V, K], or the reverse."""
    return state.transpose(-1, -2) if flipped and state is not None else state


def _unit(x: Tensor) -> Tensor:
    """Return rows divided by sqrt(sum(row**2) + 1e-6), computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _gate(place: str, g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """Return -exp(A_log) * softplus(g + dt_bias), by head or by column of the keys."""
    if a_log is None:
        raise ValueError(f"{place} needs A_log if use_gate_in_kernel=True")
    by_column = g.dim() == 4
    rate = -a_log.float().exp()
    rate = rate.reshape(-1, 1) if by_column else rate.reshape(-1)
    g = g.float()
    if dt_bias is not None:
        g = g + dt_bias.float().reshape(g.shape[2:])
    return rate * softplus(g)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)
