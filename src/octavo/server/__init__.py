"""OpenAI's API, metrics and the memory page over HTTP. Imported by `octavo serve` only; needs the extra "server"."""
