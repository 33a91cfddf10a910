"""Training through Hugging Face: recomputed gradients, Trainer's accumulation, LoRA."""

import pytest
import torch

from grt.methods import METHODS

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import Trainer, TrainingArguments

from grt.hf import GRTForCausalLM

# Names that peft and users of transformers before 5.24 know.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
CASES = [(method, "1+1x3+1") for method in METHODS] + [("ladder", "4L")]


def gradients(hf, ids, **inputs):
    hf.zero_grad()
    torch.manual_seed(3)  # noise
    hf(ids, labels=ids, **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("method", "layout"), CASES, ids=[*METHODS, "dense"])
def test_recomputed_gradients_are_the_kept_ones(tiny, ids, method, layout, reentrant):
    hf = GRTForCausalLM.of(tiny(method, layout)).train()
    kept = gradients(hf, ids)
    hf.gradient_checkpointing_enable({"use_reentrant": reentrant})
    counted = []
    hf.loop.prelude[0].ln1.register_forward_pre_hook(lambda *_: counted.append(1))
    again = gradients(hf, ids, use_cache=True)
    assert len(counted) == 2 and kept.keys() == again.keys()
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-9, atol=1e-12)
    assert set(dict(hf.named_parameters())) - kept.keys() <= {
        "model.recurrent.rule.gate.weight",
        "model.recurrent.rule.gate.bias",
    }


@pytest.fixture
def quiet(tiny):
    """Without noise, so that gradients do not depend on how a batch is cut."""
    return GRTForCausalLM.of(tiny(dtype=torch.float32, state_noise=0.0, gate_noise=0.0))


def test_trainer_counts_tokens_and_not_batches(quiet, tmp_path):
    """Ragged labels: four rows at once and four times one row give the same gradient."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(23, (4, 12), generator=generator)
    data = []
    for row, n in zip(rows, (12, 7, 4, 3), strict=True):
        labels = torch.where(torch.arange(12) < n, row, -100)
        data.append({"input_ids": row, "labels": labels, "attention_mask": (torch.arange(12) < n).long()})
    start, norms, after = {k: v.clone() for k, v in quiet.state_dict().items()}, [], []
    for batch, accumulation in ((4, 1), (1, 4)):
        quiet.load_state_dict(start)
        options = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1,
            learning_rate=1e-1, optim="sgd", logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(quiet, options, train_dataset=data)
        trainer.train()
        norms.append(next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row))
        after.append({k: v.clone() for k, v in quiet.state_dict().items()})
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0.1
    for name, x in after[0].items():
        torch.testing.assert_close(x, after[1][name], rtol=1e-4, atol=1e-6)
    assert not torch.equal(after[0]["lm_head.weight"], start["lm_head.weight"])


def adapted(hf, targets):
    peft = pytest.importorskip("peft", reason="LoRA adapters are peft's")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    return peft.get_peft_model(hf, config).train()


@pytest.mark.parametrize("targets", [["attn.qkv", "attn.out", "mlp.up", "mlp.down"], "all-linear"], ids=str)
def test_lora_trains_alone_and_merges(quiet, ids, targets):
    base = {name: x.clone() for name, x in quiet.state_dict().items()}
    with torch.no_grad():
        before = quiet(ids).logits
    model = adapted(quiet, targets)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        adapted_logits = model(input_ids=ids).logits
        said = model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert (adapted_logits - before).abs().max() > 0.05
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, adapted_logits, rtol=1e-4, atol=1e-4)
        again = merged.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(said, again)
    changed = {name for name, x in merged.state_dict().items() if not torch.equal(x, base[name])}
    linears = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assert changed and all(name.endswith((*linears, "rule.proj.weight")) for name in changed)
    assert ("model.recurrent.rule.proj.weight" in changed) == (targets == "all-linear")


FAST = ("grt", "poisson", "rrt", "ouro", "mor")  # each has linears or paths of its own
ADAPTED = [
    pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow)
    for case, name in zip(CASES, [*METHODS, "dense"], strict=True)
]


@pytest.mark.parametrize(("method", "layout"), ADAPTED)
def test_every_adapter_of_all_linear_is_trained_and_merges(tiny, ids, method, layout):
    """But for Ouro's gate, which the loss of the last step does not ask."""
    hf = GRTForCausalLM.of(tiny(method, layout, state_noise=0.0, gate_noise=0.0))
    linears = {name for name, module in hf.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    model = adapted(hf, "all-linear")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)  # starts that are drawn
    model(input_ids=ids, labels=ids).loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in reached}
    assert names == linears - {"model.recurrent.rule.gate"}
    model.eval()
    with torch.no_grad():
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        want, said = model(input_ids=ids).logits, model.generate(input_ids=ids[:, :4], **options)
        with model.disable_adapter():
            assert (model(input_ids=ids).logits - want).abs().max() > 1e-3
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, want, rtol=0, atol=1e-10)
        assert torch.equal(merged.generate(ids[:, :4], **options), said)
