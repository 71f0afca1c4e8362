// Drawing tokens from rows of logits, and their log-probabilities. Knows rows and their laws, not sequences.
//
// Included only by kernels.cpp. A row is looked at in three phases, each over fixed runs of tokens, so that its result
// has the same bits whether one thread does it all or several share it:
//   peaks   each chunk's highest logit, and the highest of each set of kDepth tokens ("maxima");
//   sums    the weight of each piece, exp((logit - peak) / temperature), where the whole vocabulary's is wanted;
//   finish  the answer. Filters are lower bounds on the logit, for temperature leaves the order as it is. The maxima
//           bound the k-th largest from below and tell which runs of tokens have candidates at all, so that after the
//           first phase few tokens are looked at twice. Exact bounds are found among the candidates by bisection,
//           dropping those already decided on; nothing is ever sorted.
// Weights are float32, their sums float32 inside a piece and float64 beyond.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {
namespace sampling {

using std::int32_t;
using std::int64_t;

constexpr int64_t kChunk = 4096;      // tokens of a thread's share where several work on one row
constexpr int64_t kPiece = 256;       // tokens whose weights are summed in float32
constexpr int64_t kDepth = 16;        // tokens that share a maximum, which stand W apart
constexpr int64_t kSet = kDepth * W;  // tokens of one vector of maxima
constexpr int64_t kStride = 32;       // every so manieth token is looked at to guess how far a nucleus reaches
constexpr double kCaution = 0.7;      // of the tail that a nucleus may leave out, as much is left out by that guess
constexpr int kRoundsByValue = 24;    // as many halvings tell float32 numbers of about one size apart
constexpr float kInfinity = __builtin_inff();

static_assert(kChunk % kSet == 0 && kChunk % kPiece == 0 && kPiece % W == 0);

OCTAVO_INLINE int64_t pieces_of(int64_t tokens, int64_t size) { return (tokens + size - 1) / size; }

// What is noted of a row between its phases, and room for its candidates, which stand by rising id.
struct Notes {
  double* sums;    // [pieces of V]
  float* peaks;    // [chunks of V]; NaN where the chunk has one
  float* maxima;   // [sets of V, W]
  float* values;   // [V + W]
  float* weights;  // [V + W]
  int32_t* ids;    // [V + W]

  Notes(float* scratch, int64_t vocab) {
    float* next = scratch;
    sums = reinterpret_cast<double*>(next);
    next += 2 * pieces_of(vocab, kPiece);
    peaks = next;
    next += pieces_of(vocab, kChunk);
    maxima = next;
    next += pieces_of(vocab, kSet) * W;
    values = next;
    next += vocab + W;
    weights = next;
    next += vocab + W;
    ids = reinterpret_cast<int32_t*>(next);
  }
};

// The lanes of v that are at or over the bound, as bits.
OCTAVO_INLINE std::uint32_t at_least(F v, F bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return (std::uint32_t)_mm256_movemask_ps((__m256)(v >= bound));
#else
  const I yes = v >= bound;
  std::uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= (std::uint32_t)(yes[i] & 1) << i;
  return bits;
#endif
}

// Up to W logits from p on; the lanes beyond `left` are -inf.
OCTAVO_INLINE F load_logits(const float* p, int64_t left) {
  if (left >= W) return load(p);
  return lanes() < set1((int32_t)left) ? load_some(p, left) : set1(-kInfinity);
}

// float32 numbers in their order, as whole numbers.
OCTAVO_INLINE int32_t rank_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
OCTAVO_INLINE float of_rank(int64_t rank) {
  const int32_t key = (int32_t)rank, bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// --- peaks ----------------------------------------------------------------------------------------------------------

inline void find_peaks(const float* x, int64_t vocab, int64_t chunk, const Notes& notes) {
  const int64_t begin = chunk * kChunk, end = least(begin + kChunk, vocab);
  float* maxima = notes.maxima + begin / kSet * W;
  F highest = set1(-kInfinity);
  I magnitude = {};  // of the bits: over infinity's, there is a NaN
  for (int64_t i = begin; i < end; i += kSet, maxima += W) {
    F most_of_set = set1(-kInfinity);
    if (end - i >= kSet) {
      for (int64_t j = 0; j < kDepth; ++j) {
        const F v = load(x + i + j * W);
        const I bits = as_int(v) & 0x7fffffff;
        most_of_set = max(v, most_of_set);  // in this order a NaN is passed over
        magnitude = bits > magnitude ? bits : magnitude;
      }
    } else {
      for (int64_t j = i; j < end; j += W) {
        const F v = load_logits(x + j, end - j);
        const I bits = as_int(v) & 0x7fffffff;
        most_of_set = max(v, most_of_set);
        magnitude = bits > magnitude ? bits : magnitude;
      }
    }
    store(maxima, most_of_set);
    highest = max(most_of_set, highest);
  }
  bool is_nan = false;
  for (int i = 0; i < W; ++i) is_nan |= magnitude[i] > 0x7f800000;
  notes.peaks[chunk] = is_nan ? __builtin_nanf("") : reduce_max(highest);
}

// NaN if any logit is.
inline float peak_of(int64_t vocab, const Notes& notes) {
  float peak = -kInfinity;
  for (int64_t i = 0; i < pieces_of(vocab, kChunk); ++i) {
    if (notes.peaks[i] != notes.peaks[i]) return notes.peaks[i];
    peak = most(peak, notes.peaks[i]);
  }
  return peak;
}

// The lowest id of the highest logit.
inline int64_t greedy(const float* x, int64_t vocab, float peak, const Notes& notes) {
  int64_t set = 0;
  while (!at_least(load(notes.maxima + set * W), set1(peak))) ++set;
  int64_t i = set * kSet;
  std::uint32_t found;
  while (!(found = at_least(load_logits(x + i, vocab - i), set1(peak)))) i += W;
  return i + __builtin_ctz(found);
}

// --- sums -----------------------------------------------------------------------------------------------------------

OCTAVO_INLINE F weight_of(F x, float peak, float coldness) { return exp((x - set1(peak)) * set1(coldness)); }

inline void sum_weights(const float* x, int64_t vocab, int64_t chunk, float peak, float coldness, const Notes& notes) {
  const int64_t begin = chunk * kChunk, end = least(begin + kChunk, vocab);
  for (int64_t i = begin; i < end; i += kPiece) {
    F sum = {};
    if (end - i >= kPiece) {
      for (int64_t j = i; j < i + kPiece; j += W) sum += weight_of(load(x + j), peak, coldness);
    } else {
      for (int64_t j = i; j < end; j += W) sum += weight_of(load_logits(x + j, end - j), peak, coldness);
    }
    notes.sums[i / kPiece] = (double)reduce_add(sum);
  }
}

template <class T>
OCTAVO_INLINE double total_of(const T* parts, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += (double)parts[i];
  return total;
}

// The first of the parts with which their sum exceeds the target, and what is left of the target before it. Where
// rounding has put the target at the end: the last part that adds anything. Never one of weight 0.
template <class T>
OCTAVO_INLINE int64_t place_of(const T* parts, int64_t count, double& target) {
  double sum = 0, left = target;
  int64_t place = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double next = sum + (double)parts[i];
    if (next > sum) {
      place = i;
      left = target - sum;
    }
    if (next > target) break;
    sum = next;
  }
  target = left;
  return place;
}

// Draws from the whole vocabulary: a piece of it first, then a token of the piece.
inline int64_t draw_unfiltered(const float* x, int64_t vocab, double uniform, float peak, float coldness,
                               const Notes& notes) {
  const int64_t pieces = pieces_of(vocab, kPiece);
  double target = uniform * total_of(notes.sums, pieces);
  const int64_t begin = place_of(notes.sums, pieces, target) * kPiece, count = least(kPiece, vocab - begin);
  float weights[kPiece];
  for (int64_t i = 0; i < count; i += W)
    store(weights + i, weight_of(load_logits(x + begin + i, count - i), peak, coldness));
  return begin + place_of(weights, count, target);
}

// --- candidates -----------------------------------------------------------------------------------------------------

// Appends the chosen lanes of two vectors to two arrays that hold `count`; returns how many they hold then. The arrays
// have room for a vector more, and may be where the vectors came from.
template <class V, class T>
OCTAVO_INLINE int64_t append(std::uint32_t chosen, F a, float* to_a, int64_t count, V b, T* to_b) {
#if defined(__AVX512F__)
  store(to_a + count, (F)_mm512_maskz_compress_ps((__mmask16)chosen, (__m512)a));
  store_as(to_b + count, _mm512_maskz_compress_epi32((__mmask16)chosen, (__m512i)b));
  return count + __builtin_popcount(chosen);
#else
  for (; chosen; chosen &= chosen - 1, ++count) {
    const int lane = __builtin_ctz(chosen);
    to_a[count] = a[lane];
    to_b[count] = b[lane];
  }
  return count;
#endif
}

// Makes whole vectors of the values: no token is chosen from the padding, for its weight is 0.
inline void pad(int64_t count, const Notes& notes) {
  for (int64_t i = count; i % W; ++i) notes.values[i] = -kInfinity;
}

// Collects the tokens at or over the floor; returns how many there are.
inline int64_t gather(const float* x, int64_t vocab, float floor, const Notes& notes) {
  const F bound = set1(floor);
  int64_t count = 0;
  for (int64_t set = 0; set * kSet < vocab; ++set) {
    if (!at_least(load(notes.maxima + set * W), bound)) continue;
    const int64_t end = least((set + 1) * kSet, vocab);
    for (int64_t i = set * kSet; i < end; i += W) {
      const F values = load_logits(x + i, end - i);
      std::uint32_t found = at_least(values, bound);
      if (end - i < W) found &= (1u << (end - i)) - 1;  // a floor of -inf takes what is not there
      if (found) count = append(found, values, notes.values, count, lanes() + set1((int32_t)i), notes.ids);
    }
  }
  pad(count, notes);
  return count;
}

inline void weigh(int64_t count, float peak, float coldness, const Notes& notes) {
  for (int64_t i = 0; i < count; i += W) store(notes.weights + i, weight_of(load(notes.values + i), peak, coldness));
}

// The weight of the candidates at or over the bound.
inline double weight_from(float bound, int64_t count, const Notes& notes) {
  double total = 0;
  for (int64_t i = 0; i < count; i += kPiece) {
    F sum = {};
    for (int64_t j = i; j < least(i + kPiece, count); j += W)
      sum += load(notes.values + j) >= set1(bound) ? load(notes.weights + j) : set1(0.0f);
    total += (double)reduce_add(sum);
  }
  return total;
}

// Keeps the candidates at or over the bound, or those under it; the ids are not kept in step.
inline int64_t drop(float bound, bool keeps_under, int64_t count, const Notes& notes) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += W) {
    const F values = load(notes.values + i), weights = load(notes.weights + i);
    const std::uint32_t all = (std::uint32_t)((1ull << least((int64_t)W, count - i)) - 1);
    const std::uint32_t over = at_least(values, set1(bound));
    kept = append(keeps_under ? all & ~over : all & over, values, notes.values, kept, weights, notes.weights);
  }
  pad(kept, notes);
  return kept;
}

// The highest bound that candidates of the wanted weight pass (or a lower one that the same pass); `low` where even
// those from it on weigh less. None is over `high`. Uses the values and weights up.
//
// Bisects the numbers from low to high: by value for a while, which is soon done where logits are spread evenly, then
// by their place in the order of float32, which is done after 32 rounds whatever they are.
inline float bound_of_weight(double wanted, float low, float high, int64_t count, const Notes& notes) {
  int64_t begin = rank_of(low), end = rank_of(high);
  for (int round = 0; begin < end && count > 0; ++round) {
    int64_t middle = begin + (end - begin + 1) / 2;
    if (round < kRoundsByValue && of_rank(begin) > -kInfinity)
      middle = most(begin + 1, (int64_t)rank_of(of_rank(begin) * 0.5f + of_rank(end) * 0.5f));
    const float bound = of_rank(middle);
    const double weight = weight_from(bound, count, notes);
    if (weight == wanted) return bound;
    if (weight > wanted) {
      begin = middle;
      if (count > kPiece) count = drop(bound, false, count, notes);
    } else {
      end = middle - 1;
      wanted -= weight;  // of all those that pass a lower bound too
      count = drop(bound, true, count, notes);
    }
  }
  return of_rank(begin);
}

// --- filters --------------------------------------------------------------------------------------------------------

struct Law {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;  // 0: all
  float coldness;

  Law(const DrawArgs& a, int64_t draw)
      : temperature(a.temperature[draw]),
        top_p(a.top_p[draw]),
        min_p(a.min_p[draw]),
        uniform(a.uniform[draw]),
        top_k(a.top_k[draw] < a.vocab ? a.top_k[draw] : 0),
        coldness((float)(1 / temperature)) {}

  bool filtered() const { return top_k > 0 || top_p < 1 || min_p > 0; }
  // A nucleus of the whole vocabulary.
  bool bare() const { return top_p < 1 && top_k == 0 && !(min_p > 0); }
  bool wants_sums() const { return temperature > 0 && (bare() || !filtered()); }
};

// A bound that exactly the candidates at or over the k-th largest pass. `low` is at or under it.
inline float bound_of_largest(int64_t k, float low, float high, int64_t count, const Notes& notes) {
  for (int64_t i = 0; i < count; i += W) store(notes.weights + i, set1(1.0f));
  return bound_of_weight((double)k, low, high, count, notes);
}

// A logit not over the k-th largest, but mostly near it: the k-th largest of the maxima of disjoint sets of tokens.
inline float near_largest(int64_t vocab, int64_t k, float peak, const Notes& notes) {
  const int64_t count = pieces_of(vocab, kSet) * W;
  if (count < k) return -kInfinity;
  std::memcpy(notes.values, notes.maxima, sizeof(float) * (std::size_t)count);
  return bound_of_largest(k, -kInfinity, peak, count, notes);
}

// A logit that the nucleus hardly reaches below, by a sample of tokens: the tail of small weights that a nucleus leaves
// out is long, so that a sample of it tells its weight well.
inline float guess_nucleus(const float* x, int64_t vocab, const Law& law, float peak, double mass, const Notes& notes) {
  const int64_t count = pieces_of(vocab, kStride);
  float high = -kInfinity;
  for (int64_t i = 0; i < count; ++i) {
    notes.values[i] = x[i * kStride];
    high = most(high, notes.values[i]);
  }
  pad(count, notes);
  weigh(count, peak, law.coldness, notes);
  const double tail = kCaution * (1 - law.top_p) * mass / (double)kStride;
  const double wanted = weight_from(-kInfinity, count, notes) - tail;
  return wanted > 0 ? bound_of_weight(wanted, -kInfinity, high, count, notes) : high;
}

// Gathers and weighs the tokens that pass all filters; returns how many there are.
inline int64_t gather_survivors(const float* x, int64_t vocab, const Law& law, float peak, const Notes& notes) {
  float floor = -kInfinity;
  double mass = 0;
  if (law.min_p > 0) floor = (float)((double)peak + law.temperature * __builtin_log(law.min_p));
  if (law.top_k > 0) floor = most(floor, near_largest(vocab, law.top_k, peak, notes));
  if (law.bare()) {
    mass = total_of(notes.sums, pieces_of(vocab, kPiece));
    floor = guess_nucleus(x, vocab, law, peak, mass, notes);
  }
  int64_t count = gather(x, vocab, floor, notes);
  if (law.top_k > 0 && count > law.top_k) {
    floor = bound_of_largest(law.top_k, floor, peak, count, notes);
    count = gather(x, vocab, floor, notes);
  }
  weigh(count, peak, law.coldness, notes);
  if (law.top_p >= 1) return count;
  const double here = weight_from(floor, count, notes);
  const double wanted = law.top_p * (law.bare() ? mass : here);
  if (here < wanted) {
    // Tokens each less likely than (1 - p) / 2V weigh less than 1 - p together: the nucleus needs none of them.
    const double least_weight = (1 - law.top_p) * mass / (double)(2 * vocab);
    floor = (float)((double)peak + law.temperature * __builtin_log(least_weight));
    count = gather(x, vocab, floor, notes);
    weigh(count, peak, law.coldness, notes);
  }
  floor = bound_of_weight(wanted, floor, peak, count, notes);
  count = gather(x, vocab, floor, notes);
  weigh(count, peak, law.coldness, notes);
  return count;
}

inline int64_t draw_filtered(const float* x, int64_t vocab, const Law& law, float peak, const Notes& notes) {
  const int64_t count = gather_survivors(x, vocab, law, peak, notes), pieces = pieces_of(count, kPiece);
  for (int64_t i = count; i % W; ++i) notes.weights[i] = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    F sum = {};
    for (int64_t i = piece * kPiece; i < least((piece + 1) * kPiece, count); i += W) sum += load(notes.weights + i);
    notes.sums[piece] = (double)reduce_add(sum);
  }
  double target = law.uniform * total_of(notes.sums, pieces);
  const int64_t begin = place_of(notes.sums, pieces, target) * kPiece;
  return notes.ids[begin + place_of(notes.weights + begin, least(kPiece, count - begin), target)];
}

// --- rows -----------------------------------------------------------------------------------------------------------

// Takes each row through its phases. As many rows as go evenly into the threads are done by one thread each, from
// begin to end; those left over by all threads together. `Row(i)` knows its logits `x`, `coldness`, whether it
// `wants_sums`, and how to `finish(peak, notes)`.
template <class MakeRow>
void each_row(int64_t rows, int64_t vocab, float* scratch, Team& team, int thread, MakeRow make_row) {
  const int64_t size = row_scratch(vocab), chunks = pieces_of(vocab, kChunk);
  const int64_t shared = chunks > 1 ? rows % team.size() : 0, alone = rows - shared;
  const Notes own(scratch + thread * size, vocab);
  for (int64_t i = team.claim(); i < alone; i = team.claim()) {
    const auto row = make_row(i);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) find_peaks(row.x, vocab, chunk, own);
    const float peak = peak_of(vocab, own);
    for (int64_t chunk = 0; chunk < chunks && row.wants_sums; ++chunk)
      sum_weights(row.x, vocab, chunk, peak, row.coldness, own);
    row.finish(peak, own);
  }
  if (shared == 0) return;
  team.barrier();
  for (int64_t i = team.claim(); i < shared * chunks; i = team.claim()) {
    find_peaks(make_row(alone + i / chunks).x, vocab, i % chunks, Notes(scratch + i / chunks * size, vocab));
  }
  team.barrier();
  for (int64_t i = team.claim(); i < shared * chunks; i = team.claim()) {
    const Notes notes(scratch + i / chunks * size, vocab);
    const auto row = make_row(alone + i / chunks);
    if (row.wants_sums) sum_weights(row.x, vocab, i % chunks, peak_of(vocab, notes), row.coldness, notes);
  }
  team.barrier();
  for (int64_t i = team.claim(); i < shared; i = team.claim()) {
    const Notes notes(scratch + i * size, vocab);
    make_row(alone + i).finish(peak_of(vocab, notes), notes);
  }
}

struct DrawRow {
  const DrawArgs& args;
  const int64_t draw;
  const Law law;
  const float* const x;
  const float coldness;
  const bool wants_sums;

  DrawRow(const DrawArgs& a, int64_t i)
      : args(a),
        draw(i),
        law(a, i),
        x(a.logits + a.sources[i] * a.vocab),
        coldness(law.coldness),
        wants_sums(law.wants_sums()) {}

  void finish(float peak, const Notes& notes) const {
    int64_t& token = args.token_ids[draw];
    if (!__builtin_isfinite(peak)) {
      token = -1;
    } else if (!(law.temperature > 0)) {
      token = greedy(x, args.vocab, peak, notes);
    } else if (law.filtered()) {
      token = draw_filtered(x, args.vocab, law, peak, notes);
    } else {
      token = draw_unfiltered(x, args.vocab, law.uniform, peak, coldness, notes);
    }
  }
};

// --- log-probabilities ----------------------------------------------------------------------------------------------

struct LogprobRow {
  const LogprobArgs& args;
  const int64_t row;
  const float* const x;
  const float coldness = 1.0f;
  const bool wants_sums = true;

  LogprobRow(const LogprobArgs& a, int64_t i) : args(a), row(i), x(a.logits + a.sources[i] * a.vocab) {}

  void finish(float peak, const Notes& notes) const {
    const bool finite = __builtin_isfinite(peak);
    const double sum = total_of(notes.sums, pieces_of(args.vocab, kPiece));
    args.log_sums[row] = finite ? (double)peak + __builtin_log(sum) : __builtin_nan("");
    args.ranks[row] = 1 + count_over(x[args.token_ids[row]], notes);
    if (args.top == 0) return;
    int64_t* const ids = args.top_ids + row * args.top;
    for (int64_t i = finite ? list_largest(peak, notes, ids) : 0; i < args.top; ++i) ids[i] = -1;
  }

  // Tokens of a strictly higher logit.
  int64_t count_over(float logit, const Notes& notes) const {
    int64_t count = 0;
    for (int64_t set = 0; set * kSet < args.vocab; ++set) {
      const I over = load(notes.maxima + set * W) > set1(logit);
      if (!at_least(over ? set1(1.0f) : set1(0.0f), set1(1.0f))) continue;
      const int64_t end = least((set + 1) * kSet, args.vocab);
      I sum = {};
      for (int64_t i = set * kSet; i < end; i += W) sum -= (I)(load_logits(x + i, end - i) > set1(logit));
      for (int i = 0; i < W; ++i) count += sum[i];
    }
    return count;
  }

  // The `top` likeliest, the likeliest first, the lower id first among equals; returns how many there are.
  int64_t list_largest(float peak, const Notes& notes, int64_t* ids) const {
    const int64_t top = least(args.top, args.vocab);
    const float floor = near_largest(args.vocab, top, peak, notes);
    const int64_t candidates = gather(x, args.vocab, floor, notes);
    int64_t listed = 0;
    for (int64_t i = 0; i < candidates; ++i) {
      const float value = notes.values[i];
      if (listed == top && value <= x[ids[top - 1]]) continue;
      int64_t place = listed < top ? listed++ : top - 1;
      for (; place > 0 && value > x[ids[place - 1]]; --place) ids[place] = ids[place - 1];
      ids[place] = notes.ids[i];
    }
    return listed;
  }
};

}  // namespace sampling

inline void draw(const DrawArgs& args, Team& team, int thread) {
  sampling::each_row(args.draws, args.vocab, args.scratch, team, thread,
                     [&](std::int64_t i) { return sampling::DrawRow(args, i); });
}

inline void logprobs(const LogprobArgs& args, Team& team, int thread) {
  sampling::each_row(args.rows, args.vocab, args.scratch, team, thread,
                     [&](std::int64_t i) { return sampling::LogprobRow(args, i); });
}

}  // namespace octavo::OCTAVO_ISA
