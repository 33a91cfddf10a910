"""`vllm serve` with OpenAI's client: texts whole and in pieces, stop strings, requests side by side, clients that go
away or ask for too much; and what the README prints."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from served import ROOT, Server, free_port, openai, ours, vllm_command

from grt.config import RunConfig
from grt.data.tokenizer import Tokenizer, get_tokenizer
from grt.hf.export import write_model, write_tokenizer
from grt.methods import build_model
from grt.model.loop import RecurrentDepthModel
from grt.presets import change, preset
from grt.runs.checkpoint import load_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
PROMPTS = ["def main(", "import numpy", "class A:\n", "for i in range(", "return ", "x = ", "# The", "if not "]
# Not compiled, so that it is there soon; float32, so that its text is ours.
FAST = ("--enforce-eager", "--dtype", "float32")


def trained_nano() -> tuple[RecurrentDepthModel, RunConfig]:
    return load_model(ROOT / "models/grt-nano")


def random_small() -> tuple[RecurrentDepthModel, RunConfig]:
    config = change(preset("grt-small-isoflop"), model={"vocab_multiple": 1})
    torch.manual_seed(0)
    return build_model(config.model), config


class Exported(NamedTuple):
    folder: Path
    model: RecurrentDepthModel
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=[trained_nano, pytest.param(random_small, marks=pytest.mark.slow)])
def exported(request: pytest.FixtureRequest, tmp_path_factory) -> Exported:
    model, config = request.param()
    folder, tokenizer = tmp_path_factory.mktemp("exported"), get_tokenizer(config.data.tokenizer)
    write_model(model, folder, tokenizer.eot)
    write_tokenizer(tokenizer.json(), tokenizer.eot_text, config.model.context, folder)
    return Exported(folder, model.float().eval(), tokenizer)


@pytest.fixture(scope="module")
def server(exported: Exported, tmp_path_factory) -> Iterator[Server]:
    with Server([str(exported.folder), *FAST], tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def expected(exported: Exported) -> list[str]:
    """60 tokens after each prompt, by our own decoder."""
    rows = ours(exported.model, [[int(i) for i in exported.tokenizer.encode(prompt)] for prompt in PROMPTS], 60)
    return [exported.tokenizer.decode([token for token, _ in row]) for row in rows]


def text(server: Server, prompt: str, **options) -> str:
    return server.complete(prompt, **options).choices[0].text


def test_whole_and_in_pieces(server: Server, exported: Exported, expected: list[str]) -> None:
    for prompt, own in zip(PROMPTS[:2], expected, strict=False):
        whole = server.complete(prompt)
        assert whole.choices[0].text == own and whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            len(exported.tokenizer.encode(prompt)),
            60,
        )
        pieces = [piece.choices[0].text for piece in server.complete(prompt, stream=True)]
        assert "".join(pieces) == own and len(pieces) > 5


def test_stop_strings(server: Server, expected: list[str]) -> None:
    own = expected[0]
    stop = own[20:24]  # within the text, and over several tokens
    until = own[: own.index(stop)]
    whole = server.complete(PROMPTS[0], stop=[stop, "never there"])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (until, "stop")
    assert "".join(piece.choices[0].text for piece in server.complete(PROMPTS[0], stop=stop, stream=True)) == until


def test_8_side_by_side(server: Server, expected: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda prompt: text(server, prompt), PROMPTS))
    assert texts == expected and len(set(texts)) > 6


def test_a_cut_connection(server: Server, expected: list[str]) -> None:
    made = server.metric("vllm:generation_tokens_total{.*}")
    for _ in range(3):
        stream = server.complete(PROMPTS[0], max_tokens=240, stream=True)
        next(iter(stream))
        stream.close()
    until = time.monotonic() + 30
    while server.metric("vllm:num_requests_running{.*}") and time.monotonic() < until:
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running{.*}") == 0
    # Not all that were asked for. How many is the machine's affair: the server hears of the cut while it goes on.
    assert 0 < server.metric("vllm:generation_tokens_total{.*}") - made < 3 * 240
    assert text(server, PROMPTS[0]) == expected[0]


def test_too_long_a_prompt(server: Server, exported: Exported, expected: list[str]) -> None:
    context = exported.model.config.context
    for length in (context + 1, 4 * context):
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {context} tokens") as refused:
            server.complete([65] * length, max_tokens=1)
        assert refused.value.status_code == 400
    full = server.complete([65] * (context - 6))  # 60 more do not fit
    assert (full.usage.total_tokens, full.choices[0].finish_reason) == (context, "length")
    assert text(server, PROMPTS[0]) == expected[0]


def test_refused_before_anything_is_loaded(nano: Path, tmp_path: Path) -> None:
    command = [*vllm_command(), "serve", str(nano), "--hf-overrides", '{"kv": "mean"}', "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "kv is 'mean', and vLLM can share keys only as first:all: use that, or full." in ended.stderr


def test_the_bench_of_serving() -> None:
    """A turn of every contestant, in a process of its own: one JSON line at the end."""
    options = [
        "--size", "nano", "--requests", "4", "--prompt", "8", "--new", "4", "--alternations", "1",
        "--compile", "off", "--dtype", "fp32",
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "grt", "bench", "serve", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    assert [row["name"] for row in report["rows"]] == ["grt", "dense", "gpt2"]
    assert report["of_flops"].keys() == report["ratios"].keys() == {"tokens/s, grt / dense", "tokens/s, grt / gpt2"}


def example() -> tuple[str, str]:
    """The README's shell commands, and its Python."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Serve with vLLM")[1].split("\n## ")[0]
    shell, python = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    return shell, python


def test_the_example_of_the_readme(tmp_path: Path, monkeypatch) -> None:
    """As it is printed, in a folder that has models/ and the environment, on ports that are free."""
    shell, python = example()
    ports = {port: str(free_port()) for port in re.findall(r"--port (\d+)", shell)}
    assert len(ports) == 2
    for port, free in ports.items():
        shell, python = shell.replace(port, free), python.replace(port, free)
    bin_ = Path(sys.executable).parent
    (tmp_path / ".venv-vllm").symlink_to(bin_.parent)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    first, *rest = shell.strip().splitlines()
    assert first == "make vllm"  # it is there: this runs in it
    servers = []
    try:
        for line in rest:
            if not line.endswith(" &"):
                subprocess.run(line, shell=True, cwd=tmp_path, check=True, timeout=120)
                continue
            log = tmp_path / f"log{len(servers)}"
            program, serve, *arguments = shlex.split(line.removesuffix(" &"))
            assert (program, serve) == (".venv-vllm/bin/vllm", "serve")
            at = arguments.index("--port")
            servers.append(Server(arguments[:at] + arguments[at + 2 :], log, int(arguments[at + 1]), tmp_path))
        for server in servers:
            server.wait()
        ended = subprocess.run(
            [bin_ / "python", "-c", python], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
    finally:
        for server in servers:
            server.stop()
    assert ended.returncode == 0, ended.stderr
    whole, deep, shallow = ended.stdout.removesuffix("\n").split("\n---\n")
    assert whole and whole == deep[: deep.index("\n\n")]  # up to the stop string
    assert shallow != deep
