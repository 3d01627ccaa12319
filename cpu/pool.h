// Runs independent units of work on a pool of threads that may have no thread to spare.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace jax_varlen {

// Runs work(0) .. work(n - 1), each once, and returns when all are done. The caller claims units like the helpers do
// and then waits only for units that a running helper holds, so it ends even if the pool never gets to the helpers; one
// that starts late finds nothing left and touches no more than its share of the counters.
template <typename Pool, typename Work>
void RunUnits(Pool& pool, int64_t num_threads, int64_t n, Work work) {
  struct State {
    explicit State(Work w) : work(std::move(w)) {}
    Work work;
    std::atomic<int64_t> claimed{0}, finished{0};
    std::mutex mutex;
    std::condition_variable done;
  };
  const auto state = std::make_shared<State>(std::move(work));
  const auto help = [state, n] {
    for (;;) {
      const int64_t unit = state->claimed.fetch_add(1, std::memory_order_relaxed);
      if (unit >= n) return;
      state->work(unit);
      if (state->finished.fetch_add(1, std::memory_order_acq_rel) + 1 < n) continue;
      const std::lock_guard<std::mutex> lock(state->mutex);
      state->done.notify_all();
    }
  };
  for (int64_t i = 1; i < num_threads && i < n; ++i) pool.Schedule([help] { help(); });
  help();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->done.wait(lock, [&] { return state->finished.load(std::memory_order_acquire) == n; });
}

}  // namespace jax_varlen
