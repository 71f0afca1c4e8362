"""`octavo plan`, `octavo models` and `octavo demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.demo import PROMPTS, SYSTEM, TWICE
from tests.conftest import SHARED

from .conftest import Octavo

LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    return str(tmp_path)


class TestPlan:
    """The planner's arithmetic has its own tests; here is what goes in and comes out."""

    def test_a_config_alone_is_enough(self, octavo: Octavo, llama: str) -> None:
        ran = octavo("plan", llama, "--memory", "24GiB", "--dtype", "f16", "--typical", "1000")
        assert ran.code == 0
        assert "block_size × 2 × layers × kv_heads × head_dim × bytes" in ran.out
        assert "16 × 2 × 32 × 32 × 128 × 2 = 8,388,608 bytes" in ran.out
        assert "3,072 blocks, 49,152 tokens" in ran.out
        assert "4.0 times" in ran.out

    def test_json(self, octavo: Octavo, llama: str) -> None:
        flags = "--memory 24GiB --context 2048 --dtype bf16 --block-size 32 --avg-prompt 400 --avg-output 100 --json"
        made = json.loads(octavo("plan", llama, *flags.split()).out)
        assert (made["typical"], made["block_size"], made["contiguous"], made["tokens"]) == (500, 32, 24, 49152)
        assert made["paged"] == int(49152 / (500 + 15.5))

    def test_memory_for_less_than_one_request(self, octavo: Octavo, llama: str) -> None:
        for memory, words in (
            ("64MiB", "64 MiB does not hold one request of 4,096 tokens in blocks of 16."),
            ("1MiB", "1 MiB does not hold one block of 16 tokens (16 MiB)."),
        ):
            ran = octavo("plan", llama, "--memory", memory, "--typical", "4000", "--dtype", "f32")
            assert ran.code == 0
            assert words in ran.out
            assert ran.out.count("—") == 3
            assert "times the requests" not in ran.out

    def test_what_this_model_or_backend_would_not_run(self, octavo: Octavo, llama: str) -> None:
        ran = octavo("plan", llama, "--memory", "24GiB", "--dtype", "f16")
        assert "A context of 4,096 tokens is beyond the 2,048 that the model was made for." in ran.out
        assert not [line for line in ran.out.splitlines() if line.endswith(" ")]
        made = json.loads(octavo("plan", llama, "--memory", "24GiB", "--context", "2048", "--json").out)
        assert made["notes"] == []

    @pytest.mark.parametrize(
        ("flags", "code", "words"),
        [
            ([], 2, "--memory"),
            (["--memory", "much"], 2, "'much' is not a memory size"),
            (["--memory", "0"], 2, "memory is 0"),
            (["--memory", "1GiB", "--dtype", "f8"], 2, "f32, bf16, f16"),
            (["--memory", "1GiB", "--avg-prompt", "5"], 2, "go together"),
            (["--memory", "1GiB", "--avg-prompt", "5", "--avg-output", "5", "--typical", "5"], 2, "the sum"),
            (["--memory", "1GiB", "--typical", "5000"], 2, "longer than the context"),
            (["--memory", "1GiB", "--context", "0"], 2, "'--context': "),
            (["--memory", "1GiB", "--block-size", "3"], 2, "1, 4, 8, 16, 32, 64"),
        ],
    )
    def test_what_cannot_be(self, octavo: Octavo, llama: str, flags: list[str], code: int, words: str) -> None:
        ran = octavo("plan", llama, *flags)
        assert (ran.code, ran.out) == (code, "")
        assert words in ran.err
        assert ran.err.count("\n") == 1

    def test_a_hub_that_is_out_of_reach_is_one_sentence_at_once(
        self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import huggingface_hub

        def retries(*_: object, **__: object) -> None:
            pytest.fail("hf_hub_download retries for long, and loudly")

        def unreachable(*_: object, **__: object) -> None:
            raise OSError("no network")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", retries)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
        ran = octavo("plan", "nobody/nothing", "--memory", "1GiB")
        assert (ran.code, ran.err.count("\n")) == (1, 1)

    def test_models_that_are_not_there_or_not_supported(self, octavo: Octavo, tmp_path: Path) -> None:
        ran = octavo("plan", "nowhere-to-be-found", "--memory", "1GiB")
        assert ran.code == 1
        assert "smollm2" in ran.err  # what would work
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_7B, "model_type": "rwkv"}))
        ran = octavo("plan", str(tmp_path), "--memory", "1GiB")
        assert ran.code == 1
        assert "rwkv" in ran.err
        assert "llama" in ran.err


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TEN_AT_ONCE = AZURE + "0,64,33\n" * 10  # each holds 6 blocks in the end


class TestPlanFromATrace:
    """What memory a trace needs; the search has its own tests."""

    @pytest.fixture
    def trace(self, tmp_path: Path) -> str:
        (tmp_path / "ten.csv").write_text(TEN_AT_ONCE)
        return str(tmp_path / "ten.csv")

    def test_the_memory_that_is_needed(self, octavo: Octavo, llama: str, trace: str) -> None:
        ran = octavo("plan", llama, "--dtype", "f16", "--trace", trace, "--target-queued", "0%")
        assert (ran.code, ran.err) == (0, "")
        for words in (
            "ten: 10 requests in 0 s",
            "60 blocks, 960 tokens",
            "480 MiB",
            "0.0% wait for memory, 0.0% are rejected",
            "contiguous   10 GiB for as many, 2,048 tokens reserved for each",
            "What was tried",
        ):
            assert words in ran.out
        assert "NVIDIA A100 SXM, 80 GB" in ran.out  # whose speed it is

    def test_json(self, octavo: Octavo, llama: str, trace: str) -> None:
        flags = ("--dtype", "f16", "--trace", trace, "--target-queued", "60 %", "--json")
        made = json.loads(octavo("plan", llama, *flags).out)
        assert made["meets_targets"]
        assert made["memory"] == made["blocks"] * 8_388_608 < 61 * 8_388_608
        assert 0 < made["queued"] <= 6
        assert (made["requests"], made["too_long"], made["rejected"], made["target_queued"]) == (10, 0, 0, 0.6)
        assert made["blocks"] in [trial["blocks"] for trial in made["trials"]]
        assert "not measured" in made["step_time"]["source"]

    def test_a_memory_that_is_there(self, octavo: Octavo, llama: str, trace: str) -> None:
        flags = ("--dtype", "f16", "--trace", trace, "--memory", "48MiB", "--json")
        made = json.loads(octavo("plan", llama, *flags).out)
        assert (made["blocks"], made["queued"], made["meets_targets"]) == (6, 9, False)
        assert len(made["trials"]) == 1

    def test_what_is_left_out_and_what_does_not_fit_is_said(self, octavo: Octavo, llama: str, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(TEN_AT_ONCE + "1,3000,1\n")
        ran = octavo("plan", llama, "--trace", str(tmp_path / "t.csv"), "--gpu", "l4")
        assert "1 requests are longer than 2,048 tokens and left out" in " ".join(ran.out.split())
        assert "12.6 GiB of weights" not in ran.out
        ran = octavo("plan", llama, "--trace", str(tmp_path / "t.csv"), "--gpu", "l4", "--memory", "20GiB")
        assert "12.6 GiB of weights in 16 bits that is more than 1 × NVIDIA L4, 24 GB has room" in " ".join(
            ran.out.split()
        )

    def test_a_real_trace(self, octavo: Octavo, llama: str) -> None:
        path = SHARED / "traces" / "azure_conv_2023.csv"
        if not path.is_file():
            pytest.skip("../shared/traces/azure_conv_2023.csv is not beside the repository")
        flags = ("--dtype", "f16", "--context", "4096", "--trace", str(path), "--requests", "60", "--json")
        made = json.loads(octavo("plan", llama, *flags).out)
        assert made["meets_targets"]
        assert made["utilisation"] > 0.95
        assert made["contiguous_memory"] > 2 * made["memory"]
        faster = json.loads(octavo("plan", llama, *flags, "--rate", "4").out)
        assert faster["blocks"] > made["blocks"]

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--target-queued", "100%"], "--target-queued is '100%'; it must be a share from 0%"),
            (["--target-rejected", "few"], "--target-rejected is 'few'"),
            (["--rate", "0"], "--rate is 0.0"),
            (["--rate", "nan"], "--rate is nan"),
            (["--gpu", "abacus"], "a100-40g"),
            (["--gpu", "cpu"], "smollm2 only"),
            (["--typical", "5"], "A trace tells how long"),
            (["--memory", "1MiB"], "at least one block of 16 tokens (8 MiB)"),
            (["--context", "10"], "All 10 requests of ten are longer than 10 tokens"),
            (["--requests", "0"], "'--requests': "),
        ],
    )
    def test_what_cannot_be(self, octavo: Octavo, llama: str, trace: str, flags: list[str], words: str) -> None:
        ran = octavo("plan", llama, "--trace", trace, *flags)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
        assert ran.err.count("\n") == 1

    def test_a_file_that_is_no_trace(self, octavo: Octavo, llama: str, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text(AZURE + "0,-5,1\n")
        ran = octavo("plan", llama, "--trace", str(tmp_path / "t.csv"))
        assert ran.code == 2
        assert "line 2, column ContextTokens: '-5'" in ran.err
        assert octavo("plan", llama, "--trace", str(tmp_path / "none.csv")).err.count("\n") == 1


class TestModels:
    """What can be run is read from where it is defined."""

    def test_names_sizes_and_support(self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
        monkeypatch.setenv("COLUMNS", "200")
        ran = octavo("models")
        assert ran.code == 0
        assert all(word in ran.out for word in ("smollm2", "93.8 MiB", "Apache-2.0", "gemma3_text", "Q4_K", "GGUF"))

    def test_which_are_read_from_folders_only(self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
        from octavo.loading.gguf_model import _ARCHITECTURES

        facts = json.loads(octavo("models", "--json").out)
        in_gguf = {*_ARCHITECTURES, "gemma3_text", "mistral"} - {"gemma3"}  # GGUF's "llama" is Mistral's too
        assert set(facts["folders_only"]) == set(facts["architectures"]) - in_gguf
        monkeypatch.setenv("COLUMNS", "200")
        assert "opt: folders only" in octavo("models").out

    def test_json_tells_what_is_cached(self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from octavo.loading.resolve import BUILT_IN, cached_path

        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
        facts = json.loads(octavo("models", "--json").out)
        assert [model["cached"] for model in facts["built_in"]] == [None] * len(BUILT_IN)
        path = cached_path(BUILT_IN["smollm2"])
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(BUILT_IN["smollm2"].size)
        facts = json.loads(octavo("models", "--json").out)
        assert {model["name"]: model["cached"] for model in facts["built_in"]}["smollm2"] == str(path)


class TestDemo:
    """Eight prompts at once, and the truth about their memory."""

    def test_eight_answers_and_a_report(self, octavo: Octavo, alphabet: dict[str, Any]) -> None:
        assert len(set(PROMPTS)) == 8
        ran = octavo("demo", "--max-tokens", "30", "--max-model-len", "512")
        assert ran.code == 0
        for number in range(1, 9):
            label = f"[{number}.2] " if number == TWICE + 1 else f"[{number}] "
            assert f"\n{label}" in ran.out
        for words in ("blocks used", "blocks shared", "blocks cached", "copies made", "utilisation", "answer tokens a"):
            assert words in ran.out
        (engine,) = alphabet["made"]
        report = engine.memory_report()
        # The system message's full blocks are shared by all eight, the last prompt's by its two answers; the
        # answers part within a block, so one block is copied.
        blocks = len(SYSTEM) // 16
        assert report.peak_shared >= blocks
        assert report.prefix_hit_tokens >= 7 * blocks * 16
        assert report.copies == 1
        assert report.active == report.shared == 0
        assert "9 answers" in ran.out

    @pytest.mark.usefixtures("alphabet")
    def test_that_it_fetches_is_said(self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
        assert octavo("demo", "--max-tokens", "1").err == "Fetching smollm2 (93.8 MiB) once …\n"

    @pytest.mark.usefixtures("alphabet")
    def test_a_pool_that_is_too_small_is_said(self, octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.cli.tiny.EOS", ord("!"))  # far from any prompt's end
        blocks = (len(SYSTEM) + 1 + max(map(len, PROMPTS))) // 16 + 2
        ran = octavo("demo", "--num-blocks", str(blocks), "--max-tokens", "200")
        assert f"ended early: the KV pool of {blocks} blocks is full" in ran.err

    @pytest.mark.usefixtures("alphabet")
    def test_a_picture(self, octavo: Octavo, tmp_path: Path) -> None:
        ran = octavo("demo", "--max-tokens", "8", "--svg", str(tmp_path / "demo.svg"))
        assert ran.code == 0
        picture = (tmp_path / "demo.svg").read_text()
        assert picture.startswith("<svg")
        assert "@font-face" not in picture  # nothing is fetched to show it
        assert "url(http" not in picture
        assert all(prompt.split()[-1] in picture for prompt in PROMPTS)
