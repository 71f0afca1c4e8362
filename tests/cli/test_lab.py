"""`octavo lab`: what goes in and comes out. What is simulated, measured and drawn has its own tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from octavo.lab.results import Result, load, save
from tests.lab.synthetic import synthetic

from .conftest import Octavo

drawing = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install 'octavo[lab]'"
)


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
        flags = ("--scenario", "code", "--strategy", "max", "--strategy", "paged", "--rates", "2,1", "--seed", "3")
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
            (("--model", "llama-3.1-70b"), "More GPUs"),
        ],
    )
    def test_what_cannot_be_simulated_is_said_in_a_sentence(
        self, octavo: Octavo, small: Any, flags: tuple[str, ...], words: str
    ) -> None:
        ran = octavo(*small, *flags)
        assert ran.code == 2
        assert words in ran.err
        assert len(ran.err.splitlines()) == 1

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

    def test_a_file_that_is_not_there(self, octavo: Octavo, tmp_path: Path) -> None:
        assert octavo("lab", "report", str(tmp_path / "none.json")).code == 2
        assert octavo("lab", "report").code == 2


class TestRun:
    @drawing
    def test_the_real_engine(self, octavo: Octavo, tmp_path: Path, smollm2_path: Path) -> None:
        flags = ("--strategy", "max", "--strategy", "paged", "--rates", "8", "--slots", "2048", "--context", "1024")
        few = ("--requests", "3", "--model", str(smollm2_path), "--out", str(tmp_path / "lab"))
        ran = octavo("lab", "run", *few, *flags)
        assert ran.code == 0, ran.err
        result = load(tmp_path / "lab" / "poisson-executed.json")
        assert [run.strategy for run in result.runs] == ["max", "paged"]
        assert result.machine["cores"] >= 1
        assert result.machine["memory"] > 2**28
        assert (tmp_path / "lab" / "report.html").exists()


def test_it_explains_itself(octavo: Octavo) -> None:
    ran = octavo("lab", "--help")
    assert ran.code == 0
    assert all(word in ran.out for word in ("run", "simulate", "report"))
