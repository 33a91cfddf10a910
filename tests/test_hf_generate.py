"""`generate` of the Hugging Face model says what grt's own decoder says: every method, strategy, cache and search."""

import pytest
import torch

from grt.decode.stream import generate
from grt.errors import ConfigError
from grt.methods import METHODS

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import GenerationConfig, StaticCache

from grt.hf import GRTCache, GRTForCausalLM
from grt.hf.model import CACHE

CASES = [(method, "1+1x3+1") for method in METHODS] + [("ladder", "4L")]
NAMES = [*METHODS, "dense"]


def slow(*values):
    """A case that others cover in part."""
    return pytest.param(*values, marks=pytest.mark.slow)


STRATEGIES = ["full", "first", "last", "mean", "mod:2", "first:all"]
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7]]


@pytest.fixture
def hf(tiny):
    return GRTForCausalLM.of(tiny(context=40))


def padded(prompts=PROMPTS):
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(row)) + row for row in prompts]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def greedy(hf, n=6, prompts=PROMPTS, **options):
    """The new tokens of each row."""
    inputs = padded(prompts)
    start = inputs["input_ids"].shape[1]
    return hf.generate(**inputs, max_new_tokens=n, do_sample=False, pad_token_id=0, **options)[:, start:].tolist()


def grts(model, n=6, prompts=PROMPTS, **options):
    return [list(generate(model, row, max_new_tokens=n, temperature=0, **options)) for row in prompts]


@pytest.mark.parametrize(("method", "layout"), CASES, ids=NAMES)
def test_padded_batches_of_every_method_and_cache(tiny, method, layout):
    model = tiny(method, layout, context=40)
    hf = GRTForCausalLM.of(model)
    want = grts(model, n=4)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 5}):
        assert greedy(hf, n=4, **options) == want, options


@pytest.mark.parametrize("kv", STRATEGIES)
def test_every_strategy(tiny, kv):
    """Chunks of 5 leave one token of the prompt for the last, which is no decoded one."""
    model = tiny(context=40, spread=0.4)
    hf = GRTForCausalLM.of(model)
    want = grts(model, n=8, kv=kv, depth=2)
    assert greedy(hf, n=8, kv=kv, num_steps=2) == want
    assert greedy(hf, n=8, kv=kv, num_steps=2, cache_implementation="static", prefill_chunk_size=5) == want
    assert (hf.config.kv, hf.config.num_steps) == ("full", 3)


def test_options_come_from_the_call_the_generation_config_or_the_model(tiny):
    model = tiny(context=40, spread=0.5)
    hf = GRTForCausalLM.of(model)
    want = {(kv, k): grts(model, n=8, kv=kv, depth=k) for kv in ("full", "mean") for k in (2, 3)}
    assert len(set(map(str, want.values()))) == 4
    config = GenerationConfig(kv="mean", num_steps=2, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert hf.generate(**padded(), generation_config=config)[:, 6:].tolist() == want["mean", 2]
    assert hf.generate(**padded(), generation_config=config, num_steps=3)[:, 6:].tolist() == want["mean", 3]
    hf.generation_config.kv = "mean"
    config = GenerationConfig(num_steps=2, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert hf.generate(**padded(), generation_config=config)[:, 6:].tolist() == want["mean", 2]
    assert greedy(hf, n=8) == want["mean", 3] and greedy(hf, n=8, kv="full") == want["full", 3]
    hf.config.num_steps = 2
    assert greedy(hf, n=8) == want["mean", 2]


@pytest.mark.parametrize("kv", ["full", "first"])
def test_routed_tokens_keep_what_they_computed(tiny, kv):
    model = tiny("mor", context=40)
    assert greedy(GRTForCausalLM.of(model), kv=kv, n=9) == grts(model, kv=kv, n=9)


@pytest.mark.parametrize("kv", ["full", "first", "mean", *(slow(kv) for kv in ("last", "mod:2", "first:all"))])
def test_a_second_turn_on_a_used_cache(tiny, kv):
    """A first answer, then more text at once, in a batch whose first row ended early: as for each row alone."""
    model = tiny(context=40)
    hf = GRTForCausalLM.of(model)
    hf.config.kv = kv
    more, ends_early = torch.tensor([[8, 8, 2], [6, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])

    def turns(inputs, more, kept):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        said = hf.generate(
            **inputs, max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True, num_steps=2
        )
        # The fifth token was never fed: the answer in the cache is of four.
        ids = torch.cat((said.sequences[:, :-1], more), 1)
        mask = torch.cat((mask, kept, torch.ones_like(more)), 1)
        cache = said[CACHE]
        assert cache.get_seq_length() == ids.shape[1] - 3
        with torch.no_grad():
            logits = hf(more, attention_mask=mask, num_steps=2, **{CACHE: cache}).logits
        cache.crop(-3)
        again = hf.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, num_steps=2, **{CACHE: cache}
        )
        return logits, again[:, ids.shape[1] :].tolist()

    logits, said = turns(padded(), more, ends_early)
    for row, prompt in enumerate(PROMPTS):
        kept = ends_early[row : row + 1]
        alone, said_alone = turns(padded([prompt]), more[row : row + 1], kept)
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=0, atol=1e-10)
        assert said[row] == said_alone[0]
    # The masked part of the answer is as if it had never been said.
    with torch.no_grad():
        first = hf.generate(**padded([PROMPTS[0]]), max_new_tokens=2, do_sample=False, num_steps=2)
        cache = hf.generate(
            **padded([PROMPTS[0]]), max_new_tokens=3, do_sample=False, num_steps=2, return_dict_in_generate=True
        )[CACHE]
        want = hf(more[:1], num_steps=2, **{CACHE: cache}).logits
    assert first.shape[1] == 8 and cache.get_seq_length() == 11
    torch.testing.assert_close(logits[:1], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv", STRATEGIES)
def test_a_manual_loop_says_the_same(hf, kv):
    """Pieces of a prompt, then one token after the other: the cache ends the prompt by itself."""
    hf.config.kv = kv
    want, ids = greedy(hf, n=8, prompts=[PROMPTS[0]])[0], torch.tensor([PROMPTS[0]])
    said = []
    with torch.no_grad():
        cache = hf(ids[:, :3], use_cache=True)[CACHE]
        output = hf(ids[:, 3:], **{CACHE: cache})
        for _ in range(8):
            said.append(int(output.logits[0, -1].argmax()))
            output = hf(torch.tensor([said[-1:]]), **{CACHE: output[CACHE]})
    assert said == want and output[CACHE] is cache and len(cache) == hf.config.num_hidden_layers


def test_two_texts_of_different_lengths(hf):
    for options in ({}, {"cache_implementation": "static"}):
        short, long = greedy(hf, n=3, **options), greedy(hf, n=9, **options)
        assert [row[:3] for row in long] == short and len(long[0]) == 9


def test_a_static_cache_ends_where_it_is_full_and_a_growing_one_grows(tiny, monkeypatch):
    monkeypatch.setattr("grt.hf.cache.SMALLEST", 4)
    hf = GRTForCausalLM.of(tiny(context=30))
    cache = GRTCache(hf.config, max_cache_len=8)
    with pytest.raises(ConfigError, match="the cache has room for 8 tokens, not 9: make it larger"):
        greedy(hf, n=9, **{CACHE: cache})
    assert cache.get_max_length() == 8
    growing = GRTCache(hf.config)
    long = greedy(hf, n=20, **{CACHE: growing})
    assert long == greedy(hf, n=20, cache_implementation="static") and growing.get_max_length() == -1
    assert growing.store.capacity == 30
    growing.reset()
    assert growing.get_seq_length() == 0 and greedy(hf, n=20, **{CACHE: growing}) == long
    with pytest.raises(ConfigError, match="31 tokens are more than the model's context of 30"):
        greedy(hf, n=26)


@pytest.mark.parametrize("kv", STRATEGIES)
def test_growing_keeps_what_is_held(tiny, monkeypatch, kv):
    model = tiny(context=40)
    hf = GRTForCausalLM.of(model)
    monkeypatch.setattr("grt.hf.cache.SMALLEST", 1)
    assert greedy(hf, n=5, kv=kv, prefill_chunk_size=2) == grts(model, n=5, kv=kv)


@pytest.mark.parametrize(("method", "kv"), [("grt", "full"), ("grt", "mean"), ("mor", "full"), slow("rrt", "full")])
def test_beams_with_a_cache_are_beams_without(tiny, method, kv):
    hf = GRTForCausalLM.of(tiny(method, context=40, spread=0.3))
    cached = greedy(hf, n=5, num_beams=3, kv=kv)
    if kv == "full":
        assert cached == greedy(hf, n=5, num_beams=3, use_cache=False)
    assert cached == greedy(hf, n=5, num_beams=3, kv=kv, cache_implementation="static")
    alone = [greedy(hf, n=5, num_beams=3, kv=kv, prompts=[row])[0] for row in PROMPTS]
    assert cached == alone
    several = greedy(hf, n=5, num_beams=3, num_return_sequences=2, kv=kv)
    assert several[::2] == cached and several[1] != several[0]


def test_sampling_needs_a_seed_only(hf):
    def sampled(seed):
        torch.manual_seed(seed)
        return hf.generate(**padded(), max_new_tokens=10, do_sample=True, top_k=20, pad_token_id=0).tolist()

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("method", "layers"),
    [("grt", 4), ("grt", 6), ("mor", 4), *(slow(m, n) for m in ("poisson", "rrt", "ouro") for n in (4, 6))],
)
def test_early_exit_drafts_change_nothing(tiny, method, layers):
    hf = GRTForCausalLM.of(tiny(method, context=40))
    options = {"n": 9, "prompts": [PROMPTS[0]]}
    plain = greedy(hf, **options)
    depths = []
    hf.model.register_forward_pre_hook(lambda *_: depths.append(hf.config.num_steps))
    assert greedy(hf, assistant_early_exit=layers, **options) == plain
    assert set(depths) == {(layers - 2) // 2, 3} and hf.config.num_steps == 3
    assert greedy(hf, assistant_early_exit=layers, kv="full" if method == "mor" else "first:all", **options) == greedy(
        hf, kv="full" if method == "mor" else "first:all", **options
    )


def test_a_draft_that_fails_leaves_the_config_as_it_was(hf, monkeypatch):
    real = type(hf.loop).states

    def states(loop, ids, ctx, depth):
        if depth.steps < 3:
            raise ZeroDivisionError
        return real(loop, ids, ctx, depth)

    monkeypatch.setattr(type(hf.loop), "states", states)
    for options in ({"assistant_early_exit": 4}, {"num_steps": 2, "kv": "first"}):
        with pytest.raises(ZeroDivisionError):
            greedy(hf, prompts=[PROMPTS[0]], **options)
        assert (hf.config.num_steps, hf.config.kv) == (3, "full")
    with pytest.raises(ConfigError, match="num_hidden_layers is 5"):
        greedy(hf, prompts=[PROMPTS[0]], assistant_early_exit=5)
    assert hf.config.num_hidden_layers == 8


def test_states_of_every_new_token(hf):
    said = hf.generate(
        **padded(), max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    assert [len(states) for states in said.hidden_states] == [5, 5, 5]
    assert [len(maps) for maps in said.attentions] == [8, 8, 8] and said.attentions[2][0].shape == (2, 2, 1, 8)


def test_cropping_takes_every_slot_back(hf):
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        cache = hf(ids)[CACHE]
        cache.crop(-2)
        assert cache.get_seq_length() == 4
        got = hf(torch.tensor([[2, 2]]), **{CACHE: cache}).logits
        want = hf(torch.tensor([[*PROMPTS[0][:4], 2, 2]])).logits[:, -2:]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        cache.batch_repeat_interleave(3)
        assert hf(torch.tensor([[1], [1], [1]]), **{CACHE: cache}).logits.shape == (3, 1, 23)
    with pytest.raises(ConfigError, match=r"crop\(3\) is no number of tokens to remove"):
        cache.crop(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "furst"}, "kv is 'furst': choose one of full, first"),
        ({"num_steps": 0}, "depth is 0: give at least 1"),
        ({"num_steps": 4, "method": "rrt"}, "depth 4 is beyond the 3 steps of rrt"),
        ({"kv": "mean", "method": "mor"}, "kv is 'mean', which may ask for keys of steps that a token did not take"),
        ({"cache_implementation": "quantized"}, "a recurrent model has dynamic and static caches"),
        ({"cache_implementation": "offloaded"}, "a recurrent model has dynamic and static caches"),
        ({"cache_implementation": "static", "cache": "ours"}, "although there is a cache: give one of the two"),
        ({"cache": "theirs"}, "the cache is a StaticCache"),
        ({"assistant_early_exit": 4, "kv": "mean"}, "kv is 'mean', whose prompt has to end before drafts: use full or"),
    ],
    ids=str,
)
def test_bad_combinations_are_one_clear_sentence(tiny, options, message):
    options = dict(options)
    hf = GRTForCausalLM.of(tiny(options.pop("method", "grt"), context=40))
    if cache := options.pop("cache", None):
        options[CACHE] = GRTCache(hf.config) if cache == "ours" else StaticCache(hf.config, max_cache_len=20)
    with pytest.raises(ConfigError, match=message) as error:
        greedy(hf, prompts=[PROMPTS[0]], **options)
    assert "\n" not in str(error.value) and hf.config.num_steps == 3
