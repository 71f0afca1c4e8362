"""Choosing what computes: settings, what is refused, and that nothing is loaded before it is chosen."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops import reference
from octavo.ops.backends import auto_kv_type, choose
from octavo.ops.native import NativeOps


def choosing(*, quantised: bool = False, head_dim: int = 64, **settings: Any) -> Any:
    return choose(EngineConfig(**settings), quantised=quantised, head_dim=head_dim)


@pytest.mark.parametrize(
    ("settings", "kv_type", "threads"),
    [
        ({}, "bf16", 3),
        ({"backend": "native", "kv_dtype": "f16"}, "f16", 3),
        ({"kv_dtype": "int8"}, "int8", 3),
        ({"kv_dtype": "f32", "threads": 2, "deterministic": True}, "f32", 2),
    ],
)
def test_the_kernels_are_taken_with_the_threads_and_types_asked_for(
    settings: Any, kv_type: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ops = choosing(**settings)
    assert isinstance(ops, NativeOps)
    assert (ops.kv_type, ops.threads) == (kv_type, threads)


@pytest.mark.parametrize(("fast", "kv_type"), [(True, "int8"), (False, "bf16")])
def test_keys_and_values_are_bytes_where_those_are_multiplied_fast(
    fast: bool, kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.ops.native._native.byte_dots", lambda: fast)
    for head_dim in (64, 96, 128, 256):
        assert choosing(quantised=True, head_dim=head_dim).kv_type == kv_type
        assert auto_kv_type(quantised=True, head_dim=head_dim) == kv_type
        assert choosing(quantised=False).kv_type == auto_kv_type(quantised=False, head_dim=head_dim) == "bf16"
    for head_dim in (72, 80, 33):
        assert choosing(quantised=True, head_dim=head_dim).kv_type == "bf16"
    assert choosing(quantised=True, kv_dtype="f16").kv_type == "f16"


def test_the_reference_is_taken_when_asked_for_and_refuses_what_it_cannot_do() -> None:
    assert choosing(backend="reference", quantised=True) is reference
    assert choosing(backend="reference", kv_dtype="f32", deterministic=False) is reference
    with pytest.raises(ConfigError, match="kv_dtype is bf16; the reference"):
        choosing(backend="reference", kv_dtype="bf16")
    with pytest.raises(ConfigError, match="deterministic"):
        choosing(backend="reference", deterministic=True)


def test_without_kernels_the_reference_computes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "octavo._native", None)
    monkeypatch.delitem(sys.modules, "octavo.ops.native")
    monkeypatch.delattr("octavo._native", raising=False)
    with pytest.warns(RuntimeWarning, match="no native kernels"):
        assert choosing() is reference
    assert auto_kv_type(quantised=True, head_dim=64) == "f32"
    with pytest.raises(ConfigError, match="no native kernels"):
        choosing(backend="native")
    with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match="deterministic"):
        choosing(deterministic=True)


def test_an_instruction_set_that_is_not_there_is_a_setting_that_cannot_be() -> None:
    code = "from octavo import LLM; LLM('smollm2')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"OCTAVO_ISA": "cray1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ConfigError" in ran.stderr
    assert "cray1" in ran.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"backend": "cuda"}, "auto, native or reference"),
        ({"kv_dtype": "int4"}, "auto, bf16, f16, f32 or int8"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": True}, "threads is True"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"deterministic": 1}, "deterministic is 1"),
    ],
)
def test_settings_that_cannot_be_are_named(setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**setting)


def test_importing_octavo_loads_no_kernels() -> None:
    code = "import octavo, sys; assert not [m for m in sys.modules if 'native' in m and 'octavo' in m]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
