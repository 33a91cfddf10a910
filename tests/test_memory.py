"""The peak of a training slot is the distinct storages alive at once, whatever is shared or viewed."""

import torch

from grt.model.depth import Depth
from grt.train.memory import LiveStorages, training_peak


def test_views_count_once_and_freed_storages_leave():
    storages = LiveStorages()
    with storages:
        a = torch.zeros(1000)
        views = [a.view(10, 100), a[5:]]
        b = a + 1
        del views, b
        c = a * 2
    assert storages.peak == 8000 and storages.now == 8000
    del a, c
    assert storages.now == 0


def test_the_peak_of_a_product_is_its_closed_form():
    """Weights 4n, their gradient 4n, moments 8n, input, output and the scalars of the loss."""
    layer = torch.nn.Linear(100, 50, bias=False)
    x = torch.ones(10, 100)
    n = 4 * 100 * 50
    peak = training_peak(layer, lambda: layer(x).pow(2).sum())
    assert layer.weight.grad is None
    assert 4 * n + 4 * 10 * 50 <= peak <= 4 * n + 2 * 4 * 10 * 50 + 100


def test_what_is_frozen_has_neither_gradient_nor_moments():
    layer = torch.nn.Linear(100, 50)
    layer.weight.requires_grad_(False)
    x = torch.ones(10, 100)
    n = 4 * 100 * 50
    assert n < training_peak(layer, lambda: layer(x).pow(2).sum()) < 1.5 * n


def test_the_peak_grows_by_the_same_with_each_pass(tiny, ids):
    """MemTracker of torch.distributed refuses a core that runs twice; here each further pass keeps as much again."""
    model = tiny("grt", dtype=torch.float32).train()
    one, two, three = (
        training_peak(model, lambda k=k: model.loss(ids[:, :-1], ids[:, 1:], Depth(k)).total) for k in (1, 2, 3)
    )
    assert three - two == two - one > 0
