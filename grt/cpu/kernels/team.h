// A few threads at one piece of work, within a single parallel_for: to meet costs them less than to be called again.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

struct Range {
  int64_t first, last;
};

// Members are numbered; parallel_for may hand several numbers, first..last, to one thread, which then does their work.
struct Member {
  std::atomic<int64_t>& arrived;
  int64_t size, first, last, rounds = 0;

  // This member's part of n things, in whole `grain`s. It is the same at every call: pass after pass, each thread finds
  // its part of a recurrent core in its own cache.
  Range part(int64_t n, int64_t grain) const {
    int64_t grains = (n + grain - 1) / grain;
    return {std::min(n, grains * first / size * grain), std::min(n, grains * last / size * grain)};
  }

  // Goes on when all have come here and see what the others wrote.
  void meet() {
    arrived.fetch_add(last - first, std::memory_order_acq_rel);
    int64_t everyone = ++rounds * size;
    for (int tries = 0; arrived.load(std::memory_order_acquire) < everyone; tries++) {
      if (tries > 1'000)  // the others may be waiting for this thread's processor
        std::this_thread::yield();
#ifdef __x86_64__
      else
        _mm_pause();
#endif
    }
  }
};

// What was done, to be done again at the same addresses: one call then does what took a hundred.
struct Tape {
  struct Work {
    bool shared;  // by all members
    std::function<void(Member&)> run;
  };
  std::vector<Work> works;

  void play() const {
    int64_t size = torch::stable::get_num_threads();
    std::atomic<int64_t> arrived{0};
    torch::stable::parallel_for(0, size, 1, [&](int64_t first, int64_t last) {
      Member me{arrived, size, first, last};
      for (const Work& work : works) {
        if (work.shared) {
          work.run(me);
        } else if (first == 0) {
          std::atomic<int64_t> nobody{0};
          Member alone{nobody, 1, 0, 1};
          work.run(alone);
        }
        me.meet();
      }
    });
  }
};

thread_local Tape* recording = nullptr;

// `work` must own, or be outlived by, all that it reads and writes.
template <class F>
void together(int64_t size, const F& work) {
  size = std::clamp<int64_t>(size, 1, torch::stable::get_num_threads());
  if (recording) recording->works.push_back({size > 1, work});
  std::atomic<int64_t> arrived{0};
  torch::stable::parallel_for(0, size, 1, [&](int64_t first, int64_t last) {
    Member member{arrived, size, first, last};
    work(member);
  });
}

}  // namespace
