"""Cached decoding against a slow loop over tokens, steps and past tokens, for every strategy of sharing.

Shapes: B batch, T tokens, d width, H heads, R steps, V vocabulary.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from grt.backbone.block import project
from grt.backbone.context import LoopContext
from grt.cache.kv import KVCache
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model.depth import Depth
from grt.model.loop import last_of

EXACT = {"rtol": 0, "atol": 1e-11}  # float64
SHARED = ("first", "last", "mean", "mod:1", "mod:2", "mod:3", "mod:7")
STRATEGIES = ("full", *SHARED, "first:all")
ROUTED = ("mor", "mor-token")  # a token has keys of the steps that it took
CASES = [(m, s) for m in METHODS for s in STRATEGIES if m not in ROUTED or s in ("full", "first")]
every_case = pytest.mark.parametrize(("method", "strategy"), CASES)
some_cases = pytest.mark.parametrize(("method", "strategy"), [c for c in CASES if c[0] in ("grt", "poisson", *ROUTED)])
PROMPT = 5


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


class Oracle:
    """One token after the other, with every K_r(j) and V_r(j) of the core kept as it was computed."""

    def __init__(self, model, strategy: str) -> None:
        self.model, self.strategy = model, strategy
        self.outer: dict[tuple, list] = {}
        self.core: list[dict[int, dict[int, tuple]]] = []  # token -> block -> step (from 1) -> (K, V)
        self.prompt = True
        self.routed = model.config.method in ROUTED

    def shared(self, j: int, block: int, r: int):
        """C_r(j)."""
        ran = self.core[j][block]
        k = max(ran, default=0)
        if self.strategy == "first:all" or (self.strategy == "first" and not self.prompt):
            return ran[1]
        if self.prompt or self.strategy == "full":
            return ran.get(r) if self.routed else ran[min(r, k)]
        if self.strategy == "last":
            return ran[k]
        if self.strategy == "mean":
            return tuple(torch.stack([ran[s][i] for s in ran]).mean(0) for i in (0, 1))
        K = int(self.strategy[4:])
        congruent = [s for s in ran if s % K == r % K]
        return ran[max(congruent) if congruent else k]

    def block(self, block, x, past, own, ctx):
        """One block on one token (1, 1, d); past: (K, V) of those before it, own: keeps the token's and may replace."""
        H, norm = block.attn.n_heads, nn.Identity()
        qkv = project("attn.qkv", block.attn.qkv, block.ln1(x), ctx).flatten()
        q, k, v = (z.view(H, -1) for z in qkv.chunk(3))
        pairs = [*past, own(k, v)]
        heads = []
        for h in range(H):
            scores = torch.stack([(q[h] * K[h]).sum() / math.sqrt(q.shape[-1]) for K, _ in pairs]).softmax(0)
            heads.append(sum(w * V[h] for w, (_, V) in zip(scores, pairs, strict=True)))
        x = x + project("attn.out", block.attn.out, torch.cat(heads).view_as(x), ctx)
        x = getattr(block, "ln1_post", norm)(x)
        return getattr(block, "ln2_post", norm)(x + block.mlp(block.ln2(x), ctx))

    def stack(self, section, x):
        for i, block in enumerate(getattr(self.model, section)):
            kept = self.outer.setdefault((section, i), [])
            x = self.block(block, x, list(kept), lambda k, v, kept=kept: kept.append((k, v)) or (k, v), LoopContext())
        return x

    def through_core(self, x, ctx, low_rank=None):
        r, position = ctx.step + 1, len(self.core) - 1
        for ctx.block, block in enumerate(self.model.core):
            ctx.low_rank = low_rank[ctx.block] if low_rank else None

            def own(k, v, i=ctx.block):
                self.core[-1][i][r] = (k, v)
                return self.core[-1][i][1] if self.strategy == "first:all" else (k, v)

            past = [pair for j in range(position) if (pair := self.shared(j, ctx.block, r))]
            x = self.block(block, x, past, own, ctx)
        return x

    def token(self, token: int, depth: int):
        """Logits (V,) after one more token that runs `depth` steps."""
        model, position = self.model, len(self.core)
        rule, ctx = model.rule, LoopContext(norm=model.ln_f, positions=torch.tensor([position]))
        x = model.embed.tokens.weight[token] + model.embed.positions.weight[position]
        h_pre = self.stack("prelude", rule.embed(x.view(1, 1, -1)))
        self.core.append({i: {} for i in range(len(model.core))})
        h = rule.start(h_pre, ctx)
        for ctx.step in range(depth):
            h = rule.step(h, h_pre, self.through_core, ctx)
        return F.linear(model.ln_f(self.stack("coda", h)), model.embed.tokens.weight).flatten()

    def run(self, ids, depths, prompt=PROMPT):
        rows = []
        for i, (token, depth) in enumerate(zip(ids.tolist(), depths, strict=True)):
            self.prompt = i < prompt
            rows.append(self.token(token, depth))
        return torch.stack(rows)


def cached(model, ids, cache, chunks, depth=3, real=None, prompt=PROMPT):
    """Logits (B, T, V): the prompt in chunks of the first sizes, commit, then the others."""
    out, at = [], 0
    for size in chunks:
        if at == prompt:
            cache.commit()
        piece = slice(at, at + size)
        one_by_one = cache.decoding and cache.core.sequential
        for one in [slice(t, t + 1) for t in range(at, at + size)] if one_by_one else [piece]:
            ctx = LoopContext(cache=cache, real=None if real is None else real[:, one])
            out.append(model.logits(last_of(model.states(ids[:, one], ctx, Depth(depth))), ctx))
            if cache.decoding:
                cache.commit()
        at += size
    return torch.cat(out, 1)


def make(model, strategy, batch=2, **options):
    return KVCache(model, batch, 12, strategy=strategy, **{"prompt": PROMPT} | options)


@every_case
def test_every_strategy_is_the_slow_loop(tiny, ids, method, strategy):
    model = tiny(method)
    got = cached(
        model, ids, make(model, strategy), [PROMPT, 7] if strategy in ("full", "first") else [PROMPT] + 7 * [1]
    )
    for row in range(2):
        torch.testing.assert_close(got[row], Oracle(model, strategy).run(ids[row], 12 * [3]), **EXACT)


@pytest.mark.parametrize("chunks", [[5, 7], 12 * [1], [2, 3, 4, 3], [3, 2, 7]], ids=str)
@some_cases
def test_any_chunking_is_the_same(tiny, ids, method, strategy, chunks):
    model = tiny(method)
    got = cached(model, ids, make(model, strategy), chunks)
    torch.testing.assert_close(got, cached(model, ids, make(model, strategy), [PROMPT] + 7 * [1]), **EXACT)
    if strategy in ("full", "mod:3", "mod:7"):  # three steps need no more than three slots
        torch.testing.assert_close(got, model(ids), **EXACT)
    elif strategy != "first:all":
        torch.testing.assert_close(got[:, :PROMPT], model(ids[:, :PROMPT]), **EXACT)
        assert not torch.allclose(got[:, PROMPT:], model(ids)[:, PROMPT:], atol=1e-6)


@some_cases
@pytest.mark.parametrize(
    "depths",
    [[3] * 5 + [1, 3, 2, 3, 1, 2, 3], [2] * 5 + [3, 3, 1, 1, 3, 3, 3], [1, 3, 2, 1, 3] + 7 * [3]],
    ids=["prompt3", "prompt2", "mixed"],
)
def test_the_depth_may_change_in_mid_sequence(tiny, ids, method, strategy, depths):
    """A token that ran fewer steps is read at its deepest one by tokens that run more."""
    model, cache, out = tiny(method), make(tiny(method), strategy), []
    for t, depth in enumerate(depths):
        ctx = LoopContext(cache=cache)
        out.append(model.logits(last_of(model.states(ids[:, t : t + 1], ctx, Depth(depth))), ctx)[:, 0])
        if t >= PROMPT - 1:
            cache.commit()
    for row in range(2):
        want = Oracle(model, strategy).run(ids[row], depths)
        torch.testing.assert_close(torch.stack(out, 1)[row], want, **EXACT)


@some_cases
@pytest.mark.parametrize("tokens", [1, 4])
def test_rollback_then_redo_never_happened(tiny, ids, method, strategy, tokens):
    model, cache = tiny(method), make(tiny(method), strategy)
    straight = cached(model, ids, make(model, strategy), [PROMPT] + 7 * [1])
    first = cached(model, ids[:, :10], cache, [PROMPT] + 5 * [1])
    torch.testing.assert_close(first, straight[:, :10], **EXACT)
    cache.rollback(tokens)
    wrong = (ids[:, 10 - tokens : 10] + 1) % 23
    cached(model, wrong, cache, tokens * [1], prompt=-1)
    cache.rollback(tokens)
    again = cached(model, ids[:, 10 - tokens :], cache, (tokens + 2) * [1], prompt=-1)
    torch.testing.assert_close(again, straight[:, 10 - tokens :], **EXACT)


@some_cases
def test_a_prompt_taken_back_leaves_no_trace(tiny, ids, method, strategy):
    """Not even where padding comes to stand in the place of tokens."""
    model, cache = tiny(method), make(tiny(method), strategy)
    real = torch.arange(12) >= torch.tensor([[0], [2]])
    cached(model, ids.flip(1)[:, :PROMPT], cache, [PROMPT])
    cache.rollback(PROMPT)
    got = cached(model, ids, cache, [3, 2] + 7 * [1], real=real)
    want = cached(model, ids, make(model, strategy), [3, 2] + 7 * [1], real=real)
    torch.testing.assert_close(got, want, **EXACT)


@every_case
def test_each_row_of_a_padded_batch_is_the_row_alone(tiny, ids, method, strategy):
    model, pads = tiny(method), (3, 0, 1)
    lengths = [12 - pad for pad in pads]
    rows = [ids.flatten()[i : i + n] for i, n in zip((0, 5, 9), lengths, strict=True)]
    batch = torch.stack([F.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    real = torch.tensor([[False] * pad + [True] * (12 - pad) for pad in pads])
    got = cached(model, batch, make(model, strategy, batch=3), [PROMPT] + 7 * [1], real=real)
    for row, pad, out in zip(rows, pads, got, strict=True):
        alone = cached(model, row[None], make(model, strategy, batch=1), [PROMPT - pad] + 7 * [1], prompt=PROMPT - pad)
        torch.testing.assert_close(out[pad:], alone[0], **EXACT)
    uncached = model(batch, ctx=LoopContext(real=real))
    for row, pad, out in zip(rows, pads, uncached, strict=True):
        torch.testing.assert_close(out[pad:], model(row[None])[0], **EXACT)


@some_cases
def test_reordered_rows(tiny, ids, method, strategy):
    model, cache = tiny(method), make(tiny(method), strategy)
    real = torch.arange(12) >= torch.tensor([[0], [2]])
    cached(model, ids[:, :8], cache, [PROMPT] + 3 * [1], real=real)
    cache.reorder(torch.tensor([1, 1, 0]))
    got = cached(model, ids[[1, 1, 0], 8:], cache, 4 * [1], prompt=-1)
    want = cached(model, ids, make(model, strategy), [PROMPT] + 7 * [1], real=real)[:, 8:]
    torch.testing.assert_close(got, want[[1, 1, 0]], **EXACT)


@some_cases
@pytest.mark.parametrize("readouts", [False, True])
def test_a_cache_that_grows_keeps_what_it_holds(tiny, ids, method, strategy, readouts):
    """In the prompt and after it, padding and the coda's keys of every step too."""
    model, real = tiny(method), torch.ones(2, 12, dtype=torch.bool)
    real[1, :2] = False
    cache = KVCache(model, 2, 3, strategy=strategy, readouts=readouts)
    got = [cached(model, ids[:, :3], cache, [3], real=real)]
    for room, at, chunks in ((5, 3, [2]), (8, 5, 3 * [1]), (12, 8, 4 * [1])):
        cache.grow(room)
        if at == PROMPT:
            cache.commit()
        got.append(cached(model, ids[:, at:room], cache, chunks, real=real[:, at:], prompt=-1))
    want = cached(model, ids, make(model, strategy), [PROMPT] + 7 * [1], real=real)
    torch.testing.assert_close(torch.cat(got, 1), want, **EXACT)
    assert cache.capacity == 12


@every_case
def test_a_cleared_cache_is_a_new_one(tiny, ids, method, strategy):
    """Without the padding that it had, too."""
    model, cache = tiny(method), make(tiny(method), strategy)
    real = torch.arange(12) >= torch.tensor([[0], [2]])
    cached(model, ids.flip(1), cache, [PROMPT] + 6 * [1], real=real)
    size = cache.nbytes
    cache.clear()
    got = cached(model, ids, cache, [PROMPT] + 7 * [1])
    torch.testing.assert_close(got, cached(model, ids, make(model, strategy), [PROMPT] + 7 * [1]), **EXACT)
    assert cache.nbytes == size or method in ROUTED  # whose room grows with need


# What it holds

TOKEN = 2 * 2 * 16 * 8  # bytes: keys and values of two rows of width 16 in float64


@pytest.mark.parametrize(
    ("method", "strategy", "tokens", "prompt"),
    [
        ("grt", "full", 12 * (2 + 2 * 3), 0),  # prelude and coda, and two blocks of three steps
        ("grt", "first", 12 * (2 + 2) + 2, 5 * 2 * 3),  # K_1 of the token in progress; all steps of the prompt
        ("grt", "last", 12 * (2 + 2), 5 * 2 * 3),
        ("grt", "mean", 12 * (2 + 2) + 2, 5 * 2 * 3),  # the sums of the token in progress
        ("grt", "mod:2", 12 * (2 + 2 * 2), 5 * 2 * 3),
        ("grt", "mod:7", 12 * (2 + 2 * 3), 5 * 2 * 3),  # three steps need no more than three slots
        ("grt", "first:all", 12 * (2 + 2), 0),
        ("mor", "full", 12 * 2 + 2 * (12 + 8 + 4), 0),  # a third fewer tokens from step to step
        ("mor", "first", 12 * 2 + 2 * 12, 2 * (8 + 4)),
    ],
)
def test_bytes_of_keys_and_values(tiny, method, strategy, tokens, prompt):
    cache = make(tiny(method), strategy)
    assert cache.nbytes == (tokens + prompt) * TOKEN
    cache.begin(1)
    cache.commit()
    assert cache.nbytes == tokens * TOKEN


def test_means_of_bf16_are_taken_in_float32(tiny):
    """Over the steps of the prompt's tokens and of a decoded one: rounded once, at the end."""
    cache, generator = make(tiny(dtype=torch.bfloat16), "mean"), torch.Generator().manual_seed(3)
    for new in (PROMPT, 1):
        cache.begin(new)
        given = torch.randn(3, 2, 2, 2, new, 8, generator=generator).bfloat16()  # step, K or V, (B, H, m, c)
        for step, (k, v) in enumerate(given):
            for block in (0, 1):
                cache.extend(("core", block, step), k, v)
        cache.commit()
        want = given.double().mean(0).bfloat16()
        for (slot,) in cache.core.slots:
            assert torch.equal(slot[..., cache.length - new : cache.length, :], want)


# What is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0}, "^batch is 0: it must be at least 1"),
        ({"capacity": 0}, "^capacity is 0: it must be at least 1"),
        ({"capacity": -3}, "^capacity is -3"),
        ({"capacity": 13}, "a cache of 13 tokens is more than model.context 12"),
        ({"prompt": 0}, "^prompt is 0: it must be at least 1"),
        ({"capacity": 6, "prompt": 7}, "^prompt is 7: it must be at most the capacity, 6"),
        ({"depth": 0}, "^depth is 0: it must be at least 1"),
        ({"depth": 193}, "^depth is 193: it must be at most 64 times the model's 3 steps"),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense(tiny, sizes, message):
    with pytest.raises(ValueError, match=message):
        KVCache(tiny(), **{"batch": 2, "capacity": 12} | sizes)


def test_more_tokens_than_there_is_room_for(tiny):
    cache = make(tiny(), "full")
    with pytest.raises(ConfigError, match="the cache has room for 5 tokens of prompt, and 6 are needed"):
        cache.begin(6)
    cache.begin(5)
    cache.commit()
    cache.begin(7)
    with pytest.raises(ConfigError, match="the cache has room for 12 tokens, and 13 are needed"):
        cache.begin(1)


def test_gradients_are_refused(tiny):
    with torch.inference_mode(False), torch.enable_grad():
        cache = make(tiny(), "full")
        with pytest.raises(ConfigError, match="a cache keeps no gradients: decode under torch.inference_mode"):
            cache.begin(1)


def test_a_dense_model_has_no_depth(tiny):
    assert KVCache(tiny(layout="4L"), 1, 1, depth=0).depth == 0


@some_cases
def test_a_pass_that_is_too_deep_leaves_the_cache_as_it_was(tiny, ids, method, strategy):
    model, cache = tiny(method), make(tiny(method), strategy, depth=2)
    cached(model, ids[:, :6], cache, [PROMPT, 1], depth=2)
    with pytest.raises(ConfigError, match="depth 3 is beyond the 2 steps of the cache"):
        cached(model, ids[:, 6:7], cache, [1], depth=3, prompt=-1)
    assert cache.length == 6
    want = cached(model, ids[:, :8], make(model, strategy, depth=2), [PROMPT, 1, 1, 1], depth=2)
    torch.testing.assert_close(cached(model, ids[:, 6:8], cache, [1, 1], depth=2, prompt=-1), want[:, 6:], **EXACT)


def test_a_frozen_cache_takes_one_token_at_a_time(tiny, ids):
    model, cache = tiny(), make(tiny(), "full")
    cached(model, ids[:, :PROMPT], cache, [PROMPT])
    cache.commit()
    cache.freeze()
    cache.advance()
    with pytest.raises(ConfigError, match="a frozen cache takes one token at a time, and 3 came: feed them one by one"):
        model(ids[:, 5:8], ctx=LoopContext(cache=cache))
