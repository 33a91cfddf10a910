"""The pass of one token from a tape: the same logits as without one, and passes that no tape can repeat."""

import subprocess
import sys

import pytest
import torch
from tiny import ROOT
from tiny_model import build_tiny

from grt.cpu import kernels
from grt.cpu.captured import Tape, Unrecordable
from grt.decode.decoder import Decoder
from grt.decode.quantize import keep_weights
from grt.methods import METHODS

PLAYED = {"dense", "grt", "poisson", "ouro", "ladder", "ladder-noise", "ladder-inject"}


@pytest.fixture(autouse=True)
def compiler():
    if not kernels.load():
        pytest.skip("no C++ compiler here")


def kept(method="grt", weights="fp32", dtype=torch.float32):
    of = {"layout": "3L"} if method == "dense" else {"method": method}
    return keep_weights(build_tiny(dtype=torch.float32, **of), weights, dtype)


def logits(model, prompt, tokens, *, taped, **options):
    decoder = Decoder(model, [prompt], len(tokens) + 1, **options)
    decoder.unrecordable = not taped
    rows = [decoder.prefill(), *(decoder.step(torch.tensor([token])) for token in tokens)]
    return decoder, torch.cat(rows)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("method", ["dense", *METHODS])
def test_a_tape_repeats_the_pass(method, weights):
    """To a rounding of what torch computes otherwise, sigmoid and norms, which for int8 may be one of 16 bits."""
    for dtype, atol in ((torch.float32, 5e-4 if weights == "int8" else 1e-5), (torch.bfloat16, 0.01)):
        model = kept(method, weights, dtype)
        decoder, played = logits(model, [5, 6, 7], [1, 2, 3, 4], taped=True)
        assert (decoder.tape is not None) == (method in PLAYED)
        plain = logits(model, [5, 6, 7], [1, 2, 3, 4], taped=False)[1]
        assert torch.allclose(played, plain, atol=atol)  # numbers of bf16 between 1 and 2 are .008 apart
        assert (played[1:] - played[:-1]).abs().amax(1).min() > 0.01  # no token gets another's logits


@pytest.mark.parametrize("kv", ["full", "first", "last", "mean", "mod:2", "first:all"])
def test_every_strategy_is_played(kv):
    model = kept()
    for depth in (1, 2, 3):
        decoder, played = logits(model, [5, 6], [1, 2, 3, 4], taped=True, kv=kv, depth=depth)
        assert decoder.tape is not None
        plain = logits(model, [5, 6], [1, 2, 3, 4], taped=False, kv=kv, depth=depth)[1]
        assert torch.allclose(played, plain, atol=1e-5)


def test_a_tape_serves_other_prompts_but_not_other_rows():
    model, token = kept(), torch.tensor([3])
    decoder, tapes = Decoder(model, [[1, 2, 3, 4]], 6), set()
    for prompt in ([1, 2, 3, 4], [7, 8]):
        decoder.restart([prompt])
        decoder.prefill()
        one = [decoder.step(token), decoder.step(token + 1)]
        tapes.add(decoder.tape)
        assert torch.allclose(torch.cat(one), logits(model, prompt, [3, 4], taped=False)[1][1:], atol=1e-5)
    assert len(tapes) == 1 and None not in tapes
    two = Decoder(model, [[1, 2], [7, 8]], 6)
    two.prefill()
    two.step(torch.tensor([3, 3]))
    assert two.tape is None  # two rows
    two.keep([1])
    last = [two.step(token + 1), two.step(token + 2)]
    assert two.tape is not None
    assert torch.allclose(torch.cat(last), logits(model, [7, 8], [3, 4, 5], taped=False)[1][2:], atol=1e-5)


def test_a_row_that_is_kept_leaves_its_tape():
    """Whose addresses are those of the rows as they were."""
    model, tokens = kept(), [3, 4, 5, 6]
    decoder = Decoder(model, [[1, 2]], 5)
    rows = [decoder.prefill(), decoder.step(torch.tensor([3])), decoder.step(torch.tensor([4]))]
    before = decoder.tape
    decoder.keep([0])
    rows += [decoder.step(torch.tensor([token])) for token in (5, 6)]
    assert torch.allclose(torch.cat(rows), logits(model, [1, 2], tokens, taped=False)[1], atol=1e-5)
    assert before is not None and decoder.tape is not None and decoder.tape is not before


def test_decoders_take_turns():
    """Each has its own tape, whatever the number of threads it is played with."""
    model = kept()
    decoders = [Decoder(model, [prompt], 8) for prompt in ([1, 2], [5, 6, 7])]
    rows = [[decoder.prefill()] for decoder in decoders]
    try:
        for threads, token in ((1, 3), (2, 4), (1, 5), (3, 6)):
            torch.set_num_threads(threads)
            for decoder, its in zip(decoders, rows, strict=True):
                its.append(decoder.step(torch.tensor([token])))
    finally:
        torch.set_num_threads(1)
    for prompt, its in zip(([1, 2], [5, 6, 7]), rows, strict=True):
        want = logits(model, prompt, [3, 4, 5, 6], taped=False)[1]
        assert torch.allclose(torch.cat(its), want, atol=1e-5)


@torch.inference_mode()
def test_a_tape_takes_new_numbers_only_by_its_input():
    store, index = torch.zeros(2, 3, 4), torch.tensor([1])

    def work(x):
        store.index_copy_(1, index, torch.stack((x, x + x)))
        return torch.sigmoid(x).to(torch.bfloat16)

    tape = Tape(work, torch.ones(1, 4))
    index.fill_(2)
    got = tape(torch.full((1, 4), 3.0))
    assert torch.equal(got, torch.sigmoid(torch.full((1, 4), 3.0)).bfloat16())
    assert store[:, :, 0].tolist() == [[0, 1, 3], [0, 2, 6]]
    tape.erase()
    with pytest.raises((RuntimeError, IndexError)):
        tape(torch.ones(1, 4))


@torch.inference_mode()
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.cumsum(-1),
        lambda x: x.argmax(-1) + x.argmax(-1),
        lambda x: torch.stack((x.double(), x.double())),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.add_(x),
        lambda x: x + 1,
        lambda x: x + x.view(4, 1),
        lambda x: torch.stack((x, x), 1),
        lambda x: torch.nn.functional.layer_norm(x, (1, 4)),
    ],
)
def test_what_no_tape_can_repeat_is_refused(work):
    with pytest.raises(Unrecordable):
        Tape(work, torch.ones(1, 4))
    assert torch.equal(Tape(lambda x: x.sigmoid(), torch.zeros(1, 4)).result, torch.full((1, 4), 0.5))


def test_the_first_token_does_not_wait_for_a_compiler_to_load():
    """torch._dynamo takes seconds to import; a tape is for who does not want to wait."""
    code = (
        "import sys, torch; from pathlib import Path; from grt.decode.decoder import Decoder; "
        "from grt.decode.quantize import keep_weights; from grt.runs.checkpoint import find_checkpoint, load_model; "
        "model, _ = load_model(find_checkpoint(Path('models/grt-nano'))[0], torch.device('cpu')); "
        "decoder = Decoder(keep_weights(model, 'int8', torch.float32), [[1, 2]], 3); "
        "decoder.prefill(); decoder.step(torch.tensor([5])); "
        "print(decoder.tape is not None, 'torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"]
