"""`octavo lab`: what goes in and comes out. What is simulated, measured and drawn has its own tests."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.lab import study
from octavo.lab.results import Result, Run, load, save
from tests.lab.synthetic import POOL, synthetic

from .conftest import Octavo

drawing = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install 'octavo[lab]'"
)

BOTH = ("--strategy", "max", "--strategy", "paged")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sharing saves is computed for two widths, not for nine."""
    monkeypatch.setattr("octavo.lab.study.SAMPLES", (2,))
    monkeypatch.setattr("octavo.lab.study.BEAMS", (2,))
    monkeypatch.setattr("octavo.lab.sweeps.BLOCK_SIZES", (16, 64))
    monkeypatch.setattr("octavo.lab.sweeps.REQUESTS", 4)


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """A simulation of few requests into a folder of the test."""
    return ("lab", "simulate", "--requests", "6", "--out", str(tmp_path / "lab"))


class TestSimulate:
    @drawing
    def test_a_scenario_leaves_a_result_a_report_and_figures(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        flags = ("--scenario", "code", *BOTH, "--rates", "2,1", "--seed", "3")
        ran = octavo(*small, *flags)
        assert ran.code == 0, ran.err
        assert "report.html: 1 result" in ran.out
        result = load(tmp_path / "lab" / "code-simulated.json")
        assert [(run.strategy, run.rate) for run in result.runs] == [("max", 1), ("max", 2), ("paged", 1), ("paged", 2)]
        assert (result.seed, result.work["requests"], result.kind) == (3, 6, "simulated")
        assert {sweep.name for sweep in result.sweeps} == {"block_size", "samples", "beams"}
        assert (tmp_path / "lab" / "report.html").stat().st_size > 20_000
        assert len(list((tmp_path / "lab").glob("report-code-simulated-*.png"))) == 8

    @drawing
    def test_the_same_seed_gives_the_same_bytes(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        for folder in ("one", "two"):
            out = ("--scenario", "code", "--strategy", "paged", "--rates", "1", "--out", str(tmp_path / folder))
            assert octavo(*small, *out).code == 0
        one, two = (tmp_path / folder / "code-simulated.json" for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()

    @drawing
    def test_a_trace(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        trace = tmp_path / "mine.csv"
        rows = "".join(f"2023-11-16 18:15:4{second}.0000000,{300 + second},20\n" for second in range(6))
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
        ran = octavo(*small, "--trace", str(trace), "--strategy", "paged", "--rates", "1")
        assert ran.code == 0, ran.err
        (path,) = (tmp_path / "lab").glob("*.json")
        assert load(path).work["requests"] == 6

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--scenario", "nothing"), "There is no scenario 'nothing'; there are"),
            (("--strategy", "nothing"), "There is no strategy 'nothing'; there are"),
            (("--gpu", "nothing"), "There are no figures for a GPU 'nothing'; there are"),
            (("--model", "nothing"), "There are no figures for a model 'nothing'; there are"),
            (("--rates", "1,fast"), "--rates is '1,fast'; it must be numbers"),
            (("--rates", "0"), "each above 0 and finite"),
            (("--rates", "nan"), "each above 0 and finite"),
            (("--rates", "1e-320"), "each above 0 and finite"),
            (("--rates", "inf"), "each above 0 and finite"),
            (("--seed", str(2**63)), "Invalid value for '--seed'"),
            (("--gpus", "1000000"), "Fewer GPUs would work"),
            (("--model", "llama-3.1-70b"), "needs 131.4 GiB for its weights alone"),
        ],
    )
    def test_what_cannot_be_simulated_is_said_in_a_sentence(
        self, octavo: Octavo, small: Any, flags: tuple[str, ...], words: str
    ) -> None:
        ran = octavo(*small, *flags)
        assert ran.code == 2
        assert words in ran.err
        assert len(ran.err.splitlines()) == 1

    def test_a_trace_of_which_nothing_fits(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        trace = tmp_path / "long.csv"
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100000,5\n1,10,5000\n")
        ran = octavo(*small, "--trace", str(trace))
        assert ran.code == 2
        assert "All 2 requests of long are longer than the 4,096 tokens" in ran.err
        assert not list(tmp_path.glob("lab/*"))

    @drawing
    def test_works_of_one_name_are_kept_apart_and_one_work_is_done_once(
        self, octavo: Octavo, small: Any, tmp_path: Path
    ) -> None:
        chosen = []
        for place, name in enumerate(("one", "two")):
            trace = tmp_path / name / f"{'<b>' * 70}$\\frac$.csv"  # too long for a figure, not HTML, no formula
            trace.parent.mkdir()
            trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,{10 + place},5\n")
            chosen += ["--trace", str(trace), "--trace", str(trace)]
        ran = octavo(*small, *chosen, "--strategy", "paged", "--rates", "1")
        assert ran.code == 0, ran.err
        results = [load(path) for path in sorted((tmp_path / "lab").glob("*.json"))]
        assert sorted(result.work["prompt_tokens"] for result in results) == [10, 11]
        page = (tmp_path / "lab" / "report.html").read_text(encoding="utf-8")
        assert "<b><b>" not in page
        assert "&lt;b&gt;" in page

    def test_without_matplotlib_the_extra_is_named_before_anything_is_done(
        self, octavo: Octavo, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("octavo.lab.figures.find_spec", lambda name: None)
        for words in (small, ("lab", "run", "--out", str(tmp_path / "lab"))):
            ran = octavo(*words)
            assert ran.code == 2
            assert ran.err.count("\n") == 1
            assert "pip install 'octavo[lab]'" in ran.err
            assert not (tmp_path / "lab").exists()

    @drawing
    def test_what_fails_leaves_no_folder(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        out = ("--model", "llama-3.1-70b", "--out", str(tmp_path / "new" / "lab"))
        assert octavo(*small, *out).code == 2
        assert not (tmp_path / "new").exists()

    @drawing
    def test_a_second_run_reports_on_its_own_and_names_what_it_left_alone(
        self, octavo: Octavo, small: Any, tmp_path: Path
    ) -> None:
        flags = ("--strategy", "own", "--rates", "1")
        first = octavo(*small, "--scenario", "code", *flags)
        assert "Not in the report" not in first.out
        assert first.err.count("\n") == 1  # one line for a work where there is no terminal
        assert "code: 6 requests, 1 run" in first.err
        before = (tmp_path / "lab" / "code-simulated.json").read_bytes()
        second = octavo(*small, "--scenario", "poisson", *flags)
        assert "report.html: 1 result;" in second.out
        assert "Not in the report, as it was there before: code-simulated.json." in second.out
        assert (tmp_path / "lab" / "code-simulated.json").read_bytes() == before

    @drawing
    def test_without_paging_there_is_nothing_about_sharing(self, octavo: Octavo, small: Any, tmp_path: Path) -> None:
        assert octavo(*small, "--scenario", "code", "--strategy", "max", "--rates", "1").code == 0
        assert load(tmp_path / "lab" / "code-simulated.json").sweeps == []


class TestReport:
    @drawing
    def test_results_become_one_page(self, octavo: Octavo, tmp_path: Path) -> None:
        results: list[Result] = [synthetic(rates=(1.0,)), synthetic(kind="executed", rates=(1.0,), sweeps=False)]
        paths = [tmp_path / f"{result.kind}.json" for result in results]
        for result, path in zip(results, paths, strict=True):
            save(result, path)
        ran = octavo("lab", "report", *map(str, paths), "-o", str(tmp_path / "out" / "page.html"))
        assert ran.code == 0, ran.err
        page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
        assert "code simulated" in page
        assert "code executed" in page

    def test_what_is_no_result_is_named(self, octavo: Octavo, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text("{}")
        ran = octavo("lab", "report", str(path), "-o", str(tmp_path / "page.html"))
        assert ran.code == 2
        assert "other.json" in ran.err
        assert not (tmp_path / "page.html").exists()

    @pytest.mark.parametrize(
        ("path", "value", "words"),
        [
            ((), [1], "it is [1]; it must be an object"),
            (("format",), 2, "has the format 2; this version reads 1"),
            (("colour",), "red", "there is no colour in this format"),
            (("kind",), "guessed", "kind is \"guessed\"; it must be 'simulated' or 'executed'"),
            (("pool_slots",), 0, "pool_slots is 0; it must be at least 1"),
            (("model", "token_bytes"), "8", "model.token_bytes is"),
            (("runs", 0, "rate"), -1, "runs[0].rate is -1; it must be above 0"),
            (("runs", 0, "summary"), {}, "runs[0].summary.utilisation is missing"),
            (("runs", 0, "summary", "throughput"), float("nan"), "runs[0].summary.throughput is NaN"),
            (("runs", 0, "summary", "ttft", "p50"), "soon", 'runs[0].summary.ttft.p50 is "soon"'),
            (("runs", 0, "series", "time", 3), None, "runs[0].series.time[3] is null; it must be a finite number"),
            (("runs", 0, "series", "stored"), [1], "runs[0].series has lists of different lengths"),
            (("runs", 0, "map", 0, "kind"), "rented", 'runs[0].map[0].kind is "rented"'),
            (("runs", 0, "map", 0, "slots"), 10**18, "runs[0].map does not share out the pool"),
            (("sweeps", 0, "x"), [], "sweeps[0] has lists of different lengths"),
        ],
    )
    def test_what_is_damaged_is_told_by_its_place(
        self, octavo: Octavo, tmp_path: Path, path: tuple[str | int, ...], value: Any, words: str
    ) -> None:
        whole: Any = {"result": asdict(synthetic(rates=(1.0,)))}
        place, last = whole, "result"
        for step in path:
            place, last = place[last], step
        place[last] = value
        (tmp_path / "damaged.json").write_text(json.dumps(whole["result"]))
        ran = octavo("lab", "report", str(tmp_path / "damaged.json"), "-o", str(tmp_path / "page.html"))
        assert ran.code == 2
        assert words in ran.err
        assert len(ran.err.splitlines()) == 1
        assert not (tmp_path / "page.html").exists()

    def test_a_file_too_deep_to_read(self, octavo: Octavo, tmp_path: Path) -> None:
        (tmp_path / "deep.json").write_text("[" * 100_000)
        ran = octavo("lab", "report", str(tmp_path / "deep.json"))
        assert ran.code == 2
        assert "deep.json is no result of octavo lab: it is not JSON" in ran.err

    def test_text_that_cannot_be_shown(self, octavo: Octavo, tmp_path: Path) -> None:
        (tmp_path / "half.json").write_text('{"format": 1, "commit": "\\ud800"}')
        ran = octavo("lab", "report", str(tmp_path / "half.json"))
        assert ran.code == 2
        assert "half.json is no result of octavo lab: it is not JSON" in ran.err

    def test_a_file_that_is_not_there(self, octavo: Octavo, tmp_path: Path) -> None:
        assert octavo("lab", "report", str(tmp_path / "none.json")).code == 2
        assert octavo("lab", "report").code == 2


class TestRun:
    @drawing
    def test_the_real_engine(self, octavo: Octavo, tmp_path: Path, smollm2_path: Path) -> None:
        flags = (*BOTH, "--rates", "8", "--slots", "2048", "--context", "1024", "--rounds", "1")
        few = ("--requests", "3", "--model", str(smollm2_path), "--out", str(tmp_path / "lab"))
        ran = octavo("lab", "run", *few, *flags)
        assert ran.code == 0, ran.err
        result = load(tmp_path / "lab" / "questions-executed.json")
        assert [run.strategy for run in result.runs] == ["max", "paged"]
        assert result.machine["cores"] >= 1
        assert result.machine["memory"] > 2**28
        assert (tmp_path / "lab" / "report.html").exists()

    @drawing
    def test_the_highest_load_is_run_in_rounds_and_strategies_in_turns(
        self, octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[tuple[str, float]] = []
        throughputs = iter([1.0, 10.0, 10.0, 2.0, 20.0, 5.0, 50.0, 3.0, 30.0])

        def execute(work: Any, strategy: str, *, rate: float, **_: Any) -> Run:
            ran.append((strategy, rate))
            run = next(run for run in synthetic(rates=(1.0,)).runs if run.strategy == strategy)
            run.rate, run.summary.throughput = rate, next(throughputs)
            return run

        monkeypatch.setattr("octavo.lab.execute.execute", execute)
        monkeypatch.setattr("octavo.llm.LLM", FakeLLM)
        flags = (*BOTH, "--rates", "2,1000", "--requests", "3", "--slots", str(POOL))
        assert octavo("lab", "run", *flags, "--out", str(tmp_path / "lab")).code == 0
        turn = [("max", 1000.0), ("paged", 1000.0)]
        assert ran == [("max", study.FASTEST), ("max", 2.0), ("paged", 2.0), *turn, *turn, *turn]
        result = load(tmp_path / "lab" / "questions-executed.json")
        figures = [(run.strategy, run.rate, run.summary.throughput, run.repeats) for run in result.runs]
        assert figures == [
            ("max", 2.0, 10.0, []),
            ("max", 1000.0, 3.0, [2.0, 5.0, 3.0]),
            ("paged", 2.0, 10.0, []),
            ("paged", 1000.0, 30.0, [20.0, 50.0, 30.0]),
        ]

    def test_no_rounds_at_all(self, octavo: Octavo) -> None:
        assert octavo("lab", "run", "--rounds", "0").code == 2


class FakeLLM:
    """An engine that tells its size."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.engine = SimpleNamespace(block_bytes=160, config=SimpleNamespace(block_size=16))


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, result = tmp_path / "result.json", synthetic(rates=(1.0,))
    save(result, path)
    before = path.read_bytes()
    result.runs[0].summary.throughput = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        save(result, path)
    result.runs[0].summary.throughput = 1.0
    monkeypatch.setattr(Path, "replace", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(result, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_commit_is_our_own_and_not_that_of_the_repository_we_are_installed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(study, "__file__", str(tmp_path / "study.py"))
    (tmp_path / "study.py").touch()
    assert study.commit() == ""


@pytest.mark.parametrize("command", ["simulate", "run"])
def test_help_names_what_can_be_named(octavo: Octavo, command: str) -> None:
    """A string in the command's module, as it must not be loaded for help: it can fall behind what there is."""
    from octavo.lab import hardware, scenarios, strategies

    words = " ".join(octavo("lab", command, "--help").out.replace("│", " ").split())
    names = [f"{strategy.name} ({strategy.label})" for strategy in strategies.ALL.values()] + list(scenarios.ALL)
    if command == "simulate":
        names += [*hardware.GPUS, *hardware.MODELS]
    assert [name for name in names if name not in words] == []


def test_it_explains_itself(octavo: Octavo) -> None:
    ran = octavo("lab", "--help")
    assert ran.code == 0
    assert all(word in ran.out for word in ("run", "simulate", "report"))
