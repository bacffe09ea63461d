"""Samples of slow tests with many values, which run at every change.

The other values are marked `thorough`: their verdicts are on record by hash, or
`scripts/test --all` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

PATTERNS = (
    "score_mod-trigonometric, score_mod-all_dimensions, score_mod-causal_torch, "
    "score_mod-bias_by_distance, "
    "score_mod-alibi_table, mask_mod-by_length, mask_mod-interleaved, mask_mod-alternating"
)
SAMPLES: Mapping[str, frozenset[str]] = {
    name: frozenset(part.strip() for part in sample.split(",") if part)
    for name, sample in {
        "flex/test_import.py::test_pattern_as_a_live_function": PATTERNS,
        "flex/test_import.py::test_pattern_and_back": PATTERNS,
        "kernels/attention/adapt/test_transformers.py::test_a_model_is_what_it_is_in_eager": (
            "llama, gemma3, gpt_oss"
        ),
        "kernels/attention/parallel/test_partial_sums.py::test_parts_add_up": (
            "True-True-True-2, False-False-False-0, True-False-True-2"
        ),
        "kernels/attention/adapt/test_engines.py::test_batches_are_those_of_float64": (
            "sglang window, vllm fp8"
        ),
        "kernels/attention/test_hopper.py::test_verified": (
            "sliding_window, llama3_gqa, decode_gqa, varlen_causal, mla_prefill, learned_slopes"
        ),
        "kernels/attention/test_hopper.py::test_races_are_found": (
            "keys freed before they are read, values freed before both halves have met p, "
            "dS multiplied before products see it, dk stored where dv still leaves from, "
            "queries freed before dk is there, pairs read before they are there, "
            "results sent before TMA sees them, barriers that TMA arrives at before it sees them"
        ),
        "kernels/attention/test_kernels.py::test_verified_in_the_interpreter": (
            "causal_alibi, document_causal, decode_gqa, constants, decode_ends, sunk, steps"
        ),
        "kernels/attention/test_block_mask.py::test_verified_in_the_interpreter": (
            "causal_images-block-mask-lists, block_sparse-block-mask-lists, "
            "causal_images-block-mask-reuse, causal_images-blocks-in-runs"
        ),
        "kernels/attention/test_loads.py::test_verified": "varlen_causal",
        "kernels/attention/test_machine_code.py::test_a_slot_is_freed_after_its_loads": "",
        "kernels/attention/test_machine_code.py::test_operands_in_registers_stay": "",
        "kernels/attention/test_machine_code.py::test_what_is_stored_is_not_where_a_barrier_is": (
            "gpt_oss"
        ),
        "kernels/attention/test_tuning.py::test_the_worker_compiles": "varlen_alibi",
        "kernels/chunk_output/test_chunk_output.py::test_what_is_expected_can_be_stored": (
            "gated_delta_output_fla, chunk_mixed, retention_output, chunk_least"
        ),
        "kernels/chunk_output/test_cute.py::test_kernels_compile_without_a_gpu": "gated, packed",
        "kernels/chunk_output/test_kernels_chunk_output.py::test_verified_in_the_interpreter": (
            "chunk_least"
        ),
        "kernels/norm/test_kernels_norm.py::test_verified_in_the_interpreter": (
            "norm_integers, norm_modified"
        ),
        "kernels/norm/test_cuda.py::test_norms_compile_and_do_not_spill": "heads",
        "kernels/norm/test_cuda.py::test_norms_are_for_nvcc_too": "bare",
        "test_exported_folders.py::test_a_process_that_imports_it_loads_it": (
            "gated_delta_output, two"
        ),
        "test_fuzzing.py::test_what_is_planted_is_found_and_made_smaller": "a bound, a position",
        "test_fuzzing.py::test_what_was_found_stays_mended": "numbers_of_loops, score_of_none",
    }.items()
}
"""The values in the sample, by file and function. A sample may be empty."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that are not in a sample."""
    for item in items:
        place, _, value = item.nodeid.partition("[")
        sample = SAMPLES.get(place.removeprefix("tests/"))
        if sample is not None and value.removesuffix("]") not in sample:
            item.add_marker(pytest.mark.thorough)
