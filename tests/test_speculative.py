"""Speculative decoding: its passes are the plain ones, greedy text is the same.

Shapes: V vocabulary.
"""

import json
from pathlib import Path

import pytest
import torch
from speaking import GREEDY, PROMPT, speak, tokens_of

from grt import cli
from grt.cli.report import generation_report
from grt.decode.decoder import Decoder
from grt.decode.sampling import Sampling
from grt.decode.speculative import Draft, Drafter, SpeculativeStream, expected_tokens
from grt.decode.stream import Stream
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.runs.checkpoint import load_model

NANO = Path(__file__).resolve().parent.parent / "models/grt-nano"
RESUMED = [method for method in METHODS if method not in ("mor", "mor-token")]


def plain(model, prompt=PROMPT, n=9, **options):
    return tokens_of(Stream(model, [prompt], **{"max_new_tokens": n, "sampling": GREEDY} | options))


# The passes


@pytest.mark.parametrize("strategy", ["full", "first", "first:all"])
@pytest.mark.parametrize("method", RESUMED)
def test_drafts_go_on_to_what_plain_decoding_gives(tiny, method, strategy):
    """Verifications of 3, 1 and 4 tokens, the first with one that is taken back, in float64."""
    model, ids = tiny(method), [5, 17, 2, 2, 9, 21, 0]
    decoders = [Decoder(model, [PROMPT], 9, kv=strategy) for _ in range(2)]
    for decoder in decoders:
        decoder.prefill()
    drafter = Drafter(decoders[0], 2)
    want = torch.cat([decoders[1].step(torch.tensor([token])) for token in ids])
    got = []
    for tokens, stay in (([5, 17, 3], 2), ([2], 1), ([2, 9, 21, 0], 4)):
        for token in tokens:
            drafter.advance(token, read_out=token != tokens[-1])
        got.append(drafter.verify()[:stay])
        drafter.cache.rollback(len(tokens) - stay)
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=1e-11)
    assert (want[1:] - want[:-1]).abs().max() > 0.01


@pytest.mark.parametrize("k", [1, 2])
def test_a_draft_reads_out_the_shallow_model(tiny, k):
    """To the bit of float64 where there is no coda, whose keys would be the full model's for tokens that stand."""
    model = tiny(layout="1+2x3+0")
    deep, shallow = Decoder(model, [PROMPT], 9), Decoder(model, [PROMPT], 9, depth=k)
    for decoder in (deep, shallow):
        decoder.prefill()
    drafter = Drafter(deep, k)
    for token in (5, 17, 2):
        got = drafter.advance(token, read_out=True)
        torch.testing.assert_close(got, shallow.step(torch.tensor([token]))[0], rtol=0, atol=1e-11)


# Greedy text


def same_texts(model, prompts, n, **options) -> int:
    """How many of the prompts part, which they may where the two likeliest tokens are within 1e-4 of each other."""
    parted = 0
    for prompt in prompts:
        got, want = tokens_of(speak(model, prompt, n, **options)), plain(model, prompt, n)
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            with torch.no_grad():
                first, second = model(torch.tensor([prompt + want[:at]]))[0, -1].topk(2).values.tolist()
            assert first - second < 1e-4, f"{prompt}: {got} instead of {want}"
            parted += 1
    print(f"{parted} of {len(prompts)} texts part at a near tie")
    return parted


def random_prompts(count, V, longest):
    rng = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest + 1, (count,), generator=rng).tolist()
    return [torch.randint(V, (length,), generator=rng).tolist() for length in lengths]


@pytest.mark.parametrize("draft", [Draft(1, 2), Draft(2, None)], ids=str)
def test_greedy_text_is_the_same(tiny, draft):
    model = tiny(dtype=torch.float32, context=24)
    assert same_texts(model, random_prompts(20, 23, 8), 16, draft=draft) <= 1


def test_repeated_tokens_are_punished_as_without_drafts(tiny):
    """Drafted ones among them."""
    model, sampling = tiny(dtype=torch.float32, context=24), Sampling(0, repetition_penalty=5.0)
    for prompt in random_prompts(5, 23, 8):
        want = plain(model, prompt, 16, sampling=sampling)
        assert tokens_of(speak(model, prompt, 16, sampling=sampling)) == want != plain(model, prompt, 16)


@pytest.mark.parametrize("method", RESUMED)
def test_greedy_text_is_the_same_with_each_method(tiny, method):
    model = tiny(method, dtype=torch.float32)
    for strategy in ("full", "first", "first:all"):
        assert tokens_of(speak(model, kv=strategy)) == plain(model, kv=strategy)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_greedy_texts_of_a_trained_model():
    model, _ = load_model(NANO, torch.device("cpu"))
    assert same_texts(model, random_prompts(1000, 257, 40), 16) <= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_text_is_the_same(tiny):
    model = tiny(dtype=torch.float32, context=24)
    for draft in (Draft(1, 3), Draft(2, None)):
        assert tokens_of(speak(model, n=19, draft=draft, compiled=True)) == plain(model, n=19)


@pytest.mark.parametrize("n", range(7))
def test_the_budget_ends_a_draft(tiny, n):
    """With room behind it, and where the context of 12 tokens ends."""
    model, prompt = tiny(dtype=torch.float32), list(range(12 - n))
    assert tokens_of(speak(model, n=n, draft=Draft(2, 50))) == plain(model, n=n)
    got = tokens_of(speak(model, prompt, None if n else 0, draft=Draft(1, 5)))
    assert len(got) == n and got == plain(model, prompt, n)


def test_end_of_text_within_a_draft_ends(tiny):
    model = tiny(dtype=torch.float32)
    text = plain(model)
    for at, stop in enumerate(text):
        got = tokens_of(speak(model, stop_ids=[stop], draft=Draft(2, 8)))
        assert got == text[: text.index(stop)], at


def test_a_stop_string_and_the_report():
    options = {"device": "cpu", "sampling": GREEDY, "max_new_tokens": 40, "logprobs": True}
    want = generation_report(NANO, "def ", **options)
    stop = want["text"][17:20]
    for more in ({}, {"stop": [stop]}):
        got = generation_report(NANO, "def ", draft=Draft(), **options, **more)
        want = generation_report(NANO, "def ", **options, **more)
        counts = got.pop("speculative")
        assert got.pop("logprobs") == pytest.approx(want.pop("logprobs"), abs=1e-5)
        assert {**got, "tokens_per_s": 0} == {**want, "tokens_per_s": 0}
    assert counts["draft_depth"] == 1 and 0 < counts["accepted"] <= counts["drafted"] and counts["acceptance"] <= 1
    assert got["finish_reason"] == "stop" and stop not in got["text"]


# The number of drafts


def test_all_drafts_stand_where_deeper_steps_do_nothing(tiny):
    """The gate copies the state: whatever the sampling, there is nothing to reject."""
    model = tiny(dtype=torch.float32, context=40)
    model.rule.gate.down.bias.data.fill_(1e4)
    stream = speak(model, n=36, draft=Draft(1, None), sampling=Sampling(1.2, top_p=0.9))
    assert len(tokens_of(stream)) == 36
    assert stream.tally.accepted == stream.tally.drafted == stream.tally.seen
    assert stream.tally.verifications == 4  # 1 of the prompt, 9 each, 8 that were left


def test_as_many_drafts_as_pay(tiny):
    stream = speak(tiny(layout="1+1x6+1"), draft=Draft(1, None))
    lengths = []
    for accepted in (8, 8, 0, 0, 0, 0, 0, 0, 0, 0):
        lengths.append(stream.length())
        stream._count(8, accepted)
    assert lengths[0] == 8 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 4
    assert speak(tiny(), draft=Draft(1, 5)).length() == 5


def test_what_is_counted_and_remembered(tiny):
    """Drafts behind the first that fell are never asked about; what is long ago counts less, 0.95 a verification."""
    stream = speak(tiny(), draft=Draft(1, None))
    stream._count(8, 3)
    stream._count(2, 2)
    assert (stream.tally.verifications, stream.tally.drafted, stream.tally.seen, stream.tally.accepted) == (2, 10, 6, 5)
    assert stream.recent == pytest.approx([0.95 * (0.95 + 3) + 2, 0.95 * (0.95 + 4) + 2])
    assert stream.tally.acceptance == 5 / 6 and stream.tally.tokens_per_verification == 3.5


def test_expected_tokens():
    """1 + a + ... + a^m."""
    assert [expected_tokens(0.5, m) for m in (1, 2, 3)] == [1.5, 1.75, 1.875]
    assert expected_tokens(1, 3) == 4 and expected_tokens(0, 5) == 1


def test_training_mode_is_left_as_it_was(tiny):
    model = tiny(dtype=torch.float32, state_noise=9.0, gate_noise=9.0)
    want = tokens_of(speak(model))
    assert tokens_of(speak(model.train())) == want and model.training


@pytest.mark.parametrize(
    ("method", "layout", "options", "message"),
    [
        ("ladder", "4L", {}, "a dense model has no core of which a part could draft"),
        ("mor", "1+2x3+1", {}, "mor chooses in each pass who goes on"),
        ("mor-token", "1+2x3+1", {}, "mor-token chooses in each pass who goes on"),
        ("grt", "1+2x3+1", {"kv": "last"}, "kv shares what only a token's last step decides"),
        ("grt", "1+2x3+1", {"kv": "mean"}, "kv shares"),
        ("grt", "1+2x3+1", {"kv": "mod:3"}, "kv shares"),
        ("grt", "1+2x3+1", {"draft": Draft(3)}, "draft_depth is 3: give at least 1, and less than the full depth of 3"),
        ("grt", "1+2x3+1", {"draft": Draft(), "depth": 1}, "a draft takes fewer steps than the depth of 1: give more"),
        ("grt", "1+2x3+1", {"draft": Draft(0)}, "draft_depth is 0: give at least 1"),
        ("grt", "1+2x3+1", {"draft": Draft(2), "depth": 2}, "draft_depth is 2: .* less than the full depth of 2"),
        ("grt", "1+2x3+1", {"draft": Draft(1, 0)}, "draft_tokens is 0: it must be at least 1"),
        ("grt", "1+2x3+1", {"crop": True}, "crop decodes without a cache"),
    ],
    ids=str,
)
def test_what_cannot_be_drafted(tiny, method, layout, options, message):
    with pytest.raises(ConfigError, match=message):
        speak(tiny(method, layout), **options)


def test_one_prompt_at_a_time(tiny):
    with pytest.raises(ConfigError, match="speculative decoding takes one prompt at a time, not 2"):
        SpeculativeStream(tiny(), [PROMPT, PROMPT], draft=Draft())


def test_the_command(capsys):
    arguments = ["generate", str(NANO), "--prompt", "def ", "--max-new-tokens", "12", "--temperature", "0"]
    assert cli.main(arguments) == 0
    want = capsys.readouterr().out
    assert cli.main([*arguments, "--speculative", "--draft-depth", "2", "--draft-tokens", "3"]) == 0
    told = capsys.readouterr()
    assert told.out == want and "drafts stood" in told.err
    assert cli.main([*arguments, "--speculative", "--max-new-tokens", "0", "--json"]) == 0
    told = capsys.readouterr()
    counts = json.loads(told.out)["speculative"]
    assert counts["verifications"] == 0 and counts["tokens_per_verification"] is None and not told.err
    assert cli.main([*arguments, "--speculative", "--max-new-tokens", "0"]) == 0
    assert "verification" not in capsys.readouterr().err
    assert cli.main([*arguments, "--draft-depth", "2"]) == 2
    assert "--draft-depth and --draft-tokens are for drafts: add --speculative" in capsys.readouterr().err
