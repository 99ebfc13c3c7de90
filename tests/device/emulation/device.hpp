// A device on the CPU: the same kernels, over an emulation of ptx.cuh and far.cuh.
//
// Every lane is a thread, so that ThreadSanitizer judges what lanes, warps and blocks share. Bulk
// loads are done by an engine of its own, in any order. A bulk store happens as late as it can: its
// source is read, and its destination written, when the thread waits for that. Puts over the
// network are overtaken by signals. Proxy fences do nothing here, but leaving one out is noticed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace emulation {

#if !defined(UEC_EMULATED_LANES)
#define UEC_EMULATED_LANES 2
#endif
#if !defined(UEC_EMULATED_WARPS)
#define UEC_EMULATED_WARPS 2
#endif
inline constexpr int32_t kLanes = UEC_EMULATED_LANES;  // of a warp
inline constexpr int32_t kWarps = UEC_EMULATED_WARPS;  // of a block, where a launch does not say

[[noreturn]] inline void violate(const char* what) {
  std::fprintf(stderr, "emulated device: %s\n", what);
  std::fflush(stderr);
  std::_Exit(1);
}

class Barrier {
 public:
  explicit Barrier(int32_t count) : count_(count) {}
  void wait() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      // Sequentially consistent: a release store could be overtaken by notify_all()'s look for
      // sleepers (libstdc++ 12), and one that just fell asleep would never wake.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      phase_.notify_all();
      return;
    }
    phase_.wait(phase, std::memory_order_acquire);
  }

 private:
  const int32_t count_;
  std::atomic<int32_t> arrived_{0};
  std::atomic<uint32_t> phase_{0};
};

struct Warp {
  Barrier barrier{kLanes};
  uint32_t values[kLanes] = {};
  // Lanes without a proxy fence since they waited for their bulk stores.
  std::atomic<uint32_t> unfenced_deliveries{0};
  std::atomic<uint32_t> observations{0};   // of all lanes so far
  std::atomic<int32_t> far_pending{0};     // puts and signals under way
  std::atomic<int32_t> far_awaited{0};     // lanes that wait for all of them
  std::atomic<int32_t> far_fast{0};        // quick ones so far
  std::atomic<bool> far_unordered{false};  // puts that what comes next need not be behind
};

struct Block {
  explicit Block(int32_t num_warps) : barrier(kLanes * num_warps), warps(num_warps) {}
  Barrier barrier;
  std::vector<Warp> warps;
};

struct BulkStore {
  uint8_t* to;
  const uint8_t* from;
  std::vector<uint8_t> bytes;  // read from there
  bool read = false;
};
using Group = std::vector<BulkStore>;

struct Thread {
  int32_t thread = 0, block_x = 0, block_y = 0, num_blocks_x = 0, num_warps = 0;
  Block* block = nullptr;
  Warp* warp = nullptr;
  std::vector<Group> groups = std::vector<Group>(1);  // of bulk stores; the last one is open
  uint32_t dice = 1;
  uint64_t clock_behind = 0;
  uint32_t observed = 0,
           fenced = 0;  // observations that it knows of, and those behind a proxy fence
};

inline thread_local Thread self;

inline uint32_t roll() {
  self.dice = self.dice * 1664525 + 1013904223;
  return self.dice >> 16;  // the low bits go round soon
}

inline int32_t lane() { return self.thread % kLanes; }
inline uint32_t lane_bit() { return 1u << lane(); }

// What one lane has observed, others may rely on once they have synchronised with it.
inline void observed() {
  self.observed = self.warp->observations.fetch_add(1, std::memory_order_relaxed) + 1;
}
inline void meet() {
  self.warp->barrier.wait();
  self.observed = self.warp->observations.load(std::memory_order_relaxed);
}
inline void fence_observations() { self.fenced = self.observed; }
inline void require_fence(const char* what) {
  if (self.fenced != self.observed) violate(what);
}

// ---- mbarriers: phase | expected | pending arrivals | bytes still to come -----------------------

struct Mbarrier {
  uint32_t phase : 1, expected : 15, pending : 16;
  int32_t bytes;
};
static_assert(sizeof(Mbarrier) == 8);

template <class F>
void update(uint64_t* word, F&& change) {
  std::atomic_ref<uint64_t> atomic(*word);
  uint64_t old = atomic.load(std::memory_order_relaxed), next;
  do {
    Mbarrier barrier;
    std::memcpy(&barrier, &old, 8);
    change(barrier);
    if (barrier.pending == 0 && barrier.bytes == 0) {
      barrier.phase ^= 1;
      barrier.pending = barrier.expected;
    }
    std::memcpy(&next, &barrier, 8);
  } while (!atomic.compare_exchange_weak(old, next, std::memory_order_acq_rel));
}

// ---- the engine of bulk copies, and the network -------------------------------------------------

class CopyEngine {
 public:
  // Apart, so that ThreadSanitizer does not take their turns for order.
  static CopyEngine& bulk() {
    static CopyEngine engine;
    return engine;
  }
  static CopyEngine& network() {
    static CopyEngine engine;
    return engine;
  }
  static CopyEngine& slow_network() {
    static CopyEngine engine;
    return engine;
  }

  void submit(std::function<void()> operation) {
    {
      const std::lock_guard lock(mutex_);
      operations_.push_back(std::move(operation));
    }
    wake_.notify_one();
  }

  ~CopyEngine() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  CopyEngine() {
    for (uint32_t i = 0; i < 2; ++i) threads_.emplace_back([this, i] { run(i + 1); });
  }

  void run(uint32_t seed) {
    std::minstd_rand random(seed);
    for (;;) {
      std::function<void()> operation;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !operations_.empty(); });
        if (operations_.empty()) return;
        const size_t i = random() % operations_.size();
        operation = std::move(operations_[i]);
        operations_[i] = std::move(operations_.back());
        operations_.pop_back();
      }
      if (random() % 8 == 0) std::this_thread::yield();
      operation();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> operations_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

inline void bulk_load(uint8_t* to, const uint8_t* from, uint32_t bytes, uint64_t* barrier) {
  require_fence("a bulk load follows an observation without proxy fence");
  CopyEngine::bulk().submit([=] {
    std::memcpy(to, from, bytes);
    update(barrier, [&](Mbarrier& b) { b.bytes -= static_cast<int32_t>(bytes); });
  });
}

inline void read_source(BulkStore& store) {
  if (!store.read) std::memcpy(store.bytes.data(), store.from, store.bytes.size());
  store.read = true;
}

inline void bulk_store(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  require_fence("a bulk store follows an observation without proxy fence");
  self.groups.back().push_back({to, from, std::vector<uint8_t>(bytes), false});
  if (roll() % 4 == 0) read_source(self.groups.back().back());  // now and then at once
}

inline void bulk_commit() { self.groups.emplace_back(); }

inline void bulk_wait(int32_t pending, bool read_only) {
  const auto closed = static_cast<int32_t>(self.groups.size()) - 1;
  for (int32_t i = 0; i < closed - pending; ++i)
    for (BulkStore& store : self.groups[i]) {
      read_source(store);
      if (!read_only) std::memcpy(store.to, store.bytes.data(), store.bytes.size());
    }
  if (read_only) return;
  if (closed > pending) self.groups.erase(self.groups.begin(), self.groups.end() - 1 - pending);
  self.warp->unfenced_deliveries.fetch_or(lane_bit(), std::memory_order_relaxed);
}

// ---- far peers ----------------------------------------------------------------------------------

struct Network {
  std::vector<uint8_t*> bases;  // [PE] symmetric memory
  int64_t bytes = 0;            // of each
  static Network& instance() {
    static Network network;
    return network;
  }
  // What `symmetric`, in this rank's memory, is called on a peer.
  uint8_t* translate(const void* symmetric, int32_t pe) const {
    const auto* const at = static_cast<const uint8_t*>(symmetric);
    for (uint8_t* base : bases)
      if (at >= base && at < base + bytes) return bases[pe] + (at - base);
    violate("a put to memory that is not symmetric");
  }
};

// A slow one arrives when its warp waits for it, or late. A quick one that need not come behind it
// has been there for long by then.
inline void submit_far(bool slow, std::function<void()> operation) {
  Warp* const warp = self.warp;
  warp->far_pending.fetch_add(1, std::memory_order_relaxed);
  const int32_t ahead = warp->far_fast.fetch_add(slow ? 0 : 1, std::memory_order_relaxed);
  CopyEngine& network = slow ? CopyEngine::slow_network() : CopyEngine::network();
  network.submit([=] {
    using std::chrono::steady_clock;
    const auto late = steady_clock::now() + std::chrono::milliseconds(10);
    while (slow && warp->far_awaited.load(std::memory_order_relaxed) == 0 &&
           steady_clock::now() < late)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (slow && warp->far_fast.load(std::memory_order_relaxed) != ahead)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    operation();
    warp->far_pending.fetch_sub(1, std::memory_order_release);
  });
}

inline void far_quiet() {
  self.warp->far_awaited.fetch_add(1, std::memory_order_relaxed);
  while (self.warp->far_pending.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  self.warp->far_awaited.fetch_sub(1, std::memory_order_relaxed);
  self.warp->far_unordered.store(false, std::memory_order_relaxed);
}

// ---- launches -----------------------------------------------------------------------------------

// A block that has drawn something is delayed now and then, as by other work on a multiprocessor,
// for as long as the others may need to get ahead of it. Otherwise, what they must not do without
// it would nearly always go well. Differs from launch to launch.
inline void hold_up() {
  if (roll() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
}

// Runs `kernel(shared_memory)` in every thread of the grid, and waits for all. None begins before
// all are there: the first would be far ahead of the last.
inline void launch(int32_t num_blocks_x, int32_t num_blocks_y, int64_t shared_bytes,
                   const std::function<void(std::byte*)>& kernel, int32_t num_warps = kWarps) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::byte*> shared;
  std::vector<std::thread> threads;
  static std::atomic<uint32_t> num_launches{0};
  const uint32_t seed = 2654435761 * num_launches.fetch_add(1, std::memory_order_relaxed);
  std::atomic<bool> all_there{false};
  for (int32_t y = 0; y < num_blocks_y; ++y)
    for (int32_t x = 0; x < num_blocks_x; ++x) {
      blocks.push_back(std::make_unique<Block>(num_warps));
      const auto size = static_cast<size_t>((shared_bytes + 127) / 128 * 128);
      shared.push_back(static_cast<std::byte*>(std::aligned_alloc(128, size)));
      std::memset(shared.back(), 0xA5, size);
      for (int32_t t = 0; t < num_warps * kLanes; ++t)
        threads.emplace_back(
            [=, block = blocks.back().get(), memory = shared.back(), &kernel, &all_there] {
              self = {};
              self.thread = t;
              self.block_x = x;
              self.block_y = y;
              self.num_blocks_x = num_blocks_x;
              self.num_warps = num_warps;
              self.block = block;
              self.warp = &block->warps[t / kLanes];
              self.dice = seed + static_cast<uint32_t>(x * 31 + y * 7 + t + 1);
              all_there.wait(false);
              kernel(memory);
              for (const Group& group : self.groups)
                if (!group.empty()) violate("a block ended with bulk stores under way");
            });
    }
  all_there.store(true);
  all_there.notify_all();
  for (std::thread& thread : threads) thread.join();
  for (std::byte* memory : shared) std::free(memory);
}

}  // namespace emulation
