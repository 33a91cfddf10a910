"""Exits of a run: losses, calibration, what `grt calibrate`, `eval`, `generate` and `bench halting` say of them."""

import json

import pytest
import torch
from tiny import finish, quick, tiny, write_text
from tiny_model import build_tiny

from grt import cli
from grt.bench.halting import against_fixed, bench_halting, bootstrap, measured
from grt.errors import ConfigError
from grt.evals.early_exit import calibrate, halted_loss
from grt.evals.loss import evaluate
from grt.exits.kept import result_of
from grt.exits.policies import POLICIES, Exit, FixedDepth
from grt.methods import METHODS
from grt.model import cost
from grt.runs.checkpoint import load_model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        finish(tiny(text), out)
    return out


@pytest.fixture
def make():
    return build_tiny


@pytest.fixture
def split(split_of):
    return split_of([(7 * i * i + i) % 23 for i in range(400)])


@pytest.fixture
def document(capsys):
    def call(*arguments):
        assert cli.main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def refused(capsys):
    def call(*arguments):
        assert cli.main([*map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        return err

    return call


def test_fixed_depths_are_those_of_the_evaluation(make, split):
    model = make("grt", "1+1x4+1", dtype=torch.float32)
    losses = evaluate(model, split).loss_by_depth
    for k in range(1, 5):
        halted = halted_loss(model, split, Exit.of(model, FixedDepth(k)), batch_size=5)
        assert halted.loss == pytest.approx(losses[k], rel=1e-5)
        assert halted.shares == {k: 1.0} and halted.mean_depth == k and len(halted.nats) == 33
        want = cost.executed_flops(model, k, 12) + cost.head_flops(model.config)
        assert cost.halting_flops(model, halted.shares, 12, reads_out=False) == pytest.approx(want)


def test_what_is_said_of_an_exit(make, split):
    """FLOPs are those of a full window, which attention adds to; by hand for plain tying: 2 + 2 blocks and the head."""
    model = make("ladder", "1+1x4+1", dtype=torch.float32)
    exit = Exit.of(model, FixedDepth(2), 3)
    said = result_of(model, exit, halted_loss(model, split, exit, limit=2))
    assert said["steps"] == 3 and said["mean_depth"] == 2 and said["depth_shares"] == {"2": 1.0}
    assert said["flops_per_token"] == 4 * (24 * 16**2 + 4 * 12 * 16) + 2 * 16 * 23


def test_a_budget_in_evaluation(make, split):
    """Token by token; with no policy beside it, all that it allows is used."""
    model = make("grt", "1+1x4+1")
    whole = halted_loss(model, split, Exit.of(model, None), limit=3)
    assert halted_loss(model, split, Exit.of(model, None, budget=4), limit=3).loss == pytest.approx(whole.loss)
    half = halted_loss(model, split, Exit.of(model, None, budget=2.5), limit=3)
    assert half.shares == {2: 0.5, 3: 0.5} and half.loss != pytest.approx(whole.loss, rel=1e-6)
    policy = POLICIES["kl"](1e9)
    assert halted_loss(model, split, Exit.of(model, policy, budget=2.5), limit=3).shares == {1: 1.0}


def test_read_outs_are_paid_for(make):
    model = make("grt", "1+1x4+2")
    shares = {1: 0.5, 4: 0.5}
    readout = 2 * (24 * 16 * 16 + 4 * 12 * 16) + 2 * 16 * 23
    without, with_them = (cost.halting_flops(model, shares, 12, reads_out) for reads_out in (False, True))
    assert with_them - without == pytest.approx(0.5 * 3 * readout)
    assert without == pytest.approx(
        cost.head_flops(model.config) + sum(0.5 * cost.executed_flops(model, k, 12) for k in shares)
    )


@pytest.mark.parametrize(("method", "name"), [("grt", "state"), ("ladder", "kl"), ("ladder", "top1"), ("ouro", "q")])
def test_calibration_hits_the_depth(make, split, method, name):
    model, policy = make(method, "1+1x4+1", dtype=torch.float32), POLICIES[name]
    for target in (1, 2.5, 4):
        found, result, whole = calibrate(model, split, policy, 4, mean_depth=target, limit=12)
        assert result.mean_depth <= target
        assert result.mean_depth > target - 0.05 or policy.counts
        again = halted_loss(model, split, Exit.of(model, found), limit=12)
        assert (again.loss, again.shares) == (result.loss, result.shares)
        assert str(found) == f"{name}:{found.threshold!r}".removesuffix(".0"), "what is printed is what was found"
        if target == 4:
            assert result.loss == pytest.approx(whole.loss)


def test_calibration_keeps_to_the_loss(run):
    model, config = load_model(run)
    split = config_split(config)
    losses = evaluate(model, split, limit=40).loss_by_depth
    most = (losses[1] - losses[3]) / 2
    assert most > 0, "depth pays"
    found, result, whole = calibrate(model, split, POLICIES["state"], 3, loss_increase=most, limit=40)
    assert result.loss - whole.loss <= most and result.mean_depth < 3
    shallower = Exit.of(model, type(found)(found.threshold * 1.2))
    assert halted_loss(model, split, shallower, limit=40).loss - whole.loss > most
    none, result, _ = calibrate(model, split, POLICIES["state"], 3, loss_increase=10, limit=4)
    assert result.mean_depth == 1 and none.threshold > found.threshold


def config_split(config):
    from grt.train.loop import open_data

    return open_data(config, quiet=True).split("val", config.data.windows)


def test_a_threshold_is_kept_with_the_run(document, refused, run, tmp_path):
    found = document("calibrate", run, "--exit", "kl", "--mean-depth", "2", "--windows", "8")
    assert found["mean_depth"] <= 2 and found["loss_increase"] == found["loss"] - found["loss_of_all_steps"]
    assert found["asked"] == {"mean_depth": 2.0, "loss_increase": None} and found["windows"] == 8
    kept = json.loads((run / "exits.json").read_text())
    assert found["kept"] == str((run / "exits.json").resolve()) and kept["kl"]["threshold"] == found["threshold"]
    document("calibrate", run / "checkpoints/best", "--exit", "state", "--loss-increase", "0.01", "--windows", "4")
    assert json.loads((run / "exits.json").read_text()).keys() == {"kl", "state"}
    options = ("generate", run, "--max-new-tokens", "9", "--temperature", "0")
    implied, named = document(*options, "--exit", "kl"), document(*options, "--exit", f"kl:{found['threshold']}")
    apart = document(*options, "--exit", "kl", "--threshold", found["threshold"])
    assert implied["tokens"] == named["tokens"] == apart["tokens"] and implied["depths"] == named["depths"]
    assert implied["mean_depth"] == pytest.approx(sum(implied["depths"]) / 9) and max(implied["depths"]) <= 3
    report = document("eval", run, "--windows", "8", "--exit", "kl")
    assert report["exit"]["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert report["exit"]["mean_depth"] == pytest.approx(found["mean_depth"]) and report["exit"]["reads_out"]
    assert sum(report["exit"]["depth_shares"].values()) == pytest.approx(1)
    elsewhere = document(
        "calibrate", run, "--exit", "top1", "--mean-depth", "2", "--windows", "4", "--out", tmp_path / "new"
    )
    assert elsewhere["kept"] == str(tmp_path / "new" / "exits.json") and "top1" not in json.loads(
        (run / "exits.json").read_text()
    )
    assert "exit top1 has no threshold" in refused("generate", run, "--exit", "top1")
    asked = ("calibrate", run, "--exit", "kl", "--windows", "4", "--out", tmp_path / "new")
    shallow = document(*asked, "--mean-depth", "2", "--depth", "2")
    assert shallow["steps"] == 2 and shallow["depth_shares"].keys() <= {"1", "2"}
    assert shallow["loss_of_all_steps"] == pytest.approx(
        document("eval", run, "--windows", "4")["loss_by_depth"]["2"], rel=1e-6
    )


def test_a_threshold_of_another_step_warns(document, run):
    path = run / "exits.json"
    before = path.read_text() if path.exists() else None
    path.write_text(json.dumps({"state": {"threshold": 0.1, "step": 7}}))
    with pytest.warns(UserWarning, match="was found at step 7, this is step 30: calibrate it again"):
        document("generate", run, "--max-new-tokens", "2", "--exit", "state")
    path.unlink() if before is None else path.write_text(before)


def test_tables_for_people(run, capsys, tmp_path):
    aside = "calibrate", str(run), "--exit", "entropy", "--mean-depth", "2", "--windows", "4", "--out", str(tmp_path)
    assert cli.main([*aside]) == 0
    out = capsys.readouterr().out
    assert "`--exit entropy:" in out and "takes it from the run's folder" not in out
    assert cli.main(["calibrate", str(run), "--exit", "entropy", "--mean-depth", "2", "--windows", "4"]) == 0
    assert "`--exit entropy` takes it from the run's folder" in capsys.readouterr().out
    assert cli.main(["eval", str(run), "--windows", "4", "--exit", "entropy", "--budget", "2"]) == 0
    out = capsys.readouterr().out
    assert "each token leaves on its own" in out and "coda and head after each step" in out
    assert cli.main(["generate", str(run), "--max-new-tokens", "3", "--budget", "1.5"]) == 0


def test_each_mistake_has_its_sentence(refused, run, tmp_path):
    for told, *arguments in (
        ("threshold is 3, of no policy: give exit as well", "generate", "--threshold", "3"),
        ("exit kl:1 has a threshold already: leave threshold out", "eval", "--exit", "kl:1", "--threshold", "3"),
        ("already: name the policy alone, kl", "calibrate", "--exit", "kl:1", "--mean-depth", "2"),
        ("either --mean-depth or --loss-increase", "calibrate", "--exit", "kl"),
        ("either --mean-depth or", "calibrate", "--exit", "kl", "--mean-depth", "2", "--loss-increase", "1"),
        ("--mean-depth is 0.5: it must lie between 1 and", "calibrate", "--exit", "kl", "--mean-depth", "0.5"),
        ("--mean-depth is 3.5: it must lie between 1 and the 3", "calibrate", "--exit", "kl", "--mean-depth", "3.5"),
        ("--loss-increase is -1: it must be", "calibrate", "--exit", "kl", "--loss-increase", "-1"),
        ("windows is 0", "calibrate", "--exit", "kl", "--mean-depth", "2", "--windows", "0"),
        ("missing: --exit POLICY", "calibrate"),
        (
            "cannot be written: give --out",
            "calibrate",
            "--exit",
            "kl",
            "--mean-depth",
            "2",
            "--out",
            run / "config.json",
        ),
        ("leave exit or drafts out", "generate", "--exit", "kl:1", "--speculative"),
        ("kv full: leave --kv out", "eval", "--exit", "kl:1", "--kv", "mean"),
        ("budget is 9: it must lie between 1 and the 3 steps", "eval", "--budget", "9"),
        ("leave crop and compile out", "generate", "--exit", "kl:1", "--crop"),
        ("exit is 'lk'", "bench", "halting", "--exits", "lk", "--new", "0"),
        ("--mean-depths has 7: give numbers from 1 to the 3", "bench", "halting", "--mean-depths", "7", "--new", "0"),
        ("--new is 1:", "bench", "halting", "--new", "1"),
        ("--windows is 1", "bench", "halting", "--windows", "1"),
        ("windows are too few", "bench", "halting", "--new", "0", "--calibration-windows", "9999"),
        ("make the folder", "bench", "halting", "--out", tmp_path / "none" / "a.png"),
    ):
        at = 2 if arguments[0] == "bench" else 1
        assert told in refused(*arguments[:at], run, *arguments[at:])


def test_a_damaged_file_is_named(refused, run, tmp_path):
    (tmp_path / "exits.json").write_text("{")
    arguments = ("calibrate", run, "--exit", "kl", "--mean-depth", "2", "--windows", "4", "--out", tmp_path)
    assert "exits.json is damaged: remove it" in refused(*arguments)


def test_the_bench(run, tmp_path, capsys):
    from grt.bench.halting import show

    report = bench_halting(
        run,
        ["state", "kl:0.001"],
        [2],
        windows=12,
        calibration_windows=6,
        batches=[1, 3],
        new=4,
        alternations=1,
        out=tmp_path / "a.png",
    )
    show(report)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report and (tmp_path / "a.png").exists()
    fixed, others = report["rows"][:3], report["rows"][3:]
    assert [row["name"] for row in fixed] == ["fixed:1", "fixed:2", "fixed:3"] and len(others) == 2
    assert fixed[-1]["predicted_speedup"] == fixed[-1]["speed"]["3"]["speedup"] == 1
    for row in others:
        low, high = row["against_fixed"]["interval"]
        assert low <= row["against_fixed"]["difference"] <= high and row["speed"].keys() == {"1", "3"}
    assert len(report["ratios"]) == 2 * 5


def test_against_a_fixed_depth_that_is_the_same(run):
    """A policy that is a fixed depth is neither better nor worse than it, and between two it is their mean."""
    model, config = load_model(run)
    split = config_split(config)
    fixed = [measured(model, split, FixedDepth(k), slice(4, 12)) for k in (1, 2, 3)]
    for k, row in enumerate(fixed, 1):
        same = against_fixed(row, fixed)
        assert same["depth"] == k and same["difference"] == 0 and same["verdict"] == "undecided"
    row = fixed[2]
    row.flops = (fixed[0].flops + fixed[1].flops) / 2
    between = against_fixed(row, [*fixed[:2], measured(model, split, FixedDepth(3), slice(4, 12))])
    assert between["depth"] == pytest.approx(1.5)
    assert between["loss"] == pytest.approx((fixed[0].result.loss + fixed[1].result.loss) / 2)


def test_bootstrap():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap(x + 1)
    want = 2 * 1.96 * x.std().item() / 20
    assert low < 1 + x.mean() < high and high - low == pytest.approx(want, rel=0.05)  # its ends are drawn: 2 % each


def test_every_method_says_whether_it_halts():
    assert {name for name, method in METHODS.items() if not method.rule.halts} == {"mor", "mor-token"}
    assert {name for name, method in METHODS.items() if method.rule.learned_exit} == {"ouro"}


def test_a_routed_run_is_refused(make):
    with pytest.raises(ConfigError, match="mor has a router"):
        Exit.of(make("mor", "1+1x4+1"), None, budget=2)
