"""`octavo plan`, `octavo models` and `octavo demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.demo import PROMPTS, SYSTEM, TWICE

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
            ran = octavo("plan", llama, "--memory", memory, "--typical", "4000")
            assert ran.code == 0
            assert words in ran.out
            assert ran.out.count("—") == 3
            assert "times the requests" not in ran.out

    def test_what_this_model_or_backend_would_not_run(self, octavo: Octavo, llama: str) -> None:
        ran = octavo("plan", llama, "--memory", "24GiB", "--dtype", "f16")
        assert "A context of 4,096 tokens is beyond the 2,048 that the model was made for." in ran.out
        assert "f16 is for planning" in ran.out
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
