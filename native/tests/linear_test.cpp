// Products, norms and elementwise rows against double precision, in all formats and odd shapes, and bit for bit alone
// and in a batch, on one thread and on three. Compiled once per instruction set.
#include "linear.hpp"
#include "rows.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace octavo;
namespace isa = octavo::OCTAVO_ISA;

std::mt19937 rng(20260101);
int failures = 0;

void check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

float normal() { return std::normal_distribution<float>()(rng); }

struct Type {
  const char* name;
  int block_bytes, block_columns;
  std::vector<int> halves;  // where f16 scales lie in a block
};

const std::vector<Type> kTypes = {
    {"Q4_0", 18, 32, {0}},     {"Q4_1", 20, 32, {0, 2}},  {"Q5_0", 22, 32, {0}},     {"Q5_1", 24, 32, {0, 2}},
    {"Q8_0", 34, 32, {0}},     {"Q4_K", 144, 256, {0, 2}}, {"Q5_K", 176, 256, {0, 2}}, {"Q6_K", 210, 256, {208}},
    {"BF16", 2, 1, {}},        {"F16", 2, 1, {}},         {"F32", 4, 1, {}},
};

std::vector<std::uint8_t> random_raw(const Type& type, std::int64_t rows, std::int64_t columns) {
  std::vector<std::uint8_t> raw(static_cast<std::size_t>(rows * columns / type.block_columns * type.block_bytes));
  for (auto& byte : raw) byte = static_cast<std::uint8_t>(rng());
  const std::string name = type.name;
  for (std::size_t block = 0; block < raw.size(); block += static_cast<std::size_t>(type.block_bytes)) {
    for (const int at : type.halves) {
      const auto half = static_cast<std::uint16_t>(0x1c00 + (rng() & 0x83ff));  // +-0.004 to 0.008
      std::memcpy(&raw[block + static_cast<std::size_t>(at)], &half, 2);
    }
    const float value = normal();
    const auto half = static_cast<std::uint16_t>(0x3000 + (rng() & 0x87ff));
    std::uint16_t brain[isa::W];
    isa::store_as(brain, isa::to_bf16(isa::set1(value)));
    if (name == "F32") std::memcpy(&raw[block], &value, 4);
    if (name == "F16") std::memcpy(&raw[block], &half, 2);
    if (name == "BF16") std::memcpy(&raw[block], brain, 2);
  }
  return raw;
}

// Rows of activations in all forms.
struct Rows {
  Rows(std::int64_t count, std::int64_t width)
      : columns(width), stride(width + 3), padded((width + 31) / 32 * 32), f32(static_cast<std::size_t>(count * stride)),
        q8(static_cast<std::size_t>(width % 32 ? 0 : count * width / 32)),
        bf16(static_cast<std::size_t>(count * padded)) {
    for (auto& x : f32) x = normal() * (rng() % 50 == 0 ? 30.0f : 1.0f);
    isa::kKernels.convert(forms(0), columns, 0, count);
  }
  Forms forms(std::int64_t first) {
    Forms x;
    x.f32 = f32.data() + first * stride;
    x.stride = stride;
    x.q8 = q8.empty() ? nullptr : q8.data() + first * columns / 32;
    x.bf16 = bf16.data() + first * padded;
    x.bf16_stride = padded;
    return x;
  }
  double at(std::int64_t row, std::int64_t k, Input input) const {
    const auto r = static_cast<std::size_t>(row * columns / 32 + k / 32);
    if (input == Input::q8) return static_cast<double>(q8[r].q[k % 32]) * q8[r].scale;
    if (input == Input::bf16) return isa::bf16_to_float(bf16[static_cast<std::size_t>(row * padded + k)]);
    return f32[static_cast<std::size_t>(row * stride + k)];
  }
  bool same(const Rows& other) const {
    bool equal = std::memcmp(q8.data(), other.q8.data(), q8.size() * sizeof(Q8)) == 0 && bf16 == other.bf16;
    for (std::size_t i = 0; i < f32.size(); ++i) {
      if (static_cast<std::int64_t>(i) % stride < columns) equal = equal && f32[i] == other.f32[i];
    }
    return equal;
  }
  std::int64_t columns, stride, padded;
  std::vector<float> f32;
  std::vector<Q8> q8;
  std::vector<std::uint16_t> bf16;
};

// What comes after a product is a product of the same: more threads than it has pairs of panels ask for those too.
void run(LinearArgs args, int threads) {
  args.after = args.weight;
  args.after_gated = args.gated;
  Team team(threads);
#pragma omp parallel num_threads(threads)
  isa::kKernels.linear(args, team, omp_get_thread_num());
}

void test_product(const Type& type, std::int64_t n, std::int64_t k, std::int64_t rows, bool gated) {
  const std::string what = std::string(type.name) + " " + std::to_string(n) + "x" + std::to_string(k) + ", " +
                           std::to_string(rows) + " rows" + (gated ? ", gated" : "");
  const auto raw = random_raw(type, n, k);
  // Two parts, where the first has whole panels or not: rows must find their place.
  const std::int64_t first = gated || n < 3 ? n : n / 3;
  std::vector<Part> parts = {{type.name, raw.data(), first, k}};
  const std::size_t row_bytes = raw.size() / static_cast<std::size_t>(n);
  if (first < n) parts.push_back({type.name, raw.data() + row_bytes * static_cast<std::size_t>(first), n - first, k});
  const auto weight = pack(parts, 2);
  Rows x(rows, k);
  std::vector<float> bias(static_cast<std::size_t>(n)), decoded(static_cast<std::size_t>(n * k));
  for (auto& b : bias) b = normal();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) ids[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  Forms table;
  table.f32 = decoded.data();
  table.stride = k;
  isa::kKernels.embed({weight.get(), ids.data(), 1.0f, k, table}, 0, n);
  const std::int64_t width = gated ? n / 2 : n, out_stride = width + 5;
  std::vector<float> out(static_cast<std::size_t>(rows * out_stride), 7.0f);
  const std::vector<float> before = out;
  const Forms to = {.f32 = out.data(), .stride = out_stride};
  const float added = gated ? 0.0f : 7.0f;
  run({weight.get(), bias.data(), x.forms(0), rows, gated ? nullptr : out.data(), out_stride, gated, Activation::silu, to},
      3);
  if (gated && width % kGroup == 0) {
    Rows made(rows, width), right(rows, width);
    run({weight.get(), bias.data(), x.forms(0), rows, nullptr, 0, true, Activation::silu, made.forms(0)}, 3);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::copy_n(&out[static_cast<std::size_t>(row * out_stride)], width, right.forms(row).f32);
    }
    isa::kKernels.convert(right.forms(0), width, 0, rows);
    check(made.same(right), what + ": other forms than of its float32");
  }
  const Format format = weight->segments[0].format;
  const Input input = format == Format::bf16 ? (isa::kKernels.bf16_rows ? Input::bf16 : Input::f32) : weight->inputs[0];
  double worst = 0;
  const auto dot = [&](std::int64_t row, std::int64_t col, double& size) {
    double sum = bias[static_cast<std::size_t>(col)];
    for (std::int64_t c = 0; c < k; ++c) {
      const double product = x.at(row, c, input) * decoded[static_cast<std::size_t>(col * k + c)];
      sum += product;
      size += std::fabs(product);
    }
    return sum;
  };
  for (std::int64_t row = 0; row < rows; row += rows > 40 ? 13 : 1) {
    for (std::int64_t col = 0; col < width; ++col) {
      double size = 1, expected = dot(row, col, size);
      if (gated) {
        double size_up = 1;
        const double up = dot(row, col + width, size_up), gate = expected / (1 + std::exp(-expected));
        expected = gate * up;
        size = size * (1 + std::fabs(up)) + std::fabs(gate) * size_up;
      }
      worst = std::max(worst, std::fabs(out[static_cast<std::size_t>(row * out_stride + col)] - added - expected) / size);
    }
    for (std::int64_t col = width; col < out_stride; ++col) {
      check(out[static_cast<std::size_t>(row * out_stride + col)] == 7.0f, what + ": wrote beyond its columns");
    }
  }
  check(worst < 3e-6, what + ": off by " + std::to_string(worst * 1e6) + "e-6");
  for (std::int64_t row = 0; row < rows; row += rows > 40 ? 13 : 1) {
    std::vector<float> alone(before.begin(), before.begin() + out_stride);
    run({weight.get(), bias.data(), x.forms(row), 1, gated ? nullptr : alone.data(), out_stride, gated,
         Activation::silu, {.f32 = alone.data(), .stride = out_stride}},
        1);
    const bool same = std::memcmp(alone.data(), &out[static_cast<std::size_t>(row * out_stride)],
                                  static_cast<std::size_t>(width) * 4) == 0;
    check(same, what + ": row " + std::to_string(row) + " has other bits alone");
  }
}

void test_norm(std::int64_t columns, std::int64_t group, bool layer) {
  const std::string what = "norm of " + std::to_string(columns) + " by " + std::to_string(group);
  Rows x(3, columns);
  std::vector<float> weight(static_cast<std::size_t>(group)), bias(weight), y(static_cast<std::size_t>(3 * columns));
  for (auto& w : weight) w = normal();
  for (auto& b : bias) b = normal();
  Forms out;
  out.f32 = y.data();
  out.stride = columns;
  isa::kKernels.norm({x.f32.data(), x.stride, columns, group, weight.data(), layer ? bias.data() : nullptr, 1e-5f, x.f32.data(),
             x.stride, out},
            0, 3);
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t start = 0; start < columns; start += group) {
      double mean = 0, square = 0;
      for (std::int64_t k = 0; k < group && layer; ++k) mean += x.at(row, start + k, Input::f32) / static_cast<double>(group);
      for (std::int64_t k = 0; k < group; ++k) square += std::pow(x.at(row, start + k, Input::f32) - mean, 2);
      for (std::int64_t k = 0; k < group; ++k) {
        const double value = x.at(row, start + k, Input::f32);
        double expected = (value - mean) / std::sqrt(square / static_cast<double>(group) + 1e-5) *
                          weight[static_cast<std::size_t>(k)];
        if (layer) expected += bias[static_cast<std::size_t>(k)];
        const double got = y[static_cast<std::size_t>(row * columns + start + k)];
        check(std::fabs(got - value - expected) < 1e-5 * (1 + std::fabs(expected) + std::fabs(value)), what);
      }
    }
  }
}

// The largest sums that integers of a group can make, of either sign.
void test_extremes() {
  for (const int byte : {-128, 127}) {
    const std::int64_t n = 32, k = 64, rows = 33;
    std::vector<std::uint8_t> raw(static_cast<std::size_t>(n * k / 32 * 34), static_cast<std::uint8_t>(byte));
    for (std::size_t block = 0; block < raw.size(); block += 34) std::memcpy(&raw[block], "\x00\x3c", 2);  // 1.0
    const auto weight = pack({{"Q8_0", raw.data(), n, k}}, 1);
    Rows x(rows, k);
    for (std::int64_t i = 0; i < rows * x.stride; ++i) x.f32[static_cast<std::size_t>(i)] = i / x.stride % 2 ? 127 : -127;
    isa::kKernels.convert(x.forms(0), k, 0, rows);
    std::vector<float> out(static_cast<std::size_t>(rows * n));
    run({weight.get(), nullptr, x.forms(0), rows, nullptr, 0, false, Activation::silu,
         {.f32 = out.data(), .stride = n}},
        1);
    for (std::int64_t i = 0; i < rows * n; ++i) {
      const auto expected = static_cast<float>(k * byte * (i / n % 2 ? 127 : -127));
      check(out[static_cast<std::size_t>(i)] == expected, "products of extremes");
    }
  }
}

// What is not a number must stay so through int8, not become one, and keep to its row.
void test_not_a_number() {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(64, 1.0f);
    x[40] = bad;
    std::vector<Q8> q8(2);
    Forms forms;
    forms.f32 = x.data();
    forms.stride = 64;
    forms.q8 = q8.data();
    isa::kKernels.convert(forms, 64, 0, 1);
    check(std::isfinite(q8[0].scale) && !std::isfinite(q8[1].scale), "int8 of a value that is no number");
    for (const char* name : {"Q4_1", "Q8_0"}) {
      const std::size_t block_bytes = name[1] == '4' ? 20 : 34;
      const std::vector<std::uint8_t> raw(32 * 2 * block_bytes, 0x22);
      const auto weight = pack({{name, raw.data(), 32, 64}}, 1);
      Rows rows(33, 64);
      rows.f32[static_cast<std::size_t>(20 * rows.stride + 40)] = bad;
      isa::kKernels.convert(rows.forms(0), 64, 0, 33);
      std::vector<float> out(33 * 32);
      run({weight.get(), nullptr, rows.forms(0), 33, nullptr, 0, false, Activation::silu,
           {.f32 = out.data(), .stride = 32}},
          1);
      for (std::size_t i = 0; i < out.size(); ++i) {
        check(std::isfinite(out[i]) == (i / 32 != 20), std::string(name) + " times a value that is no number");
      }
    }
  }
}

void test_functions() {
  for (int i = -3000; i <= 3000; ++i) {
    const float x = static_cast<float>(i) * 0.03f;
    const double d = x;
    const auto near = [&](isa::F got, double expected, const char* name) {
      check(std::fabs(got[0] - expected) <= 3e-7 * std::fabs(expected) + 4e-7 * (1 + std::fabs(d)),
            std::string(name) + " of " + std::to_string(x));
    };
    if (x <= 88 && x >= -87) {
      check(std::fabs(isa::exp(isa::set1(x))[0] / std::exp(d) - 1) < 3e-7, "exp of " + std::to_string(x));
    }
    near(isa::tanh(isa::set1(x)), std::tanh(d), "tanh");
    near(isa::erf(isa::set1(x)), std::erf(d), "erf");
    near(isa::silu(isa::set1(x)), d / (1 + std::exp(-d)), "silu");
    near(isa::gelu(isa::set1(x)), d / 2 * (1 + std::erf(d / std::sqrt(2.0))), "gelu");
    near(isa::gelu_tanh(isa::set1(x)), d / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (d + 0.044715 * d * d * d))),
         "gelu_tanh");
  }
  check(std::isnan(isa::exp(isa::set1(NAN))[0]), "exp of NaN");
  check(std::isnan(isa::silu(isa::set1(NAN))[0]), "silu of NaN");
  for (std::uint32_t h = 0; h < 65536; ++h) {
    std::uint16_t halves[isa::W] = {static_cast<std::uint16_t>(h)};
    const float x = isa::load_f16(halves)[0];
    isa::store_as(halves, isa::to_f16(isa::set1(x)));
    check(halves[0] == h || std::isnan(x), "f16 there and back: " + std::to_string(h));
  }
}

}  // namespace

int main() {
  test_functions();
  test_extremes();
  test_not_a_number();
  for (const Type& type : kTypes) {
    for (const std::int64_t k : {32, 96, 256, 1280}) {
      if (k % type.block_columns != 0) continue;
      test_product(type, 33, k, 1, false);
      test_product(type, 50, k, 5, false);
      test_product(type, 1, k, 17, false);
      test_product(type, 64, k, 31, true);
    }
    for (std::int64_t rows = 2; rows < 16; ++rows) test_product(type, 40, 256, rows, false);
    test_product(type, 40, 1792, 32, false);  // runs of groups that are not equal
    test_product(type, 96, 256, 127, false);
    test_product(type, 35, 256, 531, false);
    test_product(type, 96, 256, 15, true);
    for (const std::int64_t rows : {1, 9, 33, 531}) test_product(type, 192, 256, rows, true);
  }
  for (const char* name : {"F32", "F16", "BF16"}) {
    for (const Type& type : kTypes) {
      if (std::string(type.name) == name) test_product(type, 20, 45, 17, false);
    }
  }
  for (const bool layer : {false, true}) {
    for (const std::int64_t columns : {1, 15, 17, 64, 576}) test_norm(columns, columns, layer);
  }
  for (const std::int64_t group : {2, 48, 64, 80, 96}) test_norm(3 * group, group, false);
  std::printf(failures ? "%d failures\n" : "all well\n", failures);
  return failures != 0;
}
