// Copies of whole KV blocks, within a pool and between pools (copy-on-write, swap). Knows sizes, not what a block holds.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// target[b] = source[a] for each of `count` pairs (a, b), as if all were read before any is written: the pools may be
// one, and pairs may form chains and rings. No b comes twice. A pool is blocks of `block_bytes`, one after another.
// On `threads` threads. Throws std::bad_alloc where the blocks that must be put aside find no room.
void copy_blocks(const void* source, void* target, std::size_t block_bytes, const std::int32_t* pairs,
                 std::int64_t count, int threads);

}  // namespace octavo
