"""`grt generate`, as a user calls it."""

import pytest
import torch
from tiny_run import R

from grt import cli
from grt.data.tokenizer import ByteTokenizer
from grt.decode.stream import Drawn
from grt.model.depth import Depth
from grt.runs.checkpoint import load_model


def test_generate_document(document, run):
    report = document("generate", run, "--prompt", "größe 東", "--max-new-tokens", "5")
    assert report.keys() == {"prompt", "text", "tokens", "finish_reason", "depths", "mean_depth", "tokens_per_s"}
    assert report["prompt"] == "größe 東" and report["text"] == ByteTokenizer().decode(report["tokens"])
    if report["finish_reason"] == "length":
        assert len(report["tokens"]) == 5
    assert report["depths"] == [R] * len(report["tokens"]) and report["mean_depth"] == R
    assert report["tokens_per_s"] > 0


def test_generate_options_take_effect(document, run):
    def text(*options) -> list[int]:
        return document("generate", run, "--prompt", "page", "--max-new-tokens", "12", *options)["tokens"]

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    greedy = text("--temperature", "0")
    assert greedy == text("--temperature", "0", "--seed", "5")
    assert greedy == text("--top-k", "1") == text("--top-p", "1e-9")  # one token is left to draw from
    assert greedy == text("--min-p", "1") != text("--min-p", "1", "--repetition-penalty", "9")
    assert text("--temperature", "0.01") != text("--temperature", "3")
    assert greedy != text("--temperature", "0", "--kv", "last") or greedy != text("--temperature", "0", "--kv", "first")
    assert document("generate", run, "--depth", "2", "--max-new-tokens", "3")["depths"] == [2, 2, 2]
    with pytest.warns(UserWarning, match="depth 8 is beyond"):
        assert document("generate", run, "--depth", "8", "--max-new-tokens", "1")["mean_depth"] == 8
    assert text("--device", "cpu") == text()


def test_generate_at_depth_1_differs_from_R(run):
    model, _ = load_model(run)
    ids = torch.arange(8)[None]
    assert not torch.equal(model(ids, Depth(1)), model(ids))


class Scripted:
    """In the place of a Stream: one row of given ids."""

    max_new_tokens = 99

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, *_, **__):
        return self

    def __iter__(self):
        yield from ([Drawn(i, -0.5, R)] for i in self.ids)


@pytest.mark.parametrize(
    "ids", [list("añ東😀z".encode()), [0xE6, 0x9D], [0xFF, 65, 0xC3], list("é\ufffd".encode()), []], ids=str
)
def test_streamed_text_is_the_text_whatever_the_bytes(monkeypatch, grt, document, run, ids):
    monkeypatch.setattr("grt.cli.report.Stream", Scripted(ids))
    assert grt("generate", run, "--prompt", "→") == "→" + bytes(ids).decode(errors="replace") + "\n"
    report = document("generate", run, "--prompt", "→")
    assert report["text"] == bytes(ids).decode(errors="replace") and report["finish_reason"] == "stop"


def test_characters_are_streamed_whole(monkeypatch, run):
    from grt.cli.report import generation_report

    monkeypatch.setattr("grt.cli.report.Stream", Scripted("東é".encode()))
    pieces: list[str] = []
    generation_report(run, "", show=pieces.append)
    assert [piece for piece in pieces if piece] == ["東", "é"]


@pytest.mark.parametrize("stop", [["w\n"], ["zz", "w\n", "\nx"], ["two"]], ids=str)
def test_a_stop_string_ends_the_text(monkeypatch, grt, document, run, stop):
    monkeypatch.setattr("grt.cli.report.Stream", Scripted(b"one tw\nxtwo tail"))
    options = [part for text in stop for part in ("--stop", text)]
    want = "one tw\nx" if stop == ["two"] else "one t"
    assert grt("generate", run, *options) == want + "\n"
    report = document("generate", run, *options, "--logprobs")
    assert report["text"] == want and report["finish_reason"] == "stop"
    assert report["tokens"] == list((want + ("two" if stop == ["two"] else "w\n")).encode())
    assert report["logprobs"] == [-0.5] * len(report["tokens"])


def test_logprobs_of_the_document(document, run):
    report = document("generate", run, "--prompt", "pa", "--max-new-tokens", "5", "--logprobs", "--top-k", "1")
    model, _ = load_model(run)
    ids = torch.tensor([[*b"pa", *report["tokens"]]])
    want = model(ids)[0, 1:-1].log_softmax(-1).gather(1, ids[0, 2:, None]).flatten().tolist()
    assert report["logprobs"] == pytest.approx(want, abs=1e-5)


def test_generate_in_bf16(document, run):
    def logprobs(dtype: str) -> list[float]:
        options = ("--prompt", "page", "--max-new-tokens", "6", "--logprobs", "--temperature", "0")
        return document("generate", run, *options, "--dtype", dtype)["logprobs"]

    half, single = logprobs("bf16"), logprobs("fp32")
    assert half != single
    assert half == pytest.approx(single, abs=5e-3)  # bf16 has three digits, and these are of 5.5
    assert logprobs("auto") in (half, single)


def test_an_empty_prompt_starts_a_document(document, run):
    without, empty = (document("generate", run, *prompt, "--max-new-tokens", "4") for prompt in ([], ["--prompt", ""]))
    assert without.pop("tokens_per_s") > 0 < empty.pop("tokens_per_s")
    assert without == empty and len(empty["tokens"]) == 4
    nothing = document("generate", run, "--max-new-tokens", "0")
    assert (nothing["text"], nothing["tokens"], nothing["depths"]) == ("", [], [])


def test_a_prompt_that_is_longer_than_the_context(document, refused, run):
    long = ("generate", run, "--prompt", "x" * 100, "--max-new-tokens", "2")
    assert "a prompt of 100 tokens leaves no room for new ones in model.context 16: shorten it" in refused(*long)
    report = document(*long, "--crop")
    assert report["prompt"] == "x" * 100 and len(report["tokens"]) == 2


def test_generate_fills_the_context(document, run):
    report = document("generate", run, "--prompt", "12345", "--temperature", "0")
    assert len(report["tokens"]) == 11 and report["finish_reason"] == "length"
    beyond = document("generate", run, "--prompt", "12345", "--temperature", "0", "--crop", "--max-new-tokens", "30")
    assert len(beyond["tokens"]) == 30 and beyond["tokens"][:11] == report["tokens"]


def test_ctrl_c_while_generating_is_130(monkeypatch, capsys, run):
    def ids():
        yield 65
        raise KeyboardInterrupt

    monkeypatch.setattr("grt.cli.report.Stream", Scripted(ids()))
    assert cli.main(["generate", str(run)]) == 130
    out, err = capsys.readouterr()
    assert out == "A" and err == "grt: interrupted\n"
