"""Our models inside lm-evaluation-harness: it makes the requests and the metrics, we say how likely each text is.

Its conventions are kept: end-of-text is the context of a text that has none; a context that is too long loses its
first tokens; spaces between context and text belong to the text.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from grt.data.tokenizer import Tokenizer
from grt.evals.continuations import Pair, Score
from grt.evals.scores import Progress, Scores

BOOTSTRAPS = 1000  # for the standard error of what is no mean over items (LAMBADA's perplexity)


class HarnessModel(TemplateLM):
    """One depth of a model, as lm-eval sees it. progress: told how many requests are done, of how many.

    tokens, steps: how many were predicted so far, and the passes through the core behind them. truncated: requests that
    have lost the start of their context.
    """

    def __init__(self, scores: Scores, depth: int, tokenizer: Tokenizer, progress: Progress) -> None:
        super().__init__()
        self.tokens = self.steps = self.truncated = 0
        self.scores, self.depth, self.encode, self.eot, self.progress = (
            scores, depth, tokenizer.encode, tokenizer.eot, progress,
        )  # fmt: skip

    @property
    def eot_token_id(self) -> int:
        return self.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.encode(string).tolist()

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        scores = self._scores([Pair(context, text) for _, context, text in requests])
        return [(score.log_prob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [Pair([self.eot], self.tok_encode(request.args[0])) for request in requests]
        return [score.log_prob for score in self._scores(texts)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("tasks for which a model has to write are refused when they are loaded")

    def _scores(self, pairs: list[Pair]) -> list[Score]:
        scores = self.scores.of(pairs, self.depth, self.progress)
        self.tokens += sum(len(pair.text) for pair in pairs)
        self.steps += sum(score.steps for score in scores)
        self.truncated += sum(len(pair.context) + len(pair.text) > self.scores.T + 1 for pair in pairs)
        return scores


def evaluate_task(task: Task, model: HarnessModel, limit: int | None = None) -> dict[str, float | None]:
    """What the task measures, and NAME_stderr beside each NAME (None where lm-eval has none); limit: the first items
    only."""
    with quiet():
        found: Any = evaluate(
            model, {"tasks": {task.task_name: task}}, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
    row = {name.partition(",")[0]: value for name, value in found["results"][task.task_name].items() if "," in name}
    return {name: float(value) if isinstance(value, int | float) else None for name, value in row.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and messages of lm-eval, which writes them to both streams."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork a process that has torch's threads
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
