"""Speculative decoding: sampled text has the full model's law, and a wrong rule is told from it."""

import itertools

import pytest
import torch
from speaking import PROMPT, speak, tokens_of

from grt.decode import speculative
from grt.decode.sampling import Sampling
from grt.model.depth import Depth


def p_value(counts, probabilities) -> float:
    """Of Pearson's chi-square; cells with fewer than 5 expected are one cell, an impossible one that was seen is 0."""
    expected = counts.sum() * probabilities
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    x = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), x / 2).item()


class Tables:
    """In a Drafter's place: the logits of every text of up to three tokens, so that many can be drawn."""

    def __init__(self, model) -> None:
        self.deep, self.shallow = {}, {}
        for n in range(4):
            texts = list(itertools.product(range(8), repeat=n))
            ids = torch.tensor([[*PROMPT, *text] for text in texts])
            with torch.no_grad():
                deep, shallow = model(ids)[:, -1], model(ids, Depth(1))[:, -1]
            self.deep |= dict(zip(texts, deep, strict=True))
            self.shallow |= dict(zip(texts, shallow, strict=True))
        self.depth, self.full, self.cache = Depth(1), model.full_depth, self
        self.restart()

    def restart(self) -> None:
        self.text, self.under_way = [], 0

    def advance(self, token, read_out):
        self.text.append(token)
        self.under_way += 1
        return self.shallow[tuple(self.text[1:])]  # the first is the last of the prompt

    def verify(self):
        first, self.under_way = len(self.text) - self.under_way, 0
        return torch.stack([self.deep[tuple(self.text[1 : i + 1])] for i in range(first, len(self.text))])

    def rollback(self, tokens) -> None:
        del self.text[len(self.text) - tokens :]

    def law(self, sampling):
        """(512,): of the three tokens after PROMPT, from full depth alone."""
        law = torch.zeros(8, 8, 8, dtype=torch.float64)
        for a, b, c in itertools.product(range(8), repeat=3):
            texts = (), (a,), (a, b)
            p = [sampling.probabilities(self.deep[text], [*PROMPT, *text]) for text in texts]
            law[a, b, c] = p[0][a] * p[1][b] * p[2][c]
        return law.flatten()


def drawn_texts(model, tables, sampling, seed, n):
    """Counts (512,) of n texts of three tokens."""
    stream = speak(model, sampling=sampling)
    stream.drafter, stream.generators, stream.rows = tables, [torch.Generator().manual_seed(seed)], [0]
    counts = torch.zeros(8, 8, 8, dtype=torch.float64)
    for _ in range(n):
        tables.restart()
        stream.past, stream.left, stream.live = [list(PROMPT)], 4, {0}
        stream.certain.clear()
        counts[tuple(drawn.token for (drawn,) in itertools.islice(stream, 3))] += 1
    return counts.flatten(), stream.tally.acceptance


def accept_always(p, q, drafts, generator):
    return len(drafts), p[-1]


LAWS = [
    Sampling(1.0, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=3.0),
    Sampling(1.0, top_k=6, top_p=0.95),
    Sampling(0.7, top_k=6, top_p=0.95),
    Sampling(1.5, top_k=6, top_p=0.95),
]
slowly = [pytest.param(law, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for law in LAWS[1:]]


@pytest.mark.parametrize("sampling", [LAWS[0], *slowly], ids=str)
def test_three_tokens_follow_the_full_models_law(tiny, monkeypatch, sampling):
    """... over all 512 texts, whatever is drafted; and the test tells when every draft stands."""
    slow = sampling is not LAWS[0]
    n, model = 4000 if slow else 1500, tiny("ladder-inject", vocab_size=8, spread=0.25)
    tables = Tables(model)
    law = tables.law(sampling)
    for seed in range(3) if slow else [0]:
        counts, acceptance = drawn_texts(model, tables, sampling, seed, n)
        p = p_value(counts, law)
        print(f"seed {seed}: p = {p:.3f}, {acceptance:.0%} of the drafts stood, {(law > 0).sum()} texts are possible")
        assert 0.3 < acceptance < 0.9, "too easy, or too hard, to tell anything"
        assert p > 0.001
    monkeypatch.setattr(speculative, "accept", accept_always)
    assert p_value(drawn_texts(model, tables, sampling, 0, n)[0], law) < 0.001


def test_behind_drafts_that_stand_the_last_row_decides():
    """And behind one that falls, what full depth gives more often than the draft did, at its place."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.2, 0.2]], dtype=torch.float64)
    n, behind = speculative.accept(p, [p[0], p[1]], [0, 2], torch.Generator().manual_seed(0))
    assert n == 2 and torch.equal(behind, p[2])
    p, q = torch.tensor([[0.5, 0.4, 0.1, 0.0], [0.2, 0.2, 0.3, 0.3]]).double(), torch.tensor([0.0, 0.1, 0.2, 0.7])
    n, behind = speculative.accept(p, [q.double()], [3], torch.Generator().manual_seed(0))  # full depth never says 3
    assert n == 0 and behind.tolist() == pytest.approx([5 / 8, 3 / 8, 0, 0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("always", [False, True])
def test_the_law_through_the_models_own_passes(tiny, monkeypatch, always):
    """With a first token from the prompt's pass, and drafts whose coda reads what was verified."""
    if always:
        monkeypatch.setattr(speculative, "accept", accept_always)
    model, sampling = tiny("ladder-inject", vocab_size=8, spread=0.25), LAWS[1]
    counts = torch.zeros(8, 8, 8, dtype=torch.float64)
    for seed in range(2000):
        stream = speak(model, n=5, seeds=[seed], sampling=sampling)
        counts[tuple(drawn.token for (drawn,) in itertools.islice(stream, 3))] += 1
    p = p_value(counts.flatten(), Tables(model).law(sampling))
    print(f"p = {p:.4f}")
    assert (p < 0.001) == always


def test_the_seed_decides_the_text(tiny):
    model = tiny(dtype=torch.float32)
    texts = [tokens_of(speak(model, seeds=[seed], sampling=Sampling())) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts}) == 3
