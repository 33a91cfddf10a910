"""What the tests of the vLLM plug-in share: engines in this process, servers, and text by our own decoder."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grt.decode.sampling import Sampling
from grt.decode.stream import Stream
from grt.model.loop import RecurrentDepthModel

WHERE = "vLLM has an environment of its own: make vllm-test"
vllm = pytest.importorskip("vllm", reason=WHERE)
openai = pytest.importorskip("openai", reason=WHERE)

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
        cleanup_dist_env_and_memory()
        gc.collect()


def ours(model: RecurrentDepthModel, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[Row]:
    """What grt says after each prompt; options: depth and kv."""
    rows: list[Row] = [[] for _ in prompts]
    for drawn in Stream(model, prompts, max_new_tokens=new, sampling=Sampling(temperature=0), **options):
        for row, one in zip(rows, drawn, strict=True):
            assert one is not None
            row.append((one.token, one.logprob))
    return rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def vllm_command() -> list[str]:
    return [str(Path(sys.executable).parent / "vllm")]


class Server:
    """`vllm serve`, with its output in the file `log`; as a context it runs, and answers."""

    def __init__(self, arguments: Sequence[str], log: Path, port: int = 0, cwd: Path | None = None) -> None:
        self.port, self.log = port or free_port(), log
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ENABLE")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*vllm_command(), "serve", *arguments, "--port", str(self.port)],
                stdout=out, stderr=out, cwd=cwd, env=environment, start_new_session=True,
            )  # fmt: skip
        self.client = openai.OpenAI(base_url=f"http://localhost:{self.port}/v1", api_key="none", max_retries=0)

    def __enter__(self) -> "Server":
        self.wait()
        self.model = self.client.models.list().data[0].id
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, seconds: float = 400) -> None:
        """Until it answers."""
        until = time.monotonic() + seconds
        while "Application startup complete" not in (said := self.log.read_text(errors="replace")):
            assert self.process.poll() is None and time.monotonic() < until, said[-3000:]
            time.sleep(0.2)

    def stop(self) -> None:
        self.client.close()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def complete(self, prompt: str, **options: Any) -> Any:
        """Greedily, 60 tokens unless told."""
        return self.client.completions.create(
            **({"model": self.model, "prompt": prompt, "max_tokens": 60, "temperature": 0} | options)
        )

    def metric(self, pattern: str) -> float:
        """The sum of the server's metrics whose name and labels are like this."""
        with urllib.request.urlopen(f"http://localhost:{self.port}/metrics") as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.M))
