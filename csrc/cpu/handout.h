// Work handed out to threads as they ask for it: one that is held up delays nobody.
#pragma once

#include <cstdint>

namespace kv8::KV8_ISA {

// Numbers from 0 on, each given once; shared by the threads of a region.
struct Handout {
  int64_t next = 0;

  int64_t take() {
    int64_t i;
#pragma omp atomic capture
    i = next++;
    return i;
  }
};

// Call work(i, next) for i and what the thread is handed after it, below `count`. So it knows its
// next piece of work, `count` or more if there is none, in time to fetch what that needs.
template <class Work>
void take_ahead(Handout& handout, int64_t i, int64_t count, Work&& work) {
  while (i < count) {
    const int64_t next = handout.take();
    work(i, next);
    i = next;
  }
}

}  // namespace kv8::KV8_ISA
