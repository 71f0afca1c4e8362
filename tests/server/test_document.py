"""Schemathesis holds the server against its own OpenAPI document: statuses, shapes, what must and must not be taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.toys import toy_server

HERE = Path(__file__).parent


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    with toy_server() as toy:
        command = [
            *(str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"{toy.url}/openapi.json", "--seed", "1", "--max-examples", "30", "--request-timeout", "20"),
            *("--exclude-path", "/memory/events"),  # a stream without an end
            *("--generation-database", "none", "--no-color"),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout[-6000:]
        assert "generated" in ended.stdout
        assert toy.held_blocks() == 0
