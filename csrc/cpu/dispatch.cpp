// The C interface, and the choice of the build that fits the CPU.
#include "kernels.h"

#if defined(KV8_AMX)
#include "linear_amx.h"
#endif

#define KV8_DECLARE(isa)                                   \
  namespace kv8::isa {                                     \
  int64_t store(const kv8_store& store, int num_threads);  \
  int64_t attend(const kv8_attend& attend, int num_threads); \
  }
KV8_DECLARE(plain)
#if defined(KV8_X86)
KV8_DECLARE(avx2)
KV8_DECLARE(avx512)
KV8_DECLARE(avx512bf16)
KV8_DECLARE(amx)
#endif

namespace {

enum Isa : int32_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

#if defined(KV8_X86)
bool has_bfloat16() {
#if defined(KV8_BF16)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_matrix_unit() {
#if defined(KV8_AMX)
  return kv8::amx::available();
#else
  return false;
#endif
}
#endif

int32_t best_isa() {
#if defined(KV8_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq"))
    return !has_bfloat16() ? kAvx512 : has_matrix_unit() ? kAmx : kAvx512Bf16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPlain;
}

// Dot products of vectors of bfloat16 run at half the rate of float32 multiply-adds, or less, on the
// CPUs where this was measured: without a matrix unit they have to be asked for.
int32_t fastest_isa() {
  const int32_t best = best_isa();
  return best == kAvx512Bf16 ? static_cast<int32_t>(kAvx512) : best;
}

// The one variable of the library: written by kv8_use_isa, which only tests call.
int32_t isa_in_use = fastest_isa();

}  // namespace

extern "C" {

int32_t kv8_isa(void) { return isa_in_use; }

int32_t kv8_use_isa(int32_t isa) {
  if (isa >= kPlain && isa <= best_isa()) isa_in_use = isa;
  return isa_in_use;
}

int64_t kv8_store_run(const kv8_store* store, int32_t num_threads) {
#if defined(KV8_X86)
  if (isa_in_use >= kAvx512) return kv8::avx512::store(*store, num_threads);
  if (isa_in_use == kAvx2) return kv8::avx2::store(*store, num_threads);
#endif
  return kv8::plain::store(*store, num_threads);
}

int64_t kv8_attend_run(const kv8_attend* attend, int32_t num_threads) {
#if defined(KV8_AMX)
  if (isa_in_use == kAmx) return kv8::amx::attend(*attend, num_threads);
#endif
#if defined(KV8_BF16)
  if (isa_in_use == kAvx512Bf16) return kv8::avx512bf16::attend(*attend, num_threads);
#endif
#if defined(KV8_X86)
  if (isa_in_use >= kAvx512) return kv8::avx512::attend(*attend, num_threads);
  if (isa_in_use == kAvx2) return kv8::avx2::attend(*attend, num_threads);
#endif
  return kv8::plain::attend(*attend, num_threads);
}
}
