"""Ouro (arXiv 2510.25741) by loops: its states, cross-entropies and exits, the slow way."""

import torch

from grt.backbone.context import LoopContext


def naive_states(model, ids, k):
    """h_1..h_k and lambda_1..lambda_k."""
    gate, ctx = model.rule.gate, LoopContext()
    h, states, lambdas = model.prelude(model.embed(ids), ctx), [], []
    for _ in range(k):
        o = model.core(h, ctx)
        z = model.ln_f(o)
        h = z if model.config.loop_carry == "normed" else o
        states.append(h)
        lambdas.append(1 / (1 + torch.exp(-(z * gate.weight[0]).sum(-1) - gate.bias[0])))
    return states, lambdas


def naive_ce(model, h, targets):
    """In float32, as the model has it, whatever the weights are in."""
    logits = torch.nn.functional.linear(model.ln_f(model.coda(h, LoopContext())), model.embed.tokens.weight)
    return -logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def naive_p(lambdas):
    """p_1..p_R of one token, each a product written out."""
    R, p = len(lambdas), []
    for t in range(1, R + 1):
        product = 1.0 if t == R else lambdas[t - 1]
        for j in range(1, t):
            product = product * (1 - lambdas[j - 1])
        p.append(product)
    return p
