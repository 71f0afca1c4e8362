"""One model served to many clients: who may enter, for how long, and what happens when one leaves. Knows no bodies.

Everything runs on the event loop; the engine has a thread of its own (AsyncLLM), so neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from octavo.async_llm import AsyncLLM
from octavo.errors import OctavoError
from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import Completion, RequestOutput
from octavo.server.asked import Job
from octavo.server.errors import ApiError
from octavo.server.logs import log_finished
from octavo.server.metrics import Metrics
from octavo.server.settings import ServerSettings

Deltas: TypeAlias = AsyncGenerator[tuple[int, RequestOutput], None]


class Admission:
    """A bounded house: so many sequences may be in it, running and waiting; who comes beyond is told when to return."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.inside = 0  # sequences
        self._seconds = 1.0  # that a sequence stays, of late

    def enter(self, sequences: int) -> None:
        """Raises ApiError 429 with Retry-After. A request that would fill the house alone may enter an empty one."""
        if self.inside and self.inside + sequences > self.capacity:
            raise ApiError(
                429,
                f"{self.inside} sequences run or wait here, {self.capacity} may; try again later.",
                code="queue_full",
                headers={"Retry-After": str(max(1, min(60, math.ceil(self._seconds / 2))))},
            )
        self.inside += sequences

    def leave(self, sequences: int, seconds: float) -> None:
        """After so many seconds."""
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
        self.draining = asyncio.Event()  # set: nobody enters any more
        self._active: set[str] = set()  # the engine's names of requests that have not ended

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

    async def deltas(self, job: Job) -> Deltas:
        """(place of the prompt, what is new of its answers) until all are finished. Raises ApiError for what fails.

        Closing it aborts what still runs.
        """
        if self.draining.is_set():
            raise ApiError(503, "The server is shutting down.", code="unavailable", headers={"Retry-After": "5"})
        with self._entered(job), self._deadline(job) as deadline:
            async with contextlib.aclosing(self._all_deltas(job)) as deltas:
                async for place, output in deltas:
                    yield place, _checked(output, deadline)

    @contextlib.contextmanager
    def _entered(self, job: Job) -> Iterator[None]:
        try:
            self.admission.enter(job.num_sequences)
        except ApiError:
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
        deadline = _Deadline(self.settings.request_timeout)

        def expire() -> None:
            deadline.expired = True
            self._abort(job.request_ids)

        timer = asyncio.get_running_loop().call_later(deadline.seconds, expire) if deadline.seconds else None
        try:
            yield deadline
        finally:
            if timer is not None:
                timer.cancel()

    def abort_all(self) -> None:
        """End every request now; its client is told so."""
        self._abort(self._active)

    def _abort(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OctavoError):  # closed: everything is aborted already
            for name in names:
                self.llm.abort_soon(name)

    def _all_deltas(self, job: Job) -> Deltas:
        return self._one(job, 0) if len(job.prompts) == 1 else self._several(job)

    async def _one(self, job: Job, place: int) -> Deltas:
        stream = self.llm.generate(
            job.prompts[place],
            job.params,
            request_id=job.request_ids[place],
            priority=job.priority,
            cache_salt=job.cache_salt,
            deltas=True,
        )
        record = _Record(job.request_ids[place], with_texts=self.settings.log_prompts)
        self._active.add(record.name)
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    record.note(output)
                    yield place, output
        finally:
            self._active.discard(record.name)
            self._tell_of_end(record, job)

    def _tell_of_end(self, record: _Record, job: Job) -> None:
        whole, aborted = record.whole(), record.latest is None or not record.latest.finished
        self.metrics.observe_finished(whole, job.params, aborted=aborted)
        log_finished(whole, engine_id=record.name, aborted=aborted, log_prompts=self.settings.log_prompts)

    async def _several(self, job: Job) -> Deltas:
        """The streams of several prompts as one."""
        merged: asyncio.Queue[tuple[int, RequestOutput] | BaseException] = asyncio.Queue()

        async def feed(place: int) -> None:
            try:
                async with contextlib.aclosing(self._one(job, place)) as stream:
                    async for item in stream:
                        merged.put_nowait(item)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.create_task(feed(place)) for place in range(len(job.prompts))]
        unfinished = len(tasks)
        try:
            while unfinished:
                item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                unfinished -= item[1].finished
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Record:
    """What is remembered of a request for metrics and logs, from the deltas that went by."""

    name: str
    with_texts: bool
    latest: RequestOutput | None = None
    completions: dict[int, Completion] = field(default_factory=dict)

    def note(self, output: RequestOutput) -> None:
        self.latest = output
        for completion in output.completions:
            kept = self.completions.setdefault(completion.index, Completion(completion.index))
            kept.finish_reason = completion.finish_reason
            if self.with_texts:
                kept.text += completion.text

    def whole(self) -> RequestOutput | None:
        """The request as it stood last; without the answers' tokens, which `output_tokens` counts."""
        return self.latest and replace(self.latest, completions=list(self.completions.values()))


@dataclass(slots=True)
class _Deadline:
    seconds: float  # 0: none
    expired: bool = False


def _checked(output: RequestOutput, deadline: _Deadline) -> RequestOutput:
    """Raises ApiError for a request that failed in the engine, or that was ended from elsewhere."""
    if not output.finished:
        return output
    reasons = {completion.finish_reason for completion in output.completions}
    if output.error is not None or "error" in reasons:
        raise ApiError(500, output.error or "The engine failed.", code="engine_error")
    if "abort" in reasons or not reasons:
        if deadline.expired:
            message = f"The request was not done within {deadline.seconds:g} seconds."
            raise ApiError(504, message, code="request_timeout")
        raise ApiError(503, "The request was aborted: the server is shutting down.", code="aborted")
    return output
