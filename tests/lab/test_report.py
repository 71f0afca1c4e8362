"""The lab's report: everything in a result is on the page, the page needs nothing else, and claims are judged."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.lab import claims, figures, report, study
from octavo.lab.results import Percentiles, Result, load, save

from .synthetic import POOL, synthetic

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'octavo[lab]'")
VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """A page's tags, ids, addresses and text; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str] = []
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(text)
        assert not self._open
        self.words = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-label":
                self.labels.append(value or "")
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                self.addresses.append(value or "")
            self.addresses += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self._words.append(data)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [synthetic(), synthetic(kind="executed", rates=(4.0,), sweeps=False)]


@pytest.fixture(scope="module")
def written(results: list[Result], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return report.write(results, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(written: list[Path]) -> Page:
    return Page(written[0].read_text(encoding="utf-8"))


class TestPage:
    def test_every_figure_of_every_result_is_there_with_its_panels(self, page: Page, results: list[Result]) -> None:
        names = ["maps", "shares", "waste", "in-flight", "latency", "throughput", "block-size", "savings"]
        assert [figure.name for figure in figures.all_figures(results[0])] == names
        assert [figure.name for figure in figures.all_figures(results[1])] == names[:4]
        for place, result in enumerate(results, start=1):
            for figure in figures.all_figures(result):
                assert f"result-{place}-{figure.name}" in page.ids
                assert figure.title in page.words
                assert all(f"{figure.title}: {panel.title}" in page.labels for panel in figure.panels if panel.title)
        panels = sum(len(figure.panels) for result in results for figure in figures.all_figures(result))
        assert page.tags.count("svg") == panels

    def test_every_strategy_and_every_measure_is_in_the_table(self, page: Page, results: list[Result]) -> None:
        for run in results[0].runs:
            if run.rate == 4.0:
                summary = run.summary
                for shown in (
                    run.label,
                    f"{100 * summary.utilisation:.1f} %",
                    f"{summary.in_flight_mean:,.1f}",
                    f"{summary.throughput:,.1f}",
                    report.seconds(summary.ttft.p50),
                ):
                    assert shown in page.words
        assert "954 MiB" in page.words  # copied by doubling
        assert "37" in page.words  # failures though enough was free, of the oracle
        assert "rejected" not in page.words  # nobody was: a column of zeros says nothing

    def test_every_claim_is_on_the_page_and_those_measured_with_their_source(
        self, page: Page, results: list[Result]
    ) -> None:
        rows = claims.rows(results)
        assert {"not measured", "as published", "no verdict"} <= {row.verdict for row in rows}
        for row in rows:
            assert row.claim in page.words
            for words in (row.here, row.where, row.why, *([row.source, row.verdict] if row.here else [])):
                assert words in page.words
        assert claims.RULE in page.words
        assert "octavo lab simulate --strategy own --strategy paged" in page.words  # what nobody ran
        assert "at the highest load" not in page.words.split("What was claimed")[0]  # nothing was repeated
        assert page.ids.index("claims") > page.ids.index("result-2-in-flight")  # after the pictures

    def test_what_was_run_is_said(self, page: Page, results: list[Result]) -> None:
        for words in ("commit 0123abcd", "seed 0", f"{POOL:,} token slots", "RTX 4090", "9.77 GiB", "Xeon", "roofline"):
            assert words in page.words
        assert "made <here>" in page.words  # text stays text

    def test_nothing_is_fetched(self, page: Page, written: list[Path]) -> None:
        assert page.addresses
        assert not [address for address in page.addresses if not address.startswith(("#", "data:"))]
        text = written[0].read_text(encoding="utf-8")
        assert not re.findall(r"https?:|//[a-z]|@import|<image|@font-face", text)

    def test_ids_are_unique_and_what_refers_to_one_finds_it(self, page: Page) -> None:
        assert len(set(page.ids)) == len(page.ids)
        assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)

    def test_drawings_take_the_pages_colours(self, written: list[Path]) -> None:
        text = written[0].read_text(encoding="utf-8")
        drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
        assert "var(--active)" in drawings
        # (neither #fff nor black: what is not among the colours would not follow the theme)
        assert not set(re.findall(r"#[0-9a-f]{6}\b", drawings)) - {"#000000", "#211d18"}
        assert "#000000" not in re.sub(r"stroke: #000000", "", drawings)

    def test_figures_are_beside_it_and_are_pictures(self, written: list[Path], results: list[Result]) -> None:
        from PIL import Image

        pictures = [path for path in written if path.suffix == ".png"]
        assert len(pictures) == sum(len(figures.all_figures(result)) for result in results)
        for path in pictures:
            assert path.parent == written[0].parent
            picture = Image.open(io.BytesIO(path.read_bytes()))
            assert picture.width > 500
            assert len(set(picture.convert("RGB").resize((64, 64)).tobytes())) > 10

    def test_the_same_result_gives_the_same_page(self, results: list[Result], written: list[Path]) -> None:
        again = report.write(results[1:], written[0].parent / "again" / "report.html")
        more = report.write(results[1:], written[0].parent / "more" / "report.html")
        assert [path.read_bytes() for path in again] == [path.read_bytes() for path in more]


class TestFigures:
    def test_a_map_shows_every_slot_once_in_its_place(self) -> None:
        run = synthetic().runs[1]
        cells = figures._cells(run, 1)
        assert [begin for _, begin, _ in cells[1:]] == [end for _, _, end in cells[:-1]]
        assert (cells[0][1], cells[-1][2]) == (0, POOL)
        for kind in ("stored", "internal", "reserved", "free"):
            slots = sum(piece.slots for piece in run.map if piece.kind == kind)
            assert sum(end - begin for name, begin, end in cells if name == kind) == slots

    def test_a_run_of_slots_breaks_at_the_ends_of_rows(self) -> None:
        rectangles = figures._wrapped(8, 25, 10)
        assert [(r[0], r[2][0]) for r in rectangles] == [((8, 0), 10), ((0, 1), 10), ((0, 2), 5)]

    def test_sharing_is_drawn_only_beside_paging(self) -> None:
        result = synthetic()
        result.runs = [run for run in result.runs if run.strategy != "paged"]
        assert not {"block-size", "savings"} & {figure.name for figure in figures.all_figures(result)}

    def test_no_cache_has_no_map_and_is_left_out_where_it_would_squash_the_rest(self) -> None:
        result = synthetic()
        for run in result.runs:
            if run.strategy == "none":
                run.summary.ttft = Percentiles(p50=900.0, p90=1000.0, p99=1100.0)
        made = {figure.name: figure for figure in figures.all_figures(result)}
        assert "no cache" not in " ".join(panel.title for panel in made["maps"].panels)
        assert "No cache has no map" in made["maps"].caption
        assert "No cache is left out" in made["latency"].caption
        assert "none: no cache" not in [words for _, words in made["latency"].key]
        assert "none: no cache" in [words for _, words in made["throughput"].key]

    @pytest.mark.parametrize("heights", [[0.5] * 8, [0.0, 0.1, 0.98, 0.99, 1.0], [0.2], []])
    def test_names_of_lines_are_apart_and_within_the_axes(self, heights: list[float]) -> None:
        placed = figures._spread(heights, 0.1)
        assert all(after - before > 0.0999 for before, after in itertools.pairwise(placed))
        assert all(-0.0001 <= height <= 1 for height in placed)

    def test_colours_are_the_memory_pages(self) -> None:
        assert figures.palette("light")["active"] == "#136f7f"
        assert figures.palette("dark")["active"] == "#3db3c4"
        assert figures.palette("light")["on-state"] == "#ffffff"
        assert set(figures.palette("light")) == set(figures.palette("dark"))

    def test_nothing_at_all_draws_nothing_and_breaks_nothing(self, tmp_path: Path) -> None:
        empty = replace(synthetic(), runs=[], sweeps=[])
        assert figures.all_figures(empty) == []
        assert report.write([empty], tmp_path / "report.html") == [tmp_path / "report.html"]

    def test_a_run_in_which_nothing_finished(self, tmp_path: Path) -> None:
        result = synthetic(rates=(1.0, 2.0))
        for run in result.runs:
            none = Percentiles(p50=None, p90=None, p99=None)
            run.summary = replace(run.summary, ttft=none, tpot=none, throughput=0.0, in_flight_mean=0.0)
            run.series, run.map = replace(run.series, time=[0.0]), []
            for name in ("stored", "internal", "reserved", "external", "free", "in_flight", "waiting"):
                setattr(run.series, name, [0])
        written = report.write([result], tmp_path / "report.html")
        assert "—" in Page(written[0].read_text(encoding="utf-8")).words

    def test_a_missing_matplotlib_is_one_sentence_that_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("octavo.lab.figures.find_spec", lambda name: None)
        with pytest.raises(RequestError, match=r"pip install 'octavo\[lab\]'"):
            figures.require_matplotlib()


def _row(result: Result, claim: str) -> claims.Row:
    return next(row for row in claims.rows([result]) if row.claim.startswith(claim))


def _fill(result: Result, strategy: str, *, stored: float, internal: float, external: float = 0.0) -> None:
    for run in result.runs:
        if run.strategy == strategy:
            run.summary = replace(
                run.summary, utilisation=stored / (stored + internal), stored=stored, internal=internal, reserved=0.0,
                external=external,
            )  # fmt: skip


REAL = "Tokens a second on a real engine"


def _at_once(*, max_: float, paged: float) -> Result:
    """An execution with these tokens a second, all of whose requests came within the first of 200 seconds."""
    result = synthetic(kind="executed", rates=(1.0,), sweeps=False)
    result.runs = [run for run in result.runs if run.strategy in ("max", "paged")]
    result.work["seconds"] = 1.0
    for run, throughput, batch, seconds in zip(result.runs, (max_, paged), (2.0, 12.0), (90.0, 180.0), strict=True):
        run.summary = replace(
            run.summary, throughput=throughput, decode_batch=batch, decode_seconds=seconds, prompt_seconds=20.0,
            seconds=200.0, preemptions=0, recomputed_tokens=0,
        )  # fmt: skip
        run.series.waiting = [1] * len(run.series.time)
    return result


class TestClaims:
    @pytest.mark.parametrize(
        ("used", "verdict"),
        [(0.963, "as published"), (0.9634, "as published"), (0.98, "near"), (0.87, "near"), (0.86, "less")],
    )
    def test_a_verdict_follows_the_rule_that_the_page_states(self, used: float, verdict: str) -> None:
        result = synthetic()
        _fill(result, "paged", stored=used, internal=1 - used)
        row = _row(result, "Utilisation, paged")
        assert (row.verdict, row.here) == (verdict, f"{100 * used:.1f} %")

    def test_utilisation_is_compared_with_external_waste_and_both_are_shown(self) -> None:
        result = synthetic()
        _fill(result, "oracle", stored=0.38, internal=0.12, external=0.5)
        row = _row(result, "Utilisation, exactly the right length")
        assert (row.here, row.verdict) == ("38.0 % with external waste (76.0 % of what is held)", "near")
        assert report._FIRST[1][1](next(run for run in result.runs if run.strategy == "oracle")) == "76.0 %"

    def test_a_range_that_reaches_beyond_the_published_one_is_partly_so(self) -> None:
        row = _row(synthetic(), "Memory that parallel samples save by sharing, n = 2 to 6, short")
        assert (row.here, row.verdict) == ("8.0–15.0 %", "partly")
        assert row.where == "a made-up work with Alpaca-like lengths, simulated"

    def test_no_strategy_stands_in_for_one_that_was_not_run(self) -> None:
        row = _row(synthetic(), "Tokens a second at most, paged against what a server without an oracle")
        assert (row.verdict, row.here, row.needs) == ("not measured", "", ("paged", "own"))

    @pytest.mark.parametrize("claim", ["Tokens a second at most, paged against the longest", "Requests in flight"])
    def test_sides_that_answered_other_requests_get_no_verdict(self, claim: str) -> None:
        result = synthetic()
        for run in result.runs:
            if run.strategy == "max":
                run.summary.finished, run.summary.rejected = 297, 3
        row = _row(result, claim)
        assert row.verdict == "no verdict"
        assert "rejected 3 of 300" in row.why

    @pytest.mark.parametrize(
        ("last", "verdict", "why"), [(104.0, "as published", ""), (106.0, "no verdict", "still rising")]
    )
    def test_throughput_is_judged_where_its_curve_is_flat(self, last: float, verdict: str, why: str) -> None:
        result = synthetic(rates=(1.0, 2.0))
        for run in result.runs:
            times = 3 if run.strategy == "paged" else 1
            run.summary.throughput = times * (100.0 if run.rate == 1 else last)
        row = _row(result, "Tokens a second at most, paged against the longest")
        assert row.verdict == verdict
        assert why in row.why
        one = _row(replace(result, runs=[run for run in result.runs if run.rate == 2]), "Tokens a second at most")
        assert one.verdict == "no verdict"

    def test_without_waiting_memory_decided_nothing(self) -> None:
        result = synthetic()
        for run in result.runs:
            run.series.waiting = [0] * len(run.series.time)
        row = _row(result, "Requests in flight, paged against the longest")
        assert (row.verdict, "no request ever waited" in row.why) == ("no verdict", True)

    def test_requests_that_come_all_at_once_need_no_further_load(self) -> None:
        result = _at_once(max_=100.0, paged=300.0)
        assert _row(result, "Tokens a second at most, paged against the longest").verdict == "as published"
        result.work["seconds"] = 20.0  # of 200
        row = _row(result, "Tokens a second at most, paged against the longest")
        assert (row.verdict, "one load only" in row.why) == ("no verdict", True)
        row = _row(result, REAL)
        assert (row.verdict, "more load might give more" in row.why) == ("no verdict", True)

    def test_on_the_real_engine_paging_is_judged_at_the_highest_load(self) -> None:
        row = _row(_at_once(max_=100.0, paged=300.0), REAL)
        assert (row.here, row.verdict) == ("3.0 × (300.0 against 100.0)", "as published")
        assert row.why == (
            "A step that only wrote answers wrote 12.0 of them on average instead of 2.0, and took 2.0 times as long."
        )
        assert _row(synthetic(), REAL).verdict == "not measured"  # a simulation is no engine

    def test_rounds_and_how_far_apart_they_were_are_said(self) -> None:
        result = _at_once(max_=100.0, paged=300.0)
        by_name = claims.under_load(result)
        by_name["max"].repeats, by_name["paged"].repeats = [100.0, 80.0, 110.0], [290.0, 300.0, 330.0]
        assert _row(result, REAL).here.endswith("medians of 3 rounds, which gave 2.9 to 3.8 ×")

    @pytest.mark.parametrize(
        ("ours", "theirs", "why"),
        [
            (
                {"prompt_seconds": 150.0, "decode_seconds": 50.0},
                {"prompt_seconds": 150.0, "decode_seconds": 130.0},
                "Steps with prompts in them took 75 % of paging's time, and no batch saves their arithmetic. The steps "
                "that only wrote took 50.0 s with pages and 130.0 s without: 2.6 times as long.",
            ),
            (
                {"decode_seconds": 180.0},
                {"decode_seconds": 250.0},
                "So a batch 6.0 times as large saved little: each answer",
            ),
            ({"decode_batch": 3.0}, {}, "Memory let paging write only 1.5 times as many answers at once."),
            (
                {"decode_seconds": 180.0, "preemptions": 7, "recomputed_tokens": 1234},
                {"decode_seconds": 250.0},
                "Paging preempted 7 times and computed 1,234 tokens again.",
            ),
            ({"prompt_seconds": 20.0, "decode_seconds": 100.0}, {"decode_seconds": 120.0}, "For 40 % of the time"),
        ],
    )
    def test_below_twice_the_result_says_why(self, ours: Any, theirs: Any, why: str) -> None:
        result = _at_once(max_=100.0, paged=150.0)
        by_name = claims.under_load(result)
        by_name["paged"].summary = replace(by_name["paged"].summary, **ours)
        by_name["max"].summary = replace(by_name["max"].summary, **theirs)
        row = _row(result, REAL)
        assert (row.here[:5], row.verdict) == ("1.5 ×", "less")
        assert why in row.why

    def test_below_twice_without_waiting_memory_was_no_bound(self) -> None:
        result = _at_once(max_=100.0, paged=101.0)
        by_name = claims.under_load(result)
        by_name["paged"].summary = replace(by_name["paged"].summary, decode_batch=2.0)
        by_name["max"].series.waiting = [0] * len(by_name["max"].series.time)
        assert "No request ever waited" in _row(result, REAL).why

    def test_a_file_of_before_tells_no_reason(self) -> None:
        result = _at_once(max_=100.0, paged=150.0)
        for run in result.runs:
            run.summary = replace(run.summary, prompt_seconds=0.0, decode_seconds=0.0, decode_steps=0, decode_batch=0.0)
        assert "tells no times of steps" in _row(result, REAL).why

    def test_ratios_are_taken_at_the_highest_load(self) -> None:
        result = synthetic()
        under = claims.under_load(result)
        ratio = under["paged"].summary.in_flight_mean / under["max"].summary.in_flight_mean
        row = next(row for row in claims.rows([result]) if row.claim.startswith("Requests in flight"))
        assert row.here.startswith(f"{ratio:.1f} ×")

    def test_what_no_result_says_is_said_to_be_not_measured(self) -> None:
        result = replace(synthetic(), runs=[], sweeps=[])
        assert {row.verdict for row in claims.rows([result])} == {"not measured"}
        assert {row.verdict for row in claims.rows([])} == {"not measured"}

    def test_every_claim_names_its_source(self) -> None:
        for row in claims.rows([synthetic()]):
            assert re.search(r"§|fig\.|abstract", row.source)


def test_what_was_repeated_is_said_and_commands_name_what_is_missing(tmp_path: Path) -> None:
    result = _at_once(max_=100.0, paged=300.0)
    result.runs[0].repeats = result.runs[1].repeats = [1.0, 2.0, 3.0]
    words = Page(report.write([result], tmp_path / "a.html")[0].read_text(encoding="utf-8")).words
    assert "at the highest load, 3 times in turns" in words
    assert "octavo lab run" not in words
    words = Page(report.write([synthetic(rates=(1.0,))], tmp_path / "b.html")[0].read_text(encoding="utf-8")).words
    assert "octavo lab run --strategy max --strategy paged" in words


def test_a_rejection_stands_beside_the_name(tmp_path: Path) -> None:
    result = synthetic(rates=(1.0,))
    next(run for run in result.runs if run.strategy == "max").summary.rejected = 3
    words = Page(report.write([result], tmp_path / "report.html")[0].read_text(encoding="utf-8")).words
    assert "contiguous, the longest reserved 3 of 303 " in words
    assert "Rejected: requests that could never fit" in words


def test_the_map_shows_the_moment_nearest_to_what_is_held_while_requests_wait() -> None:
    run = synthetic(rates=(1.0,)).runs[-1]
    run.series.time, run.series.waiting = [1.0, 2.0, 3.0, 4.0], [0, 5, 5, 5]
    run.series.stored, run.series.internal, run.series.reserved = [48, 20, 50, 80], [0] * 4, [0] * 4
    assert study.typical_moment([run]) == 3.0  # the mean while any wait is 50
    run.series.waiting = [0, 0, 0, 0]
    run.series.in_flight = [1, 0, 0, 0]
    assert study.typical_moment([run]) == 1.0
    assert study.typical_moment([]) is None


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = synthetic()
    save(result, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == result
    save(load(tmp_path / "result.json"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "result.json").read_bytes()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', '{"format": 99}', "null"])
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=r"other\.json"):
        load(path)
