"""The Hugging Face model is the loop that it wraps: logits, states, losses, padding, configuration, initialisation."""

import pytest
import torch
from torch.nn import functional as F

from grt.backbone.context import LoopContext
from grt.errors import ConfigError
from grt.methods import METHODS
from grt.model.depth import Depth

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from grt.hf import GRTCache, GRTConfig, GRTForCausalLM

CASES = [(method, "1+2x3+1") for method in METHODS] + [("ladder", "4L")]
NAMES = [*METHODS, "dense"]


def left_padded(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids whose first tokens give way to padding of a strange id, and the mask."""
    mask = torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]
    return torch.where(mask, ids, 11), mask.long()


@pytest.mark.parametrize(("method", "layout"), CASES, ids=NAMES)
def test_logits_and_states_are_the_loops(tiny, ids, method, layout):
    model = tiny(method, layout)
    hf = GRTForCausalLM.of(model)
    with torch.no_grad():
        got = hf(ids, use_cache=False, output_hidden_states=True)
        ctx = LoopContext(taps={"anchor": lambda h_pre, ctx: ctx.carry.update(h_pre=h_pre)})
        states = list(model.states(ids, ctx, model.full_depth))
        assert torch.equal(got.logits, model(ids)) and got.logits.shape == (2, 12, 23)
        assert len(got.hidden_states) == len(states) + 1
        assert all(map(torch.equal, got.hidden_states, [ctx.carry["h_pre"], *states]))
        kept = hf(ids, use_cache=False, logits_to_keep=3).logits
        torch.testing.assert_close(kept, got.logits[:, -3:], rtol=0, atol=1e-12)  # a product of fewer rows
        assert torch.equal(hf(ids, use_cache=False, logits_to_keep=torch.tensor([0, 5])).logits, got.logits[:, [0, 5]])
        assert torch.equal(hf.model(ids, use_cache=False).last_hidden_state @ hf.lm_head.weight.T, got.logits)
        torch.testing.assert_close(hf(ids, return_dict=False)[0], got.logits)


@pytest.mark.parametrize(("method", "layout"), CASES, ids=NAMES)
def test_depth_is_an_argument_and_a_number_of_layers(tiny, ids, method, layout):
    model = tiny(method, layout)
    hf, blocks = GRTForCausalLM.of(model), model.config.blocks
    assert hf.config.num_hidden_layers == blocks.n_executions() and hf.config.num_steps == blocks.R
    if blocks.is_dense:
        with pytest.raises(ConfigError, match="num_hidden_layers is 3, but 4L executes 4: set it to that"):
            hf.config.num_hidden_layers = 3
        with pytest.raises(ConfigError, match="a dense model has no core"):
            hf(ids, num_steps=2)
        return
    for k in (1, 2, 3):
        want = model(ids, Depth(k))
        assert torch.equal(hf(ids, num_steps=k).logits, want)
        hf.config.num_hidden_layers = 2 + 2 * k
        assert hf.config.num_steps == k and torch.equal(hf(ids).logits, want)
    for wrong in (2, 5, 0, -2):
        with pytest.raises(
            ConfigError, match=rf"num_hidden_layers is {wrong}, but 1\+2x3\+1 executes 2 \+ 2 k, k at least 1"
        ):
            hf.config.num_hidden_layers = wrong
    assert hf.config.num_steps == 3
    with pytest.raises(ConfigError, match="depth is 0: give at least 1"):
        hf(ids, num_steps=0)
    if model.rule.extrapolates:
        with pytest.warns(UserWarning, match="depth 5 is beyond the 3 steps"), torch.no_grad():
            assert torch.allclose(hf(ids, num_steps=5).logits, model(ids, Depth(5)), atol=1e-12)  # with a cache


def test_attentions_of_every_execution(tiny, ids):
    hf = GRTForCausalLM.of(tiny())
    with torch.no_grad():
        maps = hf(ids, output_attentions=True).attentions
    assert len(maps) == hf.config.num_hidden_layers and maps[0].shape == (2, 2, 12, 12)
    assert torch.stack(maps).triu(1).eq(0).all() and torch.allclose(
        torch.stack(maps).sum(-1), torch.tensor(1.0).double()
    )
    assert not torch.allclose(maps[1], maps[3])  # the same block, a step later


@pytest.mark.parametrize(("method", "layout"), CASES, ids=NAMES)
@pytest.mark.parametrize("cached", [False, True])
def test_padded_rows_are_single_rows(tiny, ids, method, layout, cached):
    hf = GRTForCausalLM.of(tiny(method, layout))
    pads = [0, 5]
    padded, mask = left_padded(ids, pads)
    with torch.no_grad():
        got = hf(padded, attention_mask=mask, use_cache=cached).logits
        for row, pad in enumerate(pads):
            want = hf(ids[row : row + 1, pad:], use_cache=False).logits
            torch.testing.assert_close(got[row : row + 1, pad:], want, rtol=0, atol=1e-12)
        if not cached:  # right padding, as trainers have it
            right = torch.cat((padded[:, 5:], torch.full((2, 5), 11)), 1)
            behind = torch.cat((torch.ones(2, 7), torch.zeros(2, 5)), 1).long()
            want = hf(padded[:, 5:], use_cache=False).logits
            torch.testing.assert_close(hf(right, behind, use_cache=False).logits[:, :7], want, rtol=0, atol=1e-12)


def test_the_loss_is_the_mean_over_real_next_tokens(tiny, ids):
    hf = GRTForCausalLM.of(tiny(dtype=torch.float32))
    labels = ids.clone()
    labels[0, :4] = labels[1, 9:] = -100
    got = hf(ids, labels=labels)
    want = F.cross_entropy(got.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(got.loss, want)
    n_items = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(hf(ids, labels=labels, num_items_in_batch=3 * n_items).loss, want / 3)


@pytest.mark.parametrize("method", ["mor", "mor-token"])
def test_routers_add_their_share_in_training(tiny, ids, method):
    hf = GRTForCausalLM.of(tiny(method, dtype=torch.float32, router_loss=3.0)).train()
    plain = hf(ids, labels=ids)
    lm = F.cross_entropy(plain.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert plain.loss > lm + 0.01
    torch.testing.assert_close(hf(ids, labels=ids, num_items_in_batch=4 * 22).loss, plain.loss / 4)


def test_config_goes_through_json_and_auto_classes(tiny, tmp_path):
    config = GRTConfig(method="rrt", layout="1+2x3+1", d_model=32, n_heads=4, vocab_size=50, lora_rank=3, num_steps=2)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, GRTConfig) and again.to_diff_dict() == config.to_diff_dict()
    assert (again.hidden_size, again.num_attention_heads, again.max_position_embeddings) == (32, 4, 1024)
    assert again.recurrent == config.recurrent and again.recurrent.lora_rank == 3 and again.num_steps == 2
    assert isinstance(AutoModelForCausalLM.from_config(config), GRTForCausalLM)
    assert AutoModel.from_config(config).loop.config == config.recurrent
    with pytest.raises(ConfigError, match="'x', which is not a layout"):
        GRTConfig(layout="x")


@pytest.mark.parametrize(("method", "layout"), CASES, ids=NAMES)
def test_built_from_a_config_it_begins_as_grts_own(method, layout):
    from grt.methods import build_model

    config = GRTConfig(method=method, layout=layout, d_model=16, n_heads=2, context=12, vocab_size=23)
    torch.manual_seed(5)
    ours = build_model(config.recurrent).state_dict()
    torch.manual_seed(5)
    theirs = GRTForCausalLM(config).loop.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


def test_the_head_is_tied_unless_it_is_not(tiny, ids, tmp_path):
    from safetensors.torch import load_file

    hf = GRTForCausalLM.of(tiny(dtype=torch.float32))
    assert hf.lm_head.weight is hf.get_input_embeddings().weight
    hf.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    apart = GRTForCausalLM(GRTConfig(**hf.config.recurrent.__dict__, tie_word_embeddings=False))
    apart.save_pretrained(tmp_path / "apart")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "apart")
    assert torch.equal(again.lm_head.weight, apart.lm_head.weight)
    assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)
    hf.resize_token_embeddings(30)
    assert hf(ids).logits.shape == (2, 12, 30) and hf.lm_head.weight is hf.get_input_embeddings().weight


@pytest.mark.parametrize("missing", ["rule.gate.down.bias", "core.1.ln1.weight", "embed.positions.weight"])
def test_a_missing_tensor_is_made_anew_alone(tiny, tmp_path, missing):
    """With its own start value, gates' biases too; the report names it."""
    from safetensors.torch import load_file, save_file

    hf = GRTForCausalLM.of(tiny(dtype=torch.float32, gate_bias=2.5))
    hf.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.recurrent.{missing}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(told["missing_keys"]) == {f"model.recurrent.{missing}"}
    before, after = hf.state_dict(), again.state_dict()
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed == {f"model.recurrent.{missing}"}
    made = after[f"model.recurrent.{missing}"]
    start = {"rule.gate.down.bias": 2.5, "core.1.ln1.weight": 1.0}.get(missing)
    assert made.eq(start).all() if start is not None else 0.01 < made.std() < 0.03


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": None}, "input_ids is missing or has no token"),
        ({"inputs_embeds": torch.zeros(2, 12, 16)}, "inputs_embeds is no input of a GRT model"),
        ({"position_ids": torch.arange(12)}, "position_ids is no input of a GRT model"),
        (
            {"attention_mask": torch.ones(2, 1, 12, 12)},
            r"attention_mask has shape \(2, 1, 12, 12\).* of shape \(2, 12\)",
        ),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask has shape \(2, 9\)"),
        ({"num_steps": 9, "method": "rrt"}, "depth 9 is beyond the 3 steps of rrt"),
        (
            {"cache": "dynamic"},
            "the cache is a DynamicCache, but a recurrent model needs a slot for each step and block",
        ),
        ({"input_ids": torch.zeros(2, 13, dtype=torch.long)}, "13 tokens are more than the model's context of 12"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_bad_inputs_are_one_clear_sentence(tiny, ids, inputs, message):
    from transformers import DynamicCache

    inputs = dict(inputs)
    hf = GRTForCausalLM.of(tiny(inputs.pop("method", "grt")))
    if inputs.get("cache"):
        inputs["cache"] = DynamicCache()
    with pytest.raises(ConfigError, match=message) as error, torch.no_grad():
        hf(**{"input_ids": ids} | inputs)
    assert "\n" not in str(error.value)


def test_a_cache_keeps_no_gradients(tiny, ids):
    hf = GRTForCausalLM.of(tiny())
    assert "cache" not in hf(ids) and "past_key_values" not in hf(ids)
    with pytest.raises(ConfigError, match="a cache keeps no gradients"):
        hf(ids, cache=GRTCache(hf.config))
