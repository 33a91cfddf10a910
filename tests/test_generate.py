"""generate: greedy text, seeds, stops, depths, and the window that slides where the context ends."""

import pytest
import torch

from grt.decode.stream import generate
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model.depth import Depth

PROMPT = [3, 1, 4]
CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]


@pytest.fixture
def model(tiny):
    return tiny(dtype=torch.float32)


def text(model, prompt=PROMPT, n=9, **options):
    return list(generate(model, prompt, max_new_tokens=n, **options))


def greedy_by_hand(model, ids, n, depth=None):
    """argmax of the full forward pass over the last `context` tokens, again and again."""
    ids = list(ids)
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-model.config.context :]]), depth)
        ids.append(int(logits[0, -1].argmax()))
    return ids[-n:]


@pytest.mark.parametrize(("method", "layout"), CASES, ids=[*METHODS, "dense"])
def test_greedy_is_the_argmax_of_the_full_forward(tiny, method, layout):
    """25 tokens: past the context of 12."""
    model = tiny(method, layout, dtype=torch.float32)
    got = text(model, n=25, temperature=0, crop=True)
    assert got[:9] == text(model, n=9, temperature=0)
    assert got == greedy_by_hand(model, PROMPT, 25) and len(set(got)) > 1


def test_a_broken_model_is_one_clear_sentence(model):
    model.ln_f.bias.data[3] = torch.nan
    for options in ({"temperature": 0}, {"seed": 1}, {"temperature": 0, "crop": True}):
        with pytest.raises(ConfigError, match="the model's logits are not finite: its weights are broken"):
            text(model, **options)


def test_a_long_prompt_uses_its_last_tokens(model):
    long = [i % 23 for i in range(0, 200, 7)]
    for options in ({"temperature": 0, "crop": True}, {"seed": 5, "crop": True}):
        assert text(model, long, 1, **options) == text(model, long[-12:], 1, **options)
    assert text(model, long, 5, temperature=0, crop=True) == greedy_by_hand(model, long, 5)
    firsts = {text(model, long[-k:], 1, temperature=0, crop=True)[0] for k in range(1, 13)}
    assert len(firsts) > 1, "the model ignores its prompt"


def test_seed_decides_the_text(model):
    torch.manual_seed(0)
    a = text(model, seed=3)
    before = torch.random.get_rng_state()
    assert text(model, seed=3) == a  # whatever the global generator does
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len({tuple(text(model, seed=seed)) for seed in range(5)}) == 5
    assert text(model, n=4, seed=3) == a[:4]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_narrow_sampling_is_greedy(model, options):
    want = text(model, temperature=0)
    assert all(text(model, seed=seed, **options) == want for seed in range(3))
    assert any(text(model, seed=seed) != want for seed in range(3))


def test_stop_token_ends_and_is_not_part(model):
    plain = text(model, temperature=0)
    stop = plain[4]
    assert text(model, temperature=0, stop=stop) == plain[: plain.index(stop)]
    assert text(model, temperature=0, stop=next(i for i in range(23) if i not in plain)) == plain
    assert text(model, n=0) == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_is_the_truncated_models(tiny, model, depth):
    shallow = tiny(layout=f"1+2x{depth}+1", dtype=torch.float32)
    shallow.load_state_dict(model.state_dict())
    options = {"temperature": 0, "n": 20, "crop": True}
    got = text(model, depth=depth, **options)
    assert got == text(shallow, **options) == greedy_by_hand(model, PROMPT, 20, Depth(depth))
    assert got not in [text(model, depth=k, **options) for k in (1, 2, 3) if k != depth]
    assert got[:9] == text(model, temperature=0, depth=depth)


def test_training_mode_and_noise(tiny):
    """Noise is off while generating, also for a model in training, which stays in training."""
    model = tiny(dtype=torch.float32, state_noise=9.0, gate_noise=9.0)
    want = text(model)
    assert text(model.train()) == want and model.training
    stream = generate(model, PROMPT, max_new_tokens=5)
    next(stream)
    stream.close()  # a reader that leaves early
    assert model.training
    assert not model.eval().training and text(model) == want and not model.training


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "a prompt is empty"),
        ([], {"crop": True}, "a prompt is empty"),
        ([3, 23], {}, "id 23 of a prompt is not below 23"),
        ([3, -1], {"crop": True}, "id -1 of a prompt is not below 23"),
        (PROMPT, {"temperature": -0.5}, "temperature is -0.5"),
        (PROMPT, {"seed": -1}, "seed is -1"),
        (PROMPT, {"n": -1}, "max_new_tokens is -1"),
        (PROMPT, {"depth": 0}, "depth is 0: give at least 1"),
        (PROMPT, {"depth": -2, "crop": True}, "depth is -2: give at least 1"),
        (PROMPT, {"n": 10}, "3 tokens and 10 new ones are more than model.context 12: ask for at most 9"),
        (13 * [1], {"n": None}, "a prompt of 13 tokens leaves no room for new ones .* 12: shorten it, or let .* slide"),
        (12 * [1], {"n": None}, "a prompt of 12 tokens leaves no room for new ones in model.context 12: shorten it"),
        (12 * [1], {"n": 1}, "a prompt of 12 tokens leaves no room for new ones in model.context 12: shorten it"),
        (PROMPT, {"depth": 193}, "depth is 193: give at most 192, 64 times the model's R."),
        (PROMPT, {"depth": 193, "crop": True}, "depth is 193: give at most 192"),
        (PROMPT, {"kv": "furst"}, "kv is 'furst': choose one of full, first"),
        (PROMPT, {"kv": "first", "crop": True}, "crop decodes without a cache"),
    ],
    ids=str,
)
def test_errors_come_at_once(model, prompt, options, message):
    """Before anything is asked of the iterator."""
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, **{"max_new_tokens": options.pop("n", 5)} | options)


def test_as_many_as_fit(model):
    assert text(model, n=None) == text(model, n=9)
    assert len(text(model, 11 * [1], n=None)) == 1
    assert len(text(model, 40 * [1], n=None, crop=True)) == 12


def test_depth_of_a_dense_model(tiny):
    dense = tiny(layout="4L", dtype=torch.float32)
    assert text(dense, depth=0) == text(dense) == text(dense, crop=True)
    with pytest.raises(ConfigError, match="dense model has no core"):
        text(dense, depth=1)
