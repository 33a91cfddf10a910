"""Tokens that leave the loop one by one: against a slow loop, in every mode, for every policy. All of it asks
one oracle; so it stays one file.

Shapes: B batch, T tokens, d width, R steps, V vocabulary.
"""

import math

import pytest
import torch
from test_cache import Oracle
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.decode.decoder import Decoder
from grt.decode.early_exit import HaltingDecoder
from grt.decode.sampling import Sampling
from grt.decode.stream import Stream, generate
from grt.errors import ConfigError
from grt.exits.loop import halting_cache, run_halting
from grt.exits.policies import POLICIES, Exit, FixedDepth, Spent, parse_exit, with_threshold
from grt.methods.ouro import exit_distribution, exit_step
from grt.model.depth import Depth

EXACT = {"rtol": 0, "atol": 1e-11}  # float64
PROMPT = 5
CASES = [
    ("grt", "fixed"), ("grt", "state"), ("grt", "kl"), ("ladder", "top1"), ("ouro", "q"), ("huginn", "entropy"),
    ("rrt", "state"),
]  # fmt: skip
every_policy = pytest.mark.parametrize(("method", "name"), CASES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def read(model, ids, exit, sizes=None, strategy="full", scores=None, prompt=None):
    """Logits (B, T, V) and depths (B, T), in pieces of these sizes; from the token `prompt` on, each is committed."""
    cache = halting_cache(model, exit, len(ids), ids.shape[1], strategy=strategy, prompt=prompt)
    logits, depths, at = [], [], 0
    for piece in ids.split(sizes or [ids.shape[1]], 1):
        some, deep = run_halting(model, piece, LoopContext(cache=cache), exit, scores=scores)
        at += piece.shape[1]
        if prompt is not None and at >= prompt:
            cache.commit()
        logits.append(some)
        depths.append(deep)
    return torch.cat(logits, 1), torch.cat(depths, 1)


def halfway(model, ids, name, share=0.5):
    """An exit that lets some tokens leave at each step: a threshold well between two scores."""
    policy = POLICIES[name]
    if policy.counts:
        return Exit.of(model, policy(2))
    scores = []
    read(model, ids, Exit.of(model, policy(1.0 if policy.learned else 0.0)), scores=scores)
    ranked = torch.cat([score.flatten() for score in scores[:-1]]).sort().values
    middle = ranked[int(len(ranked) * share) :][:12]
    at = int((middle[1:] / middle[:-1]).argmax())
    return Exit.of(model, policy(middle[at : at + 2].mean().item()))


class ReadingOracle(Oracle):
    """The coda runs after every step; at step r a token reads the others' keys of step r, or of their last one."""

    def token(self, token, depth):
        model, position = self.model, len(self.core)
        rule, ctx = model.rule, LoopContext(norm=model.ln_f, positions=torch.tensor([position]))
        x = model.embed.tokens.weight[token] + model.embed.positions.weight[position]
        h_pre = self.stack("prelude", rule.embed(x.view(1, 1, -1)))
        self.core.append({i: {} for i in range(len(model.core))})
        h = z = rule.start(h_pre, ctx)
        for ctx.step in range(depth):
            z = h = rule.step(h, h_pre, self.through_core, ctx)
            for i, block in enumerate(model.coda):
                kept = self.outer.setdefault(("coda", i), [])
                del kept[position + 1 :]
                if len(kept) == position:
                    kept.append({})
                past = [ran[min(ctx.step + 1, max(ran))] for ran in kept[:position]]
                z = self.block(
                    block,
                    z,
                    past,
                    lambda k, v, r=ctx.step + 1, kept=kept: kept[-1].setdefault(r, (k, v)),
                    LoopContext(),
                )
        return F.linear(model.ln_f(z), model.embed.tokens.weight).flatten()


@every_policy
def test_all_at_once_is_one_by_one_is_the_slow_loop(tiny, ids, method, name):
    model = tiny(method, "1+1x4+2")
    exit = halfway(model, ids, name)
    logits, depths = read(model, ids, exit)
    assert len(depths.unique()) > 1 or POLICIES[name] is FixedDepth, "the threshold tells no tokens apart"
    for sizes in ([1] * 12, [5, 4, 3]):
        again, deep = read(model, ids, exit, sizes)
        assert torch.equal(deep, depths)
        torch.testing.assert_close(again, logits, **EXACT)
    oracle = (ReadingOracle if exit.policy.reads_out else Oracle)(model, "full")
    torch.testing.assert_close(logits[0], oracle.run(ids[0], depths[0].tolist()), **EXACT)


SHARED = [(s, "state") for s in ("first", "last", "mean", "mod:2", "mod:3", "first:all")] + [
    ("full", "kl"),
    ("last", "kl"),
]


@pytest.mark.parametrize(("strategy", "name"), SHARED)
def test_every_way_of_sharing_is_the_slow_loop(tiny, ids, strategy, name):
    """Prompt at once, then one token of each row at a time, of which those that go on are gathered."""
    model = tiny("grt", "1+1x4+1")
    exit = halfway(model, ids, name)
    logits, depths = read(model, ids, exit, [PROMPT] + 7 * [1], strategy, prompt=PROMPT)
    assert (depths[0] != depths[1]).any() and len(depths[:, PROMPT:].unique()) > 1
    oracle = (ReadingOracle if exit.policy.reads_out else Oracle)(model, strategy)
    torch.testing.assert_close(logits[1], oracle.run(ids[1], depths[1].tolist()), **EXACT)


@pytest.mark.parametrize("strategy", ["full", "first", "last", "mean", "mod:2", "mod:3", "first:all"])
def test_tokens_of_a_prompt_leave_at_any_depths(tiny, ids, strategy):
    """Given ones: the keys of the step that a token left at are those of all steps behind it."""
    model, depths = tiny("grt", "1+1x4+1"), torch.tensor([[2, 4, 1, 3, 2], [3, 1, 4, 2, 4]])
    exit = Exit.of(model, FixedDepth(4))
    cache = halting_cache(model, exit, 2, 9, strategy=strategy, prompt=PROMPT)
    logits, ran = run_halting(model, ids[:, :PROMPT], LoopContext(cache=cache), exit, most=depths)
    cache.commit()
    rest = []
    for t in range(PROMPT, 9):
        rest.append(run_halting(model, ids[:, t : t + 1], LoopContext(cache=cache), exit)[0])
        cache.commit()
    got = torch.cat([logits, *rest], 1)
    assert torch.equal(ran, depths)
    for row in (0, 1):
        want = Oracle(model, strategy).run(ids[row, :9], [*depths[row].tolist(), 4, 4, 4, 4])
        torch.testing.assert_close(got[row], want, **EXACT)


@every_policy
def test_in_single_precision_within_1e_5(tiny, ids, method, name):
    model = tiny(method, "1+1x4+1", spread=0.3)
    exit = halfway(model, ids, name)
    model.float()
    logits, depths = read(model, ids, exit)
    again, deep = read(model, ids, exit, [1] * 12)
    assert torch.equal(deep, depths)
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-5)


@every_policy
def test_extreme_thresholds(tiny, ids, method, name):
    model, policy = tiny(method, "1+1x4+1"), POLICIES[name]
    shallow, deep = {True: (1, 4), False: (1e9, 0)}[policy.counts] if not policy.learned else (0, 1)
    for threshold, depth in ((shallow, 1), (deep, 4)):
        logits, depths = read(model, ids, Exit.of(model, policy(threshold)))
        assert (depths == depth).all()
        torch.testing.assert_close(logits, model(ids, Depth(depth)), **EXACT)


def test_scores_are_what_their_file_says(tiny, ids):
    model = tiny("ouro", "1+1x4+1", spread=0.3)
    ctx = LoopContext()
    states = list(model.states(ids, ctx, Depth(4)))
    p = [model(ids, Depth(r)).softmax(-1) for r in range(1, 5)]
    want = {name: [] for name in POLICIES}
    for r in range(1, 5):
        h, before, now = states[r], states[r - 1], p[r - 1]
        earlier = p[r - 2] if r > 1 else torch.full_like(now, 1 / 23)
        want["fixed"].append(torch.full((2, 12), float(r)))
        want["state"].append((h - before).square().sum(-1).sqrt() / h.square().sum(-1).sqrt())
        want["kl"].append((earlier * (earlier / now).log()).sum(-1))
        want["entropy"].append(-(now * now.log()).sum(-1))
        top = [q.argmax(-1) for q in p[:r]]
        want["top1"].append(sum(torch.stack([top[-1] == t for t in top[-n:]]).all(0).float() for n in range(1, r + 1)))
        want["q"].append(exit_distribution([*ctx.carry["exit"][:r], torch.zeros(2, 12)])[:r].sum(0))
    for name, policy in POLICIES.items():
        scores = []
        read(model, ids, Exit.of(model, policy({"q": 1, "fixed": 4, "top1": 4}.get(name, 0))), scores=scores)
        for got, expected in zip(scores, want[name], strict=True):
            torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("policy", "leaves"),
    [
        (POLICIES["state"](0.5), [True, False, False]),  # below the threshold
        (POLICIES["q"](0.5), [False, True, True]),  # where it is reached
        (POLICIES["q"](1.0), [False, False, False]),  # never, however the sum is rounded
        (POLICIES["top1"](1), [False, False, True]),
    ],
    ids=str,
)
def test_a_threshold_is_met_exactly(policy, leaves):
    scores = torch.tensor([0.25, 0.5, 1.0])
    assert policy.leaving(scores).tolist() == leaves


def test_a_learned_exit_is_the_methods_own(tiny, ids):
    model = tiny("ouro", "1+1x4+1", spread=0.3)
    for q in (0.0, 0.3, 0.6, 0.8, 1.0):
        ctx = LoopContext()
        list(model.states(ids[:, :1], ctx, Depth(4)))  # the first token has no others, whose leaving would change it
        _, depths = read(model, ids[:, :1], Exit.of(model, POLICIES["q"](q)))
        assert torch.equal(depths, exit_step(exit_distribution(ctx.carry["exit"]), q)), q


def test_only_rows_that_go_on_are_computed(tiny, ids):
    model = tiny("grt", "1+1x4+1")
    exit = halfway(model, ids, "kl")
    seen = {"core": 0, "coda": 0}
    for section in seen:
        block = getattr(model, section)[0]
        block.register_forward_pre_hook(lambda _, args, s=section: seen.update({s: seen[s] + args[0].shape[0]}))
    _, depths = read(model, ids, exit, [1] * 12)
    assert seen == {"core": depths.sum(), "coda": depths.sum()} and depths.float().mean() < 3


@pytest.mark.parametrize(("name", "kv"), [("state", "full"), ("kl", "full"), ("state", "mean"), ("kl", "last")])
def test_rows_of_a_batch_are_rows_alone(tiny, ids, name, kv):
    """Prompts of several lengths; one row leaves on the way."""
    model = tiny("grt", "1+1x4+1", context=24)
    rows = [ids[0, :7].tolist(), ids[1, :3].tolist(), ids[0, 5:10].tolist()]
    exit = halfway(model, ids, name)
    together = HaltingDecoder(model, rows, 9, exit, kv=kv)
    alone = [HaltingDecoder(model, [row], 9, exit, kv=kv) for row in rows]
    live, logits, depths = [0, 1, 2], together.prefill(), []
    parts = torch.cat([decoder.prefill() for decoder in alone])
    for turn in range(8):
        torch.testing.assert_close(logits, parts[live], **EXACT)
        assert together.depths == [alone[row].depths[0] for row in live]
        depths += together.depths
        if turn == 4:
            together.keep([0, 2])
            live, logits = [0, 2], logits[[0, 2]]
            assert together.depths == [alone[row].depths[0] for row in live]
        tokens = (ids[:, turn].repeat(2)[live] + turn) % 23
        logits = together.step(tokens)
        for token, row in zip(tokens, live, strict=True):
            parts[row] = alone[row].step(token[None])[0]
    assert len(set(depths)) > 1


def test_a_text_in_pieces_and_twice(tiny, ids):
    model = tiny("grt", "1+1x4+1")
    exit = Exit.of(model, halfway(model, ids, "kl").policy, budget=2)
    rows = [ids[0, :8].tolist(), ids[1, :5].tolist()]
    decoder = HaltingDecoder(model, rows, 4, exit)
    logits = decoder.prefill()
    decoder.step(logits.argmax(-1))
    decoder.restart(rows)
    torch.testing.assert_close(decoder.prefill(chunk=3), logits, **EXACT)
    assert max(decoder.depths) <= 2
    decoder = HaltingDecoder(model, rows, 4, Exit.of(model, None, budget=2))
    whole = decoder.prefill()
    decoder.restart(rows)
    torch.testing.assert_close(decoder.prefill(chunk=3), whole, **EXACT)  # the budget is not of the pieces' last ones


def test_without_leaving_it_is_the_ordinary_decoder(tiny, ids):
    model, rows = tiny("grt", "1+1x4+1"), ids[:, :6].tolist()
    halting, plain = HaltingDecoder(model, rows, 3, Exit.of(model, FixedDepth(4))), Decoder(model, rows, 3)
    a, b = halting.prefill(), plain.prefill()
    for _ in range(3):
        torch.testing.assert_close(a, b, **EXACT)
        assert halting.depths == plain.depths == [4, 4]
        a, b = (decoder.step(b.argmax(-1)) for decoder in (halting, plain))


@pytest.mark.parametrize("budget", [1, 1.7, 2.5, 4])
def test_a_budget_is_never_exceeded(tiny, ids, budget):
    model = tiny("grt", "1+1x4+1", context=40)
    prompts, greedy = [ids[0, :4].tolist(), ids[1, :7].tolist()], Sampling(temperature=0)
    for name in ("state", None):
        policy = None if name is None else halfway(model, ids, name, share=0.2).policy
        exit = Exit.of(model, policy, budget=budget)
        drawn = list(Stream(model, prompts, max_new_tokens=25, sampling=greedy, exit=exit))
        for row in (0, 1):
            depths = [step[row].depth for step in drawn]
            spent = torch.tensor(depths).cumsum(0)
            left = budget * torch.arange(1, 26) - spent
            assert (left >= -1e-6).all() and min(depths) >= 1
            if name is None:
                assert (left < 1).all(), "steps that it has are not used"


def test_a_budget_is_each_rows_own(tiny):
    exit = Exit(FixedDepth(4), 4, 2.0)
    spent = Spent(exit, 2, torch.device("cpu"))
    assert spent.most().tolist() == [2, 2]
    spent.spend(torch.tensor([1, 2]))
    assert spent.most().tolist() == [3, 2]
    spent.spend(torch.tensor([1, 2]))
    assert spent.most().tolist() == [4, 2]
    spent.keep(torch.tensor([1]))
    assert spent.most().tolist() == [2]
    spent = Spent(Exit(FixedDepth(4), 4, 1.4), 1, torch.device("cpu"))
    spent.tokens, spent.steps = 44, torch.tensor([61])
    assert 1.4 * 45 < 63 and spent.most().tolist() == [2]  # of the 63 steps that 45 tokens may take, but for rounding


def test_generate_takes_an_exit(tiny, ids):
    model, prompt = tiny("grt", "1+1x4+1", context=40), ids[0, :5].tolist()
    texts = [list(generate(model, prompt, max_new_tokens=20, temperature=0, **o)) for o in (
        {"depth": 1}, {"exit": "kl:1e9"}, {"exit": "fixed:1"}, {}, {"exit": "kl:0"}, {"budget": 4}, {"budget": 1},
    )]  # fmt: skip
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]
    assert texts[6] not in (texts[0], texts[3]), "the prompt goes deep, the text does not"


@pytest.mark.parametrize(
    ("method", "layout", "exit", "told"),
    [
        ("mor", "1+1x4+1", "kl:1", "mor has a router, which decides how deep each token goes: leave exit out"),
        ("mor-token", "1+1x4+1", "kl:1", "mor-token has a router"),
        ("grt", "4L", "kl:1", "a dense model has none: leave exit out"),
        ("grt", "1+1x4+1", "q:1", "exit q needs the exit probabilities of ouro, grt has none: use fixed, state"),
        ("grt", "1+1x4+1", "ql:1", "exit is 'ql': did you mean q"),
        ("grt", "1+1x4+1", "kl:much", "exit is 'kl:much': give a number"),
        ("grt", "1+1x4+1", "kl", "exit kl has no threshold: give one as kl:NUMBER"),
        ("grt", "1+1x4+1", "kl:-0.1", "the threshold of exit kl is -0.1: give a finite number of at least 0"),
        ("grt", "1+1x4+1", "state:inf", "the threshold of exit state is inf"),
        ("grt", "1+1x4+1", "state:nan", "the threshold of exit state is nan"),
        ("grt", "1+1x4+1", "top1:1.5", "the threshold of exit top1 is 1.5: give a whole number of steps"),
        ("grt", "1+1x4+1", "top1:nan", "the threshold of exit top1 is nan"),
        ("grt", "1+1x4+1", "fixed:0", "the threshold of exit fixed is 0"),
        ("grt", "1+1x4+1", "fixed:5", "exit fixed:5 asks for more than the 4 steps there are: give at most 4"),
        ("ouro", "1+1x4+1", "q:1.1", "the threshold of exit q is 1.1: it must lie between 0 and 1"),
    ],
)
def test_what_cannot_work_is_refused(tiny, method, layout, exit, told):
    with pytest.raises(ConfigError, match=told):
        Exit.of(tiny(method, layout), with_threshold(*parse_exit(exit)))


@pytest.mark.parametrize("budget", [0.9, 4.1, math.nan, -1])
def test_budgets_that_cannot_be(tiny, budget):
    with pytest.raises(ConfigError, match="budget is .*: it must lie between 1 and the 4 steps"):
        Exit.of(tiny("grt", "1+1x4+1"), None, budget=budget)


@pytest.mark.parametrize("option", [{"crop": True}, {"compiled": True}])
def test_neither_crop_nor_compiled(tiny, option):
    model = tiny("grt", "1+1x4+1")
    with pytest.raises(ConfigError, match="leave crop and compile out"):
        Stream(model, [[1]], exit=Exit.of(model, FixedDepth(2)), **option)
