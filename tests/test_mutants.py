"""The list of mutants in dev/mutants.py is still of this code: a fault that can no longer be made finds nothing."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listed() -> list:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "dev" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.mutants())


MUTANTS = listed()


def test_each_old_text_is_there_once():
    times = {(m.file, m.old): (ROOT / m.file).read_text(encoding="utf-8").count(m.old) for m in MUTANTS}
    assert {of: n for of, n in times.items() if n != 1} == {}, "name what is there once"


def test_each_mutant_is_another_program_that_can_be_read():
    for mutant in MUTANTS:
        whole = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.old != mutant.new and mutant.source(ROOT) != whole, mutant
        compile(mutant.source(ROOT), mutant.file, "exec")


def test_each_is_found_by_a_test_file_that_there_is():
    assert {m.test for m in MUTANTS if not (ROOT / m.test).is_file()} == set()
    assert all(Path(m.test).name.startswith("test_") for m in MUTANTS)


def test_none_is_listed_twice():
    assert len(set(MUTANTS)) == len(MUTANTS) > 400
