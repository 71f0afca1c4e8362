"""How far an engine's next-token distributions lie from the float32 reference's, on real weights and real text.

    python benchmarks/quality.py MODEL... [--texts FILE...] [--longest 512] [--backend native] [--kv-dtype bf16,int8]
        [--peers FOLDER] [--out FILE.json]

For every token of 64 prompts (prompts.txt), or of longer texts, a file each: KL(reference || engine) in nats over the
whole vocabulary, the same weights and token ids given to both. A GGUF model is compared on llama.cpp as well where
--peers holds it, through its library, with its defaults. `end` is the mean at the last token of each prompt, where an
answer would begin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ceilings import num_processors
from compiled import CannotCompileError, compiled
from octavo.engine.engine import Engine
from octavo.errors import OctavoError
from octavo.llm import load_engine, make_config
from octavo.loading.resolve import resolve
from octavo.ops.interface import CacheLayout, StepInput

Logits = NDArray[np.float32]  # [T, V]
PROMPTS = Path(__file__).resolve().parent / "prompts.txt"
BLOCK = 16


class Speaker(Protocol):
    """Something that scores what comes next."""

    name: str

    def logits(self, token_ids: Sequence[int], /) -> Logits:
        """Scores after each of the tokens: [T, V]."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine against the reference on one model."""

    model: str
    engine: str
    distributions: int
    mean_kl: float  # nats
    p99_kl: float
    end_mean_kl: float  # at the last tokens of the prompts
    same_top: float  # share of positions where both find the same token likeliest


class Octavo:
    """One of Octavo's backends, computing a prompt in one step."""

    def __init__(self, model: str | Path, longest: int, settings: dict[str, object]) -> None:
        blocks = -(-longest // BLOCK)
        config = make_config(None, {"num_blocks": blocks, "block_size": BLOCK, "swap_memory": 0, **settings})
        self.engine: Engine = load_engine(model, config)
        self.name = f"octavo {settings['backend']}, keys and values {self.engine.ops.kv_type}"
        built = self.engine.model
        layout = CacheLayout(built.num_layers, built.num_kv_heads, BLOCK, built.head_dim)
        self._tables = np.arange(blocks, dtype=np.int32)[None]
        self._cache = self.engine.ops.new_cache(blocks, layout)

    def logits(self, token_ids: Sequence[int], /) -> Logits:
        """Scores after each of the tokens."""
        places = np.arange(len(token_ids), dtype=np.int32)
        step = StepInput(
            token_ids=np.array(token_ids, np.int32),
            positions=places,
            slots=places,
            query_starts=np.array([0, len(places)], np.int32),
            context_lens=np.array([len(places)], np.int32),
            block_tables=self._tables,
            logit_rows=places,
        )
        model = self.engine.model
        return np.array(self.engine.ops.to_numpy(model.logits(model.forward(step, self._cache))))


class LlamaCpp:
    """llama.cpp's library in a process of its own."""

    name = "llama.cpp"

    def __init__(self, model: Path, peers: Path, longest: int) -> None:
        (source,) = peers.glob("llama_cpp_python-*/vendor/llama.cpp")
        library = (peers / "lcpp" / "bin").resolve()
        headers = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
        link = [f"-L{library}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{library}"]
        program = compiled("llamacpp_logits.cpp", ["-std=c++20", "-O2", *headers, *link])
        command = [str(program), str(model), str(num_processors()), str(longest)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._vocab = int(np.frombuffer(self._read(4), np.int32)[0])

    def logits(self, token_ids: Sequence[int], /) -> Logits:
        """Scores after each of the tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{len(token_ids)} {' '.join(map(str, token_ids))}\n".encode())
        self._process.stdin.flush()
        answer = self._read(4 * len(token_ids) * self._vocab)
        return np.frombuffer(answer, np.float32).reshape(len(token_ids), self._vocab)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        answer = self._process.stdout.read(size)
        if len(answer) < size:
            raise RuntimeError(f"llama.cpp ended with exit code {self._process.wait()}.")
        return answer


def compare(model: str, options: argparse.Namespace) -> list[Agreement]:
    """Every engine that can run the model, each against the reference."""
    path = resolve(model)
    longest = options.longest
    reference = Octavo(path, longest, {"backend": "reference", "kv_dtype": "auto"})
    assert reference.engine.tokenizer is not None
    prompts = [reference.engine.tokenizer.encode(text)[:longest] for text in texts_of(options)]
    with ExitStack() as open_ones:
        speakers: list[Speaker] = [
            Octavo(path, longest, {"backend": options.backend, "kv_dtype": kv_dtype})
            for kv_dtype in options.kv_dtype.split(",")
        ]
        if path.suffix == ".gguf" and options.peers is not None:
            try:
                peer = LlamaCpp(path, options.peers, longest)
                open_ones.callback(peer.close)
                speakers.append(peer)
            except (OSError, ValueError, RuntimeError, CannotCompileError) as problem:
                print(f"llama.cpp is left out: {problem}", file=sys.stderr)
        return agreements(path.name, reference, speakers, prompts)


def texts_of(options: argparse.Namespace) -> list[str]:
    """The texts asked for, or the prompts."""
    if options.texts:
        return [path.read_text(encoding="utf-8") for path in options.texts]
    return PROMPTS.read_text(encoding="utf-8").splitlines()[: options.prompts]


def agreements(
    model: str, reference: Speaker, speakers: Sequence[Speaker], prompts: Sequence[Sequence[int]]
) -> list[Agreement]:
    """Each of the speakers against the reference over all tokens of the prompts."""
    divergence: list[list[NDArray[np.float64]]] = [[] for _ in speakers]
    same: list[list[NDArray[np.bool_]]] = [[] for _ in speakers]
    for ids in prompts:
        expected = reference.logits(ids)
        for place, speaker in enumerate(speakers):
            found = speaker.logits(ids)
            divergence[place].append(kl_divergence(expected, found))
            same[place].append(expected.argmax(-1) == found.argmax(-1))
    results = []
    for speaker, values, tops in zip(speakers, divergence, same, strict=True):
        every = np.concatenate(values)
        results.append(
            Agreement(
                model=model,
                engine=speaker.name,
                distributions=len(every),
                mean_kl=float(every.mean()),
                p99_kl=float(np.quantile(every, 0.99)),
                end_mean_kl=float(np.mean([one[-1] for one in values])),
                same_top=float(np.concatenate(tops).mean()),
            )
        )
    return results


def kl_divergence(expected: Logits, found: Logits) -> NDArray[np.float64]:
    """KL(expected || found) of each row of logits, in nats: [T]."""
    rows = []
    for p, q in zip(expected, found, strict=True):
        log_p, log_q = log_softmax(p), log_softmax(q)
        rows.append(float(np.sum(np.exp(log_p) * (log_p - log_q))))
    return np.array(rows)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log(softmax(x)) of a row, in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def table(results: Sequence[Agreement]) -> str:
    """As Markdown."""
    rows = ["| model | engine | distributions | mean KL | 99 % below | mean KL, end | same top token |"]
    rows.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for r in results:
        figures = f"{r.mean_kl:.2e} | {r.p99_kl:.2e} | {r.end_mean_kl:.2e} | {r.same_top:.1%}"
        rows.append(f"| {r.model} | {r.engine} | {r.distributions:,} | {figures} |")
    return "\n".join(rows)


def main() -> None:
    """Measure and print; what cannot be run is one sentence, and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a built-in name, a GGUF file, a folder")
    parser.add_argument("--backend", default="native", help="what is compared with the reference")
    parser.add_argument(
        "--kv-dtype", default="auto", help="types of keys and values to try, with commas between; %(default)s"
    )
    parser.add_argument("--peers", type=Path, help="the folder of the installed peers")
    parser.add_argument("--prompts", type=int, default=64, help="how many of the prompts")
    parser.add_argument("--texts", nargs="+", type=Path, metavar="FILE", help="instead of prompts")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a text that are computed")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    try:
        results = [result for model in options.models for result in compare(model, options)]
    except (OctavoError, OSError) as problem:
        print(f"quality.py: {problem}", file=sys.stderr)
        sys.exit(2)
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
