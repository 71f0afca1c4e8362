"""What has been published about paging, beside what the lab's results say. Reads results, and draws nothing.

Every published figure names its section. A row says whether ours falls within it, and if not, what is different here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.lab.results import Result, Run

Verdict = Literal["as published", "partly", "more", "less", "not measured"]

PAPER = "PagedAttention (Kwon et al., SOSP 2023)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    claim: str
    here: str  # "" where nothing was measured
    where: str  # its work and hardware
    published: str
    source: str
    verdict: Verdict
    why: str  # where it comes out otherwise; "" where it does not


@dataclass(frozen=True, slots=True)
class _Found:
    """A figure of ours: its values and the words for them."""

    low: float
    high: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A published figure, what counts as the same, and where ours comes from."""

    claim: str
    published: str
    section: str
    low: float  # from here
    high: float  # to here ours counts as published
    find: Callable[[Result], _Found | None]
    less: str  # why ours may be below
    more: str  # and above


def rows(results: Sequence[Result]) -> list[Row]:
    """One row for each claim and each result that says something about it; one that says so where none does."""
    made = []
    for claim in _CLAIMS:
        found = [(result, value) for result in results if (value := claim.find(result)) is not None]
        made += [_row(claim, result, value) for result, value in found] or [_unmeasured(claim)]
    return made


def _row(claim: _Claim, result: Result, found: _Found) -> Row:
    below, above = found.low < claim.low, found.high > claim.high
    verdict: Verdict = "as published"
    if found.high < claim.low:
        verdict, above = "less", False
    elif found.low > claim.high:
        verdict, below = "more", False
    elif below or above:
        verdict = "partly"
    return Row(
        claim=claim.claim,
        here=found.words,
        where=where(result),
        published=claim.published,
        source=f"{PAPER}, {claim.section}",
        verdict=verdict,
        why=" ".join(why for holds, why in ((below, claim.less), (above, claim.more)) if holds),
    )


def _unmeasured(claim: _Claim) -> Row:
    return Row(
        claim=claim.claim,
        here="",
        where="",
        published=claim.published,
        source=f"{PAPER}, {claim.section}",
        verdict="not measured",
        why="None of these results holds what it takes.",
    )


def where(result: Result) -> str:
    """The work and what it ran on, in a few words."""
    on = result.machine.get("name") or result.machine.get("gpu") or result.machine.get("processor") or "unnamed"
    how = "executed" if result.kind == "executed" else "simulated"
    return f"{result.work.get('name', 'unnamed')}, {result.model.get('name', 'unnamed')}, {how}: {on}"


# What is read from a result.


def under_load(result: Result) -> dict[str, Run]:
    """The runs at the highest load, by strategy; of several of one strategy the first."""
    rate = max((run.rate for run in result.runs), default=0.0)
    chosen: dict[str, Run] = {}
    for run in result.runs:
        if run.rate == rate:
            chosen.setdefault(run.strategy, run)
    return chosen


def _shares(values: Iterable[float]) -> _Found | None:
    shares = sorted(100 * value for value in values)
    if not shares:
        return None
    low, high = f"{shares[0]:.1f}", f"{shares[-1]:.1f}"
    return _Found(shares[0], shares[-1], f"{low} %" if low == high else f"{low}–{high} %")


def _utilisation(strategy: str) -> Callable[[Result], _Found | None]:
    def find(result: Result) -> _Found | None:
        run = under_load(result).get(strategy)
        return None if run is None else _shares([run.summary.utilisation])

    return find


def _in_flight_against(than: str) -> Callable[[Result], _Found | None]:
    """How many times as many requests paging has in flight as the strategy `than`, at the highest load."""

    def find(result: Result) -> _Found | None:
        runs = under_load(result)
        if "paged" not in runs or than not in runs:
            return None
        return _ratio(runs["paged"].summary.in_flight_mean, runs[than].summary.in_flight_mean)

    return find


def _throughput_against(*than: str) -> Callable[[Result], _Found | None]:
    """How many times as many tokens a second paging makes as the first of these strategies that was run, at best."""

    def find(result: Result) -> _Found | None:
        best: dict[str, float] = {}
        for run in result.runs:
            best[run.strategy] = max(best.get(run.strategy, 0.0), run.summary.throughput)
        other = next((best[name] for name in than if name in best), None)
        return None if other is None or "paged" not in best else _ratio(best["paged"], other)

    return find


def _ratio(ours: float, theirs: float) -> _Found | None:
    if not theirs:
        return None
    return _Found(ours / theirs, ours / theirs, f"{ours / theirs:.1f} × ({ours:,.1f} against {theirs:,.1f})")


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


_FULLER = "These requests fill more of what is reserved for them than the paper's did."
_EMPTIER = "What is reserved is a larger multiple of what these requests hold than in the paper's workload."
_SAMPLES = (
    "Only the prompt is shared, so what is saved follows from how long prompts are beside answers; these lengths have "
    "the data set's means, not its spread, and prompts that fill no block to its end are copied in part."
)
_BEAMS = (
    "What beams share depends on how soon the survivors go back to one ancestor. Here the model is made up, and its "
    "probabilities part the beams in another way than a trained model's: the wider the search, the more."
)
_COMPUTE = (
    "More requests at once make more tokens only while memory is what runs out: here computing is the bound, or the "
    "requests are too few to fill the memory."
)

_CLAIMS = (
    _Claim(
        claim="Utilisation, the longest sequence reserved for each request",
        published="20.4 %",
        section="§1 and fig. 2, Orca (Max); here 15–45 % counts as such",
        low=15.0,
        high=45.0,
        find=_utilisation("max"),
        less=_EMPTIER,
        more=_FULLER,
    ),
    _Claim(
        claim="Utilisation, a power of two reserved",
        published="26.8 %",
        section="fig. 2, Orca (Pow2); ± a quarter",
        low=20.1,
        high=33.5,
        find=_utilisation("pow2"),
        less=_EMPTIER,
        more=_FULLER + " Only the answer is rounded up to a power of two here, and prompts are longer than answers.",
    ),
    _Claim(
        claim="Utilisation, exactly the right length reserved",
        published="38.2 %",
        section="fig. 2, Orca (Oracle); ± a quarter",
        low=28.7,
        high=47.8,
        find=_utilisation("oracle"),
        less=_EMPTIER,
        more="Only the answer is still to come when a request starts: where prompts are long beside answers, a "
        "reservation of exactly the right length is nearly full from its first moment.",
    ),
    _Claim(
        claim="Utilisation, paged",
        published="96.3 %",
        section="fig. 2, vLLM; ± 1 point",
        low=95.3,
        high=97.3,
        find=_utilisation("paged"),
        less="On average half of a sequence's last block is empty, which weighs the more the shorter sequences are.",
        more="Sequences are longer than the paper's, so that half of a last block weighs less.",
    ),
    _Claim(
        claim="Requests in flight, paged against the longest sequence reserved",
        published="4.3 ×",
        section="§6.2 and fig. 13a (OPT-13B, ShareGPT); ± a quarter",
        low=3.2,
        high=5.4,
        find=_in_flight_against("max"),
        less="Too few requests were there to fill the memory, or they are longer beside the longest allowed.",
        more="These requests are shorter beside the longest sequence allowed than the paper's beside 2,048 tokens, "
        "or share what they store.",
    ),
    _Claim(
        claim="Requests in flight, paged against the right length reserved",
        published="2.2 ×",
        section="§6.2 and fig. 13a (OPT-13B, ShareGPT); ± a quarter",
        low=1.6,
        high=2.8,
        find=_in_flight_against("oracle"),
        less="Where prompts are long beside answers, a reservation of exactly the right length wastes little: "
        "paging's advantage is that nobody knows that length.",
        more="Prompts are shared here, which no contiguous reservation can be.",
    ),
    _Claim(
        claim="Tokens a second at most, paged against the longest sequence reserved",
        published="2.7–8 ×",
        section="§6.2, request rate sustained (ShareGPT)",
        low=2.7,
        high=8.0,
        find=_throughput_against("max"),
        less=_COMPUTE,
        more="Against one request at a time there is no upper end, and prompts found in the cache cost nothing.",
    ),
    _Claim(
        claim="Tokens a second at most, paged against the right length reserved",
        published="1.7–2.7 ×",
        section="§6.2, request rate sustained (ShareGPT)",
        low=1.7,
        high=2.7,
        find=_throughput_against("oracle"),
        less="As with requests in flight: long prompts and short answers leave little to gain over an oracle, "
        "which no real server has. " + _COMPUTE,
        more="Prompts are shared here, which no contiguous reservation can be, and what is found is not computed.",
    ),
    _Claim(
        claim="Tokens a second at most, paged against what a server without an oracle can do",
        published="2–4 ×",
        section="abstract, throughput at the same latency; here against a reservation of the request's own limit",
        low=2.0,
        high=4.0,
        find=_throughput_against("own", "pow2", "max"),
        less=_COMPUTE,
        more="Prompts are shared here, which no contiguous reservation can be, and what is found is not computed.",
    ),
    _Claim(
        claim="Memory that parallel samples save by sharing, n = 2 to 6, short requests",
        published="6.1–9.8 %",
        section="§6.3 and fig. 15a (Alpaca); ± 15 %",
        low=5.2,
        high=11.3,
        find=_saved("samples", "Alpaca"),
        less=_SAMPLES,
        more=_SAMPLES,
    ),
    _Claim(
        claim="Memory that parallel samples save by sharing, n = 2 to 6, longer requests",
        published="16.2–30.5 %",
        section="§6.3 (ShareGPT); ± 15 %",
        low=13.8,
        high=35.1,
        find=_saved("samples", "ShareGPT"),
        less=_SAMPLES,
        more=_SAMPLES,
    ),
    _Claim(
        claim="Memory that beams save by sharing, width 2 to 6, short requests",
        published="37.6–55.2 %",
        section="§6.3 and fig. 15b (Alpaca); ± 15 %",
        low=32.0,
        high=63.5,
        find=_saved("beams", "Alpaca"),
        less=_BEAMS,
        more=_BEAMS,
    ),
    _Claim(
        claim="Memory that beams save by sharing, width 2 to 6, longer requests",
        published="44.3–66.3 %",
        section="§6.3 (ShareGPT); ± 15 %",
        low=37.7,
        high=76.2,
        find=_saved("beams", "ShareGPT"),
        less=_BEAMS,
        more=_BEAMS,
    ),
)
