"""Scores of texts after contexts: against one plain pass each, in any batch, under every strategy; kept on the disk."""

import json
import random

import pytest
import torch

from grt.backbone.context import LoopContext
from grt.errors import ConfigError
from grt.evals import continuations
from grt.evals.continuations import (
    AtOnce,
    Halting,
    HaltingTokenByToken,
    Pair,
    Score,
    TokenByToken,
    batches,
    pieces,
    score,
)
from grt.evals.scores import ScoreFile, Scores, key_of
from grt.evals.sharing import forced_log_probs
from grt.exits.loop import halting_cache, run_halting
from grt.exits.policies import Exit, asked_exit, parse_exit
from grt.methods import METHODS
from grt.model.depth import Depth

T = 12  # the tiny models' context
STRATEGIES = ("full", "first", "last", "mean", "mod:2", "first:all")


def pairs_of(n: int, seed: int = 0) -> list[Pair]:
    """Pairs of any lengths that fit T."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        total = rng.randint(2, T + 1)
        cut = rng.randint(1, total - 1)
        ids = rng.choices(range(23), k=total)
        made.append(Pair(ids[:cut], ids[cut:]))
    return made


def scores_of(scorer, pairs, size):
    """Batch by batch, as the harness would."""
    found = {}
    for batch in batches(pairs, size, T):
        for depth, of_batch in score(scorer, [pairs[i] for i in batch]).items():
            found |= {(i, depth): s for i, s in zip(batch, of_batch, strict=True)}
    return found


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert got[name].log_prob == pytest.approx(one.log_prob, abs=1e-5), name
        assert got[name][1:] == one[1:], name


@pytest.mark.parametrize("method", [*METHODS, "dense"])
def test_at_once_is_one_plain_pass_a_pair(tiny, method):
    if method == "dense":
        model, depths = tiny("ladder", "4L", dtype=torch.float32), [0]
    else:
        model, depths = tiny(method, "1+1x3+1", dtype=torch.float32), [0, 1, 3]
    pairs = pairs_of(12)
    likely = [model(torch.tensor([context[:T]]))[0, -1].argmax().item() for context, _ in pairs[:5]]
    pairs += [Pair(pair.context, [token]) for pair, token in zip(pairs, likely, strict=False)]
    want = {}
    for i, (context, text) in enumerate(pairs):
        for depth in depths:
            with torch.inference_mode():
                logits = model(torch.tensor([[*context, *text[:-1]]]), Depth(depth))[0, len(context) - 1 :]
            nats = logits.log_softmax(-1)[range(len(text)), text]
            want[i, depth] = Score(nats.sum().item(), logits.argmax(-1).tolist() == text, depth * len(text))
    assert {s.greedy for s in want.values()} == {True, False}, "the pairs decide nothing about greedy"
    for size in (1, 4, None):
        assert_close(scores_of(AtOnce(model, depths, torch.float32), pairs, size), want)


CASES = [*(("grt", strategy) for strategy in STRATEGIES), ("mor", "first"), ("poisson", "mean"), ("ouro", "last")]


@pytest.mark.parametrize(("method", "strategy"), CASES)
def test_token_by_token_in_a_batch_is_each_alone(tiny, method, strategy):
    model, pairs, depths = tiny(method, "1+1x3+1", dtype=torch.float32, spread=0.5), pairs_of(7, seed=1), [1, 3]
    got = scores_of(TokenByToken(model, depths, torch.float32, strategy), pairs, 4)
    for i, (context, text) in enumerate(pairs):
        for depth in depths:
            nats = forced_log_probs(model, torch.tensor([context]), torch.tensor([text]), strategy, steps=depth)
            assert got[i, depth].log_prob == pytest.approx(nats.sum().item(), rel=2e-6, abs=1e-5)
    plain = scores_of(AtOnce(model, depths, torch.float32), pairs, 4)
    if strategy == "full":
        assert_close(got, plain)
    else:
        assert any(abs(got[name].log_prob - plain[name].log_prob) > 1e-4 for name in got), "the strategy had no effect"


@pytest.mark.parametrize("policy", ["state:0.037", "kl:0.108", "fixed:2"])
def test_tokens_that_leave_on_their_own(tiny, policy):
    """In a batch with padding as token by token alone, and at fixed depth as at that depth."""
    model, pairs = tiny(dtype=torch.float32), pairs_of(12, seed=3)
    made, threshold = parse_exit(policy)
    exit = Exit.of(model, made(threshold), 3)
    got = scores_of(Halting(model, [exit], torch.float32), pairs, 4)
    for i, (context, text) in enumerate(pairs):
        ctx, nats, steps = LoopContext(cache=halting_cache(model, exit, 1, T)), 0.0, 0
        for at, token in enumerate([*context, *text[:-1]], 1 - len(context)):
            with torch.inference_mode():
                logits, depths = run_halting(model, torch.tensor([[token]]), LoopContext(cache=ctx.cache), exit)
            if at >= 0:
                nats += logits[0, 0].log_softmax(-1)[text[at]].item()
                steps += int(depths)
        assert got[i, 3].log_prob == pytest.approx(nats, abs=1e-5) and got[i, 3].steps == steps
    if policy == "fixed:2":
        plain = scores_of(AtOnce(model, [2], torch.float32), pairs, 4)
        assert_close({(i, 3): s for (i, _), s in plain.items()}, got)
    else:
        assert len({s.steps / len(pairs[i].text) for (i, _), s in got.items()}) > 1, "all tokens went as deep"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_that_leave_with_shared_keys(tiny, strategy):
    """At several depths at the latest, in a batch with padding, as each alone and token by token."""
    model, pairs = tiny(dtype=torch.float32, spread=0.5), pairs_of(8, seed=3)
    exits = [asked_exit(model, "state:0.7", steps=steps) for steps in (2, 3)]
    got = scores_of(HaltingTokenByToken(model, exits, torch.float32, strategy), pairs, 4)
    taken = set()
    for i, (context, text) in enumerate(pairs):
        for exit in exits:
            cache = halting_cache(model, exit, 1, T, strategy=strategy, prompt=len(context))
            nats, steps = 0.0, 0
            for ids, token in zip([context, *([t] for t in text[:-1])], text, strict=True):
                with torch.inference_mode():
                    logits, depths = run_halting(model, torch.tensor([ids]), LoopContext(cache=cache), exit)
                cache.commit()
                nats += logits[0, -1].log_softmax(-1)[token].item()
                steps += int(depths[0, -1])
                taken.add(int(depths[0, -1]))
            assert got[i, exit.steps].log_prob == pytest.approx(nats, abs=2e-5) and got[i, exit.steps].steps == steps
    assert taken == {1, 2, 3}
    if strategy == "full":
        assert_close(got, scores_of(Halting(model, exits, torch.float32), pairs, 4))


def test_a_pair_that_is_too_long_is_cut_as_lm_eval_cuts():
    utils = pytest.importorskip("lm_eval.utils")
    for n in (1, 5, 11, 12, 13, 24, 25, 30):
        text = list(range(n))
        windows = utils.get_rolling_token_windows(text, prefix_token=99, max_seq_len=T, context_len=1)
        want = [Pair(*utils.make_disjoint_window(window)) for window in windows]
        assert pieces(Pair([99], text), T) == want
    context = list(range(30))
    assert pieces(Pair(context, [7, 8]), T) == [Pair(context[-T + 1 :], [7, 8])]  # T + 1 tokens, the last unread
    assert pieces(Pair(context[:11], [7, 8]), T) == [Pair(context[:11], [7, 8])]


def test_batches_hold_each_pair_once_and_fit_the_context(monkeypatch):
    pairs = pairs_of(100, seed=2)
    for size in (1, 7, None):
        monkeypatch.setattr(continuations, "BATCH_TOKENS", 40)
        made = list(batches(pairs, size, T))
        assert sorted(i for batch in made for i in batch) == list(range(100))
        for batch in made:
            context, text = (max(len(pairs[i][part]) for i in batch) for part in (0, 1))
            assert context + text - 1 <= T and len(batch) <= (size or 40 // (context + text - 1))
        lengths = [sum(map(len, pairs[i])) for batch in made for i in batch]
        assert lengths == sorted(lengths, reverse=True)
    assert len(list(batches(pairs, None, T))) > 3 and list(batches([], 4, T)) == []
    longest = Pair([1] * 5, [2] * (T - 4))  # T + 1 tokens, of which the model reads all but the last
    assert list(batches([longest] * 3, 2, T)) == [[0, 1], [2]]
    assert [len(batch) for batch in batches([longest] * 3, None, T)] == [3]  # 3 x 12 of at most 40


def test_where_memory_is_short_batches_are_halved():
    sizes = []

    def scorer(pairs):
        sizes.append(len(pairs))
        if len(pairs) > 2:
            raise torch.OutOfMemoryError
        return {3: [Score(-float(len(pair.text)), False, 3) for pair in pairs]}

    pairs = pairs_of(7)
    assert score(scorer, pairs) == {3: [Score(-float(len(pair.text)), False, 3) for pair in pairs]}
    assert sizes == [7, 3, 1, 2, 4, 2, 2]

    def hopeless(pairs):
        raise torch.OutOfMemoryError

    with pytest.raises(ConfigError, match="too little memory for a single request"):
        score(hopeless, pairs)


# On the disk


def made_up(pair: Pair, depth: int) -> Score:
    return Score(-0.1 * sum(pair.text) - depth, depth == 3, depth * len(pair.text))


class Counted:
    """A scorer that counts what it is asked, and is killed at the `last` call."""

    def __init__(self, last: int = 1000) -> None:
        self.calls, self.last = 0, last

    def __call__(self, pairs):
        self.calls += 1
        if self.calls == self.last:
            raise KeyboardInterrupt
        return {depth: [made_up(pair, depth) for pair in pairs] for depth in (1, 3)}


def ask(tmp_path, scorer, pairs, settings=None, told=lambda done, of: None):
    scores = Scores(scorer, [1, 3], ScoreFile(tmp_path, settings or {"weights": "a"}), T, 2)
    return [scores.of(pairs, depth, told) for depth in (1, 3)]


def test_scores_are_asked_for_once(tmp_path):
    pairs = [*pairs_of(9), pairs_of(1)[0]]  # the first one twice
    first, told = Counted(), []
    got = ask(tmp_path, first, pairs, told=lambda done, of: told.append((done, of)))
    assert first.calls == len(list(batches(pairs[:9], 2, T)))
    assert got == [[made_up(pair, depth) for pair in pairs] for depth in (1, 3)]
    assert told[0] == (0, 9) and told[-1] == (9, 9)
    again = Counted()
    assert ask(tmp_path, again, pairs) == got and again.calls == 0
    assert ask(tmp_path, again, pairs, {"weights": "b"}) == got and again.calls == first.calls  # another file
    headers = {path.read_text("utf-8").splitlines()[0] for path in tmp_path.iterdir()}
    assert headers == {'{"weights": "a"}', '{"weights": "b"}'}


def test_a_killed_run_goes_on(tmp_path):
    pairs = [Pair([i], [i, 2]) for i in range(9)]
    want = ask(tmp_path / "whole", Counted(), pairs)
    killed = Counted(last=3)
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, killed, pairs)
    [path] = tmp_path.glob("*.jsonl")
    whole = path.read_text("utf-8")
    path.write_text(whole[:-9], "utf-8")  # in the middle of a line
    assert len(whole.splitlines()) == 1 + 2 * 2 * 2
    resumed = Counted()
    assert ask(tmp_path, resumed, pairs) == want
    assert resumed.calls == 3  # for six pairs: the last score of the second batch was cut off
    assert ask(tmp_path, Counted(last=1), pairs) == want
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line)[0] for line in lines[1:5]] == [json.loads(line)[0] for line in whole.splitlines()[1:5]]


def test_a_long_text_is_the_sum_of_its_pieces(tmp_path):
    text = [5] * 40  # its pieces are alike
    at_1, at_3 = ask(tmp_path, Counted(), [Pair([1], text), Pair([1] * 20, [2])])
    assert at_1[0].log_prob == pytest.approx(-0.1 * sum(text) - 4) and len(pieces(Pair([1], text), T)) == 4
    assert at_1[0].steps == 40 and at_3[0].steps == 3 * 40
    for hollow in (Pair([1], []), Pair([], [1])):
        with pytest.raises(AssertionError, match="a text without tokens would be certain"):
            ask(tmp_path, Counted(), [hollow])


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be written .*: give --cache a folder that can"):
        ScoreFile(tmp_path / "file", {}).add(["a"], {1: [Score(0.0, True, 1)]})


def test_keys_tell_contexts_from_texts():
    assert len({key_of(p) for p in (Pair([1, 2], [3]), Pair([1], [2, 3]), Pair([12], [3]), Pair([1, 2], [4]))}) == 4
