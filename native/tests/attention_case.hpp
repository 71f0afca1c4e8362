// Random steps for the attention kernel, and what they should give by brute force in double. Knows not the inside of a
// block; of partitions only how weights are rounded in them. Caches are filled by the kernel's own writes, every other
// slot holds NaN.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attention.hpp"
#include "plan.hpp"
#include "team.hpp"

namespace octavo::testing {

namespace isa = octavo::OCTAVO_ISA;

struct Shape {
  KvType type = KvType::f32;
  int num_kv_heads = 1, group = 1, head_dim = 64, block_size = 16;
  std::int64_t window = 0;
  float softcap = 0.0f;
  int rotated = 64;  // dimensions; 0: none
  bool spiky = false;  // of a head's queries and keys only one dimension is not 0: mixed, all are as large
};

// Tokens [begin, end) of a sequence, computed in one step.
struct Piece {
  int sequence;
  int begin, end;
};
using Steps = std::vector<std::vector<Piece>>;

inline float round_to(KvType type, float x) {
  if (type == KvType::f32) return x;
  float in[isa::W] = {x}, out[isa::W];
  isa::H half = type == KvType::bf16 ? isa::to_bf16(isa::load(in)) : isa::to_f16(isa::load(in));
  std::uint16_t halves[isa::W];
  isa::store_as(halves, half);
  if (type == KvType::bf16) return isa::bf16_to_float(halves[0]);
  isa::store(out, isa::load_f16(halves));
  return out[0];
}

// A row as a cache holds it. As bytes: multiples of a 127th of the largest.
inline std::vector<double> round_to(KvType type, const std::vector<float>& row) {
  float largest = 0.0f;
  for (const float x : row) largest = std::max(largest, std::abs(x));
  const float inverse = 127.0f / largest, scale = largest / 127.0f;
  std::vector<double> rounded;
  for (const float x : row) {
    if (type == KvType::int8)
      rounded.push_back(static_cast<double>(std::nearbyint(x * inverse)) * static_cast<double>(scale));
    else
      rounded.push_back(static_cast<double>(round_to(type, x)));
  }
  return rounded;
}

// Sequences of random queries, keys and values. The first `shared` tokens of all, whole blocks, are those of sequence 0.
class Case {
 public:
  Case(const Shape& shape, std::vector<int> lengths, int shared, unsigned seed)
      : shape_(shape), lengths_(std::move(lengths)), shared_(shared), random_(seed) {
    for (std::size_t s = 0; s < lengths_.size(); ++s) {
      const auto fill = [&](int heads, float size) {
        std::normal_distribution<float> normal(0.0f, size);
        std::vector<float> x(static_cast<std::size_t>(lengths_[s] * heads * shape_.head_dim));
        for (float& value : x) value = normal(random_);
        return x;
      };
      q_.push_back(fill(shape_.num_kv_heads * shape_.group, 2.0f));
      k_.push_back(fill(shape_.num_kv_heads, 1.0f));
      v_.push_back(fill(shape_.num_kv_heads, 1.0f));
      for (auto* const rows : {&q_, &k_})
        for (std::size_t i = 0; shape_.spiky && i < rows->back().size(); ++i)
          rows->back()[i] *= i % static_cast<std::size_t>(shape_.head_dim) == 1 ? 5.0f : 0.0f;
      if (s == 0) continue;
      std::copy_n(q_[0].begin(), shared_ * query_width(), q_[s].begin());
      std::copy_n(k_[0].begin(), shared_ * key_width(), k_[s].begin());
      std::copy_n(v_[0].begin(), shared_ * key_width(), v_[s].begin());
    }
    for (int i = 0; i < shape_.rotated / 2; ++i)
      inv_freq_.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / shape_.rotated)));
  }

  // Runs the steps on a fresh cache and returns the outputs, NaN where no step computed them.
  // `fork`: the blocks of the shared tokens are one another's, not copies.
  // `taken`: only each piece's last token attends, as in a layer that nothing but the head comes after.
  std::vector<std::vector<float>> run(const Steps& steps, int threads, bool fork, bool taken = false) {
    make_cache(fork);
    std::vector<std::vector<float>> out;
    for (const auto& q : q_) out.emplace_back(q.size(), NAN);
    AttentionPlanner planner(shape_.block_size);
    const int heads = shape_.num_kv_heads * shape_.group;
    const int rope = shape_.rotated ? planner.add_rope(inv_freq_.data(), shape_.rotated / 2, 1.25f, 1 << 20) : -1;
    for (const bool last : {false, true})
      planner.add_layer(heads, shape_.num_kv_heads, shape_.head_dim, shape_.window, last);
    for (const std::vector<Piece>& pieces : steps) step(planner, rope, pieces, threads, taken, out);
    return out;
  }

  // The right outputs of a token, and the largest value it could see (what errors are relative to). Where weights are
  // rounded, each near the middle between two may become either: `either` is what that may change.
  std::vector<double> expect(int sequence, int token, double* largest, std::vector<double>* either) const {
    const int heads = shape_.num_kv_heads * shape_.group, dim = shape_.head_dim;
    std::vector<double> out(static_cast<std::size_t>(heads * dim));
    either->assign(out.size(), 0.0);
    const int begin = shape_.window > 0 ? std::max<int>(0, token + 1 - static_cast<int>(shape_.window)) : 0;
    *largest = 0;
    for (int h = 0; h < heads; ++h) {
      const auto q = turn(&q_[at(sequence)][at(token * query_width() + h * dim)], token,
                          rounds_weights() ? shape_.type : KvType::f32);
      std::vector<double> scores;
      for (int t = begin; t <= token; ++t) {
        const auto k = turn(&k_[at(sequence)][at(t * key_width() + h / shape_.group * dim)], t, shape_.type);
        double score = 0;
        for (int i = 0; i < dim; ++i) score += q[at(i)] * k[at(i)];
        score *= static_cast<double>(scale()) / mixed();
        if (shape_.softcap > 0) score = shape_.softcap * std::tanh(score / shape_.softcap);
        scores.push_back(score);
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double total = 0;
      for (double& score : scores) total += score = std::exp(score - top);
      std::vector<std::vector<double>> values;
      for (int t = begin; t <= token; ++t) {
        const float* const value = &v_[at(sequence)][at(t * key_width() + h / shape_.group * dim)];
        values.push_back(round_to(shape_.type, std::vector<float>(value, value + dim)));
      }
      std::vector<double> steps(scores.size(), 0.0);  // by which a weight may be off
      if (shape_.type == KvType::int8) round_weights(begin, values, scores, steps);
      if (rounds_to_bf16()) round_weights_to_bf16(begin, scores, steps);
      for (std::size_t t = 0; t < values.size(); ++t)
        for (int i = 0; i < dim; ++i) {
          const double v = values[t][at(i)];
          out[at(h * dim + i)] += scores[t] / total * v;
          (*either)[at(h * dim + i)] += steps[t] / total * std::abs(v);
          *largest = std::max(*largest, std::abs(v));
        }
    }
    return out;
  }

  const std::vector<int>& lengths() const { return lengths_; }
  bool rounds_weights() const { return shape_.type == KvType::int8 || rounds_to_bf16(); }
  int query_width() const { return shape_.num_kv_heads * shape_.group * shape_.head_dim; }

 private:
  // Weights times their values' scales become multiples of a 255th of the largest among 64 tokens of the context.
  static void round_weights(int begin, const std::vector<std::vector<double>>& values, std::vector<double>& weights,
                            std::vector<double>& steps) {
    std::vector<double> scales;
    for (const auto& value : values) {
      double scale = 0;
      for (const double x : value) scale = std::max(scale, std::abs(x) / 127);
      scales.push_back(scale);
    }
    for (std::size_t first = 0, last; first < weights.size(); first = last) {
      const std::size_t offset = at(begin) + first;
      last = std::min(weights.size(), first + 64 - offset % 64);
      double largest = 0;
      for (std::size_t t = first; t < last; ++t) largest = std::max(largest, weights[t] * scales[t]);
      for (std::size_t t = first; t < last; ++t) {
        const double x = weights[t] * scales[t] / largest * 255, middle = std::floor(x) + 0.5;
        const double step = largest / 255 / scales[t];
        weights[t] = std::nearbyint(x) * step;
        if (std::abs(x - middle) < 5e-4 * x + 1e-5) steps[t] = step;
      }
    }
  }

  // Weights relative to the largest of their partition get the 8 bits of bf16.
  static void round_weights_to_bf16(int begin, std::vector<double>& weights, std::vector<double>& steps) {
    for (std::size_t first = 0, last; first < weights.size(); first = last) {
      last = std::min(weights.size(), first + kPartition - (at(begin) + first) % kPartition);
      const double largest = *std::max_element(&weights[first], &weights[0] + last);
      for (std::size_t t = first; t < last; ++t) {
        const double x = weights[t] / largest, step = std::ldexp(1.0, x > 0 ? std::ilogb(x) - 7 : -130);
        const double middle = (std::floor(x / step) + 0.5) * step;
        weights[t] = std::nearbyint(x / step) * step * largest;
        if (std::abs(x - middle) < 3e-4 * x) steps[t] = step * largest;
      }
    }
  }

  bool rounds_to_bf16() const { return shape_.type == KvType::bf16 && isa::attend::Bf16::rounds; }
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int key_width() const { return shape_.num_kv_heads * shape_.head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  std::vector<double> turn(const float* x, int position, KvType type) const {
    std::vector<float> y(x, x + shape_.head_dim);
    const int half = shape_.rotated / 2;
    for (int i = 0; i < half; ++i) {  // in float, like the reference: what is rounded next must be the same number
      const float angle = static_cast<float>(position) * inv_freq_[at(i)];
      const float c = std::cos(angle) * 1.25f, s = std::sin(angle) * 1.25f;
      y[at(i)] = x[i] * c - x[i + half] * s;
      y[at(i + half)] = x[i + half] * c + x[i] * s;
    }
    if (type == KvType::int8) mix(y);
    return round_to(type, y);
  }

  // The Walsh-Hadamard transform of runs of `mixed` dimensions, step by step in float.
  void mix(std::vector<float>& y) const {
    for (int far = 1; far < mixed(); far *= 2)
      for (int i = 0; i < shape_.head_dim; ++i) {
        if (i / far % 2) continue;
        const float left = y[at(i)], right = y[at(i + far)];
        y[at(i)] = left + right;
        y[at(i + far)] = left - right;
      }
  }
  int mixed() const {
    int run = 1;
    while (shape_.type == KvType::int8 && shape_.head_dim % (2 * run) == 0) run *= 2;
    return run;
  }

  void make_cache(bool fork) {
    const int size = shape_.block_size;
    int blocks = 1;  // block 0 stays NaN and stands for those that are given back
    std::vector<int> ids;
    for (int length : lengths_) blocks += (length + size - 1) / size;
    for (int i = 1; i < blocks; ++i) ids.push_back(i);
    std::shuffle(ids.begin(), ids.end(), random_);
    tables_.clear();
    for (int length : lengths_) {
      tables_.emplace_back();
      for (int b = 0; b < (length + size - 1) / size; ++b) {
        const bool same = fork && tables_.size() > 1 && (b + 1) * size <= shared_;
        tables_.back().push_back(same ? tables_[0][at(b)] : ids.back());
        if (!same) ids.pop_back();
      }
    }
    const std::int64_t of_head = head_bytes(shape_.type, shape_.head_dim);
    cache_.assign(at(blocks * 2 * kLayers * shape_.num_kv_heads * size) * static_cast<std::size_t>(of_head), 0xff);
    num_blocks_ = blocks;
  }

  void step(AttentionPlanner& planner, int rope, const std::vector<Piece>& pieces, int threads, bool taken,
            std::vector<std::vector<float>>& out) {
    const int size = shape_.block_size;
    std::vector<std::int32_t> positions, slots, starts{0}, lens, tables, wanted;
    std::size_t longest = 0;
    for (const auto& table : tables_) longest = std::max(longest, table.size());
    std::vector<float> q, k, v;
    for (const Piece& piece : pieces) {
      const std::vector<std::int32_t>& table = tables_[at(piece.sequence)];
      for (int t = piece.begin; t < piece.end; ++t) {
        positions.push_back(t);
        slots.push_back(table[at(t / size)] * size + t % size);
        const auto row = [&](std::vector<float>& to, const std::vector<float>& from, int width) {
          to.insert(to.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
          to.insert(to.end(), 3, NAN);  // rows may be runs of columns of wider ones
        };
        row(q, q_[at(piece.sequence)], query_width());
        row(k, k_[at(piece.sequence)], key_width());
        row(v, v_[at(piece.sequence)], key_width());
      }
      starts.push_back(starts.back() + piece.end - piece.begin);
      wanted.push_back(starts.back() - 1);
      lens.push_back(piece.end);
      for (std::size_t b = 0; b < longest; ++b) {
        const bool own = b < table.size() && static_cast<int>(b) * size < piece.end;
        const bool given_back = shape_.window > 0 && static_cast<int>(b + 1) * size <= piece.begin + 1 - shape_.window;
        tables.push_back(own && !given_back ? table[b] : 0);
      }
    }
    const std::int64_t tokens = starts.back();
    const StepView view{nullptr, positions.data(), slots.data(), starts.data(), lens.data(), tables.data(),
                        static_cast<std::int64_t>(longest), wanted.data(), tokens,
                        static_cast<std::int64_t>(pieces.size()), static_cast<std::int64_t>(wanted.size())};
    AttentionPlan* plan = planner.begin(view, threads);
    const std::int64_t stride = query_width() + 5;
    std::vector<float> result(static_cast<std::size_t>(tokens * stride), NAN);
    const AttentionArgs args{.q = q.data(), .k = k.data(), .v = v.data(),
                             .q_stride = query_width() + 3, .k_stride = key_width() + 3, .v_stride = key_width() + 3,
                             .cache = {cache_.data(), shape_.type, num_blocks_, kLayers, shape_.num_kv_heads, size,
                                       shape_.head_dim},
                             .layer = 1, .plan = plan, .num_heads = shape_.num_kv_heads * shape_.group,
                             .num_kv_heads = shape_.num_kv_heads, .head_dim = shape_.head_dim, .scale = scale(),
                             .window = shape_.window, .softcap = shape_.softcap, .rope = rope, .taken = taken,
                             .out = result.data(), .out_stride = stride};
    Team team(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread) {
      planner.rotate(team, thread);
      team.barrier();
      isa::kKernels.attention(args, team, thread);
    }
    const float* row = result.data();
    for (const Piece& piece : pieces)
      for (int t = taken ? piece.end - 1 : piece.begin; t < piece.end; ++t, row += stride)
        std::copy_n(row, query_width(), out[at(piece.sequence)].begin() + t * query_width());
  }

  static constexpr int kLayers = 2;
  const Shape shape_;
  const std::vector<int> lengths_;
  const int shared_;
  std::mt19937 random_;
  std::vector<std::vector<float>> q_, k_, v_;
  std::vector<float> inv_freq_;
  std::vector<std::vector<std::int32_t>> tables_;
  std::vector<std::uint8_t> cache_;
  std::int64_t num_blocks_ = 0;
};

}  // namespace octavo::testing
