"""The contract of an emitted file on plain PyTorch, for quick tests: keys past lens[b] are hidden.

fp32, head sizes 8 and 8, any group of heads.
"""

import torch

_LIBRARY = torch.library.Library(
    "kgen_test_" + "".join(c if c.isalnum() else "_" for c in __name__), "FRAGMENT"
)


def _operator(function):
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))

    def in_float32(*args):
        with torch.autocast(args[0].device.type, enabled=False):
            return function(*args)

    _LIBRARY.impl(name, in_float32, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _LIBRARY.ns), name).default


def _empty(like):
    """In the memory order of `like`: [B, S, H, D] or [B, H, S, D]."""
    b, h, s, d = like.shape
    by_token = like.stride(1) < like.stride(2)
    return like.new_empty(b, s, h, d).transpose(1, 2) if by_token else like.new_empty(like.shape)


def _weights(q, k, lens, scale):
    hidden = torch.arange(k.shape[2], device=q.device) >= lens[:, None, None, None]
    k = k.masked_fill(hidden.mT, 0.0).repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.where(hidden, 0.0, torch.softmax(s, -1))
    return p, lse, k, hidden


@_operator
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    p, weights_lse, _, hidden = _weights(q, k, lens, scale)
    out = _empty(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    out.copy_(p @ v.masked_fill(hidden.mT, 0.0).repeat_interleave(q.shape[1] // v.shape[1], 1))
    lse.copy_(weights_lse)
    return out, lse


@torch.library.register_fake(_forward, lib=_LIBRARY)
def _(q, k, v, lens, scale):
    return _empty(q), q.new_empty(q.shape[:3])


@_operator
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, scale: float,
    out: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    p, _, full_k, hidden = _weights(q, k, lens, scale)
    group = q.shape[1] // k.shape[1]
    full_v = v.masked_fill(hidden.mT, 0.0).repeat_interleave(group, 1)
    ds = p * (do @ full_v.mT - (do * out).sum(-1, keepdim=True) + dlse[..., None])
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q * scale, p.mT @ do))
    gradients = ds @ full_k * scale, dk, dv
    return tuple(
        _empty(x).copy_(gradient) for x, gradient in zip((q, k, v), gradients, strict=True)
    )


@torch.library.register_fake(_backward, lib=_LIBRARY)
def _(q, k, v, lens, scale, out, do, dlse):
    return _empty(q), _empty(k), _empty(v)


class _Constant(torch.autograd.Function):
    """What a function gives, without a derivative: to ask for one is an error."""

    @staticmethod
    def forward(function, *args):
        return function(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def _setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[0])


def _gradient(ctx, do, dlse):
    q, k, v, lens, out = ctx.saved_tensors
    return *_Constant.apply(_backward, q, k, v, lens, ctx.scale, out, do, dlse), None, None


torch.library.register_autograd(_forward, _gradient, setup_context=_setup, lib=_LIBRARY)


def plain(q, k, v, *, lens, scale=None, return_lse=False):
    """Attention over [B, H, S, 8] float32 tensors where keys past lens[b] are hidden."""
    if any(t.ndim != 4 or t.shape[3] != 8 for t in (q, k, v)):
        raise ValueError("q, k and v must be [B, H, S, 8]")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (
            t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in (q, k, v)
        )
    if any(t.dtype != torch.float32 for t in (q, k, v)) or lens.dtype != torch.int32:
        raise TypeError("q, k and v must be float32 and lens int32")
    if (
        k.shape != v.shape
        or k.shape[0] != q.shape[0]
        or q.shape[1] % k.shape[1]
        or lens.shape != q.shape[:1]
    ):
        raise ValueError("shapes do not match")
    if any(t.device != q.device for t in (k, v, lens)):
        raise ValueError("k, v and lens must be where q is")
    if scale is not None and (type(scale) is not float or not 1e-38 < scale < 2e38):
        raise ValueError("scale must be a positive number, finite in float32")
    _Constant.apply(lambda *_: (), q, k, v)
    out, lse = _forward(q, k, v, lens, 8**-0.5 if scale is None else scale)
    return (out, lse) if return_lse else out
