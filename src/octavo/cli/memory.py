"""The memory report as a table for people. Knows the report's numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from octavo.engine.report import MemoryReport


def memory_table(report: MemoryReport) -> Table:
    """Blocks, sharing, the prefix cache, preemptions and speed, each with the numbers it comes from."""
    table = Table(title="KV memory", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in _rows(report):
        table.add_row(name, text)
    return table


def _rows(r: MemoryReport) -> list[tuple[str, str]]:
    used = r.active + r.shared
    found = f", {r.prefix_hit_tokens / r.prefix_lookup_tokens:.0%}" if r.prefix_lookup_tokens else ""
    preempted = r.preemptions_recompute + r.preemptions_swap
    kinds = f" ({r.preemptions_recompute} recomputed, {r.preemptions_swap} swapped)" if preempted else ""
    return [
        ("pool", f"{r.num_blocks:,} blocks of {r.block_size} tokens, {size(r.block_bytes)} each, {r.kv_type}"),
        (
            "blocks used",
            f"{r.peak_used:,} at the peak ({r.peak_used / r.num_blocks:.1%} of the pool, "
            f"{size(r.peak_used * r.block_bytes)}), {used:,} now",
        ),
        ("blocks shared", f"{r.peak_shared:,} at the peak, {r.shared:,} now"),
        ("blocks cached", f"{r.cached:,} now, {r.free:,} free"),
        ("copies made", f"{r.copies:,} (blocks copied on write)"),
        ("utilisation", f"{r.peak_utilisation:.1%} of the slots in used blocks held a token, at the peak"),
        ("prefix cache", f"{r.prefix_hit_tokens:,} of {r.prefix_lookup_tokens:,} prompt tokens found{found}"),
        ("evictions", f"{r.evictions:,} cached blocks reclaimed"),
        ("preemptions", f"{preempted:,} requests{kinds}"),
        ("tokens", f"{r.prompt_tokens:,} of prompts computed, {r.output_tokens:,} of answers made"),
        ("speed", f"{r.tokens_per_second:,.1f} answer tokens a second over {r.busy_seconds:.1f} s of steps"),
    ]


def size(number: float) -> str:
    """Bytes as people write them: 22.5 KiB, 1.2 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.1f} {unit}".replace(".0 ", " ")
        number /= 1024
    return f"{number:,.1f} TiB"
