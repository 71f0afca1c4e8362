// What this processor can do at most: reads of memory, and products in each form that it has an instruction for.
//
// Loops with nothing in them but the instruction measured; threads start together, and the slowest counts. Compiled by
// ceilings.py with -march=native, so only the instructions of this machine are in it; knows no kernel of Octavo.
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstring>

namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that the slowest of `threads` takes for body(thread), all starting together. Negative: no such team.
template <class Body>
double timed(int threads, const Body& body) {
  double slowest = 0;
  int started = 0;
#pragma omp parallel num_threads(threads) reduction(max : slowest, started)
  {
    started = omp_get_num_threads();
#pragma omp barrier
    const double begin = seconds_now();
    body(omp_get_thread_num());
    slowest = seconds_now() - begin;
  }
  return started == threads ? slowest : -1;
}

// Makes the compiler believe that a value is needed. It is a copy that lies in memory: the loop's own stays in a register.
template <class T>
void keep(T value) {
  asm volatile("" : : "m"(value));
}

constexpr int kChains = 12;  // independent sums: enough to hide the latency of two units

// Runs step(sum) on every chain `rounds` times.
template <class Vector, class Step>
void chains(std::int64_t rounds, Vector start, const Step& step) {
  Vector sum[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sum[j] = start;
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) step(sum[j]);
  }
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) keep(sum[j]);
}

typedef float Floats __attribute__((vector_size(64)));

#if defined(__AMX_TILE__)
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t column_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

bool use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void load_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.column_bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}
#endif

}  // namespace

extern "C" {

// Each thread reads its share of `bytes` from first to last, `passes` times: seconds, or -1.
double read_seconds(const std::uint8_t* data, std::int64_t bytes, int threads, std::int64_t passes) {
  typedef std::int64_t Line __attribute__((vector_size(64)));
  const std::int64_t lines = bytes / 64 / threads / 8 * 8;
  return timed(threads, [=](int thread) {
    const Line* own = reinterpret_cast<const Line*>(data) + lines * thread;
    Line sum[8] = {};
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      for (std::int64_t i = 0; i < lines; i += 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) sum[j] ^= own[i + j];
      }
      keep(sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7]);
      asm volatile("" : : : "memory");  // else one pass would do for all
    }
  });
}

// Room on large pages where there are any; each share is first touched by the thread that will read it.
std::uint8_t* allocate(std::int64_t bytes, int threads) {
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
#endif
  const std::int64_t share = bytes / threads;
#pragma omp parallel num_threads(threads)
  std::memset(static_cast<std::uint8_t*>(data) + share * omp_get_thread_num(), 1, static_cast<std::size_t>(share));
  return static_cast<std::uint8_t*>(data);
}

void release(std::uint8_t* data, std::int64_t bytes) { munmap(data, static_cast<std::size_t>(bytes)); }

// Products. Each returns the seconds of `rounds` rounds of its instruction on `threads` threads, or -1 if this
// processor has none, and in *operations the multiplications and additions that one thread did in them.

double f32_fma(int threads, std::int64_t rounds, double* operations) {
  *operations = static_cast<double>(rounds) * kChains * 16 * 2;
  const Floats factor = Floats{} + 0.5f;
  return timed(threads, [=](int) {
    Floats x = factor;
    chains(rounds, factor, [&](Floats& sum) {
#if defined(__AVX512F__)
      asm("vfmadd231ps %1, %1, %0" : "+v"(sum) : "v"(x));
#else
      sum += x * x;
      asm("" : "+m"(x));
#endif
    });
  });
}

double bf16_vector(int threads, std::int64_t rounds, double* operations) {
  *operations = static_cast<double>(rounds) * kChains * 32 * 2;
#if defined(__AVX512BF16__)
  return timed(threads, [=](int) {
    const __m512i x = _mm512_set1_epi32(0x3f803f80);
    chains(rounds, _mm512_setzero_ps(), [&](__m512& sum) { asm("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(x)); });
  });
#else
  return (void)threads, -1;
#endif
}

double int8_vector(int threads, std::int64_t rounds, double* operations) {
#if defined(__AVX512VNNI__)
  *operations = static_cast<double>(rounds) * kChains * 64 * 2;
  return timed(threads, [=](int) {
    const __m512i x = _mm512_set1_epi8(3);
    chains(rounds, _mm512_setzero_si512(), [&](__m512i& sum) { asm("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(x)); });
  });
#elif defined(__AVX2__)
  *operations = static_cast<double>(rounds) * kChains * 32 * 2;
  return timed(threads, [=](int) {
    const __m256i x = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
    chains(rounds, _mm256_setzero_si256(), [&](__m256i& sum) {
      __m256i left = x;
      asm("" : "+x"(left));  // else the product would be taken out of the loop
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(left, x), ones));
    });
  });
#else
  return (void)threads, (void)rounds, *operations = 0, -1;
#endif
}

double bf16_tile(int threads, std::int64_t rounds, double* operations) {
  *operations = static_cast<double>(rounds) * 4 * 16 * 16 * 32 * 2;
#if defined(__AMX_BF16__)
  if (!use_tiles()) return -1;
  return timed(threads, [=](int) {
    load_tiles();
    for (std::int64_t i = 0; i < rounds; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  });
#else
  return (void)threads, -1;
#endif
}

double int8_tile(int threads, std::int64_t rounds, double* operations) {
  *operations = static_cast<double>(rounds) * 4 * 16 * 16 * 64 * 2;
#if defined(__AMX_INT8__)
  if (!use_tiles()) return -1;
  return timed(threads, [=](int) {
    load_tiles();
    for (std::int64_t i = 0; i < rounds; ++i) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
  });
#else
  return (void)threads, -1;
#endif
}

}  // extern "C"
