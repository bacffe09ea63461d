"""Names of a spec in CUDA kernels of norms. A name that the file already has gets an underscore.

kgen does not parse C++ to collect names. The file's own names are listed here, and
`tests/kernels/norm/test_cuda_names.py` checks that none is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from kgen.expr.functions import TABLE
from kgen.targets.code import CUDA

# Names are compared in lower case, so constants are in lower case too. The list has words and
# macros of C++ that Python does not have.
TAKEN = frozenset(
    """
    t v i n p s to from left most share place first round turn step begin live rank vector vectors
    column prefetch ring moments stage stages sums sum squares deviations largest inverse scale
    scratch hs outs out_of h_of for_each held head lane stripe total shared means statistic finish
    one mine theirs row_parts row_sums row_turn largest_parts largest_turn statistic_parts
    statistic_turn threads elements cluster blocks block single saves forward_shapes backward_shapes
    col early unroll stride further has staged part part_of there load store store_one
    rounded bf16 fp16 to_float access total_of copy_async address keep more side_by_side keeps_rows
    in_one_register any_number one_by_one owned unrolled cluster_asm arrive_with_shared
    forward_kernel forward_kernels backward_kernel backward_kernels columns_kernel finalize_kernel c
    r error configure config run run_first kernels launch stream size std make_index_sequence
    vector_of next_mean next_rstd head_of_row kept policy
    copies refills spare lanes end read write copy commit wait row_barrier cluster_barrier
    cluster_rank sum_lanes pragma endif maybe_unused auto bool char const constexpr default delete
    do double enum extern float goto inline int long namespace new operator private protected public
    register short signed sizeof static struct switch template this throw typedef union unsigned
    using virtual void volatile alignas alignof and_eq asm bitand bitor char16_t char32_t compl
    concept const_cast decltype dynamic_cast explicit export false friend mutable noexcept not_eq
    nullptr or_eq reinterpret_cast requires static_assert static_cast thread_local true typeid
    typename wchar_t xor xor_eq errno huge_val infinity int_max int_min linux m_e m_pi
    math_errhandling nan null stderr stdin stdout unix
    """.split()  # noqa: SIM905
)
FUNCTIONS = frozenset({"forward", "backward"})
"""Names of a spec whose namespace, such as `forward_kernels`, would clash with a function in it."""
CALLED = frozenset(row.spelled[CUDA].form.partition("(")[0] for row in TABLE.values())
"""Names of functions in expressions, without operators."""

FORMS = (
    "{}",
    "{}_ptr",
    "{}_stride",
    "{}_at",
    "{}_held",
    "{}_from",
    "{}_further",
    "{}_to",
    "{}_part",
)


def slots(name: str) -> str:
    """Return the type of a tensor's slots in shared memory."""
    words = name.rstrip("_")
    return f"{words.title().replace('_', '')}{'_' * (len(name) - len(words))}Slots"


def made_of(name: str) -> frozenset[str]:
    """Return all names that a file derives from a tensor, its gradient or a number, in lower
    case.
    """
    own = (name, f"d{name}")
    named = {form.format(n) for form in FORMS for n in own}
    return frozenset(named | {f"read_{name}", *(slots(n).lower() for n in own)})


def given_way(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Return the name in kernels for each name of a spec.

    `taken` are other names that depend on the spec.
    """
    there, found = TAKEN | CALLED | set(taken), dict[str, str]()
    for name in names:
        found[name] = name
        while there & made_of(found[name]):
            found[name] += "_"
        there |= made_of(found[name])
    return found
