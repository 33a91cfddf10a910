"""Configs: what is read back, what is refused and how, and which fields name a run."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grt.config import DataConfig, Layout, ModelConfig, OptimConfig, RunConfig, TrainConfig, config_hash, dump, load
from grt.errors import ConfigError
from grt.presets import PRESETS, change
from grt.schema import from_dict, identity, to_dict

SECTIONS = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}
FIELDS = [(section, field) for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)]
field_ids = [f"{section}.{field.name}" for section, field in FIELDS]

counts = st.integers(0, 50)
layouts = st.one_of(
    st.builds(Layout, counts, st.integers(1, 50), st.integers(1, 50), counts),
    st.builds(lambda p: Layout(p, 0, 0, 0), st.integers(1, 50)),
)


def sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and len(text) < 400
    return text


# Layouts


@given(layouts)
def test_layout_round_trip(layout):
    assert Layout.parse(str(layout)) == layout
    if layout.is_dense:
        assert Layout.parse(f"{layout.p}L") == Layout.parse(f"{layout.p}") == layout
    else:
        assert Layout.parse(str(layout).replace("x", "×")) == layout
    assert layout.n_executions() == layout.n_executions(layout.R) == layout.p + layout.n * layout.R + layout.c
    assert layout.n_executions(0) == layout.p + layout.c
    assert layout.n_unique == layout.p + layout.n + layout.c


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "which is not a layout"), ("L", "not a layout"), ("12l", "not a layout"), ("-1+2x3+1", "not a layout"),
        ("1+2x3", "not a layout"), ("1+2*3+1", "not a layout"), (" 12L", "not a layout"), ("12L\n", "not a layout"),
        ("1+2x3+1+1", "not a layout"), ("1.5L", "not a layout"), ("١٢L", "not a layout"), ("1+²x3+1", "not a layout"),
        ("0", "has no block"), ("0L", "has no block"), ("0+0x0+0", "has no block"),
        ("1+2x0+1", "needs both"), ("1+0x3+1", "needs both"), ("0+0x1+0", "has no block"),
    ],
)  # fmt: skip
def test_impossible_layouts(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        Layout.parse(text)
    assert repr(text) in sentence(error)


@pytest.mark.parametrize("text", ["9" * 5000 + "L", "1+1x" + "9" * 5000 + "+1"], ids=["dense", "recurrent"])
def test_layouts_of_thousands_of_digits(text):
    with pytest.raises(ConfigError, match="which is not a layout"):
        Layout.parse(text)


@given(st.text(st.sampled_from("0123456789+x×L .-١²"), max_size=12))
def test_any_text_is_a_layout_or_refused(text):
    try:
        layout = Layout.parse(text)
    except ConfigError:
        return
    assert Layout.parse(str(layout)) == layout and layout.n_unique > 0 and (layout.n == 0) == (layout.R == 0)


# Values that cannot work


@pytest.mark.parametrize(
    ("section", "fields", "names"),
    [
        ("model", {"d_model": 100, "n_heads": 3}, ["model.d_model 100", "model.n_heads 3"]),
        ("model", {"d_model": 0}, ["model.d_model is 0"]),
        ("model", {"n_heads": -1}, ["model.n_heads is -1"]),
        ("model", {"context": 0}, ["model.context is 0"]),
        ("model", {"vocab_size": 0}, ["model.vocab_size is 0"]),
        ("model", {"vocab_multiple": 0}, ["model.vocab_multiple is 0"]),
        ("model", {"gate_temperature": 0.0}, ["model.gate_temperature is 0.0"]),
        ("model", {"state_noise": -0.1}, ["model.state_noise is -0.1"]),
        ("model", {"gate_noise": -0.1}, ["model.gate_noise is -0.1"]),
        ("model", {"layout": "0L"}, ["model.layout '0L'"]),
        ("data", {"val_fraction": 0.0}, ["data.val_fraction is 0.0"]),
        ("data", {"val_fraction": 1.0}, ["data.val_fraction is 1.0"]),
        ("optim", {"lr": 0.0}, ["optim.lr is 0.0"]),
        ("optim", {"min_lr_ratio": 1.1}, ["optim.min_lr_ratio is 1.1"]),
        ("optim", {"beta1": 1.0}, ["optim.beta1 is 1.0"]),
        ("optim", {"beta2": -0.1}, ["optim.beta2 is -0.1"]),
        ("optim", {"warmup_steps": -1}, ["optim.warmup_steps is -1"]),
        ("optim", {"weight_decay": -1.0}, ["optim.weight_decay is -1.0"]),
        ("optim", {"grad_clip": 0.0}, ["optim.grad_clip is 0.0"]),
        ("train", {"steps": 0}, ["train.steps is 0"]),
        ("train", {"batch_size": 0}, ["train.batch_size is 0"]),
        ("train", {"tokens_per_step": 0}, ["train.tokens_per_step is 0"]),
        ("train", {"eval_every": 0}, ["train.eval_every is 0"]),
        ("train", {"eval_windows": 0}, ["train.eval_windows is 0"]),
        ("train", {"checkpoint_every": 0}, ["train.checkpoint_every is 0"]),
        ("train", {"keep": 0}, ["train.keep is 0"]),
        ("train", {"threads": -1}, ["train.threads is -1"]),
        ("train", {"tokens_per_step": 8 * 1024 + 1}, ["train.tokens_per_step 8193", "train.batch_size 8", "= 8192"]),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_impossible_values_are_named(section, fields, names):
    with pytest.raises(ConfigError) as error:
        change(RunConfig(), **{section: fields})
    text = sentence(error)
    assert all(name in text for name in names), text


@pytest.mark.parametrize(
    ("section", "field"), [f for f in FIELDS if f[1].type in (float, "float")], ids=lambda x: getattr(x, "name", x)
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(section, field, value):
    """However they arrive: from a file, or from the command line, which builds the dataclasses itself."""
    with pytest.raises(ConfigError, match=f"{section}.{field.name} is"):
        change(RunConfig(), **{section: {field.name: value}})
    with pytest.raises(ConfigError, match=f"{section}.{field.name} is") as error:
        from_dict(RunConfig, {section: {field.name: value}})
    sentence(error)


def test_slots():
    config = change(RunConfig(), model={"context": 32}, train={"batch_size": 4, "tokens_per_step": 3 * 4 * 32})
    assert config.n_slots == 3


# Dictionaries and files


def other_value(section: str, field: dataclasses.Field):
    """A value that is allowed and not the default."""
    special = {
        ("model", "layout"): "2+5x4+2", ("model", "method"): "grt", ("model", "d_model"): 960, ("model", "n_heads"): 6,
        ("model", "context"): 512, ("train", "depth"): "fixed", ("train", "dtype"): "fp32", ("train", "device"): "cpu",
        ("model", "mean_depth"): 3.0, ("model", "router_z_loss"): 1e-5,
        ("train", "stage"): 2, ("train", "batch_size"): 4, ("train", "tokens_per_step"): 2 * 8 * 1024,
        ("optim", "warmup_steps"): 1,
    }  # fmt: skip
    if (section, field.name) in special:
        return special[section, field.name]
    default = field.default
    return default + "x" if isinstance(default, str) else default / 2 if isinstance(default, float) else default + 1


def changed(section: str, field: dataclasses.Field) -> RunConfig:
    return change(RunConfig(), **{section: {field.name: other_value(section, field)}})


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=field_ids)
def test_hash_is_of_what_decides_the_result(section, field):
    config = changed(section, field)
    assert config != RunConfig()
    same = config_hash(config) == config_hash(RunConfig())
    assert same == bool(field.metadata.get("operational"))
    if not same:
        value = getattr(getattr(config, section), field.name)
        assert identity(config) == {section: {field.name: value}}


def test_operational_fields_are_these():
    """Each entry is a claim that the field does not change what is trained."""
    names = {f"{section}.{field.name}" for section, field in FIELDS if field.metadata.get("operational")}
    assert names == {
        "model.vocab_multiple", "train.device", "train.threads", "train.eval_every", "train.eval_windows",
        "train.checkpoint_every", "train.keep", "train.recompute",
    }  # fmt: skip
    assert config_hash(replace(RunConfig(), name="another")) == config_hash(RunConfig())


def test_hashes_differ_pairwise_and_ignore_defaults():
    hashes = [config_hash(changed(s, f)) for s, f in FIELDS if not f.metadata.get("operational")]
    assert len(set(hashes)) == len(hashes)
    assert identity(RunConfig()) == {}
    # Run folders and published tables hold these: a new field, or a new order of fields, must not rename them.
    assert config_hash(RunConfig()) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert config_hash(change(RunConfig(), optim={"warmup_steps": 1, "beta1": 0.5})) == (
        "c6f0f3663cc11d1e058a351479d1945a6e8014cf5c9338adf18684ab289f7c0f"
    )


@pytest.mark.parametrize("config", [RunConfig(), *(make() for make in PRESETS.values())], ids=lambda c: c.name)
def test_dictionary_and_file_round_trip(tmp_path, config):
    assert from_dict(RunConfig, to_dict(config)) == config
    (tmp_path / "config.json").write_text(dump(config), encoding="utf-8")
    assert load(tmp_path / "config.json") == config
    decides = identity(config)  # what is operational goes back to its default
    assert from_dict(RunConfig, decides) == replace(
        config,
        name="custom",
        model=replace(config.model, vocab_multiple=1),
        train=from_dict(TrainConfig, decides.get("train", {})),
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "unknown field 'modle': this version knows name, model, data, optim, train"),
        ({"model": {"d_modle": 3}}, "unknown field 'model.d_modle'"),
        ({"model": 3}, "model is 3: it must be an object"),
        ([1], "the config is [1]: it must be an object"),
        ({"model": {"d_model": "768"}}, "model.d_model is '768': it must be of type int"),
        ({"model": {"d_model": 768.0}}, "model.d_model is 768.0: it must be of type int"),
        ({"model": {"d_model": True}}, "model.d_model is True: it must be of type int"),
        ({"optim": {"lr": True}}, "optim.lr is True: it must be of type float"),
        ({"optim": {"lr": None}}, "optim.lr is None: it must be of type float"),
        ({"optim": {"lr": "1e-3"}}, "optim.lr is '1e-3': it must be of type float"),
        ({"train": {"dtype": "fp16"}}, "train.dtype is 'fp16': choose one of auto, fp32, bf16"),
        ({"train": {"dtype": []}}, "train.dtype is []: choose one of auto, fp32, bf16"),
        ({"model": {"layout": 12}}, "model.layout is 12: it must be of type str"),
        ({"optim": {"lr": 10**400}}, "optim.lr is"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_wrong_fields_and_types_are_named(tmp_path, values, message):
    with pytest.raises(ConfigError) as error:
        from_dict(RunConfig, values)
    assert message in str(error.value)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_whole_numbers_are_floats_too():
    lr = from_dict(RunConfig, {"optim": {"lr": 1}}).optim.lr
    assert lr == 1.0 and type(lr) is float


def test_missing_files_are_named(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError) as error:
            load(path)
        assert sentence(error).startswith(str(path))
