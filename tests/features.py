"""Which feature works in which stack: README's table, and for each cell the test that shows it.

    python tests/features.py        writes the table into README.md

A cell is what the table prints and FILE::TEST behind it; a cell that no test backs is left out and prints a dash. A
new stack is one name in STACKS and its cells, a new feature one row. tests/test_features.py compares.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- features: python tests/features.py -->", "<!-- end of features -->"
NOTHING = "–"


class Cell(NamedTuple):
    told: str
    test: str


def yes(test: str) -> Cell:
    return Cell("yes", test)


STACKS = {
    "grt": "`grt generate`",
    "transformers": "transformers",
    "lm-eval": "lm-eval",
    "onnx": "ONNX",
    "vllm": "vLLM",
}  # fmt: skip

FEATURES: dict[str, dict[str, Cell]] = {
    "every method, and dense": {
        "grt": yes("test_stream::test_200_greedy_tokens_are_those_of_fresh_passes"),
        "transformers": yes("test_hf_generate::test_padded_batches_of_every_method_and_cache"),
        "lm-eval": yes("test_continuations::test_at_once_is_one_plain_pass_a_pair"),
        "onnx": Cell("all but MoR", "test_onnx::test_onnx_has_the_same_logits"),
        "vllm": Cell("all but MoR", "test_greedy::test_every_method"),
    },
    "depth dial": {
        "grt": Cell("`--depth`", "test_generate::test_depth_is_the_truncated_models"),
        "transformers": Cell("`num_steps`", "test_hf_model::test_depth_is_an_argument_and_a_number_of_layers"),
        "lm-eval": Cell("`--depths`", "test_harness::test_lm_eval_and_our_own_loss_agree"),
        "onnx": Cell("one a file", "test_onnx::test_onnx_has_the_same_logits"),
        "vllm": Cell("`--hf-overrides`", "test_greedy::test_compiled_at_two_depths"),
    },
    "keys and values shared by steps (`kv`)": {
        "grt": yes("test_stream::test_each_strategy_is_the_caches"),
        "transformers": yes("test_hf_generate::test_every_strategy"),
        "lm-eval": yes("test_continuations::test_token_by_token_in_a_batch_is_each_alone"),
        "vllm": Cell("`first:all`", "test_greedy::test_50_prompts_of_a_trained_model"),
    },
    "exit policies": {
        "grt": yes("test_halting::test_rows_of_a_batch_are_rows_alone"),
        "transformers": yes("test_hf_exit::test_padded_batches_say_what_rows_alone_say"),
        "lm-eval": yes("test_continuations::test_tokens_that_leave_on_their_own"),
    },
    "exit and shared keys": {
        "grt": yes("test_halting::test_every_way_of_sharing_is_the_slow_loop"),
        "transformers": yes("test_hf_exit::test_every_strategy"),
        "lm-eval": yes("test_continuations::test_tokens_that_leave_with_shared_keys"),
    },
    "budget of steps": {
        "grt": yes("test_halting::test_a_budget_is_each_rows_own"),
        "transformers": yes("test_hf_exit::test_a_budget_is_each_rows_own"),
    },
    "early-exit drafts": {
        "grt": Cell("all but MoR", "test_speculative::test_greedy_text_is_the_same_with_each_method"),
        "transformers": yes("test_hf_generate::test_early_exit_drafts_change_nothing"),
    },
    "batches of unequal rows": {
        "grt": Cell("`Stream`", "test_stream::test_a_row_of_a_batch_is_the_row_alone"),
        "transformers": Cell("left padding", "test_hf_model::test_padded_rows_are_single_rows"),
        "lm-eval": yes("test_harness::test_batches_of_one_and_four_and_auto_agree"),
        "onnx": Cell("equal rows", "test_onnx::test_onnx_has_the_same_logits"),
        "vllm": yes("test_server::test_8_side_by_side"),
    },
    "beams": {"transformers": yes("test_hf_generate::test_beams_with_a_cache_are_beams_without")},
    "matrices kept in bf16 or int8": {
        "grt": Cell("`--weights`", "test_quantize::test_every_method_computes_with_what_is_kept"),
    },
    "compiled decoding": {
        "grt": yes("test_stream::test_compiled_text_is_the_same"),
        "vllm": yes("test_greedy::test_compiled_at_two_depths"),
    },
    "training": {
        "grt": Cell("`grt train`", "test_conformance::test_every_parameter_learns"),
        "transformers": Cell("Trainer", "test_hf_train::test_trainer_counts_tokens_and_not_batches"),
    },
    "LoRA (peft, `all-linear`)": {
        "transformers": yes("test_hf_train::test_every_adapter_of_all_linear_is_trained_and_merges"),
    },
    "runs without grt": {
        "transformers": Cell("remote code", "test_export::test_a_fresh_process_without_grt_sees_the_same_model"),
        "onnx": yes("test_onnx::test_onnx_has_the_same_logits"),
    },
}  # fmt: skip


def table() -> str:
    lines = ["| | " + " | ".join(STACKS.values()) + " |", "|---" * (len(STACKS) + 1) + "|"]
    for feature, cells in FEATURES.items():
        told = [cells[stack].told if stack in cells else NOTHING for stack in STACKS]
        lines.append(f"| {feature} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The document, with the table as it is now between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
