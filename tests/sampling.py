"""What runs at every change, of tests of many values that take long. The others are marked `thorough`: their verdicts
are on record, by hash, or `scripts/test --all` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

SAMPLES: Mapping[str, frozenset[str]] = {
    name: frozenset(sample.split())
    for name, sample in {
        "kernels/attention/test_hopper.py::test_verified": "sliding_window llama3_gqa causal_alibi decode_gqa "
        "varlen_causal causal_images mla_prefill causal_d64 learned_slopes",
        "kernels/attention/test_kernels.py::test_verified_in_the_interpreter": "causal_alibi document_causal "
        "decode_gqa packed constants decode_ends promised quotient sunk steps",
        "kernels/attention/test_loads.py::test_verified": "causal_alibi varlen_causal",
        "kernels/attention/test_machine_code.py::test_operands_in_registers_stay": "gpt_oss-1",
        "kernels/chunk_output/test_kernels_chunk_output.py::test_verified_in_the_interpreter": "chunk_least",
        "kernels/norm/test_cuda.py::test_norms_compile_and_do_not_spill": "heads",
        "kernels/norm/test_cuda.py::test_norms_are_for_nvcc_too": "bare",
        "test_fuzzing.py::test_what_was_found_stays_mended": "index_of_sizes numbers_of_loops score_of_none",
    }.items()
}
"""By file and function, the values that stay."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark what is in no sample."""
    for item in items:
        place, _, value = item.nodeid.partition("[")
        sample = SAMPLES.get(place.removeprefix("tests/"))
        if sample is not None and value.removesuffix("]") not in sample:
            item.add_marker(pytest.mark.thorough)
