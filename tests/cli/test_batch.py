"""`octavo batch`: results in order, a bad line only its own, and a run that may be killed at any moment."""

from __future__ import annotations

import fcntl
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli.batch_line import Question, read_question
from octavo.errors import RequestError
from octavo.params import BeamParams, SamplingParams

from .conftest import Octavo

# Run in a process of its own, so that it can be killed; slow enough that kills fall everywhere.
SLOW = """
import sys
import octavo.llm
from octavo.cli import main
from tests.cli import tiny
octavo.llm.load_engine = lambda model, config: tiny.engine(config, delay=0.01)
main(sys.argv[1:])
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(path: Path) -> list[str | None]:
    return [result["completions"][0]["text"] if result["completions"] else None for result in lines_of(path)]


def write(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in requests))
    return path


@pytest.mark.usefixtures("alphabet")
class TestResults:
    """One run from beginning to end."""

    def test_in_order_whatever_ends_first(self, octavo: Octavo, tmp_path: Path) -> None:
        prompts = ["a", "y", "m", "z", "b"]
        file = write(tmp_path / "in.jsonl", *({"prompt": p, "custom_id": f"<{p}>"} for p in prompts))
        ran = octavo("batch", str(file), "--max-tokens", "40")
        assert (ran.code, ran.out) == (0, "")
        results = lines_of(tmp_path / "in.results.jsonl")
        assert [(r["line"], r["custom_id"]) for r in results] == [(i, f"<{p}>") for i, p in enumerate(prompts)]
        assert [r["completions"][0]["text"][:3] for r in results] == ["bcd", "z", "nop", "", "cde"]
        assert all(r["error"] is None for r in results)

    def test_every_kind_of_prompt(self, octavo: Octavo, tmp_path: Path) -> None:
        chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "w"}]
        file = write(
            tmp_path / "in.jsonl",
            {"prompt": "w"},
            {"messages": chat},
            {"prompt_token_ids": [ord("w")]},
            {"prompt": [ord("w")]},
            {"custom_id": 1, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "x", "messages": chat}},
        )
        octavo("batch", str(file), "-o", str(tmp_path / "out"))
        assert texts_of(tmp_path / "out") == ["xyz"] * 5
        assert [r["prompt_tokens"] for r in lines_of(tmp_path / "out")] == [1, 3, 1, 1, 3]

    def test_a_line_overrides_the_options(self, octavo: Octavo, tmp_path: Path) -> None:
        file = write(
            tmp_path / "in.jsonl",
            {"prompt": "a"},
            {"prompt": "a", "max_tokens": 2, "n": 2},
            {"prompt": "w", "width": 2},
            {"prompt": "a", "logit_bias": {str(ord("q")): 1000}, "temperature": 0},
            {"prompt": "a", "logprobs": 1},
        )
        octavo("batch", str(file), "-o", str(tmp_path / "out"), "--max-tokens", "3")
        results = lines_of(tmp_path / "out")
        assert [[c["text"] for c in r["completions"]] for r in results] == [
            ["bcd"],
            ["bc", "bc"],
            ["xyz", "xy\x00"],  # the second beam: all but the right tokens are equally unlikely
            ["qqq"],
            ["bcd"],
        ]
        assert results[4]["completions"][0]["logprobs"][0]["token_id"] == ord("b")

    def test_a_bad_line_is_an_error_of_its_own(self, octavo: Octavo, tmp_path: Path) -> None:
        bad = {
            "not json": "is not JSON",
            "[1]": "not a JSON object but list",
            "[" * 100_000: "is not JSON",
            "{}": "0 of them",
            '{"prompt": "a", "messages": []}': "2 of them",
            '{"prompt": 7}': "prompt",
            '{"prompt": ""}': "no tokens",
            '{"prompt": "\\ud800"}': "surrogate",
            '{"prompt_token_ids": [1000]}': "token id 1000",
            '{"messages": "hello"}': "messages",
            '{"messages": []}': "no tokens",
            '{"messages": [1]}': "messages must be a list of messages",
            '{"messages": [{"content": "a"}]}': "role",
            '{"prompt_token_ids": "abc"}': "list of token ids",
            '{"prompt": null}': "list of token ids, or a text",
            '{"prompt": "a", "max_token": 3}': "no parameter 'max_token'",
            '{"prompt": "a", "temperature": "hot"}': "temperature is 'hot'",
            '{"prompt": "a", "temperature": NaN}': "temperature is nan",
            '{"prompt": "a", "stop": 5}': "stop is 5",
            '{"prompt": "a", "stop": {"a": 1}}': "stop is {'a': 1}",
            '{"prompt": "a", "stop": {}}': "stop is {}",
            '{"prompt": "a", "ignore_eos": "no"}': "ignore_eos is 'no'; it must be true or false",
            '{"prompt": "a", "include_stop": 1}': "include_stop is 1",
            '{"prompt": "a", "width": 2, "skip_special_tokens": 0}': "skip_special_tokens is 0",
            '{"prompt": "a", "custom_id": [1]}': "custom_id must be",
            f'{{"prompt": "a", "temperature": 1{"0" * 400}}}': "temperature",
            '{"prompt": "a", "logit_bias": {"x": 1}}': "logit_bias has the key 'x'",
            '{"prompt": "a", "logit_bias": [1]}': "logit_bias is [1]",
            '{"prompt": "a", "width": 2, "temperature": 1}': "no parameter 'temperature'",
            '{"custom_id": 3, "body": "a"}': "body is not",
            '{"custom_id": 4, "body": {"messages": [], "tools": [1]}}': "no parameter 'tools'",
            json.dumps({"prompt": "a" * 600}): "600 tokens",
        }
        file = write(tmp_path / "in.jsonl", *(line for text in bad for line in (text, {"prompt": "w"})))
        ran = octavo("batch", str(file), "-o", str(tmp_path / "out"))
        assert ran.code == 1
        assert f"out: {2 * len(bad)} results, {len(bad)} errors." in ran.err
        results = lines_of(tmp_path / "out")
        assert texts_of(tmp_path / "out") == [None, "xyz"] * len(bad)
        for result, words in zip(results[::2], bad.values(), strict=True):
            assert words in result["error"]

    def test_bytes_that_are_no_text(self, octavo: Octavo, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "w", "custom_id": "\\ud800"}')
        octavo("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"))
        first, second = lines_of(tmp_path / "out")
        assert "is not JSON" in first["error"]
        assert second["custom_id"] == "\ud800"

    def test_many_more_lines_than_fit_in_hand(self, octavo: Octavo, tmp_path: Path) -> None:
        prompts = [chr(random.Random(i).randrange(97, 123)) for i in range(60)]
        file = write(tmp_path / "in.jsonl", *({"prompt": p} for p in prompts))
        octavo("batch", str(file), "-o", str(tmp_path / "out"), "--max-num-seqs", "3", "--num-blocks", "5")
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        assert texts_of(tmp_path / "out") == [alphabet[alphabet.index(p) + 1 :] for p in prompts]

    def test_an_empty_file(self, octavo: Octavo, tmp_path: Path) -> None:
        ran = octavo("batch", str(write(tmp_path / "in.jsonl", "", "  ")), "-o", str(tmp_path / "out"))
        assert (ran.code, (tmp_path / "out").read_text()) == (0, "")

    def test_outputs_that_cannot_be(self, octavo: Octavo, tmp_path: Path) -> None:
        file = write(tmp_path / "in.jsonl", {"prompt": "w"})
        assert octavo("batch", str(file), "-o", str(file)).code == 2
        ran = octavo("batch", str(file), "-o", str(tmp_path / "no" / "out"))
        assert (ran.code, f"{tmp_path}/no/out cannot be read or written: No such file" in ran.err) == (1, True)
        with (tmp_path / "out").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            ran = octavo("batch", str(file), "-o", str(tmp_path / "out"))
        assert (ran.code, "another octavo batch" in ran.err) == (1, True)


@pytest.mark.usefixtures("alphabet")
class TestResuming:
    """What a run makes of results that are there."""

    PROMPTS = ("a", "w", "x", "b", "y", "c")

    def whole(self, octavo: Octavo, tmp_path: Path) -> tuple[list[str], bytes]:
        file = write(tmp_path / "in.jsonl", *({"prompt": p} for p in self.PROMPTS))
        command = ["batch", str(file), "-o", str(tmp_path / "out")]
        assert octavo(*command).code == 0
        return command, (tmp_path / "out").read_bytes()

    def test_from_any_byte_on(self, octavo: Octavo, tmp_path: Path) -> None:
        command, complete = self.whole(octavo, tmp_path)
        answers = texts_of(tmp_path / "out")
        for size in [0, 1, *random.Random(0).sample(range(len(complete)), 25), len(complete) - 1, len(complete)]:
            (tmp_path / "out").write_bytes(complete[:size])
            assert octavo(*command).code == 0
            assert texts_of(tmp_path / "out") == answers
            kept = complete[: complete[:size].rfind(b"\n") + 1]
            assert (tmp_path / "out").read_bytes().startswith(kept)

    def test_what_is_cut_off_is_gone(self, octavo: Octavo, tmp_path: Path) -> None:
        command, complete = self.whole(octavo, tmp_path)
        (tmp_path / "out").write_bytes(complete + b'{"line": 6, "comp')
        assert octavo(*command).code == 0
        assert (tmp_path / "out").read_bytes() == complete

    def test_a_complete_run_does_nothing(self, octavo: Octavo, tmp_path: Path, alphabet: dict[str, Any]) -> None:
        command, complete = self.whole(octavo, tmp_path)
        alphabet["made"].clear()
        ran = octavo(*command)
        assert "was complete before: 6 results, 0 errors." in ran.err
        assert not alphabet["made"]  # not even the model is loaded
        assert (tmp_path / "out").read_bytes() == complete

    def test_errors_of_earlier_runs_count_and_it_says_where_it_goes_on(self, octavo: Octavo, tmp_path: Path) -> None:
        file, out = write(tmp_path / "in.jsonl", "bad", {"prompt": "w"}), tmp_path / "out"
        command = ["batch", str(file), "-o", str(out)]
        first = octavo(*command)
        assert (first.code, "out: 2 results, 1 error." in first.err) == (1, True)
        whole = out.read_bytes()
        assert octavo(*command).code == 1
        out.write_bytes(whole[: whole.index(b"\n") + 1])
        again = octavo(*command)
        assert "1 line was answered before; going on at line 2." in again.err
        assert (again.code, "out: 2 results, 1 error." in again.err) == (1, True)

    def test_ctrl_c_says_how_to_go_on(self, octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("tests.cli.tiny.Alphabet.logits", interrupted)
        ran = octavo("batch", str(write(tmp_path / "in.jsonl", {"prompt": "w"})))
        assert (ran.code, "run the same command again to go on" in ran.err) == (130, True)

    def test_lines_added_to_the_input_are_answered(self, octavo: Octavo, tmp_path: Path) -> None:
        command, complete = self.whole(octavo, tmp_path)
        with (tmp_path / "in.jsonl").open("a") as file:
            file.write('{"prompt": "v"}\n')
        octavo(*command)
        assert (tmp_path / "out").read_bytes().startswith(complete)
        assert texts_of(tmp_path / "out")[-1] == "wxyz"

    @pytest.mark.parametrize("change", ["input", "option", "model", "shorter", "garbage"])
    def test_results_of_something_else_are_left_alone(self, octavo: Octavo, tmp_path: Path, change: str) -> None:
        command, complete = self.whole(octavo, tmp_path)
        if change == "input":
            write(tmp_path / "in.jsonl", *({"prompt": p} for p in ("a", "w", "OTHER")))
        elif change == "shorter":
            write(tmp_path / "in.jsonl", {"prompt": "a"})
        elif change == "garbage":
            complete = b"my precious notes\n"
            (tmp_path / "out").write_bytes(complete)
        more = {"option": ["--max-tokens", "9"], "model": ["--model", "other"]}.get(change, [])
        ran = octavo(*command, *more)
        assert ran.code == 2
        assert "answers another input" in ran.err
        assert (tmp_path / "out").read_bytes() == complete


def test_killed_again_and_again_it_still_answers_everything(tmp_path: Path) -> None:
    letters = [chr(97 + i % 26) for i in range(40)]
    file = write(tmp_path / "in.jsonl", *({"prompt": letter} for letter in letters))
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, "batch", str(file), "-o", str(out), "--max-num-seqs", "4"]
    rng, kills = random.Random(1), 0
    root = Path(__file__).parents[2]
    for _ in range(30):
        process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE)
        sizes = out.stat().st_size if out.exists() else 0
        while process.poll() is None and (not out.exists() or out.stat().st_size <= sizes):
            time.sleep(0.005)  # until it has written something
        time.sleep(rng.random() * 0.5)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        _, _ = process.communicate()
        kills += 1
        whole = out.read_bytes().rpartition(b"\n")[0].splitlines()
        assert [json.loads(line)["line"] for line in whole] == list(range(len(whole)))
        with out.open("ab") as file_out:  # as a kill in the midst of a write would leave it
            file_out.write(b'{"line": 99, "comp')
    assert process.communicate()[1] is not None
    assert process.returncode == 0
    assert kills >= 2
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts_of(out) == [alphabet[alphabet.index(letter) + 1 :] for letter in letters]
    assert [result["line"] for result in lines_of(out)] == list(range(len(letters)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=3,
)
names = st.sampled_from(
    [
        *("prompt", "messages", "prompt_token_ids", "body", "custom_id", "stop", "stop_token_ids", "logit_bias"),
        *("seed", "n", "best_of", "temperature", "max_tokens", "logprobs", "top_logprobs", "width", "early_stopping"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.dictionaries(names, json_values, max_size=5).map(lambda d: json.dumps(d).encode()))
def test_any_line_is_read_or_refused_but_never_crashes(line: bytes) -> None:
    question = Question()
    try:
        read_question(line, {"max_tokens": 3}, question)
    except RequestError:
        return
    assert isinstance(question.params, (SamplingParams, BeamParams))
    assert isinstance(question.prompt, (str, list))


def test_whatever_a_line_raises_is_its_own_error(
    octavo: Octavo, alphabet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(line: bytes, *rest: Any) -> None:
        if b"odd" in line:
            raise OverflowError("too large")
        read_question(line, *rest)

    monkeypatch.setattr("octavo.cli.batch.read_question", strange)
    file = write(tmp_path / "in.jsonl", {"prompt": "odd"}, {"prompt": "w"})
    assert octavo("batch", str(file), "-o", str(tmp_path / "out")).code == 1
    assert texts_of(tmp_path / "out") == [None, "xyz"]
    assert "OverflowError: too large" in lines_of(tmp_path / "out")[0]["error"]


def test_what_is_null_in_an_openai_body_is_as_if_absent() -> None:
    question = Question()
    absent = dict.fromkeys(["stop", "n", "stream", "tools", "prompt", "seed", "max_tokens", "max_completion_tokens"])
    body: dict[str, Any] = {"messages": [{}], "logprobs": True, "top_logprobs": None, **absent}
    read_question(json.dumps({"body": body}).encode(), {"max_tokens": 7}, question)
    assert isinstance(question.params, SamplingParams)
    assert (question.params.n, question.params.stop, question.params.max_tokens) == (1, (), 7)


def test_openai_names() -> None:
    question = Question()
    body = {"model": "m", "messages": [{}], "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    read_question(json.dumps({"body": {**body, "stream": False, "user": "u"}}).encode(), {}, question)
    assert isinstance(question.params, SamplingParams)
    assert (question.params.max_tokens, question.params.logprobs) == (9, 2)
