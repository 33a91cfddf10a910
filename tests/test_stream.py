"""Stream: cached text is the uncached text, a row of a batch is the row alone, and rows that end do no harm.

Shapes: B batch, T tokens, V vocabulary.
"""

from pathlib import Path

import pytest
import torch

from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.cpu import one_row as onerow
from grt.decode.decoder import Decoder
from grt.decode.sampling import Sampling
from grt.decode.stream import Stream
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model.loop import last_of
from grt.runs.checkpoint import load_model

GREEDY = Sampling(temperature=0)
NANO = Path(__file__).resolve().parent.parent / "models" / "grt-nano"
MODELS = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]
every_model = pytest.mark.parametrize(("method", "layout"), MODELS, ids=[*METHODS, "dense"])
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # two logits that near may change places


def rows_of(stream: Stream) -> list[list[int]]:
    """The ids of each row."""
    out: list[list[int]] = [[] for _ in stream.past]
    for step in stream:
        for row, drawn in zip(out, step, strict=True):
            if drawn is not None:
                row.append(drawn.token)
    return out


def alone(model, prompt, **options) -> list[int]:
    return rows_of(Stream(model, [prompt], **options))[0]


def departures(model, prompt, text) -> tuple[list[float], int]:
    """How far the largest logit of a fresh pass lies above the second where it is not the text's token; and in how
    many places the two are too close to tell."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1].float()
    top = logits.topk(2)
    gaps = top.values[:, 0] - top.values[:, 1]
    differs = top.indices[:, 0] != torch.tensor(text)
    return gaps[differs].tolist(), int((gaps < CLOSE[model.embed.tokens.weight.dtype]).sum())


@pytest.fixture
def long(tiny):
    """Makes an untrained model with a context of 256 whose text is no mere repetition: loud positions see to that."""

    def make(method, layout, dtype=torch.float32):
        model = tiny(method, layout, dtype=torch.float32, context=256, vocab_size=64, gate_bias=-2.0)
        with torch.no_grad():
            model.embed.positions.weight *= 3
        return model.to(dtype)

    return make


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_200_greedy_tokens_are_those_of_fresh_passes(long, method, layout, dtype):
    model, shared = long(method, layout, dtype), []
    for prompt in ([3, 1, 4], list(range(40))):
        text = alone(model, prompt, max_new_tokens=200, sampling=GREEDY)
        gaps, ties = departures(model, prompt, text)
        print(f"{method}, {dtype}: {len(gaps)} of 200 tokens differ; the fresh pass has {ties} near ties")
        assert len(text) == 200 and len(set(text)) > 3
        assert all(gap < CLOSE[dtype] for gap in gaps)
        if dtype == torch.float32 and layout != "4L":
            text = alone(model, prompt, max_new_tokens=200, sampling=GREEDY, kv="first")
            shared += departures(model, prompt, text)[0]
    if dtype == torch.float32 and layout != "4L":
        assert max(shared, default=0) > CLOSE[dtype], "sharing says something else, and it does not show"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_200_greedy_tokens_of_a_trained_model(dtype):
    model, prompt = load_model(NANO)[0].to(dtype), list(b"import numpy as np\n\n\ndef ")
    text = alone(model, prompt, max_new_tokens=200, sampling=GREEDY)
    gaps, ties = departures(model, prompt, text)
    print(f"grt-nano, {dtype}: {len(gaps)} of 200 tokens differ; the fresh pass has {ties} near ties")
    # From 4 to 8, where its largest logits are, neighbours in bf16 are 1/32 apart: they are as good as tied.
    assert all(gap < CLOSE[dtype] or (dtype == torch.bfloat16 and gap <= 1 / 32) for gap in gaps)
    assert bytes(text).count(b"assert np.") > 1  # it says what it learned to say


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
SEEDS = [5, 6, 5]
DRAWN = Sampling(temperature=0.5, top_p=0.98, repetition_penalty=1.3)


# Nothing is shared in a dense model.
OPTIONS = [{}, {"kv": "first"}, {"crop": True, "max_new_tokens": 14}]
WAYS = [(*model, options) for model in MODELS for options in OPTIONS if model[1] != "4L" or "kv" not in options]


@pytest.mark.parametrize(("method", "layout", "options"), WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_row_of_a_batch_is_the_row_alone(tiny, method, layout, dtype, options):
    """Padded, with rows that end at different times and leave; the batch in another order too."""
    model = tiny(method, layout, dtype=dtype, spread=0.4)
    options = {"max_new_tokens": 7, "sampling": DRAWN} | options
    rows = [alone(model, prompt, seeds=[seed], **options) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert len({tuple(row) for row in rows}) == 3
    assert rows_of(Stream(model, PROMPTS, seeds=SEEDS, **options)) == rows
    stop = rows[1][2]
    ended = [row[: row.index(stop)] if stop in row else row for row in rows]
    assert len({len(row) for row in ended}) > 1
    assert rows_of(Stream(model, PROMPTS, seeds=SEEDS, stop_ids=[stop], **options)) == ended
    assert rows_of(Stream(model, PROMPTS[::-1], seeds=SEEDS[::-1], stop_ids=[stop], **options)) == ended[::-1]


@pytest.mark.parametrize("options", [{}, {"kv": "mean"}, {"crop": True}], ids=str)
def test_a_row_may_be_dropped(tiny, options):
    model = tiny()
    whole = rows_of(Stream(model, PROMPTS, max_new_tokens=7, **options))
    stream, got = Stream(model, PROMPTS, max_new_tokens=7, **options), []
    for step in stream:
        got.append(step)
        if len(got) == 3:
            stream.drop(0)
        if len(got) == 5:
            stream.drop(2)
    columns = [[drawn.token for drawn in row if drawn is not None] for row in zip(*got, strict=True)]
    assert columns == [whole[0][:3], whole[1], whole[2][:5]]
    assert all(drawn is None for step in got[3:] for drawn in step[:1])
    stream = Stream(model, PROMPTS, max_new_tokens=7, **options)
    for row in range(3):
        stream.drop(row)
    assert list(stream) == []


def test_ended_rows_leave_the_work(tiny, monkeypatch):
    """What the last row costs is a batch of one."""
    model, sizes = tiny(), []
    logits = type(model).logits
    monkeypatch.setattr(
        type(model), "logits", lambda self, h, *rest, **more: sizes.append(len(h)) or logits(self, h, *rest, **more)
    )
    stream = Stream(model, PROMPTS, max_new_tokens=5)
    next(stream)
    stream.drop(0)
    next(stream)
    stream.drop(2)
    list(stream)
    assert sizes == [3, 2, 1, 1, 1]  # and no pass after the last token


@pytest.mark.parametrize("strategy", ["last", "mean", "mod:2", "first:all"])
def test_each_strategy_is_the_caches(tiny, strategy):
    model, prompt = tiny(), [3, 1, 4]
    cache, ids = KVCache(model, 1, 12, strategy=strategy), list(prompt)
    new = ids
    with torch.inference_mode():
        for _ in range(9):
            ctx = LoopContext(cache=cache)
            logits = model.logits(last_of(model.states(torch.tensor([new]), ctx, model.full_depth)), ctx)
            cache.commit()
            new = [int(logits[0, -1].argmax())]
            ids += new
    assert alone(model, prompt, sampling=GREEDY, kv=strategy) == ids[3:]


@pytest.mark.parametrize("crop", [False, True])
def test_logprobs_are_those_of_the_forward_pass(tiny, crop):
    model = tiny()
    drawn = [row[0] for row in Stream(model, [[3, 1]], sampling=DRAWN, max_new_tokens=9, crop=crop)]
    with torch.inference_mode():
        want = model(torch.tensor([[3, 1] + [row.token for row in drawn]]))[0, 1:-1].log_softmax(-1)
    for i, row in enumerate(drawn):
        assert row.logprob == pytest.approx(want[i, row.token].item(), abs=1e-5)


def test_a_batch_ends_behind_its_longest_prompt(tiny):
    model = tiny()
    assert [len(row) for row in rows_of(Stream(model, PROMPTS))] == [7, 7, 7]
    with pytest.raises(ConfigError, match="a prompt of 12 tokens leaves no room"):
        Stream(model, [*PROMPTS, 12 * [1]])
    with pytest.raises(ConfigError, match="5 tokens and 8 new ones are more than model.context 12"):
        Stream(model, PROMPTS, max_new_tokens=8)


def test_two_streams_of_a_model_in_training(tiny):
    """Noise is off in every pass, and each leaves the model as it found it."""
    model = tiny(state_noise=9.0, gate_noise=9.0)
    want = alone(model, PROMPTS[0])
    model.train()
    a, b = (Stream(model, PROMPTS[:1]) for _ in range(2))
    first = [next(a), next(b), next(b)]
    assert model.training
    assert [first[0][0].token, *(row[0].token for row in a)] == want == alone(model, PROMPTS[0]) and model.training


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1]], {"kv": "mod:0"}, "kv is 'mod:0'"),
        ([[1]], {"crop": True, "compiled": True}, "crop decodes without a cache"),
        ([[1]], {"seeds": [2**63]}, "seed is 9223372036854775808"),
    ],
    ids=str,
)
def test_errors(tiny, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        Stream(tiny(), prompts, **options)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_what_a_router_refuses(tiny, method):
    for kv in ("last", "mean", "mod:2", "first:all"):
        with pytest.raises(ConfigError, match=f"kv is '{kv}', which may ask for keys"):
            Stream(tiny(method), [[1]], kv=kv)
    with pytest.raises(ConfigError, match="decode it without compiling"):
        Stream(tiny(method), [[1]], compiled=True)
    with pytest.raises(ConfigError, match="depth 4 is beyond the 3 steps"):
        Stream(tiny(method), [[1]], depth=4)


def test_deeper_than_trained(tiny):
    """The cache is as deep as what is asked for."""
    model = tiny(dtype=torch.float32)
    with pytest.warns(UserWarning, match="depth 5 is beyond"):
        cached = alone(model, [3, 1, 4], depth=5, sampling=GREEDY)
    with pytest.warns(UserWarning, match="depth 5 is beyond"):
        assert cached == alone(model, [3, 1, 4], depth=5, sampling=GREEDY, crop=True)[:9]


COMPILED = [m for m in MODELS if not m[0].startswith("mor")]  # a router's rows have no fixed number
SHARING = [(*model, kv) for model in COMPILED for kv in ("full", "first") if model[1] != "4L" or kv == "full"]


@pytest.mark.parametrize(("method", "layout", "kv"), SHARING)
def test_one_row_in_sums_is_the_same(tiny, monkeypatch, method, layout, kv):
    """What is compiled for a single row on a CPU, without compiling it."""
    model, used = tiny(method, layout, dtype=torch.float32), []
    for name in ("linear", "attention"):
        real = getattr(onerow, name)
        monkeypatch.setattr(onerow, name, lambda *args, name=name, real=real: used.append(name) or real(*args))
    executions = model.config.blocks.n_executions()
    plain, sums = (Decoder(model, [[3, 1, 4]], 6, kv=kv) for _ in range(2))
    torch.testing.assert_close(sums.prefill(), plain.prefill(), rtol=0, atol=0)
    for token in (5, 9, 2):
        want = plain.step(torch.tensor([token]))
        assert not used
        with onerow.OneRow():
            got = sums.step(torch.tensor([token]))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert used.count("attention") == executions and used.count("linear") >= 4 * executions + 1
        used.clear()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv", ["full", "first"])
def test_compiled_text_is_the_same(tiny, kv):
    """Rows that ended stay in the batch, whose size is compiled in."""
    model, options = tiny(dtype=torch.float32), {"seeds": SEEDS, "sampling": DRAWN, "kv": kv}
    plain = rows_of(Stream(model, PROMPTS, **options))
    assert rows_of(Stream(model, PROMPTS, compiled=True, **options)) == plain
    stop = plain[1][2]
    want = rows_of(Stream(model, PROMPTS, stop_ids=[stop], **options))
    assert rows_of(Stream(model, PROMPTS, stop_ids=[stop], compiled=True, **options)) == want != plain
