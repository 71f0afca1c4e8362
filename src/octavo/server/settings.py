"""How a server is set up: every setting with its default and its meaning. Knows no model and no HTTP framework."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server. Raises ConfigError, naming the setting, for a value that cannot be."""

    model_names: tuple[str, ...]  # what clients may call the model; the first is what answers call it
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    api_keys: tuple[str, ...] = ()  # none: anybody may ask
    cors_origins: tuple[str, ...] = ()  # web pages of other origins that may ask; none: CORS is off
    max_queued: int = 512  # sequences that may wait beside those that can run; beyond it requests get 429
    request_timeout: float = 0.0  # seconds a request may take, its wait included; 0: no limit
    drain_timeout: float = 60.0  # seconds that requests have to end after SIGTERM
    stream_interval: float = 0.1  # seconds that news of a stream may wait for more, when very many are sent; 0: none
    max_body_bytes: int = 8 * 2**20
    log_prompts: bool = False  # whether logs may hold what people write

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("A server needs a name for its model; give --served-model-name.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535.")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("An API key is empty or has characters that no HTTP header can carry; use plain ASCII.")
        for name in ("max_queued", "request_timeout", "drain_timeout", "stream_interval", "max_body_bytes"):
            least = 1 if name == "max_body_bytes" else 0
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
