"""Checks of block masks: lists against the mask of every pair, and calls with lists.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.verify.case import Case
from kgen.kernels.attention.verify.inputs import Inputs, call, differentiable, draw, fit, sized
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify.compare import same_bits
from kgen.verify.evaluate import evaluate
from kgen.verify.families import Subject, must_refuse

LENGTHS = (
    *(
        (1, 1),
        (1, 300),
        (300, 1),
        (127, 129),
        (128, 128),
        (129, 127),
        (255, 257),
        (256, 384),
        (640, 512),
    ),
    *((300, 900), (0, 5), (5, 0), (0, 0)),
    (1, 256 * BLOCK_SIZE + 1),  # more blocks than the kernel for lists reads at once
)
LONG = ((513, 1025), (1000, 700), (1024, 1024), (2049, 1500))
"""Further sizes on a GPU."""
MOST_PAIRS = 2**23
"""Largest number of pairs of a case. With tied lengths, the case of many blocks would have 2**30
pairs.
"""


def lists_every_pair(subject: Subject) -> None:
    """Check that each list has exactly the blocks with allowed pairs: partial, then whole blocks,
    both ascending.

    So each allowed pair is in one listed block, and a block without the mask has only allowed
    pairs.
    """
    for number, (sq, sk) in enumerate(LENGTHS + LONG * (subject.device != "cpu")):
        ints = ("mixed", "runs", "zero", "past")[number % 4]
        case = fit(subject.problem, Case(f"lists-{sq}-{sk}", sq, sk, batch=2, ints=ints), number)
        if case.sq * case.sk > MOST_PAIRS:
            continue
        inputs = draw(subject.problem, case, subject.device)
        _compare(subject.problem, inputs, build(subject, inputs))


def build(subject: Subject, inputs: Inputs) -> Any:
    """Return the block mask of some inputs from the emitted function."""
    return _maker(subject, inputs)()


def _maker(subject: Subject, inputs: Inputs) -> Callable[[], Any]:
    make = getattr(subject.module, f"{subject.problem.name}_block_mask")
    size = inputs.case.sizes
    given = {**inputs.cache, **inputs.buffers, **inputs.runtime}
    wanted = {n: v for n, v in given.items() if n in _keywords(make)}
    if "device" in _keywords(make):
        wanted["device"] = subject.device
    return partial(make, size["B"], size["HQ"], size["HKV"], size["SQ"], size["SK"], **wanted)


def _keywords(function: Any) -> tuple[str, ...]:
    code = function.__code__
    names: tuple[str, ...] = code.co_varnames[
        code.co_argcount : code.co_argcount + code.co_kwonlyargcount
    ]
    return names


def _compare(problem: Problem, inputs: Inputs, got: Any) -> None:
    size = inputs.case.sizes
    lists = [got[i : i + 3] for i in range(1, len(got), 3)]
    batches, heads = got.shape[:2]
    assert got.shape[2:] == (size["SQ"], size["SK"]), f"a block mask of {got.shape} for {size}"
    for b in range(size["B"]):
        for h in range(size["HQ"]):
            kinds = block_kinds(pairs(problem, inputs, b, h))
            for side, (partial_count, full_count, indices) in enumerate(lists):
                at = (b if batches > 1 else 0, h if heads > 1 else 0)
                own = kinds.T if side else kinds
                where = f"{inputs.case.name}, (b, h) = ({b}, {h}), {'qk'[1 - side]} blocks"
                assert torch.equal(partial_count[at].cpu(), (own == 1).sum(1).int()), (
                    f"{where}: partial ones"
                )
                assert torch.equal(full_count[at].cpu(), (own == 2).sum(1).int()), (
                    f"{where}: full ones"
                )
                assert torch.equal(indices[at].cpu(), _listed(own)), f"{where}: the lists"


def pairs(problem: Problem, inputs: Inputs, b: int, h: int) -> Tensor:
    """Return the allowed pairs, bool [SQ, SK] on the CPU, from the trees as written.

    A modified score that is always -inf counts as masked.
    """
    size = inputs.case.sizes
    sq, sk = size["SQ"], size["SK"]
    length = int(inputs.cache["kv_lens"][b]) if "kv_lens" in inputs.cache else sk
    first = length - sq if problem.aligned_to_end else 0
    index = {"q_idx": first + torch.arange(sq)[:, None], "kv_idx": torch.arange(sk)[None, :]}
    env: dict[str, Any] = {**size, **inputs.params, "inf": torch.inf, "b": b, "h": h, **index}
    env["h_kv"] = h // (size["HQ"] // size["HKV"])
    env |= {name: value.cpu() for name, value in (inputs.buffers | inputs.cache).items()}
    allowed = (index["kv_idx"] < length).expand(sq, sk)
    if problem.mask_mod is not None:
        allowed = allowed & evaluate(problem.mask_mod, env, torch)
    if problem.score_mod is not None:
        some = torch.tensor([-1e4, 0.0, 1e4])[:, None, None]
        scores = evaluate(problem.score_mod, {**env, "score": some}, torch)
        allowed = allowed & ~(torch.as_tensor(scores) == -torch.inf).expand(3, sq, sk).all(0)
    return allowed


def block_kinds(allowed: Tensor) -> Tensor:
    """Return the kind of each block of a mask [SQ, SK]: 0 empty, 1 partial, 2 whole.

    Blocks past an end are partial.
    """
    sq, sk = allowed.shape
    rows, columns = -(-sq // BLOCK_SIZE), -(-sk // BLOCK_SIZE)
    padded = torch.zeros(rows * BLOCK_SIZE, columns * BLOCK_SIZE, dtype=torch.int64)
    padded[:sq, :sk] = allowed
    counts = padded.view(rows, BLOCK_SIZE, columns, BLOCK_SIZE).sum((1, 3))
    return (counts > 0).int() + (counts == BLOCK_SIZE**2).int()


def _listed(kinds: Tensor) -> Tensor:
    """Return the columns of each row: kind 1, then 2, then 0."""
    order = (kinds == 2).int() + 2 * (kinds == 0).int()
    return order.sort(dim=1, stable=True).indices.int()


def reuses_lists(subject: Subject) -> None:
    """Check that a call returns the same bits with and without a block mask, and refuses a wrong
    one.
    """
    inputs = sized(subject.problem, "reuse", 200, 200, subject.device)
    built = build(subject, inputs)
    for (name, value), other in zip(
        _results(subject, inputs), _results(subject, inputs, built), strict=True
    ):
        assert same_bits(value, other[1]), f"{name} differs with a block mask built before"
    step = BLOCK_SIZE * max(1, subject.problem.q_multiple // BLOCK_SIZE)
    longer = build(
        subject, sized(subject.problem, "longer", 200 + step, 200 + step, subject.device)
    )
    wrong: Mapping[str, Any] = {
        "a block mask of other lengths": longer,
        "a block mask of as many blocks but other lengths": built._replace(
            shape=(*built.shape[:2], 199, 200)
        ),
        "a tuple": tuple(built),
        "lists alone": built.kv_indices,
    }
    must_refuse(
        {what: partial(call, subject.function, inputs, block_mask=m) for what, m in wrong.items()}
    )


def compiles_with_lists(subject: Subject) -> None:
    """Check that calls with a block mask return the bits of a plain call under `fullgraph=True`.

    The backend is `aot_eager`, because the traced operators are the same for every backend.
    """
    inputs = sized(subject.problem, "compiled", 140, 140, subject.device)
    make = _maker(subject, inputs)
    built, expected = make(), call(subject.function, inputs)
    torch._dynamo.reset()
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}
    given = torch.compile(lambda mask: call(subject.function, inputs, block_mask=mask), **options)
    made = torch.compile(lambda: call(subject.function, inputs, block_mask=make()), **options)
    assert same_bits(given(built), expected), "differs with a block mask as an argument"
    assert same_bits(made(), expected), "differs with a block mask made inside"


def _results(
    subject: Subject, inputs: Inputs, block_mask: Any = None
) -> Iterator[tuple[str, Tensor]]:
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}
    names = {b.name for b in subject.problem.buffers}
    out, lse = call(subject.function, inputs, block_mask=block_mask, return_lse=True)
    yield from (("out", out), ("lse", lse))
    if wanted:
        grads = torch.autograd.grad(out, list(wanted.values()), inputs.dout)
        # Gradients of buffers may be summed by atomics.
        yield from ((f"d{n}", g) for n, g in zip(wanted, grads, strict=True) if n not in names)


BLOCK_MASKS: Mapping[str, Callable[[Subject], None]] = {
    "block-mask-lists": lists_every_pair,
    "block-mask-reuse": reuses_lists,
    "block-mask-compiled": compiles_with_lists,
}
