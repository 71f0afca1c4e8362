"""`octavo generate`: prompts in from everywhere, answers out in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.endings import out_of_tokens
from octavo.llm import LLM
from octavo.params import SamplingParams

from .conftest import Octavo

pytestmark = pytest.mark.usefixtures("alphabet")


def test_one_answer_is_bare_text(octavo: Octavo) -> None:
    ran = octavo("generate", "abc", "--max-tokens", "4")
    assert (ran.code, ran.out) == (0, "defg\n")


def test_an_answer_ends_at_end_of_sequence_or_a_stop_text(octavo: Octavo) -> None:
    assert octavo("generate", "w").out == "xyz\n"
    assert octavo("generate", "a", "--stop", "ef").out == "bcd\n"
    assert octavo("generate", "a", "--stop", "zz", "--stop", "gh").out == "bcdef\n"


def test_several_answers_come_in_order_each_under_its_heading(octavo: Octavo) -> None:
    ran = octavo("generate", "a", "x", "m", "-n", "2", "--max-tokens", "20")
    assert ran.out.split("--- ")[1:] == [
        "1.1: a\nbcdefghijklmnopqrstu\n\n",
        "1.2: a\nbcdefghijklmnopqrstu\n\n",
        "2.1: x\nyz\n\n",
        "2.2: x\nyz\n\n",
        "3.1: m\nnopqrstuvwxyz\n\n",
        "3.2: m\nnopqrstuvwxyz\n\n",
    ]


def test_prompts_from_a_file_one_a_line(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("x\n\n  \ny\n")
    ran = octavo("generate", "w", "--file", str(tmp_path / "prompts.txt"))
    assert ran.out == "--- 1: w\nxyz\n\n--- 2: x\nyz\n\n--- 3: y\nz\n\n"


def test_a_pipe_is_one_prompt(octavo: Octavo) -> None:
    assert octavo("generate", stdin="1\nw\n").out == "xyz\n"


def test_json_has_texts_ids_and_counts(octavo: Octavo) -> None:
    ran = octavo("generate", "w", "xy", "--json", "--temperature", "0")
    first, second = map(json.loads, ran.out.splitlines())
    assert first["completions"] == [
        {"index": 0, "text": "xyz", "token_ids": [120, 121, 122, 123], "finish_reason": "stop"}
    ]
    assert (first["prompt_tokens"], first["output_tokens"], second["prompt_tokens"]) == (1, 4, 2)
    assert first["error"] is None
    assert 0 <= first["ttft"] <= first["seconds"]


def test_beam_search(octavo: Octavo) -> None:
    assert octavo("generate", "w", "--beam", "2").out == "xyz\n"
    (answer,) = map(json.loads, octavo("generate", "w", "--beam", "2", "--json").out.splitlines())
    assert answer["completions"][0]["score"] == pytest.approx(0, abs=1e-3)


def test_best_of_gives_only_the_best(octavo: Octavo) -> None:
    for seed in range(4):
        flags = ["--best-of", "3", "--temperature", "25", "--top-p", "1", "--seed", str(seed), "--max-tokens", "6"]
        (answer,) = json.loads(octavo("generate", "w", *flags, "--json").out)["completions"]
        assert octavo("generate", "w", *flags).out == answer["text"] + "\n"


@pytest.mark.parametrize(("flags", "expected"), [([], "0|w"), (["--raw"], "w"), (["--chat"], "0|w")])
def test_the_chat_template_is_used_unless_raw(octavo: Octavo, flags: list[str], expected: str) -> None:
    system = [] if "--raw" in flags else ["--system", "0"]
    ran = octavo("generate", "w", "--json", *system, *flags)
    assert json.loads(ran.out)["prompt_tokens"] == len(expected)


def test_a_model_without_a_template_continues_the_text(octavo: Octavo, alphabet: dict[str, Any]) -> None:
    alphabet["template"] = None
    assert octavo("generate", "w").out == "xyz\n"
    for flags in (["--chat"], ["--system", "be brief"]):
        ran = octavo("generate", "w", *flags)
        assert (ran.code, ran.out) == (2, "")
        assert "no chat template" in ran.err


def test_engine_options_reach_the_engine(octavo: Octavo, alphabet: dict[str, Any]) -> None:
    flags = "--block-size 4 --num-blocks 9 --max-num-seqs 3 --max-batched-tokens 64 --no-prefix-caching"
    octavo("generate", "w", *flags.split(), "--preemption", "swap", "--swap-memory", "1KiB", "--max-model-len", "30")
    (engine,) = alphabet["made"]
    config = engine.config
    assert (config.block_size, config.num_blocks, config.max_num_seqs, config.max_batched_tokens) == (4, 9, 3, 64)
    assert (config.prefix_caching, config.preemption, config.swap_memory) == (False, "swap", "1KiB")
    assert config.max_model_len == 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "There is no prompt"),
        (["generate", "w", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "w", "--temperature", "hot"], "; see octavo generate --help."),
        (["generate", "w", "--max-tokens", "hot"], "'--max-tokens': "),
        (["generate", "w", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "w", "--block-size", "7"], "block_size is 7"),
        (["generate", "w", "--preemption", "never"], "recompute or swap"),
        (["generate", "w", "--kv-memory", "lots"], "'lots' is not a memory size"),
        (["generate", "w", "--max-model-len", "9999"], "max_model_len is 9999"),
        (["generate", "w", "--best-of", "1", "-n", "2"], "best_of is 1"),
        (["generate", "w", "--beam", "2", "--temperature", "1", "--stop", "x"], "--stop, --temperature"),
        (["generate", "w", "--raw", "--system", "x"], "--system"),
        (["generate", "w" * 600], "600 tokens"),
        (["generate", "w", "--file", "missing.txt"], "missing.txt"),
        (["generate", "w", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense'; see octavo --help."),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(octavo: Octavo, arguments: list[str], words: str) -> None:
    ran = octavo(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ran.err.startswith("octavo: ")
    assert ran.err.count("\n") == 1


def test_a_file_that_is_no_text_or_has_no_prompts(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    (tmp_path / "empty").write_text("\n\n")
    assert "not UTF-8 text: byte 3" in octavo("generate", "-f", str(tmp_path / "bytes")).err
    assert "has no prompts" in octavo("generate", "-f", str(tmp_path / "empty")).err


def test_an_answer_that_outgrew_the_pool_is_named(octavo: Octavo) -> None:
    flags = ["--block-size", "4", "--num-blocks", "3", "--no-prefix-caching", "--ignore-eos"]
    said = "octavo: answer 1 ended early: the KV pool of 3 blocks is full; raise --kv-memory or --num-blocks.\n"
    for ran in (octavo("generate", "a", *flags), octavo("generate", "a", "--json", *flags)):
        assert (ran.code, ran.err) == (0, said)
    assert octavo("chat", *flags, stdin="a\n").err == said


def test_how_cut_answers_are_named(octavo: Octavo) -> None:
    assert octavo("generate", "a", "--max-tokens", "3").err == ""  # said on a terminal only
    llm = LLM("alphabet")
    one, two = llm.generate(["a", "y"], SamplingParams(n=2, max_tokens=3, temperature=0))
    assert out_of_tokens({0: one, 1: two}, 3) == "answers 1.1 and 1.2 ended at --max-tokens, 3."
    assert out_of_tokens({0: two}, 3) is None


def test_a_failure_in_mid_answer_is_said(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("overflow")

    monkeypatch.setattr("tests.cli.tiny.Alphabet.logits", broken)
    for prompts in (["a"], ["a", "b"]):
        ran = octavo("generate", *prompts)
        assert ran.code == 1
        assert "overflow" in ran.err
    ran = octavo("chat", stdin="a\n")
    assert "overflow" in ran.err


def test_an_interrupt_is_no_traceback(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.cli.tiny.Alphabet.logits", interrupted)
    ran = octavo("generate", "a")
    assert (ran.code, ran.err) == (130, "")
    monkeypatch.setattr("octavo.cli.app.app", interrupted)
    assert octavo().code == 130
