"""`vllm serve` with OpenAI's client: texts whole and in pieces, stop strings, requests side by side, clients that go
away or ask for too much; and what the README prints."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import ROOT, Server, free_port, openai, ours, vllm_command

from grt.train.checkpoint import load_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
PROMPTS = ["def main(", "import numpy", "class A:\n", "for i in range(", "return ", "x = ", "# The", "if not "]
FAST = ("--enforce-eager", "--dtype", "float32")


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory) -> Iterator[Server]:
    with Server([str(nano), *FAST], tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """60 tokens after each prompt, by our own decoder."""
    model = load_model(ROOT / "models/grt-nano")[0].float()
    rows = ours(model, [list(prompt.encode()) for prompt in PROMPTS], 60)
    return [bytes(token for token, _ in row).decode() for row in rows]


def text(server: Server, prompt: str, **options) -> str:
    return server.complete(prompt, **options).choices[0].text


def test_whole_and_in_pieces(server: Server, expected: list[str]) -> None:
    for prompt, own in zip(PROMPTS[:2], expected, strict=False):
        whole = server.complete(prompt)
        assert whole.choices[0].text == own and whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 60)
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
    assert 0 < server.metric("vllm:generation_tokens_total{.*}") - made < 240  # of 720 that were asked for
    assert text(server, PROMPTS[0]) == expected[0]


def test_too_long_a_prompt(server: Server, expected: list[str]) -> None:
    for length in (256, 1000):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as refused:
            server.complete("a" * length, max_tokens=1)
        assert refused.value.status_code == 400
    full = server.complete("a" * 250)  # 60 more do not fit
    assert (full.usage.total_tokens, full.choices[0].finish_reason) == (256, "length")
    assert text(server, PROMPTS[0]) == expected[0]


def test_refused_before_anything_is_loaded(nano: Path, tmp_path: Path) -> None:
    command = [*vllm_command(), "serve", str(nano), "--hf-overrides", '{"kv": "mean"}', "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "kv is 'mean', and vLLM can share keys only as first:all: use that, or full." in ended.stderr


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
