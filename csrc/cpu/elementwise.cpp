// Norms, rotary embedding and gated activations: one pass over the values, rounded where
// transformers' own modules round.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "activations.h"
#include "step.h"
#include "values.h"

namespace kv8::KV8_ISA {
namespace {

constexpr int64_t kWorthwhile = 65536;  // values a thread is worth waking for

// Sixteen words side by side, a sum for each of their values: an order that vectors of any length
// can follow.
template <class Code>
inline float sum_of_squares(const typename Code::Code* x, int64_t count) {
  constexpr int kParts = Values<Code>::kParts, kCount = Values<Code>::kCount;
  constexpr int kWords = 16, kVectors = kWords / kLanes;
  Values<Code> sums[kVectors] = {};
  auto add = [&](const typename Code::Code* from) {
    for (int j = 0; j < kVectors; ++j)
      sums[j] = for_each<Code>([](F32 sum, F32 value) { return sum + value * value; }, sums[j],
                               load_values<Code>(WholeVector<Code>(), from + j * kCount));
  };
  int64_t i = 0;
  for (; i + kWords * kParts <= count; i += kWords * kParts) add(x + i);
  if (i < count) {
    typename Code::Code rest[kWords * kParts] = {};
    std::copy(x + i, x + count, rest);
    add(rest);
  }
  float lanes[kParts * kWords];
  for (int part = 0; part < kParts; ++part)
    for (int j = 0; j < kVectors; ++j)
      store(lanes + part * kWords + j * kLanes, sums[j].part[part]);
  for (int half = kParts * kWords / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// x / rms(x) times the weight; `order` as in step.h.
template <class Code>
void norm_head(const typename Code::Code* x, const typename Code::Code* weight,
               const typename Code::Code* residual, typename Code::Code* out, int64_t size,
               float epsilon, int32_t order) {
  const float mean = sum_of_squares<Code>(x, size) / static_cast<float>(size);
  const F32 factor = splat(1.0f / std::sqrt(mean + epsilon));
  const F32 offset = splat(order == 1 ? 1.0f : 0.0f);
  const Round<Code> round;
  auto each = [&](auto weigh) {
    in_vectors<Code>(size, [&](int64_t i, auto vector) KV8_INLINED {
      auto normed = for_each<Code>([&](F32 value, F32 w) { return weigh(value * factor, w); },
                                   load_values<Code>(vector, x + i),
                                   load_values<Code>(vector, weight + i));
      if (residual != nullptr)
        normed = for_each<Code>([&](F32 before, F32 value) { return before + round(value); },
                                load_values<Code>(vector, residual + i), normed);
      store_values<Code>(vector, out + i, normed);
    });
  };
  if (order == 0)
    each([&](F32 n, F32 w) { return w * round(n); });
  else
    each([&](F32 n, F32 w) { return n * (offset + w); });
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

// Angles for the values of a vector, which may be of another type: in their order.
template <class Code, class Angle, class Vector>
KV8_INLINE Values<Code> load_angles(const Vector& vector, const typename Angle::Code* from) {
  if constexpr (std::is_same_v<Code, Angle>) {
    return load_values<Code>(vector, from);
  } else {
    float parts[Values<Code>::kParts][kLanes] = {};
    for (int64_t i = 0; i < vector.count(); ++i)
      parts[i % Values<Code>::kParts][i / Values<Code>::kParts] = Angle::decode(from[i]);
    Values<Code> angles;
    for (int i = 0; i < Values<Code>::kParts; ++i) angles.part[i] = load(parts[i]);
    return angles;
  }
}

// All heads of a token: they share its angles.
template <class Code, class Angle>
void rotate_heads(typename Code::Code* x, int64_t num_heads, int64_t size,
                  const typename Angle::Code* cos, const typename Angle::Code* sin, int64_t half) {
  const Round<Angle> round;
  in_vectors<Code>(half, [&](int64_t i, auto vector) KV8_INLINED {
    const auto low_cos = load_angles<Code, Angle>(vector, cos + i);
    const auto low_sin = load_angles<Code, Angle>(vector, sin + i);
    const auto high_cos = load_angles<Code, Angle>(vector, cos + half + i);
    const auto high_sin = load_angles<Code, Angle>(vector, sin + half + i);
    for (int64_t h = 0; h < num_heads; ++h) {
      auto* const at = x + h * size + i;
      const auto low = load_values<Code>(vector, at), high = load_values<Code>(vector, at + half);
      store_values<Code>(vector, at, for_each<Code>([&](F32 a, F32 b, F32 cos, F32 sin) {
        return round(a * cos) - round(b * sin);
      }, low, high, low_cos, low_sin));
      store_values<Code>(vector, at + half, for_each<Code>([&](F32 a, F32 b, F32 cos, F32 sin) {
        return round(b * cos) + round(a * sin);
      }, low, high, high_cos, high_sin));
    }
  });
}

template <class Code, class Angle>
void rotate(const kv8_rotary& r, int64_t num_rows, int num_threads) {
  const bool worthwhile = num_rows * r.num_heads * r.size >= kWorthwhile;
#pragma omp parallel for num_threads(num_threads) if (worthwhile && num_threads > 1)
  for (int64_t t = 0; t < num_rows; ++t)
    rotate_heads<Code, Angle>(
        static_cast<typename Code::Code*>(r.x) + t * r.x_stride, r.num_heads, r.size,
        static_cast<const typename Angle::Code*>(r.cos) + t * r.rotary,
        static_cast<const typename Angle::Code*>(r.sin) + t * r.rotary, r.rotary / 2);
}

template <class Code>
void run(const kv8_rotary& r, int64_t num_rows, int num_threads) {
  if (r.angle_dtype == r.dtype) return rotate<Code, Code>(r, num_rows, num_threads);
  return rotate<Code, Float32>(r, num_rows, num_threads);
}

template <class Code, class Function>
void gate_row(const typename Code::Code* gate, const typename Code::Code* up,
              typename Code::Code* out, int64_t size) {
  const Round<Code> round;
  in_vectors<Code>(size, [&](int64_t i, auto vector) KV8_INLINED {
    store_values<Code>(vector, out + i, for_each<Code>([&](F32 gate, F32 up) {
      return round(Function::of(gate)) * up;
    }, load_values<Code>(vector, gate + i), load_values<Code>(vector, up + i)));
  });
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
    with_activation(g.function, [&](auto function) {
      gate_row<Code, decltype(function)>(gate + from, up + from, out + to, count);
    });
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
bool gated_at_once(const kv8_gated& g, int64_t num_rows, int num_threads);

static void gated(const kv8_gated& g, int64_t num_rows, int num_threads) {
  if (gated_at_once(g, num_rows, num_threads)) return;
  linear(g.both, num_rows, num_threads);
  run_as(g.gate, num_rows, num_threads);
}

void operation(const kv8_operation& o, int64_t num_rows, int num_threads) {
  switch (o.kind) {
    case 0: return linear(*static_cast<const kv8_linear*>(o.arguments), num_rows, num_threads);
    case 1: return run_as(*static_cast<const kv8_norm*>(o.arguments), num_rows, num_threads);
    case 2: return run_as(*static_cast<const kv8_rotary*>(o.arguments), num_rows, num_threads);
    case 3: return run_as(*static_cast<const kv8_gate*>(o.arguments), num_rows, num_threads);
    case 6: return gated(*static_cast<const kv8_gated*>(o.arguments), num_rows, num_threads);
  }
}

}  // namespace kv8::KV8_ISA
