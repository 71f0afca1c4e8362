"""What has been published about paging, beside what the lab's results say. Reads results, and draws nothing.

Every published figure names its section. A row says how ours compares, by one rule (`RULE`), or why it cannot: a
comparison is judged only where both sides answered as many requests, and where more load would give no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.lab.results import Result, Run, Summary

Verdict = Literal["as published", "near", "partly", "more", "less", "no verdict", "not measured"]

PAPER = "PagedAttention (Kwon et al., SOSP 2023)"
NEAR = 0.1  # of the published figure
FLAT = 1.05  # a step of load that raises throughput by less has reached the most
RULE = (
    "“As published”: within the published range itself, to the digits shown. “Near”: within ± 10 % of its ends. "
    "“Partly”: only some of the values are. Else “less” or “more”. Ratios are judged only where both sides answered "
    "equally many requests, and throughput only where more load would give less than 5 % more on both: the last step "
    "of load gave less, or the requests came so soon that to come all at once would."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    claim: str
    here: str  # "" where nothing was measured
    where: str  # its work and hardware
    published: str
    source: str
    verdict: Verdict
    why: str  # what the result says of the difference, or why there is no verdict; may be ""
    needs: tuple[str, ...]  # strategies that it takes
    command: str  # of octavo lab, that measures it


@dataclass(frozen=True, slots=True)
class _Found:
    """A figure of ours: its values, the words for them, and why they are not to be judged ("": they are)."""

    low: float
    high: float
    words: str
    unfit: str = ""
    why: str = ""  # what the result says of where the figure comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A published figure, from `low` to `high`, and where ours comes from."""

    claim: str
    published: str
    section: str
    low: float
    high: float
    find: Callable[[Result], _Found | None]
    needs: tuple[str, ...]
    made_up: str = ""  # what it is measured on, where that is not the result's work
    setup: str = ""  # how that was made
    command: str = "simulate"


def rows(results: Sequence[Result]) -> list[Row]:
    """One row for each claim and each result that says something about it; one that says so where none does."""
    made = []
    for claim in _CLAIMS:
        found = [(result, value) for result in results if (value := claim.find(result)) is not None]
        made += [_row(claim, result, value) for result, value in found] or [_unmeasured(claim)]
    return made


def circumstances(results: Sequence[Result]) -> list[str]:
    """For each result what can be read from it of where it differs from what was published; "" where nothing can."""
    return [" ".join(filter(None, (_lengths(result), _pressure(result)))) for result in results]


def _row(claim: _Claim, result: Result, found: _Found) -> Row:
    verdict: Verdict = "no verdict" if found.unfit else _verdict(claim, found)
    return Row(
        claim=claim.claim,
        here=found.words,
        where=claim.made_up or where(result),
        published=claim.published,
        source=f"{PAPER}, {claim.section}",
        verdict=verdict,
        why=found.unfit or found.why or claim.setup,
        needs=claim.needs,
        command=claim.command,
    )


def _verdict(claim: _Claim, found: _Found) -> Verdict:
    low, high = round(found.low, 1), round(found.high, 1)
    if claim.low <= low and high <= claim.high:
        return "as published"
    least, most = claim.low * (1 - NEAR), claim.high * (1 + NEAR)
    if least <= low and high <= most:
        return "near"
    if high < least:
        return "less"
    return "more" if low > most else "partly"


def _unmeasured(claim: _Claim) -> Row:
    return Row(
        claim=claim.claim,
        here="",
        where="",
        published=claim.published,
        source=f"{PAPER}, {claim.section}",
        verdict="not measured",
        why="",
        needs=claim.needs,
        command=claim.command,
    )


def where(result: Result) -> str:
    """The work and what it ran on, in a few words."""
    on = result.machine.get("name") or result.machine.get("gpu") or result.machine.get("processor") or "unnamed"
    how = "executed" if result.kind == "executed" else "simulated"
    return f"{result.work.get('name', 'unnamed')}, {result.model.get('name', 'unnamed')}, {how}: {on}"


def refused(run: Run) -> str:
    """How many requests a run rejected, of how many; "" for none."""
    asked = run.summary.finished + run.summary.rejected
    return f"rejected {run.summary.rejected:,} of {asked:,}" if run.summary.rejected else ""


# What is read from a result.


def under_load(result: Result) -> dict[str, Run]:
    """The runs at the highest load, by strategy; of several of one strategy the first."""
    rate = max((run.rate for run in result.runs), default=0.0)
    chosen: dict[str, Run] = {}
    for run in result.runs:
        if run.rate == rate:
            chosen.setdefault(run.strategy, run)
    return chosen


def of_the_used(run: Run) -> float:
    """Tokens stored / (slots held + slots free in holes too small), which is what the paper's figure 2 shows."""
    summary = run.summary
    used = summary.stored + summary.internal + summary.reserved + summary.external
    return summary.stored / used if used else summary.utilisation


def _shares(values: Iterable[float]) -> _Found | None:
    shares = sorted(100 * value for value in values)
    if not shares:
        return None
    low, high = f"{shares[0]:.1f}", f"{shares[-1]:.1f}"
    return _Found(shares[0], shares[-1], f"{low} %" if low == high else f"{low}–{high} %")


def _utilisation(strategy: str) -> Callable[[Result], _Found | None]:
    """Of what is held and what is lost to holes, as published; beside it of what is held, where that is another."""

    def find(result: Result) -> _Found | None:
        run = under_load(result).get(strategy)
        if run is None:
            return None
        value, held = 100 * of_the_used(run), f"{100 * run.summary.utilisation:.1f} %"
        words = f"{value:.1f} %"
        if words != held:
            words += f" with external waste ({held} of what is held)"
        return _Found(value, value, ", ".join(part for part in (words, refused(run)) if part))

    return find


def _in_flight_against(than: str) -> Callable[[Result], _Found | None]:
    """How many times as many requests paging has in flight as the strategy `than`, at the highest load."""

    def find(result: Result) -> _Found | None:
        runs = under_load(result)
        if "paged" not in runs or than not in runs:
            return None
        paged, other = runs["paged"], runs[than]
        unfit = _unequal(paged, other) or _unpressed(other) or _unpressed(paged)
        return _ratio(paged.summary.in_flight_mean, other.summary.in_flight_mean, unfit)

    return find


def _throughput_against(than: str) -> Callable[[Result], _Found | None]:
    """How many times as many tokens a second paging makes as the strategy `than`, each at the load it does best at."""

    def find(result: Result) -> _Found | None:
        curves = [
            sorted((run for run in result.runs if run.strategy == name), key=lambda run: run.rate)
            for name in ("paged", than)
        ]
        if not all(curves):
            return None
        paged, other = (max(curve, key=lambda run: run.summary.throughput) for curve in curves)
        unfit = _unequal(paged, other) or " ".join(filter(None, (_rising(curve, result) for curve in curves)))
        return _ratio(paged.summary.throughput, other.summary.throughput, unfit)

    return find


def _on_the_engine(result: Result) -> _Found | None:
    """How many times as many tokens a second paging makes on the real engine, at the highest load, and why."""
    runs = under_load(result)
    if result.kind != "executed" or not {"paged", "max"} <= set(runs):
        return None
    paged, other = runs["paged"], runs["max"]
    unfit = _unequal(paged, other) or " ".join(filter(None, (_unsaturated(run, result) for run in (paged, other))))
    found = _ratio(paged.summary.throughput, other.summary.throughput, unfit)
    return found and replace(found, words=f"{found.words}{_in_rounds(paged, other)}", why=_explained(paged, other))


def _in_rounds(paged: Run, other: Run) -> str:
    """The least and the most of the ratios of runs that followed one another."""
    if not paged.repeats or len(paged.repeats) != len(other.repeats) or min(other.repeats) <= 0:
        return ""
    ratios = sorted(ours / theirs for ours, theirs in zip(paged.repeats, other.repeats, strict=True))
    return f"; medians of {len(ratios)} rounds, which gave {ratios[0]:.1f} to {ratios[-1]:.1f} ×"


def _unequal(paged: Run, other: Run) -> str:
    """Why two runs cannot be compared: they did not answer equally many requests."""
    sides = [(run.summary.finished, run.summary.rejected) for run in (paged, other)]
    if sides[0] == sides[1]:
        return ""
    words = [f"{run.label} {refused(run) or 'rejected none'}" for run in (paged, other)]
    return f"Not the same requests were answered: {'; '.join(words)}."


def _unpressed(run: Run) -> str:
    """Why memory did not decide how many were in flight: there was enough."""
    return "" if any(run.series.waiting) else f"{run.label}: no request ever waited, so memory was no bound."


def _unsaturated(run: Run, result: Result) -> str:
    """Why more load might give more: the run took no time but from the last arrival on, were all to come at once."""
    span = result.work.get("seconds")
    if isinstance(span, int | float) and FLAT * (run.summary.seconds - span / run.rate) >= run.summary.seconds:
        return ""
    return f"{run.label}: requests came for so much of the time that more load might give more."


def _rising(curve: Sequence[Run], result: Result) -> str:
    """Why the best of a strategy's loads may not be the most that it can do; "" where the curve has flattened."""
    label = curve[-1].label
    if not _unsaturated(curve[-1], result):
        return ""
    if len(curve) < 2:
        return f"{label}: one load only, which does not show the most it can do."
    before, last = (run.summary.throughput for run in curve[-2:])
    if last < FLAT * before:
        return ""
    return f"{label}: still rising: not the most it can do (the last step of load gave {_percent(last, before)} more)."


def _percent(value: float, than: float) -> str:
    return f"{100 * (value / than - 1):.0f} %" if than else "all"


def _ratio(ours: float, theirs: float, unfit: str) -> _Found | None:
    if not theirs:
        return None
    return _Found(ours / theirs, ours / theirs, f"{ours / theirs:.1f} × ({ours:,.1f} against {theirs:,.1f})", unfit)


def _saved(name: str, data: str) -> Callable[[Result], _Found | None]:
    """The savings of a sweep at the widths that the paper plots, 2 to 6, for lengths like those of a data set."""

    def find(result: Result) -> _Found | None:
        lines = [sweep for sweep in result.sweeps if sweep.name == name]
        return _shares(
            value
            for sweep in lines
            for label, line in sweep.series.items()
            for x, value in zip(sweep.x, line, strict=True)
            if data in label and 2 <= x <= 6
        )

    return find


# What a result says of a difference: only what can be read from it.

ENOUGH = 2.0  # times the throughput: what is expected of paging at the least
NOTABLE = 0.25  # of the time: what prompts must take to be named as a reason


def _explained(paged: Run, other: Run) -> str:
    """Where the ratio of two runs' throughput comes from, and if it is below what is expected, what holds it there."""
    ours, theirs = paged.summary, other.summary
    if not (ours.decode_steps and theirs.decode_steps):
        return "Its file tells no times of steps, and so not why."
    step, before = (summary.decode_seconds / summary.decode_steps for summary in (ours, theirs))
    words = (
        f"A step that only wrote answers wrote {ours.decode_batch:.1f} of them on average instead of "
        f"{theirs.decode_batch:.1f}, and took {step / before:.1f} times as long."
    )
    if ours.throughput >= ENOUGH * theirs.throughput:
        return words
    return " ".join(filter(None, (words, _held_back(paged, other), _undone(ours), _idle(ours))))


def _held_back(paged: Run, other: Run) -> str:
    """What keeps the ratio low: prompts, whose part does not shrink, or that writing became little quicker."""
    ours, theirs = paged.summary, other.summary
    share = ours.prompt_seconds / (ours.prompt_seconds + ours.decode_seconds)
    writing = theirs.decode_seconds / ours.decode_seconds
    words = (
        f"The steps that only wrote took {ours.decode_seconds:.1f} s with pages and {theirs.decode_seconds:.1f} s "
        f"without: {writing:.1f} times as long."
    )
    if share >= NOTABLE:
        words = (
            f"Steps with prompts in them took {100 * share:.0f} % of paging's time, and no batch saves their "
            f"arithmetic. {words}"
        )
    return words if writing >= ENOUGH else f"{words} {_written_slowly(paged, other)}"


def _written_slowly(paged: Run, other: Run) -> str:
    """Why writing is not so much quicker as is expected."""
    batch = paged.summary.decode_batch / other.summary.decode_batch
    if batch >= ENOUGH:
        return f"So a batch {batch:.1f} times as large saved little: each answer in it costs arithmetic of its own."
    if not any(other.series.waiting):
        return f"No request ever waited under {other.label}, so its memory was no bound."
    return f"Memory let paging write only {batch:.1f} times as many answers at once."


def _undone(ours: Summary) -> str:
    if not ours.preemptions:
        return ""
    return f"Paging preempted {ours.preemptions:,} times and computed {ours.recomputed_tokens:,} tokens again."


def _idle(ours: Summary) -> str:
    """Said where it is more than a tenth of the time."""
    idle = 1 - (ours.prompt_seconds + ours.decode_seconds) / ours.seconds if ours.seconds else 0.0
    return f"For {100 * idle:.0f} % of the time there was nothing to do under paging." if idle > 0.1 else ""


def _lengths(result: Result) -> str:
    requests, prompt, output = (result.work.get(name) for name in ("requests", "prompt_tokens", "output_tokens"))
    if not (isinstance(requests, int) and isinstance(prompt, int) and isinstance(output, int) and requests > 0):
        return ""
    return (
        f"Here a request has {prompt / requests:,.0f} tokens of prompt and {output / requests:,.0f} of answers on "
        "average; the paper's ShareGPT requests have 161 and 338."
    )


def _pressure(result: Result) -> str:
    """How long requests waited under paging at the highest load, and what it found in its cache."""
    run = under_load(result).get("paged")
    if run is None or not run.series.time:
        return ""
    waited = 100 * sum(count > 0 for count in run.series.waiting) / len(run.series.waiting)
    words = f"Requests waited {waited:.0f} % of the time under paging at the highest load."
    if run.summary.cached_tokens:
        words += f" {run.summary.cached_tokens:,} prompt tokens were found in its cache, not stored and computed again."
    return words


_LENGTHS_MADE_UP = "Lengths are exponential, with the data set's means."
_BEAMS_MADE_UP = " Which beams go on is drawn from made-up probabilities, not a trained model's."


def _used(claim: str, published: float, section: str, strategy: str) -> _Claim:
    return _Claim(
        claim=claim,
        published=f"{published} %",
        section=f"{section}; external waste counts",
        low=published,
        high=published,
        find=_utilisation(strategy),
        needs=(strategy,),
    )


def _against(
    claim: str, published: tuple[float, float], section: str, than: str, find: Callable[[Result], _Found | None]
) -> _Claim:
    low, high = published
    return _Claim(
        claim=claim,
        published=f"{low:g} ×" if low == high else f"{low:g}–{high:g} ×",
        section=section,
        low=low,
        high=high,
        find=find,
        needs=("paged", than),
    )


def _sharing(claim: str, published: tuple[float, float], section: str, sweep: str, data: str) -> _Claim:
    low, high = published
    return _Claim(
        claim=claim,
        published=f"{low}–{high} %",
        section=section,
        low=low,
        high=high,
        find=_saved(sweep, data),
        needs=("paged",),
        made_up=f"a made-up work with {data}-like lengths, simulated",
        setup=_LENGTHS_MADE_UP + (_BEAMS_MADE_UP if sweep == "beams" else ""),
    )


def _real() -> _Claim:
    return _Claim(
        claim="Tokens a second on a real engine, everything at once, paged against the longest sequence reserved",
        published="2–4 ×",
        section="abstract, against FasterTransformer and Orca at the same latency",
        low=2.0,
        high=4.0,
        find=_on_the_engine,
        needs=("paged", "max"),
        command="run",
    )


_MOST = "Tokens a second at most, paged against"
_ORCAS = "§6.2 and fig. 13a (OPT-13B, ShareGPT)"
_CLAIMS = (
    _used("Utilisation, the longest sequence reserved for each request", 20.4, "fig. 2, Orca (Max)", "max"),
    _used("Utilisation, a power of two reserved", 26.8, "fig. 2, Orca (Pow2)", "pow2"),
    _used("Utilisation, exactly the right length reserved", 38.2, "fig. 2, Orca (Oracle)", "oracle"),
    _used("Utilisation, paged", 96.3, "fig. 2, vLLM", "paged"),
    _against(
        "Requests in flight, paged against the longest sequence reserved",
        (4.3, 4.3),
        _ORCAS,
        "max",
        _in_flight_against("max"),
    ),
    _against(
        "Requests in flight, paged against the right length reserved",
        (2.2, 2.2),
        _ORCAS,
        "oracle",
        _in_flight_against("oracle"),
    ),
    _against(
        f"{_MOST} the longest sequence reserved",
        (2.7, 8.0),
        "§6.2, request rate sustained (ShareGPT)",
        "max",
        _throughput_against("max"),
    ),
    _real(),
    _against(
        f"{_MOST} the right length reserved",
        (1.7, 2.7),
        "§6.2, request rate sustained (ShareGPT)",
        "oracle",
        _throughput_against("oracle"),
    ),
    _against(
        f"{_MOST} what a server without an oracle can do",
        (2.0, 4.0),
        "abstract, throughput at the same latency; here against a reservation of the request's own limit",
        "own",
        _throughput_against("own"),
    ),
    _sharing(
        "Memory that parallel samples save by sharing, n = 2 to 6, short requests",
        (6.1, 9.8),
        "§6.3 and fig. 15a (Alpaca)",
        "samples",
        "Alpaca",
    ),
    _sharing(
        "Memory that parallel samples save by sharing, n = 2 to 6, longer requests",
        (16.2, 30.5),
        "§6.3 (ShareGPT)",
        "samples",
        "ShareGPT",
    ),
    _sharing(
        "Memory that beams save by sharing, width 2 to 6, short requests",
        (37.6, 55.2),
        "§6.3 and fig. 15b (Alpaca)",
        "beams",
        "Alpaca",
    ),
    _sharing(
        "Memory that beams save by sharing, width 2 to 6, longer requests",
        (44.3, 66.3),
        "§6.3 (ShareGPT)",
        "beams",
        "ShareGPT",
    ),
)
