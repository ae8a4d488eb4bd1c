// Norms, rotary embedding and gated activations: plain loops for the compiler to vectorize, one pass
// over the values, rounded where transformers' own modules round.
#include <cmath>

#include "formats.h"
#include "step.h"

namespace kv8::KV8_ISA {
namespace {

constexpr int64_t kWorthwhile = 65536;  // values a thread is worth waking for

template <class Code>
inline float rounded(float value) {
  return Code::decode(Code::encode(value));
}

// Sixteen sums side by side: an order that vectors of any length can follow.
template <class Code>
inline float sum_of_squares(const typename Code::Code* x, int64_t count) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int j = 0; j < 16; ++j) {
      const float value = Code::decode(x[i + j]);
      lanes[j] += value * value;
    }
  for (int j = 0; i < count; ++i, ++j) {
    const float value = Code::decode(x[i]);
    lanes[j] += value * value;
  }
  for (int half = 8; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// x / rms(x) times the weight; `order` as in step.h.
template <class Code>
void norm_head(const typename Code::Code* x, const typename Code::Code* weight,
               const typename Code::Code* residual, typename Code::Code* out, int64_t size,
               float epsilon, int32_t order) {
  using Bits = typename Code::Code;
  const float mean = sum_of_squares<Code>(x, size) / static_cast<float>(size);
  const float factor = 1.0f / std::sqrt(mean + epsilon);
  const float offset = order == 1 ? 1.0f : 0.0f;
  auto each = [&](auto value) {
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t normed = Code::encode(value(Code::decode(x[i]) * factor, i));
      out[i] = static_cast<Bits>(
          residual == nullptr ? normed
                              : Code::encode(Code::decode(residual[i]) + Code::decode(normed)));
    }
  };
  if (order == 0)
    each([&](float n, int64_t i) { return Code::decode(weight[i]) * rounded<Code>(n); });
  else
    each([&](float n, int64_t i) { return n * (offset + Code::decode(weight[i])); });
}

template <class Code>
void run(const kv8_norm& n, int64_t num_rows, int num_threads) {
  using Bits = typename Code::Code;
  const bool worthwhile = num_rows * n.num_heads * n.size >= kWorthwhile;
#pragma omp parallel for num_threads(num_threads) if (worthwhile && num_threads > 1)
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t h = 0; h < n.num_heads; ++h) {
      auto at = [&](const void* p, int64_t stride) {
        return p == nullptr ? nullptr : static_cast<const Bits*>(p) + t * stride + h * n.size;
      };
      norm_head<Code>(at(n.x, n.x_stride), static_cast<const Bits*>(n.weight),
                      at(n.residual, n.residual_stride),
                      const_cast<Bits*>(at(n.out, n.out_stride)), n.size, n.epsilon, n.order);
    }
}

template <class Code, class Angle>
void rotate_head(typename Code::Code* x, const typename Angle::Code* cos,
                 const typename Angle::Code* sin, int64_t half) {
  using Bits = typename Code::Code;
  for (int64_t i = 0; i < half; ++i) {
    const float low = Code::decode(x[i]), high = Code::decode(x[i + half]);
    const float low_sum = rounded<Angle>(low * Angle::decode(cos[i])) -
                          rounded<Angle>(high * Angle::decode(sin[i]));
    const float high_sum = rounded<Angle>(high * Angle::decode(cos[i + half])) +
                           rounded<Angle>(low * Angle::decode(sin[i + half]));
    x[i] = static_cast<Bits>(Code::encode(low_sum));
    x[i + half] = static_cast<Bits>(Code::encode(high_sum));
  }
}

template <class Code, class Angle>
void rotate(const kv8_rotary& r, int64_t num_rows, int num_threads) {
  const bool worthwhile = num_rows * r.num_heads * r.size >= kWorthwhile;
#pragma omp parallel for num_threads(num_threads) if (worthwhile && num_threads > 1)
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t h = 0; h < r.num_heads; ++h)
      rotate_head<Code, Angle>(
          static_cast<typename Code::Code*>(r.x) + t * r.x_stride + h * r.size,
          static_cast<const typename Angle::Code*>(r.cos) + t * r.rotary,
          static_cast<const typename Angle::Code*>(r.sin) + t * r.rotary, r.rotary / 2);
}

template <class Code>
void run(const kv8_rotary& r, int64_t num_rows, int num_threads) {
  if (r.angle_dtype == r.dtype) return rotate<Code, Code>(r, num_rows, num_threads);
  return rotate<Code, Float32>(r, num_rows, num_threads);
}

// e**x, relative error below 2**-21; 0 below -87, infinity above 88.
inline float exponential(float x) {
  const float inside = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // NaN stays
  const float y = inside * 1.4426950408889634f;
  // Adding this leaves a whole number in the low bits.
  const float shifted = y + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  // log(2) in two parts, the first with few enough bits that its product is exact.
  const float f = (inside - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;  // Taylor's series, its tail economized over |f| <= log(2) / 2
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const uint32_t power = (bits_of(shifted) + 127u) << 23;
  const float result = p * float_of(power);
  return x < -87.0f ? 0.0f : x > 88.0f ? __builtin_inff() : result;
}

struct Silu {
  static float of(float x) { return x / (1.0f + exponential(-x)); }
};

struct GeluTanh {
  static float of(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y))
    return x / (1.0f + exponential(-2.0f * inner));
  }
};

template <class Code, class Function>
void gate_row(const typename Code::Code* gate, const typename Code::Code* up,
              typename Code::Code* out, int64_t size) {
  using Bits = typename Code::Code;
  for (int64_t i = 0; i < size; ++i) {
    const float value = rounded<Code>(Function::of(Code::decode(gate[i])));
    out[i] = static_cast<Bits>(Code::encode(value * Code::decode(up[i])));
  }
}

template <class Code>
void run(const kv8_gate& g, int64_t num_rows, int num_threads) {
  using Bits = typename Code::Code;
  const auto* gate = static_cast<const Bits*>(g.gate);
  const auto* up = static_cast<const Bits*>(g.up);
  auto* out = static_cast<Bits*>(g.out);
  // A row is cut up too: with one row of many values there is work for all.
  constexpr int64_t kPart = 1024;
  const int64_t parts = (g.size + kPart - 1) / kPart;
  const bool worthwhile = num_rows * g.size >= kWorthwhile / 4;
#pragma omp parallel for num_threads(num_threads) if (worthwhile && num_threads > 1)
  for (int64_t i = 0; i < num_rows * parts; ++i) {
    const int64_t t = i / parts, first = i % parts * kPart;
    const int64_t count = first + kPart < g.size ? kPart : g.size - first;
    const int64_t from = t * g.in_stride + first, to = t * g.out_stride + first;
    if (g.function == 0)
      gate_row<Code, Silu>(gate + from, up + from, out + to, count);
    else
      gate_row<Code, GeluTanh>(gate + from, up + from, out + to, count);
  }
}

template <class Arguments>
void run_as(const Arguments& arguments, int64_t num_rows, int num_threads) {
  switch (static_cast<Format>(arguments.dtype)) {
    case Format::kBFloat16: return run<BFloat16>(arguments, num_rows, num_threads);
    case Format::kFloat16: return run<Float16>(arguments, num_rows, num_threads);
    default: return run<Float32>(arguments, num_rows, num_threads);
  }
}

}  // namespace

void linear(const kv8_linear& l, int64_t num_rows, int num_threads);

void operation(const kv8_operation& o, int64_t num_rows, int num_threads) {
  switch (o.kind) {
    case 0: return linear(*static_cast<const kv8_linear*>(o.arguments), num_rows, num_threads);
    case 1: return run_as(*static_cast<const kv8_norm*>(o.arguments), num_rows, num_threads);
    case 2: return run_as(*static_cast<const kv8_rotary*>(o.arguments), num_rows, num_threads);
    case 3: return run_as(*static_cast<const kv8_gate*>(o.arguments), num_rows, num_threads);
  }
}

}  // namespace kv8::KV8_ISA
