"""`grt paper` around its runs: statistics, experiments by name and by file."""

import pytest

from grt import cli
from grt.presets import change, preset
from grt.study.experiment import EXPERIMENTS, plain
from grt.study.results import Results
from grt.study.statistics import Summary, below, summary, t_quantile


def refused(capsys, *arguments: object) -> str:
    """The one sentence of a command that exits with 2."""
    assert cli.main(["paper", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("grt: ") and err.count("\n") == 1 and err.endswith((".\n", ".)\n"))
    return err[5:-1]


# Statistics


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (30, 2.04227), (1000, 1.96234)]
)
def test_quantiles_of_t(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=6e-6 * t)  # printed with six digits


def test_another_confidence():
    assert t_quantile(4, 0.99) == pytest.approx(4.60409, abs=1e-5)


def test_summary():
    found = summary([1.0, 2.0, 4.5])
    assert (found.n, found.mean) == (3, 2.5)
    assert found.sd == pytest.approx(1.802776) and found.half == pytest.approx(4.302653 * 1.802776 / 3**0.5)
    assert summary([2.5]) == Summary(1, 2.5, None, None)
    assert str(summary([2.5])) == "2.5000" and str(Summary(2, 1.0, 0.1, 0.23456)) == "1.0000 ± 0.2346"
    with pytest.raises(ValueError, match="needs one at least"):
        summary([])


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.1, 2: 2.11, 3: 3.09}, "holds"),  # pairs: seeds alone differ by much more
        ({1: 1.1, 2: 2.11, 3: 3.09}, {1: 1.0, 2: 2.0, 3: 3.0}, "fails"),
        ({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.2, 2: 1.9, 3: 3.1}, "undecided"),
        ({1: 1.0}, {1: 9.0}, "undecided"),  # one seed has no interval
        ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}, "undecided"),
        ({1: 1.0}, {2: 1.0}, "not run"),
        ({}, {}, "not run"),
    ],
)
def test_verdicts(a, b, verdict):
    assert below(a, b).verdict == verdict


def test_only_seeds_of_both_are_paired():
    found = below({1: 1.0, 2: 1.0, 3: 50.0}, {1: 2.0, 2: 2.5, 4: 0.0})
    assert found.difference is not None and (found.difference.n, found.difference.mean) == (2, -1.25)
    assert found.difference.half == pytest.approx(12.7062 * 0.25, rel=1e-4) and found.verdict == "undecided"


# Experiments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "tab_mian"], "no experiment 'tab_mian': did you mean tab_main?"),
        (["build", "nonsense"], "no experiment 'nonsense': `grt paper list` shows all names; `all`"),
        (["run", "nowhere.py"], "nowhere.py does not exist: give a Python file with RUNS(scale, seeds)."),
        (["run", "tab_main", "--scale", "tiny"], "--scale is 'tiny': choose one of nano, small, medium, large."),
        (["build", "all", "--seeds", "1,b"], "--seeds is '1,b': write whole numbers with commas, as in 1337,42,123."),
        (["list", "--seeds", "-1"], "--seeds is '-1': a seed is a whole number from 0"),
        (["work"], "grt paper work is what grt paper run starts"),
        (["list", "--seeds", "7,7"], "--seeds is '7,7': name each seed once."),
        (["run", "tab_main", "--jobs", "0"], "--jobs is 0"),
        (["run", "tab_main", "--max-time", "soon"], "--max-time is 'soon': write it as 170m"),
        (
            ["run", "tab_main", "--only", "zz"],
            "--only 'zz' names 0 runs: give more of the hash",
        ),
        (["run", "tab_main", "--only", "", "--seeds", "1"], "--only '' names 7 runs: give more of the hash"),
        (["run"], "no experiment is named: give one of learning_rates, tab_main, "),
        (["build", "--seeds", "1"], "or all, or a file with RUNS(scale, seeds)."),
        (
            ["run", "all", "--sbatch", "--only", "a"],
            "--sbatch prints an array of all that is missing: leave --only out",
        ),
        (["run", "all", "--only", "a", "--only=b"], "--only is given more than once: give it once, with all hashes"),
        (["run", "tab_hyperparams", "--sbatch"], "there are no runs at scale nano: nothing to submit."),
        (["paint"], "'paint' is nothing that grt paper does: choose one of list, run, build, pack."),
        ([], "say what to do with the paper's tables: choose one of list, run, build, pack."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_for(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "sweep.py has no RUNS: define RUNS(scale, seeds), which returns a list of RunConfig."),
        ("RUNS = [1]", "sweep.py has no RUNS"),
        ("def RUNS(:", "sweep.py, line 1 cannot be run (SyntaxError: "),
        ("x = 1\nx = = 1", "sweep.py, line 2 cannot be run (SyntaxError: "),
        ("FILE = '../mine'\nRUNS = print", "sweep.py would write ../mine.md, which is another's or no file's name"),
        ("FILE = 'README'\nRUNS = print", "sweep.py would write README.md, which is another's or no file's name"),
        ("x = 1\nx / 0", "sweep.py, line 2 cannot be run (ZeroDivisionError: division by zero): mend it."),
        ("def RUNS(scale, seeds):\n    return [{}['lr']]", "sweep.py, line 2 cannot be run (KeyError: 'lr'): mend it."),
        ("def RUNS(scale, seeds):\n    return None", "sweep.py returns NoneType: return a list of RunConfig."),
        ("RUNS = lambda scale, seeds: [{}]", "sweep.py returns a list with dict: return a list of RunConfig."),
        ("from grt.presets import preset\npreset('grt-nanoo')", "unknown preset 'grt-nanoo': did you mean grt-nano?"),
    ],
)
def test_a_file_that_is_no_experiment(capsys, tmp_path, monkeypatch, source, says):
    (tmp_path / "sweep.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for path in ("sweep.py", tmp_path / "sweep.py"):
        assert says in refused(capsys, "run", path, "--results", tmp_path, "--runs", tmp_path)


def test_a_file_without_runs_says_so(capsys, tmp_path):
    file = tmp_path / "sweep.py"
    file.write_text("RUNS = lambda scale, seeds: []\n")
    assert cli.main(["paper", "run", str(file), "--results", str(tmp_path), "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{file} has no runs at scale nano: nothing to train.\n"


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "two\nlines", "x" * 65, "\U0001d49c" * 60])
def test_a_run_whose_name_is_no_folder(capsys, tmp_path, name):
    """It would be trained, and never found."""
    file = tmp_path / "sweep.py"
    file.write_text(f"from grt.config import RunConfig\nRUNS = lambda scale, seeds: [RunConfig(name={name!r})]\n")
    for action in ("run", "build"):
        said = refused(capsys, action, file, "--results", tmp_path)
        assert said.startswith(
            f"RUNS(scale, seeds) of {file} names a run {name!r}: as it names a folder, give it up to"
        )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("None", "build(results) of FILE returns NoneType: return a Report (grt.study.report)."),
        ("Report('T', None)", "FILE builds a report that is not all text (TypeError: "),
        (
            "Report('T', [Table('t', '', ['a'], [[3.5]])])",
            "FILE builds a report that is not all text (AttributeError: ",
        ),
        ("Report('\\udc80', [])", "FILE builds a report that is not all text (UnicodeEncodeError: "),
        (
            "Report('T', [Table('../t', '', ['a'], [])])",
            "build(results) of FILE names a table or figure '../t': it names",
        ),
        (
            "Report('T', [], {'a/b': print})",
            "build(results) of FILE names a table or figure 'a/b': it names a file, give",
        ),
        ("Report('T', [], {'fig': lambda axes: 1 / 0})", "FILE, line 3 cannot draw fig (ZeroDivisionError: division"),
        ("Report('T', [], {'fig': lambda axes: axes.set_title('$a_$')})", "FILE cannot draw fig (ValueError: "),
    ],
)
def test_a_build_that_builds_nothing(capsys, tmp_path, source, says):
    file = tmp_path / "sweep.py"
    lines = ["from grt.study.report import Report, Table", "RUNS = lambda scale, seeds: []"]
    file.write_text("\n".join([*lines, f"build = lambda results: {source}\n"]))
    assert refused(capsys, "build", file, "--results", tmp_path).startswith(says.replace("FILE", str(file)))


def test_a_build_of_ones_own(capsys, tmp_path):
    """Which may have what modules have: dataclasses with annotations as text, an output name."""
    file = tmp_path / "sweep.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from grt.study.report import Report\nFILE = 'mine'\n"
        "@dataclass\nclass Row:\n    x: int\n"
        "def RUNS(scale, seeds):\n    return []\n"
        "def build(results):\n    return Report(f'{results.scale} {results.seeds}', [][: Row(1).x])\n"
    )
    assert cli.main(["paper", "build", str(file), "--seeds", "5,6", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/nano/mine.md\n"
    assert (tmp_path / "nano" / "mine.md").read_text() == "# nano (5, 6)\n"
    file.write_text(file.read_text().replace("Row(1).x", "Row(1).y"))
    assert "line 11 cannot be run (AttributeError: " in refused(capsys, "build", file, "--results", tmp_path)


def test_the_table_of_a_sweep_shows_what_differs(tmp_path):
    configs = [
        change(preset("grt-nano"), model={"gate_bias": bias}, train={"seed": s}) for s in (1, 2) for bias in (1, 2)
    ]
    [table] = plain("mine", configs, Results(tmp_path, "nano", [1])).tables
    assert list(table.columns[:5]) == ["run", "model.layout", "optim.lr", "train.seed", "model.gate_bias"]
    assert [list(cells[3:6]) for cells in table.rows] == [
        ["1", "1", "not run"], ["1", "2", "not run"], ["2", "1", "not run"], ["2", "2", "not run"],
    ]  # fmt: skip


def test_prose_needs_its_text(capsys, tmp_path, monkeypatch):
    """Alone it is refused; of all it is left out, with a line."""
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "run", "prose") == "data/prose does not exist: put the text of prose there."
    assert cli.main(["paper", "run", "all", "--sbatch"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: data/prose does not exist: put the text of prose there; its runs are left out.\n"
    assert "prose" not in out and "tab_main" not in out and "grt-nano" in out
    (tmp_path / "data" / "prose").mkdir(parents=True)
    assert cli.main(["paper", "run", "prose", "--sbatch"]) == 0 and "grt-prose" in capsys.readouterr().out


def test_list_shows_all_with_what_is_done(capsys, tmp_path):
    assert cli.main(["paper", "list", "--results", str(tmp_path), "--seeds", "1,2"]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    counts = {line[0]: line[1:3] for line in lines if line and line[0] in EXPERIMENTS}
    assert list(counts) == list(EXPERIMENTS)
    assert counts["tab_main"] == ["14", "0"] and counts["tab_hyperparams"] == ["the", "paper's"]  # none to train


def test_help(capsys):
    assert cli.main(["paper", "--help"]) == 0
    assert "usage: grt paper WHAT" in capsys.readouterr().out
