"""Our models inside lm-evaluation-harness: it makes the requests and the metrics, we say how likely each text is.

Its conventions are kept: end-of-text is the context of a text that has none; a context that is too long loses its
first tokens; spaces between context and text belong to the text. Where a token would span context and text, the text is
encoded by itself: cut at the number of the context's ids, as lm-eval does, it would lose characters, or all of them.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from grt.data.tokenizer import Tokenizer
from grt.errors import ConfigError
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

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before = context.rstrip()
        text = context[len(before) :] + continuation
        ids, whole = self.tok_encode(before), self.tok_encode(before + text)
        after = whole[len(ids) :] if whole[: len(ids)] == ids else []
        return ids or [self.eot], after or self.tok_encode(text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._encode_pair(*request.args) for request in requests]
        require_tokens(requests, [text for _, text in pairs])
        return self._loglikelihood_tokens(
            [(request.args, *pair) for request, pair in zip(requests, pairs, strict=True)]
        )

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        scores = self._scores([Pair(context, text) for _, context, text in requests])
        return [(score.log_prob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        require_tokens(requests, texts)
        return [score.log_prob for score in self._scores([Pair([self.eot], text) for text in texts])]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("tasks for which a model has to write are refused when they are loaded")

    def _scores(self, pairs: list[Pair]) -> list[Score]:
        scores = self.scores.of(pairs, self.depth, self.progress)
        self.tokens += sum(len(pair.text) for pair in pairs)
        self.steps += sum(score.steps for score in scores)
        self.truncated += sum(len(pair.context) + len(pair.text) > self.scores.T + 1 for pair in pairs)
        return scores


def require_tokens(requests: list[Instance], texts: list[list[int]]) -> None:
    """ConfigError where a text to be scored has no token: its probability would be 1, the likeliest answer of all."""
    for request, text in zip(requests, texts, strict=True):
        if not text:
            raise ConfigError(
                f"tasks has {request.task_name!r}, whose item {request.doc_id} (counted from 0) asks for the "
                f"probability of {request.args[-1]!r}, which has no token: mend that item, or leave the task out."
            )


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
