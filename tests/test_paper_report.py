"""What tables are written as: Markdown, CSV for programs, LaTeX, figures; and what a full disk leaves of them."""

import csv
import io

import pytest

from grt.study import report
from grt.study.report import Report, Table

TABLE = Table("tab_x_y", "Loss ± sd, 5 %.", ("model", "loss"), [("a_b & c", "**1.5**"), ("$d~{e}", "")])


def test_markdown():
    assert TABLE.markdown() == (
        "Loss ± sd, 5 %.\n\n| model | loss |\n|---|---:|\n| a_b & c | **1.5** |\n| $d~{e} |  |\n"
    )


def test_csv():
    assert TABLE.csv() == "model,loss\na_b & c,1.5\n$d~{e},\n"
    awkward = Table("t", "", ("a", "b"), [('x, "y"', "1")])
    assert list(csv.reader(io.StringIO(awkward.csv()))) == [["a", "b"], ['x, "y"', "1"]]


def test_csv_is_for_programs():
    """Numbers without commas; a spread in a column of its own, empty where a row has none."""
    table = Table("t", "", ("a, b", "loss", "n"), [("1,2", "**2.1 ± 0.5**", "1,234,567.5"), ("x", "not run", "+1,000")])
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["a, b", "loss", "loss ±", "n"], ["1,2", "2.1", "0.5", "1234567.5"], ["x", "not run", "", "+1000"],
    ]  # fmt: skip


def test_latex_of_a_wide_table_is_made_to_fit():
    columns = [str(i) for i in range(8)]
    wide, narrow = (Table("t", "", columns[:n], [columns[:n]]).latex() for n in (8, 7))
    assert "  \\resizebox{\\textwidth}{!}{%\n  \\begin{tabular}{lrrrrrrr}\n" in wide and "  \\end{tabular}}\n" in wide
    assert "resizebox" not in narrow and wide.count("{") == wide.count("}")


def test_latex():
    assert (
        TABLE.latex()
        == r"""\begin{table}[t]
  \centering
  \caption{Loss $\pm$ sd, 5 \%.}
  \label{tab:x_y}
  \begin{tabular}{lr}
    \toprule
    model & loss \\
    \midrule
    a\_b \& c & \textbf{1.5} \\
    \$d\textasciitilde{}\{e\} &  \\
    \bottomrule
  \end{tabular}
\end{table}
"""
    )


def test_cells_that_latex_or_markdown_would_take_for_their_own():
    """LaTeX: an argument of the row's end before it, a dash for a bar; Markdown: a further column or row."""
    table = Table("a sweep#1", "", ("[m]", "*"), [("[1] x|y", "[2]"), ("*z", "**a*b**"), ("", "two\nlines")])
    body = table.latex().splitlines()
    assert body[3] == r"  \label{tab:a-sweep-1}"
    assert [line.strip() for line in (body[6], *body[8:11])] == [
        r"{}[m] & * \\", r"{}[1] x\textbar{}y & [2] \\", r"{}*z & \textbf{a*b} \\", r"& two lines \\",
    ]  # fmt: skip
    assert table.markdown().splitlines()[4:] == [r"| [1] x\|y | [2] |", "| *z | **a*b** |", "|  | two lines |"]


def test_a_report_is_the_same_bytes_again(tmp_path):
    found = Report("Title", [TABLE], {"fig_x": lambda axes: axes.plot([1, 2], [2, 1])}, ["A note."])
    paths = found.write(tmp_path, "name")
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == [
        "name.md", "tables/tab_x_y.csv", "tables/tab_x_y.tex", "fig_x.png",
    ]  # fmt: skip
    assert paths[0].read_text("utf-8") == f"# Title\n\n{TABLE.markdown()}\n![fig_x](fig_x.png)\n\nA note.\n"
    first = [path.read_bytes() for path in paths]
    assert first[-1].startswith(b"\x89PNG")
    assert [path.read_bytes() for path in found.write(tmp_path, "name")] == first


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    """And leaves what was there, and nothing else."""
    [table, *_] = Report("T", []).write(tmp_path, "name")
    before = table.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grt.runs.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match="No space left") as failed:
        Report("U", []).write(tmp_path, "name")
    assert failed.value.filename.startswith(str(tmp_path / ".name.md"))
    assert table.read_bytes() == before and not list(tmp_path.glob(".*"))


def test_a_figure_that_fails_leaves_the_old_one(tmp_path):
    [*_, picture] = Report("T", [], {"fig": lambda axes: axes.plot([1, 2])}).write(tmp_path, "name")
    before = picture.read_bytes()

    def spoiled(axes):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        report._draw(spoiled, picture)
    assert picture.read_bytes() == before and not list(tmp_path.glob(".*"))
