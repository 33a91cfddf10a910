"""What the tests of tasks share: the nine tasks, items for them, and models/grt-nano as lm-eval sees it."""

from pathlib import Path

import torch

from grt.data.tokenizer import get_tokenizer
from grt.evals.continuations import AtOnce
from grt.evals.harness import HarnessModel
from grt.evals.scores import ScoreFile, Scores

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models" / "grt-nano"
ITEMS = ROOT / "tests" / "assets" / "tasks"  # written for these tests
TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "lambada_standard", "openbookqa", "piqa",
         "winogrande")  # fmt: skip


def harness_model(model, folder: Path, depth: int | None = None, batch_size: int | None = None) -> HarnessModel:
    depth = model.config.blocks.R if depth is None else depth
    scorer = AtOnce(model, [depth], torch.float32)
    scores = Scores(scorer, [depth], ScoreFile(folder, {}), model.config.context, batch_size)
    return HarnessModel(scores, depth, get_tokenizer("bytes"), lambda done, of: None)
