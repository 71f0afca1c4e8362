"""Which backend an engine's settings ask for. Imports a backend only when it is chosen; knows no model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.ops.interface import Ops

if TYPE_CHECKING:
    from octavo.ops.native import KvType


def choose(config: EngineConfig, *, quantised: bool, head_dim: int) -> Ops:
    """The operations for an engine of these settings, for weights quantised or not and heads of this size.

    "auto" takes the native kernels, and where this installation has none, the NumPy reference with a warning, as the
    answers are the same. Raises ConfigError for kernels that are not there, and for what a backend cannot do.
    """
    if config.backend != "reference":
        try:
            return _native(config, quantised, head_dim)
        except ImportError as error:
            lacking = f"This installation has no native kernels ({error})"
            if config.backend == "native":
                raise ConfigError(f"{lacking}; reinstall octavo, or set backend to reference.") from None
            warnings.warn(f"{lacking}: computing in NumPy, many times slower.", RuntimeWarning, stacklevel=2)
    return _reference(config)


def auto_kv_type(*, quantised: bool, head_dim: int) -> KvType:
    """What kv_dtype auto is here: the kernels' choice, or float32 where this installation has none.

    Raises ConfigError for an instruction set asked for that is not there.
    """
    try:
        from octavo.ops.native import auto_kv_type as of_kernels

        return of_kernels(quantised=quantised, head_dim=head_dim)
    except ImportError:
        return "f32"
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _native(config: EngineConfig, quantised: bool, head_dim: int) -> Ops:
    """Deterministic without being asked: no sum depends on the batch or the threads."""
    from octavo.ops.native import NativeOps

    auto = auto_kv_type(quantised=quantised, head_dim=head_dim)
    try:
        return NativeOps(auto if config.kv_dtype == "auto" else config.kv_dtype, config.threads)
    except ValueError as error:  # OCTAVO_ISA names what is not usable here
        raise ConfigError(str(error)) from None


def _reference(config: EngineConfig) -> Ops:
    from octavo.ops import reference

    if config.kv_dtype not in ("auto", "f32"):
        raise ConfigError(f"kv_dtype is {config.kv_dtype}; the reference backend keeps keys and values as f32 only.")
    if config.deterministic:
        raise ConfigError(
            "deterministic is True, but the reference backend adds by BLAS, whose rounding depends on the batch; "
            "use the native backend."
        )
    return reference
