"""What an engine can never serve, said before any work is done, with the numbers. Knows no running requests."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig, parse_bytes
from octavo.errors import ConfigError, RequestError
from octavo.kv.interface import Memory
from octavo.models.interface import Model
from octavo.params import BeamParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds a request is held against."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    max_num_seqs: int

    @classmethod
    def of(cls, config: EngineConfig, model: Model) -> Limits:
        """Raises ConfigError for a context longer than the model was made for."""
        longest = config.max_model_len or model.max_positions
        if longest > model.max_positions:
            raise ConfigError(
                f"max_model_len is {longest}; this model was made for at most {model.max_positions} tokens."
            )
        return cls(model.vocab_size, longest, config.sequence_limit)

    def most_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The longest answer there can be."""
        room = self.max_model_len - num_prompt_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def num_blocks(self, config: EngineConfig, block_bytes: int) -> int:
        """Blocks of the pool: as configured, yet no more than all sequences at full length could fill."""
        if config.num_blocks is not None:
            return config.num_blocks
        count = parse_bytes(config.kv_memory) // block_bytes
        if count < 1:
            raise ConfigError(
                f"kv_memory is {config.kv_memory}; it must hold a KV block, of {block_bytes} bytes for this model."
            )
        return min(count, self.max_num_seqs * -(-self.max_model_len // config.block_size))

    def check(self, ids: list[int], params: SamplingParams | BeamParams, kv: Memory, salt: bytes) -> None:
        """Raises RequestError for a request that no state of this engine could serve."""
        self._check_prompt(ids)
        self._check_vocabulary(params)
        self._check_memory(ids, params.num_samples, kv, salt)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("The prompt has no tokens; give at least one.")
        foreign = next((t for t in ids if not 0 <= t < self.vocab_size), None)
        if foreign is not None:
            raise RequestError(f"The prompt has the token id {foreign}; this model knows 0 to {self.vocab_size - 1}.")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"The prompt has {len(ids)} tokens; with one token of answer it exceeds the context of "
                f"{self.max_model_len} tokens (max_model_len)."
            )

    def _check_vocabulary(self, params: SamplingParams | BeamParams) -> None:
        ids = [*params.stop_token_ids, *(params.logit_bias if isinstance(params, SamplingParams) else ())]
        foreign = next((t for t in ids if t >= self.vocab_size), None)
        if foreign is not None:
            raise RequestError(f"Token id {foreign} is asked for; this model knows 0 to {self.vocab_size - 1}.")
        if isinstance(params, SamplingParams):
            for name in ("logprobs", "prompt_logprobs"):
                if (getattr(params, name) or 0) > self.vocab_size:
                    raise RequestError(f"{name} is {getattr(params, name)}; this model has {self.vocab_size} tokens.")

    def _check_memory(self, ids: list[int], num_samples: int, kv: Memory, salt: bytes) -> None:
        if num_samples > self.max_num_seqs:
            raise RequestError(
                f"The request runs {num_samples} sequences at once; at most {self.max_num_seqs} can run (max_num_seqs)."
            )
        if not kv.can_ever_fit(ids, num_samples, salt):
            raise RequestError(
                f"The prompt's {len(ids)} tokens in {num_samples} sequence(s) need "
                f"{kv.blocks_to_admit(len(ids), num_samples)} KV blocks of {kv.block_size} tokens; there are "
                f"{kv.usable_blocks}: shorten it or raise num_blocks (or kv_memory)."
            )
