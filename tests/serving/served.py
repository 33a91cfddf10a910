"""What the tests of the vLLM plug-in share: engines in this process, and text by our own decoder beside theirs."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grt.infer.generate import Stream
from grt.infer.sampling import Sampling
from grt.model.recurrent import RecurrentDepthModel

vllm = pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm-test")

ROOT = Path(__file__).resolve().parents[2]
Row = list[tuple[int, float]]  # tokens, and the log-probability of each
Greedy = Callable[[Sequence[Sequence[int]], int], list[Row]]

# The engine stays in this process, which is faster to start; threads are the caller's affair.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Greedy]:
    """greedy(prompts, new): what vLLM says after each prompt. Not compiled unless asked."""
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"enforce_eager": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 28} | options
    llm = vllm.LLM(str(folder), **settings)

    def greedy(prompts: Sequence[Sequence[int]], new: int) -> list[Row]:
        params = vllm.SamplingParams(temperature=0, max_tokens=new, logprobs=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        rows = []
        for output in llm.generate(asked, params, use_tqdm=False):
            best = output.outputs[0]
            each = zip(best.token_ids, best.logprobs, strict=True)
            rows.append([(token, of[token].logprob) for token, of in each])
        return rows

    try:
        yield greedy
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def ours(model: RecurrentDepthModel, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[Row]:
    """What grt says, one prompt at a time; options: depth and kv."""
    rows = []
    for prompt in prompts:
        stream = Stream(model, [prompt], max_new_tokens=new, sampling=Sampling(temperature=0), **options)
        rows.append([(drawn.token, drawn.logprob) for (drawn,) in stream if drawn is not None])
    return rows
