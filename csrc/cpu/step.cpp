// The C interface of step.h, on the build in use.
#include "step.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#define KV8_DECLARE(isa)                                                            \
  namespace kv8::isa {                                                              \
  void operation(const kv8_operation& operation, int64_t num_rows, int num_threads); \
  }
KV8_DECLARE(plain)
#if defined(KV8_X86)
KV8_DECLARE(avx2)
KV8_DECLARE(avx512)
#endif

extern "C" {

int64_t kv8_linear_scratch(int64_t num_rows, int64_t num_inputs) {
  // Tiles of 16 rows; vectors of at most 16 words of two values.
  return (num_rows + 15) / 16 * 16 * ((num_inputs + 31) / 32 * 32);
}

int64_t kv8_operations_run(const kv8_operation* list, int64_t count, int64_t num_rows,
                           int32_t num_threads, int64_t* done) {
  auto run = kv8::plain::operation;
#if defined(KV8_X86)
  if (kv8_isa() == 1) run = kv8::avx2::operation;
  if (kv8_isa() >= 2) run = kv8::avx512::operation;
#endif
  for (int64_t i = 0; i < count; ++i) {
    int64_t result = 0;
    if (list[i].kind == 4)
      result = kv8_store_run(static_cast<const kv8_store*>(list[i].arguments), num_threads);
    else if (list[i].kind == 5)
      result = kv8_attend_run(static_cast<const kv8_attend*>(list[i].arguments), num_threads);
    else
      run(list[i], num_rows, num_threads);
    if (result != 0) {
      *done = i;
      return result;
    }
  }
  *done = count;
  return 0;
}

void kv8_prefer_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  // Only whole pages of the system's can be spoken of. A refusal changes nothing but speed.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  if (first < end) (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}
}
