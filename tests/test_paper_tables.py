"""tab:hyperparams and tab:method_comparison: what is printed beside what is found, and that finding can fail; what
becomes of claims and of idle loops; and the rows of depth tasks."""

import json

import pytest
import torch

from grt.config import config_hash
from grt.errors import ConfigError
from grt.experiments import (
    depth_tasks,
    fig_kvcache_bar,
    properties,
    prose,
    study,
    tab_hyperparams,
    tab_method_comparison,
)
from grt.experiments.properties import probe
from grt.experiments.recipes import row
from grt.experiments.tab_method_comparison import COLUMNS, DISPUTED, EXPECTED, FOUND, tiny
from grt.presets import change, preset
from grt.study.compare import Claim, claims_table, idle_notes, losses_of
from grt.study.results import Result, Results


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path, "nano", [1, 2])


def cells(table) -> dict[tuple[str, str], list[str]]:
    return {(first, second): list(rest) for first, second, *rest in table.rows}


def finished(results: Results, name: str, losses: dict[int, dict[int, float]], seconds: float = 60.0) -> None:
    """Put runs of tab:main's row under seeds where results are looked for: seed -> depth -> loss."""
    found = {}
    for seed, by_depth in losses.items():
        config = change(row(name, "nano"), train={"seed": seed})
        evaluation = {"loss": by_depth[max(by_depth)], "loss_by_depth": {str(k): v for k, v in by_depth.items()}}
        cost = {"seconds": seconds + seed, "training_flops": 1.0}
        found[config_hash(config)] = Result(results.folder, config, evaluation, cost, {})
    results.__dict__["runs"] = results.__dict__.get("runs", {}) | found


# tab:hyperparams


def test_presets_are_as_printed_but_for_whose_depth_is_drawn(results):
    sizes, settings = tab_hyperparams.build(results).tables
    assert {r[0]: r[-1] for r in sizes.rows if r[1] == "ours"} == dict.fromkeys(tab_hyperparams.EXPECTED, "no")
    assert cells(sizes)["grt-medium-isoflop", "paper"] == [
        "2", "5", "4", "2", "1,024", "16", "491,520", "0.0006", "20,000", "",
    ]  # fmt: skip
    assert [r[0] for r in settings.rows] == list(tab_hyperparams.OURS)
    assert [r for r in settings.rows if r[-1] != "no"] == [("a depth for each", "step", "slot", "!")]


def test_a_preset_that_differs_is_marked(results, monkeypatch):
    def other(name):
        changed = {"gate_bias": -2.0} | ({"layout": "1+2x10+1"} if name == "grt-small-isoflop" else {})
        return change(preset(name), model=changed, optim={"min_lr_ratio": 0.2}, train={"depth": "fixed"})

    monkeypatch.setattr(tab_hyperparams, "preset", other)
    sizes, settings = tab_hyperparams.build(results).tables
    assert cells(sizes)["grt-small-isoflop", "ours"][-1] == "! b"
    assert cells(sizes)["grt-large-isoflop", "ours"][-1] == "no"
    marked = {r[0]: r[2] for r in settings.rows if r[-1] == "!"}
    assert marked["gate bias"] == "-2" and marked["final learning rate"] == "0.00012"
    assert " or " in marked["depths drawn"]  # of 10, 4 and 6 steps
    assert "a depth for each" not in marked and "decay" not in marked


def test_a_decay_that_is_no_cosine_is_seen(monkeypatch):
    def straight(optim, step, steps):
        return optim.lr * (1 - 0.9 * (step - optim.warmup_steps) / (steps - optim.warmup_steps))

    assert tab_hyperparams.decay(preset("grt-small-isoflop")) == "cosine"
    monkeypatch.setattr(tab_hyperparams, "learning_rate", straight)
    assert tab_hyperparams.decay(preset("grt-small-isoflop")) == "0.750 at a quarter"


# tab:method_comparison


def test_what_methods_do_is_what_is_printed_but_for_ouros_gate():
    found = {(what, name): find(name) for what, find in FOUND.items() for name in COLUMNS}
    differs = {at: cell for at, cell in found.items() if cell != EXPECTED[at[0]][at[1]]}
    assert differs == {("input-dependent gating", "ouro"): "No"} and set(differs) <= set(DISPUTED)


def test_depths_that_training_reads_out():
    depths = {}
    for name in COLUMNS:
        with tiny(name) as (model, ids):
            depths[name] = properties.trained_depths(model, ids)
    assert depths == {
        "dense": {0}, "mor": {1, 2, 3}, "poisson": set(range(1, 13)), "rrt": {3}, "ouro": {1, 2, 3}, "grt": {1, 2, 3},
    }  # fmt: skip


def test_sharing_is_lost_with_the_deltas_alone():
    with tiny("rrt") as (model, ids):
        assert properties.shares_weights(model, ids) is False
        for B in model.rule.B.values():
            B.zero_()
        assert properties.shares_weights(model, ids) is True


def test_a_gate_that_does_not_look_is_no_gating():
    with tiny("grt") as (model, ids):
        assert properties.gates_the_update(model, ids)
        model.rule.gate.down.weight.zero_()
        assert not properties.gates_the_update(model, ids)


@pytest.mark.parametrize(
    ("fields", "want"),
    [({}, "per step"), ({"gate_noise": 0.0}, "per step"), ({"state_noise": 0.0}, "per step"),
     ({"state_noise": 0.0, "gate_noise": 0.0}, "none")],
)  # fmt: skip
def test_either_noise_counts(fields, want):
    with probe("grt", **fields) as (model, ids):
        assert properties.noise(model, ids) == want


def test_probing_is_deterministic_and_leaves_the_generator(results):
    """And without results the table says so, and marks nothing there."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = tab_method_comparison.build(results)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()
    torch.manual_seed(6)
    assert tab_method_comparison.build(results).markdown() == found.markdown()
    table = cells(found.tables[0])
    for what in ("emergent early exit", "training time", "loss"):
        assert table[what, "ours"] == ["not run"] * len(COLUMNS)
    assert table["input-dependent gating", "paper"][COLUMNS.index("ouro")] == "Yes*"
    assert table["input-dependent gating", "ours"][COLUMNS.index("ouro")] == "No !"


def test_results_are_means_and_an_exit_is_near_within_one_percent(results, monkeypatch):
    monkeypatch.setattr(tab_method_comparison, "FOUND", dict.fromkeys(FOUND, lambda name: "No"))
    finished(results, "grt", {1: {0: 4.0, 3: 2.02, 6: 2.0}, 2: {0: 4.0, 3: 2.00, 6: 2.0}})
    finished(results, "poisson", {1: {0: 4.0, 3: 2.05, 6: 2.0}})
    finished(results, "rrt", {1: {0: 2.03, 3: 1.9, 6: 2.0}})
    finished(results, "mor", {1: {0: 2.01, 3: 2.0, 6: 2.0}})
    finished(results, "dense", {1: {0: 2.1}})
    table = cells(tab_method_comparison.build(results).tables[0])
    exits = dict(zip(COLUMNS, table["emergent early exit", "ours"], strict=True))
    assert exits == {
        "dense": "No", "mor": "No (+0.00%, idle) !", "poisson": "No (+2.50%) !", "rrt": "Yes (-5.00%) !",
        "ouro": "not run", "grt": "Yes (+0.50%)",
    }  # fmt: skip
    assert table["training time", "ours"][-1] == "62 s"  # of 61 and 62
    assert table["loss", "ours"] == ["2.1000", "2.0000", "2.0000", "2.0000", "not run", "2.0000"]


# What tables say of results


def test_claims_are_of_full_depth_and_of_none(results):
    finished(results, "grt", {1: {0: 2.5, 6: 2.0}, 2: {0: 2.6, 6: 2.11}})
    finished(results, "dense", {1: {0: 1.9}, 2: {0: 2.0}})
    rows = {name: row(name, "nano") for name in ("dense", "grt", "rrt")}
    losses = losses_of(rows, results)
    assert losses == {
        "dense": {1: 1.9, 2: 2.0}, "grt": {1: 2.0, 2: 2.11}, "grt at depth 0": {1: 2.5, 2: 2.6}, "rrt": {},
        "rrt at depth 0": {},
    }  # fmt: skip
    claims = [
        Claim("grt", "grt at depth 0", None), Claim("grt", "dense", -0.01, 2), Claim("grt", "dense", 0.01),
        Claim("rrt", "dense", 0.5),
    ]  # fmt: skip
    assert [tuple(cells) for cells in claims_table("x", losses, claims).rows] == [
        ("grt - grt at depth 0", "", "-0.4950", "0.0635", "2", "ours: below"),
        ("grt - dense", "-0.01", "+0.1050", "0.0635", "2", "fails"),
        ("grt - dense", "+0.010", "+0.1050", "0.0635", "2", "holds"),
        ("rrt - dense", "+0.500", "not run", "", "0", "not run"),
    ]


def test_a_loop_that_does_nothing_is_named(results):
    results.folder.mkdir()
    (results.folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "monitor", "step": 1, "warnings": [], "gate_mean": g}) + "\n"
            for g in ([0.5], [0.98, 0.99])
        )
    )
    finished(results, "grt", {1: {0: 2.01, 6: 2.0}, 2: {0: 2.02, 6: 2.0}})
    finished(results, "poisson", {1: {0: 2.03, 6: 2.0}})
    finished(results, "dense", {1: {0: 2.0}})
    [note] = idle_notes({name: row(name, "nano") for name in ("dense", "poisson", "ouro", "grt")}, results)
    assert note.startswith(
        "The loop of grt does next to nothing here, as its gates keep 0.9850 of the state at a step: at depth"
    )
    assert (
        "its loss is 2.0150 ± 0.0635, at full depth 2.0000 ± 0.0000." in note and "mostly a model of 2 blocks" in note
    )


def test_the_study_has_longer_runs_beside_it(results):
    assert study.longer(results)[0].rows == []
    finished(results, "grt", {1: {0: 2.5, 1: 2.2, 6: 2.0}})
    finished(results, "dense", {1: {0: 1.9}})
    for name, by_depth in {"dense": {"0": 1.5}, "grt": {"0": 3.0, "1": 1.7, "6": 1.6}}.items():
        path = results.folder.parent / "models" / f"{name}-nano.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": 4000, "windows": 9, "loss_by_depth": by_depth}))
    assert study.longer(results)[0].rows == [
        ("this study", "3.07", "256", "+4", "1.9000", "2.0000", "2.5000", "2.2000", "+0.1000"),
        ("`models/*-nano.json`", "16.38", "9", "-2", "1.5000", "1.6000", "3.0000", "1.7000", "+0.1000"),
    ]
    assert study.longer(Results(results.folder.parent, "small", [1])) == []
    for text in ("{", "[]", '{"step": 1, "windows": 9, "loss_by_depth": {"0": NaN}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"grt-nano\.json is damaged \(.*\): write it anew"):
            study.longer(results)


def test_the_order_on_prose_is_held_against_that_on_code(results):
    rows = prose.configs("nano")
    assert prose.order(rows, results) == []
    for i, name in enumerate(rows):
        finished(results, name, {1: {0: 2.0 + i}})
    for i, config in enumerate(rows.values()):
        config = change(config, train={"seed": 1})
        results.runs[config_hash(config)] = Result(results.folder, config, {"loss": 1.0 + i}, {}, {})
    assert "On code it is the same order: dense, dense-3L, mor," in prose.order(rows, results)[0]
    results.runs[config_hash(change(rows["grt"], train={"seed": 1}))].evaluation["loss"] = 0.5
    assert prose.order(rows, results)[0].startswith(
        "From the smallest loss: grt, dense, dense-3L, mor, poisson, ouro, rrt. "
    )
    assert "another order: dense, dense-3L, mor, poisson, ouro, rrt, grt." in prose.order(rows, results)[0]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (("full", "mean", "first", "last"), "holds here. Accuracies differ by 0.0300 at most, more than one"),
        (("mean", "full", "first", "last"), "holds here."),
        (("full", "first", "mean", "last"), "does not hold here."),
        (("full", "mean", "last", "first"), "does not hold here."),
    ],
)
def test_what_becomes_of_the_figure_of_sharing(order, says):
    found = {name: {"loss": 1.0 + i, "cloze": 0.7 + i / 100, "cloze_se": 0.02} for i, name in enumerate(order)}
    said = fig_kvcache_bar.ours(dict(sorted(found.items())))
    assert said.startswith(f"Ours, from the smallest loss: {', '.join(order)}. ") and says in said


def test_rows_of_depth_tasks_differ_in_what_their_names_say():
    configs = {name: depth_tasks.config(name, "task:p-hop:4") for name in depth_tasks.ROWS}
    assert len({config_hash(config) for config in configs.values()}) == len(configs)
    for name, base, part, field in [
        ("grt-fixed", "grt", "train", "depth"),
        ("grt-half", "grt", "optim", "lr"),
        ("dense-3L-half", "dense-3L", "optim", "lr"),
        ("dense-3L", "dense", "model", "layout"),
    ]:
        changed = {part: {field: getattr(getattr(configs[name], part), field)}}
        assert config_hash(change(configs[base], **changed)) == config_hash(configs[name])
    assert configs["grt-half"].optim.lr == configs["grt"].optim.lr / 2
