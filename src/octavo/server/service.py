"""One model served to many clients: who may enter, for how long, and what happens when one leaves. Knows no bodies.

Everything runs on the event loop; the engine has a thread of its own (AsyncLLM), so neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from octavo.async_llm import AsyncLLM, Stream
from octavo.errors import OctavoError
from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import Completion, RequestOutput
from octavo.server.assembly import Deltas
from octavo.server.errors import ApiError
from octavo.server.jobs import Job
from octavo.server.logs import log_finished
from octavo.server.metrics import Metrics
from octavo.server.pace import Pace
from octavo.server.race import unless
from octavo.server.settings import ServerSettings

T = TypeVar("T")
_QUICK = 8192  # characters or tokens that are worked on at once; with more everybody would wait
_MOST_ASIDE = 64  # longer ones that may wait, each with a body of megabytes


class Admission:
    """A bounded house: so many sequences may be in it, running and waiting; who comes beyond is told when to return."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.inside = 0  # sequences
        self._seconds = 1.0  # that a sequence stays, of late

    def enter(self, sequences: int) -> None:
        """Raises ApiError 429 with Retry-After, and 400 for more than would fit the empty house."""
        if sequences > self.capacity:
            raise ApiError(
                400,
                f"The request asks for {sequences} sequences, {self.capacity} may run and wait here; ask for fewer "
                "prompts at once or for a smaller n.",
                code="too_many_sequences",
            )
        if self.inside + sequences > self.capacity:
            raise ApiError(
                429,
                f"{self.inside} sequences run or wait here, {self.capacity} may; try again later.",
                code="queue_full",
                headers={"Retry-After": str(max(1, min(60, math.ceil(self._seconds / 2))))},
            )
        self.inside += sequences

    def leave(self, sequences: int, seconds: float) -> None:
        """Make room again; they were inside for so many seconds."""
        self.inside -= sequences
        self._seconds += 0.1 * (seconds - self._seconds)


class Service:
    """What the routes share: the model, its limits, and the way in."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        self.metrics = Metrics(llm, settings.model_names[0])
        if llm.tokenizer is not None:
            _ = llm.tokenizer.longest_token  # found now, not while somebody waits
        self.created = int(time.time())
        self.max_model_len = llm.max_model_len
        self.admission = Admission(llm.config.sequence_limit + settings.max_queued)
        self._pace = Pace(longest=settings.stream_interval)
        self.draining = asyncio.Event()  # set: nobody enters any more
        self._active: set[str] = set()  # the engine's names of requests that have not ended
        # One at a time: of several, a second each, the event loop and the engine would wait for their turns too long.
        # Not asyncio's threads, in which they would stand in line behind grammars.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="octavo-texts")
        self._aside = 0  # texts it has to do
        self._deadlines: list[_Deadline] = []  # of the jobs inside

    @property
    def is_busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return self.admission.inside > 0

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError for a model that has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "This model has no tokenizer; give token ids to /v1/completions.")
        return self.llm.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {', '.join(self.settings.model_names)} is.",
                param="model",
                code="model_not_found",
            )

    async def tokenized(self, length: int, encode: Callable[[], T]) -> T:
        """What `encode` gives for `length` characters. Refuses, without looking at it, a text that has too many tokens
        even if all are the longest there are."""
        longest = self.tokenizer.longest_token
        if length > self.max_model_len * longest:
            raise ApiError(
                400,
                f"The prompt has {length} characters; the context holds {self.max_model_len} tokens, of at most "
                f"{longest} bytes each.",
                code="context_length_exceeded",
            )
        return await self.aside(length, encode)

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """What `work` on so many characters or tokens gives, off the event loop if it may take long.

        Raises ApiError 429 where too much such work waits.
        """
        if size <= _QUICK:
            return work()
        if self._aside >= _MOST_ASIDE:
            message = "Too many long texts wait here; try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._aside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        finally:
            self._aside -= 1

    async def deltas(self, job: Job) -> Deltas:
        """What is new of the answers, step by step, with the place of each prompt, until all are finished.

        Raises ApiError for what fails. Closing it aborts what still runs.
        """
        if self.draining.is_set():
            raise ApiError(503, "The server is shutting down.", code="unavailable", headers={"Retry-After": "5"})
        with self._entered(job), self._deadline(job) as deadline:
            async with contextlib.AsyncExitStack() as stack:
                # Until it is open the engine may not know of the job, and could not end it.
                opening = stack.enter_async_context(self._open(job))
                stream = await unless(deadline.over.wait(), opening, deadline.error)
                records = stack.enter_context(self._recorded(job))
                while not all(record.is_over for record in records.values()):
                    outputs = await stream.get()
                    for output in outputs:
                        records[output.request_id].note(output)
                        _check_end(output, deadline)
                    yield [(records[output.request_id].place, output) for output in outputs]

    def _open(self, job: Job) -> contextlib.AbstractAsyncContextManager[Stream]:
        return self.llm.open(
            job.prompts,
            job.params,
            request_ids=job.request_ids,
            priority=job.priority,
            cache_salt=job.cache_salt,
            pace=self._pace,
        )

    @contextlib.contextmanager
    def _recorded(self, job: Job) -> Iterator[dict[str, _Record]]:
        """Records of the job's requests by the engine's names; metrics and logs are told when it ends."""
        names = job.request_ids
        records = {name: _Record(place, self.settings.log_prompts) for place, name in enumerate(names)}
        self._active.update(names)
        try:
            yield records
        finally:
            self._active.difference_update(names)
            for name, record in records.items():
                self._tell_of_end(name, record, job)

    @contextlib.contextmanager
    def _entered(self, job: Job) -> Iterator[None]:
        try:
            self.admission.enter(job.num_sequences)
        except ApiError as error:
            if error.status == 429:
                self.metrics.observe_rejected()
            raise
        begin = time.monotonic()
        try:
            yield
        finally:
            self.admission.leave(job.num_sequences, time.monotonic() - begin)

    @contextlib.contextmanager
    def _deadline(self, job: Job) -> Iterator[_Deadline]:
        """Has the job aborted when its time is over."""
        deadline = _Deadline(self.settings.request_timeout, self.draining)

        def expire() -> None:
            deadline.expired = True
            deadline.over.set()
            self._abort(job.request_ids)

        timer = asyncio.get_running_loop().call_later(deadline.seconds, expire) if deadline.seconds else None
        self._deadlines.append(deadline)
        try:
            yield deadline
        finally:
            self._deadlines.remove(deadline)
            if timer is not None:
                timer.cancel()

    def abort_all(self) -> None:
        """End every request now; its client is told so."""
        for deadline in self._deadlines:
            deadline.over.set()
        self._abort(self._active)

    def _abort(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OctavoError):  # closed: everything is aborted already
            for name in names:
                self.llm.abort_soon(name)

    def _tell_of_end(self, name: str, record: _Record, job: Job) -> None:
        whole = record.whole()
        self.metrics.observe_finished(whole, job.params, aborted=not record.is_over)
        log_finished(whole, engine_id=name, aborted=not record.is_over, log_prompts=self.settings.log_prompts)


@dataclass(slots=True)
class _Record:
    """What is remembered of a request for metrics and logs, from the deltas that went by."""

    place: int  # of its prompt
    with_texts: bool
    latest: RequestOutput | None = None
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.latest is not None and self.latest.finished

    def note(self, output: RequestOutput) -> None:
        self.latest = output
        for completion in output.completions:
            kept = self.completions.get(completion.index)
            if kept is None:
                kept = self.completions[completion.index] = Completion(completion.index)
            kept.finish_reason = completion.finish_reason
            if self.with_texts:
                kept.text += completion.text

    def whole(self) -> RequestOutput | None:
        """The request as it stood last; without the answers' tokens, which `output_tokens` counts."""
        return self.latest and replace(self.latest, completions=list(self.completions.values()))


@dataclass(slots=True, eq=False)
class _Deadline:
    """The end of a job's time, which may also be that of the server."""

    seconds: float  # 0: none
    draining: asyncio.Event
    expired: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def error(self) -> ApiError:
        """What a job is told that was ended from elsewhere."""
        if self.expired:
            message = f"The request was not done within {self.seconds:g} seconds."
            return ApiError(504, message, code="request_timeout")
        why = ": the server is shutting down" if self.draining.is_set() else ""
        return ApiError(503, f"The request was aborted{why}.", code="aborted")


def _check_end(output: RequestOutput, deadline: _Deadline) -> None:
    """Raises ApiError for a request that failed in the engine, or that was ended from elsewhere."""
    if not output.finished:
        return
    reasons = {completion.finish_reason for completion in output.completions}
    if output.error is not None or "error" in reasons:
        raise ApiError(500, output.error or "The engine failed.", code="engine_error")
    if "abort" in reasons or not reasons:
        raise deadline.error()
