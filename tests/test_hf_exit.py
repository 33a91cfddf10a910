"""`generate` of the Hugging Face model with an exit says what grt's own decoder says with it."""

import pytest
import torch
from test_hf_generate import PROMPTS, greedy, grts, padded

from grt.decode.sampling import Sampling
from grt.decode.stream import Stream
from grt.errors import ConfigError
from grt.exits.policies import asked_exit

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import GenerationConfig

from grt.hf import GRTCache, GRTForCausalLM
from grt.hf.model import CACHE

STRATEGIES = ["full", "first", "last", "mean", "mod:2", "first:all"]
N = 8


@pytest.fixture(scope="module")
def make():
    """A model whose tokens leave after different steps, by method; each made once."""
    from tiny_model import build_tiny

    made = {}

    def model(method="grt", layout="1+1x4+1"):
        key = method, layout
        made[key] = made.get(key) or build_tiny(method, layout, context=40, spread=0.5, seed=2)
        return made[key]

    return model


def depths_of(model, exit, budget=None, kv="full"):
    """The steps of each new token of each row, by grt's own decoder."""
    asked = asked_exit(model, exit, None, budget)
    rows = [
        Stream(model, [row], max_new_tokens=N, sampling=Sampling(temperature=0), exit=asked, kv=kv) for row in PROMPTS
    ]
    return [[drawn.depth for (drawn,) in row] for row in rows]


# A threshold of each policy at which the tokens below leave after different steps.
EXITS = {"kl": "kl:0.05", "state": "state:0.5", "entropy": "entropy:2.2", "top1": "top1:2", "fixed": "fixed:2"}


@pytest.mark.parametrize("exit", EXITS.values(), ids=EXITS)
def test_padded_batches_say_what_rows_alone_say(make, exit):
    model = make()
    hf, want = GRTForCausalLM.of(model), grts(model, n=N, exit=exit)
    assert greedy(hf, n=N, exit=exit) == want
    assert greedy(hf, n=N, exit=exit, cache_implementation="static", prefill_chunk_size=4) == want
    assert hf.exit is None and (hf.config.num_steps, hf.config.kv) == (4, "full")


def test_tokens_take_the_steps_that_ours_take(make):
    model = make()
    hf = GRTForCausalLM.of(model)
    seen = set()
    for options in ({"exit": "kl:0.05"}, {"exit": "kl:0.05", "budget": 1.5}, {"budget": 2.5}):
        said = hf.generate(
            **padded(), max_new_tokens=N, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **options
        )
        want = depths_of(model, options.get("exit"), options.get("budget"))
        # A new token is said by the one before it; the last one is never fed.
        assert said[CACHE].depths[:, 5:].tolist() == want
        seen |= {depth for row in want for depth in row}
    assert len(seen) > 2


@pytest.mark.parametrize("kv", STRATEGIES)
def test_every_strategy(make, kv):
    model = make()
    options = {"exit": "state:0.5", "kv": kv}
    assert greedy(GRTForCausalLM.of(model), n=N, **options) == grts(model, n=N, **options)


@pytest.mark.parametrize(
    ("method", "exit"), [("ladder", "kl:0.05"), ("poisson", "state:0.5"), ("rrt", "kl:0.05"), ("ouro", "q:0.7")]
)
def test_other_methods(make, method, exit):
    model = make(method)
    assert greedy(GRTForCausalLM.of(model), n=N, exit=exit) == grts(model, n=N, exit=exit)


def test_options_come_from_the_call_or_the_generation_config(make):
    model = make()
    hf = GRTForCausalLM.of(model)
    want = {k: grts(model, n=N, exit="fixed:2" if k == 2 else "state:0.5", depth=3) for k in (2, 3)}
    assert want[2] != want[3]
    config = GenerationConfig(
        exit="state", threshold=0.5, num_steps=3, max_new_tokens=N, do_sample=False, pad_token_id=0
    )
    assert hf.generate(**padded(), generation_config=config)[:, 6:].tolist() == want[3]
    assert greedy(hf, n=N, exit="state", threshold=0.5, num_steps=3) == want[3]
    hf.generation_config.exit = "fixed:2"
    assert greedy(hf, n=N) == want[2] != greedy(hf, n=N, exit="state:0.5")


def test_a_budget_is_each_rows_own(make):
    model = make()
    options = {"exit": "fixed:4", "budget": 1.75}
    for more in ({}, {"prefill_chunk_size": 4}):
        assert greedy(GRTForCausalLM.of(model), n=N, **options, **more) == grts(model, n=N, **options)


def test_beams_are_those_of_each_row_alone(make):
    hf = GRTForCausalLM.of(make())
    options = {"exit": "kl:0.05", "budget": 1.5, "num_beams": 3}
    together = greedy(hf, n=5, **options)
    assert together == [greedy(hf, n=5, prompts=[row], **options)[0] for row in PROMPTS]
    assert together != greedy(hf, n=5, num_beams=3) and together != greedy(hf, n=5, exit="kl:0.05", num_beams=3)


def test_a_second_turn_on_a_used_cache(make):
    """The budget begins anew; what is in the cache keeps the steps that it took."""
    model, exit = make(), "state:0.5"
    hf, prompt = GRTForCausalLM.of(model), [PROMPTS[0]]
    first = greedy(hf, n=5, prompts=prompt, exit=exit)[0]
    cache = GRTCache(hf.config, exit=asked_exit(hf.loop, exit))
    assert greedy(hf, n=5, prompts=prompt, exit=exit, **{CACHE: cache})[0] == first
    longer = [[*PROMPTS[0], *first, 7, 3]]
    assert greedy(hf, n=5, prompts=longer, exit=exit, **{CACHE: cache}) == grts(model, n=5, prompts=longer, exit=exit)


def test_the_last_step_alone_is_all_steps(make):
    hf = GRTForCausalLM.of(make())
    assert greedy(hf, n=N, exit="kl:0") == greedy(hf, n=N) != greedy(hf, n=N, exit="fixed:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit": "kll:1"}, "exit is 'kll:1'|exit is 'kll': did you mean kl"),
        ({"exit": "kl"}, "exit kl has no threshold: give one as kl:NUMBER"),
        ({"exit": 3}, "exit is 3: give a policy as text"),
        ({"exit": "kl", "threshold": "a"}, "threshold is 'a': give a number"),
        ({"num_steps": 2.5}, "num_steps is 2.5: give a whole number"),
        ({"threshold": 0.5}, "threshold is 0.5, of no policy: give exit as well"),
        ({"exit": "kl:1", "threshold": 0.5}, "exit kl:1 has a threshold already: leave threshold out"),
        ({"exit": "q:0.5"}, "exit q needs the exit probabilities of ouro, grt has none"),
        ({"budget": 9}, "budget is 9: it must lie between 1 and the 4 steps"),
        ({"exit": "kl:1", "method": "mor"}, "mor has a router, which decides how deep each token goes"),
        ({"exit": "kl:1", "layout": "4L", "method": "ladder"}, "a dense model has none: leave exit out"),
        ({"exit": "kl:1", "kv": "furst"}, "kv is 'furst': choose one of full, first"),
        ({"exit": "kl:1", "use_cache": False}, "with exit, tokens go as deep as they need, through a cache"),
        ({"exit": "kl:1", "assistant_early_exit": 4}, "a draft is completed to the full depth"),
        ({"exit": "kl:1", "cache": None}, "the cache was made for another exit"),
        ({"exit": "kl:1", "output_attentions": True}, "output_attentions does not go with exit"),
    ],
    ids=str,
)
def test_what_does_not_go_with_an_exit_is_one_clear_sentence(make, options, message):
    options = dict(options)
    hf = GRTForCausalLM.of(make(options.pop("method", "grt"), options.pop("layout", "1+1x4+1")))
    if "cache" in options:
        options[CACHE] = GRTCache(hf.config, exit=options.pop("cache"))
    if "output_attentions" in options:
        options["return_dict_in_generate"] = True
    with pytest.raises(ConfigError, match=message) as error:
        greedy(hf, prompts=[PROMPTS[0]], **options)
    assert "\n" not in str(error.value) and hf.exit is None


def test_a_pass_with_an_exit_gives_logits_alone(make):
    hf, ids = GRTForCausalLM.of(make()), torch.tensor([PROMPTS[0]])
    exit = asked_exit(hf.loop, "kl:0.05")
    with pytest.raises(ConfigError, match="exit keeps no gradients"):
        hf(ids, **{CACHE: GRTCache(hf.config, exit=exit)})
    with torch.no_grad(), pytest.raises(ConfigError, match="which reads out by the head: use GRTForCausalLM"):
        hf.model(ids, **{CACHE: GRTCache(hf.config, exit=exit)})
    with torch.no_grad(), pytest.raises(ConfigError, match="labels does not go with exit"):
        hf(ids, labels=ids, **{CACHE: GRTCache(hf.config, exit=exit)})
    hf.config.tie_word_embeddings = False
    with pytest.raises(ConfigError, match="this model has a head of its own: leave exit out"):
        greedy(hf, exit="kl:1")
