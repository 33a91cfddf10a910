"""Any file is a config, or is refused in a sentence that names it."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grt.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig, dump, load
from grt.errors import ConfigError
from grt.schema import from_dict, to_dict

SECTIONS = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**400, "12L"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
known = st.fixed_dictionaries(
    {},
    optional={
        section: json_values
        | st.fixed_dictionaries({}, optional={f.name: json_values for f in dataclasses.fields(cls)})
        for section, cls in SECTIONS.items()
    },
)


def load_bytes(folder, data: bytes) -> None:
    path = folder / "config.json"
    path.write_bytes(data)
    try:
        config = load(path)
    except ConfigError as error:
        assert str(error).startswith(str(path))
    else:
        assert from_dict(RunConfig, to_dict(config)) == config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@given(values=json_values | known)
def test_any_json_is_a_config_or_refused(folder, values):
    load_bytes(folder, json.dumps(values).encode())


@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_config_or_refused(folder, data):
    load_bytes(folder, data)


@given(start=st.integers(0, 1500), length=st.integers(0, 40), middle=st.binary(max_size=5))
def test_a_damaged_file_is_a_config_or_refused(folder, start, length, middle):
    whole = dump(RunConfig()).encode()
    load_bytes(folder, whole[:start] + middle + whole[start + length :])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"model": ' * 50_000,
        b'{"optim": {"lr": ' + b"9" * 5000 + b"}}",
    ],
    ids=["empty", "utf-16", "bom", "deep", "deep objects", "5000 digits"],
)
def test_hostile_files_are_refused(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
