"""Samples of slow tests, which run at every change.

The other tests and values are marked `thorough`: their verdicts are on record by hash, or
`scripts/test --all` runs them. Two rules choose them:

- `SAMPLES` lists values of a test. All its other values are thorough.
- A test with the fixture `verdict` that no list mentions is thorough. Its hash contains everything
  that decides the outcome, except for the modules that distribute work. `EVERY_CHANGE` lists the
  tests of these modules.
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
            "llama"
        ),
        "kernels/attention/parallel/test_partial_sums.py::test_parts_add_up": (
            "True-True-True-2, False-False-False-0, True-False-True-2"
        ),
        "kernels/attention/adapt/test_engines.py::test_batches_are_those_of_float64": (
            "sglang window"
        ),
        "kernels/attention/adapt/test_context_parallel.py::test_ranks_that_differ_raise": "gone",
        "kernels/attention/test_empty_buffers.py::test_kernels_read_zeros": (
            "sum over keys, sum by head, packed, decoding, Hopper"
        ),
        "kernels/attention/test_exporting.py"
        "::test_an_exported_program_runs_in_another_folder_and_process": (
            "file-package, package-file"
        ),
        "kernels/attention/test_hopper.py::test_verified": "sliding_window, decode_gqa",
        "kernels/attention/test_hopper.py::test_races_are_found": (
            "dS multiplied before products see it, results sent before TMA sees them"
        ),
        "kernels/attention/test_invisible.py::test_nothing_is_nan": "lengths",
        "kernels/attention/test_kernels.py::test_verified_in_the_interpreter": (
            "constants, decode_gqa, steps"
        ),
        "kernels/attention/test_block_mask.py::test_verified_in_the_interpreter": (
            "causal_images-block-mask-lists"
        ),
        "kernels/attention/test_row_max.py::test_the_largest_score_is_right": "packed",
        "kernels/attention/test_serve.py::test_batches": "batch",
        "kernels/attention/test_tuning.py::test_the_worker_compiles": "varlen_alibi",
        "kernels/chunk_output/test_chunk_output.py::test_what_is_expected_can_be_stored": (
            "gated_delta_output_fla, chunk_mixed, retention_output, chunk_least"
        ),
        "kernels/chunk_output/test_kernels_chunk_output.py::test_verified_in_the_interpreter": (
            "chunk_least"
        ),
        "kernels/linear_attention/test_hopper_linear_attention.py::test_forward": "plain",
        "kernels/linear_attention/test_hopper_linear_attention.py::test_races_are_found": (
            "o sent before TMA sees it"
        ),
        "kernels/linear_attention/test_hopper_linear_attention.py::test_wrong_kernels_fail": (
            "A without betas, too few chunks"
        ),
        "kernels/linear_attention/test_proofs_linear_attention.py"
        "::test_buffers_with_names_of_kernels": "seq",
        "kernels/linear_attention/test_output_norm.py::test_wrong_kernels_fail": (
            "right, no gate, the gate of another head, no eps in backward"
        ),
        "kernels/norm/test_cuda.py::test_norms_are_for_nvcc_too": "bare",
        "kernels/test_functional.py::test_transforms": "forward",
        "prove/test_proving.py::test_masks_by_block_are_proved": (
            "abs(q_idx // 64 - kv_idx // 32) <= 2, kv_idx // 4 <= q_idx"
        ),
        "verify/test_first_calls.py::test_a_first_call_imports_what_it_needs": (
            "a folder, rms_norm"
        ),
        "test_exported_folders.py::test_a_process_that_imports_it_loads_it": "two",
        "test_fuzzing.py::test_what_is_planted_is_found_and_made_smaller": "a position",
        "test_comparing.py::test_what_is_planted_is_found": "a period, a distance from the key",
        "test_large.py::test_large_calls_are_copies_of_small_ones": "rms_norm, decode_gqa",
        "test_mutating.py::test_those_of_a_sample_are_killed": (
            "a mask left out, a bound, a wait left out, a fence left out, rows of a tile, "
            "one part merged as all, a chunk without its diagonal, "
            "a state that starts at zero in each step"
        ),
        "test_recipes.py::test_a_wrong_kernel_of_a_new_schedule_is_found": ("without delta"),
        "test_unused.py::test_adapters_have_no_unused_imports_or_private_names": (
            "causal-transformers, causal-hub, causal-torch, causal-flash_attn, "
            "document_causal-context_parallel, linear_attention_elu-context_parallel"
        ),
        "test_growing.py::test_scores": (
            "sums of sums, product of functions, sum of products, choices, index of sums, "
            "functions of numbers"
        ),
        "test_growing.py::test_masks": "!=, or and or, remainders of remainders, powers of powers",
    }.items()
}
"""The values in the sample, by file and function. A sample may be empty."""
EVERY_CHANGE = (
    "kernels/attention/test_delta.py::test_kgen_compile_reports_what_the_launcher_launches",
    "verify/",
)
"""Tests and folders whose tests run at every change, unless they are marked `thorough`."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that do not run at every change."""
    for item in items:
        if _left_out(item):
            item.add_marker(pytest.mark.thorough)


def _left_out(item: pytest.Item) -> bool:
    place, _, value = item.nodeid.removeprefix("tests/").partition("[")
    if (sample := SAMPLES.get(place)) is not None:
        return value.removesuffix("]") not in sample
    return "verdict" in getattr(item, "fixturenames", ()) and not place.startswith(EVERY_CHANGE)
