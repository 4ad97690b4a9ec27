"""bench/paper.py on a few seconds of requests: the rows of figures, the report, and what a wrong name is told."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm_python import run_python

BENCH = Path(__file__).resolve().parents[1] / "bench"
PROGRAM = BENCH / "paper.py"


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def tiny():
    from figures.deployments import Effort

    return Effort(is_full=False, scale=0.02)


def test_sizes_are_the_papers():
    """Catches a wrong config of a model, a wrong GPU and a wrong number of GPUs: slots are within 6%."""
    from figures.memory import sizes

    rows = {row.name: row for row in sizes(tiny()).rows}
    for name in ("OPT-13B: slots", "OPT-66B: slots", "OPT-175B: slots", "OPT-13B: cache of a token"):
        assert rows[name].here == pytest.approx(rows[name].paper, rel=0.06)
        assert rows[name].how == "computed"


def test_waste_is_shares_of_one_cache():
    """Catches a kind that is missing: what holds tokens, what does not and what is free are all slots. Catches systems
    that were mixed up: the order is the paper's."""
    from figures.memory import held_slots, waste

    shares = {row.name: row.here for row in waste(tiny()).rows}
    systems = {name.partition(":")[0] for name in shares}
    assert len(systems) == 4
    for system in systems:
        assert math.fsum(share for name, share in shares.items() if name.startswith(f"{system}:")) == pytest.approx(1)
    held = held_slots(tiny()).rows
    assert [row.paper for row in held] == sorted(row.paper for row in held)
    assert [row.here for row in held] == sorted(row.here for row in held)


def test_a_row_for_each_gain(monkeypatch):
    """Figure 12 with rates that a stand-in gives: each gain is that of its own model, data set and system. Only
    ShareGPT has ranges of the paper."""
    from figures import rates
    from figures.deployments import Sustained

    def rate_at_latency(deployment, system, load):
        rate = {"paged": 6.0, "orca-oracle": 3.0, "orca-pow2": 2.0, "orca-max": 1.0, "fastertransformer": None}[system]
        scale = deployment.num_ranks * (10 if load.lengths == "alpaca" else 1)
        return Sustained(rate and rate * scale, [(1.0, 0.1), (2.0, 0.3)])

    monkeypatch.setattr(rates, "rate_at_latency", rate_at_latency)
    figure = rates.load_and_latency(tiny())
    here = {row.name: row.here for row in figure.rows}
    assert here["OPT-66B, Alpaca: paged"] == 240 and here["OPT-175B, ShareGPT: paged"] == 48
    for place in figure.curves:
        assert [here[f"{place}: paged over {system}"] for system in ("Orca (Oracle)", "Orca (Pow2)", "Orca (Max)")] == [
            2, 3, 6,
        ]  # fmt: skip
        assert here[f"{place}: paged over FasterTransformer"] is None
    in_paper = {row.name.partition(",")[2].partition(":")[0].strip() for row in figure.rows if row.paper}
    assert in_paper == {"ShareGPT"}


def test_turns_follow_each_other():
    """Catches a history that is not cut, a turn that is lost, and answers that the next prompt leaves out."""
    from figures.rates import MAX_PROMPT, Chats

    chats = Chats(rate=1.0, duration=5.0)
    running, num_done = list(chats.begin()), 0
    while running:
        request = running.pop()
        request.finished = request.arrival + 1
        request.output_token_ids = [-num_done] * request.num_output_tokens
        following = chats.follow_up(request)
        num_done += 1
        assert len(request.prompt_token_ids) <= MAX_PROMPT
        if following is not None:
            assert following.arrival > request.finished
            said = request.prompt_token_ids + request.output_token_ids
            num_kept = len(set(said) & set(following.prompt_token_ids))
            assert num_kept or len(following.prompt_token_ids) == MAX_PROMPT
            running.append(following)
    assert num_done == chats.num_requests


def test_the_report(tmp_path):
    """The table says what the paper says, the ratio to it, and to the nearer end of a range; and what is missing."""
    from figures.report import Figure, Range, Row, write_report

    rows = [
        Row("exact", 0.5, "{:.0%}", "simulated", 0.4),
        Row("inside", 2.0, "{:.1f}x", "measured", Range(1.5, 3.0)),
        Row("below", 1.0, "{:.1f}x", "measured", Range(2.0, 3.0)),
        Row("above", 6.0, "{:.1f}x", "measured", Range(None, 3.0)),
        Row("none", None, "{:.1f}x", "measured", 3.0),
        Row("new", 3.0, "{:.1f}x", "computed"),
    ]
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    curves = {"panel": {"paged": [(2.0, 0.3), (1.0, 0.1)]}, "other": {"paged": [(1.0, 0.1)]}, "third": {"paged": []}}
    figures = {
        "figure-0": Figure("Bars", rows, "What differs.", "a GPU."),
        "figure-00": Figure("Lines", rows, "Nothing.", curves=curves, axes=("x", "y"), y_limit=1.0),
    }
    write_report(tmp_path, ["the machine"], figures, has_matplotlib)
    text = (tmp_path / "report.md").read_text()
    for line in (
        "| exact | 50% | 40% | 1.25 | simulated |",
        "| inside | 2.0x | 1.5x to 3.0x | within | measured |",
        "| below | 1.0x | 2.0x to 3.0x | 0.50 | measured |",
        "| above | 6.0x | up to 3.0x | 2.00 | measured |",
        "| none | - | 3.0x |  | measured |",
        "| new | 3.0x |  |  | computed |",
        "Not reproduced: a GPU.",
        "- the machine",
    ):
        assert text.count(line) == (1 if line.startswith(("Not", "-")) else 2)
    for name in figures:
        assert (tmp_path / f"{name}.png").exists() == has_matplotlib == (f"({name}.png)" in text)
    assert ("Without matplotlib" in text) != has_matplotlib


def test_the_program(tmp_path):
    result = run_python(PROGRAM, "11", "1", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "report.md").read_text()
    assert text.index("## Figure 1 and table 1") < text.index("## Figure 11") and text.count("\n## ") == 2
    assert "CPUs, load" in text and "11 1 --out" in text


def test_wrong_arguments(tmp_path):
    result = run_python(PROGRAM, "4")
    assert result.returncode == 2 and "expected any of 1, 2, 3, 11" in result.stderr and "got '4'" in result.stderr
    (tmp_path / "file").touch()
    result = run_python(PROGRAM, "11", "--out", tmp_path / "file")
    assert result.returncode == 2 and f"expected a directory, got {tmp_path / 'file'}: File exists" in result.stderr


def test_the_search_of_a_rate():
    """Catches a search whose limits are not those of the figures, and runs that the plot leaves out."""
    from figures.deployments import MAX_LATENCY, search_rate

    tried = []

    def run(rate):
        tried.append((rate, rate / 100))
        return SimpleNamespace(normalized_latency=SimpleNamespace(mean=rate / 100))

    rate, points = search_rate(run, 5.0)
    assert rate == pytest.approx(100 * MAX_LATENCY, rel=0.012)
    assert points == tried and points[0] == (2.0, 0.02)  # with 10 requests, for a latency of the mean


def test_every_figure_that_is_not_measured(tmp_path, monkeypatch):
    """With the requests of a second for each number, at one rate in place of a search: catches a figure that cannot be
    made or is not written, and rows that do not depend on time and are not what they should be."""
    import paper
    from figures import deployments, measured
    from figures.deployments import Effort

    monkeypatch.setattr(
        deployments, "sustainable_rate", lambda run, max_latency, lowest, highest: (lowest, run(lowest))
    )

    names = [name for name, make in paper.FIGURES.items() if make.__module__ != measured.__name__]
    assert len(names) == len(paper.FIGURES) - 3
    paper.make_figures(names, tmp_path, ["the machine"], Effort(is_full=False, scale=0.002))
    text = (tmp_path / "report.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(names)
    for name, section in zip(names, sections, strict=True):
        assert section.startswith(f"Figure {name.partition('-')[0]}")
        assert "nan" not in section.partition("\n\n")[2].partition("\n\n")[0]
    for line in (
        "| OPT-13B: slots | 15.8K | 15.7K | 1.01 | computed |",
        "| OPT-13B: cache of a token | 800 KB | 800 KB | 1.00 | computed |",
        "| ShareGPT, output: mean | 341.0 tokens | 338.0 tokens | 1.01 | computed |",
    ):
        assert text.count(line) == 1, line
    assert "6/5 of what 6 samples save, Alpaca" in text
