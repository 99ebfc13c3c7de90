// A device on the CPU: the same kernels, over an emulation of ptx.cuh and far.cuh.
//
// Every lane is a fiber, a thread to ThreadSanitizer, which so checks what lanes, warps and blocks
// share. Bulk loads are done on their own, in any order. A bulk store happens as late as it can:
// its source is read, and its destination written, when the lane waits for that. Puts over the
// network are overtaken by signals. Proxy fences do nothing here, but leaving one out is noticed.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "ptx/client.hpp"
#include "support/fibers.hpp"

namespace emulation {

#if !defined(UEC_EMULATED_LANES)
#define UEC_EMULATED_LANES 2
#endif
inline constexpr int32_t kLanes = UEC_EMULATED_LANES;  // of a warp
inline constexpr int32_t kWarps = 2;                   // of a block, where a launch does not say

[[noreturn]] inline void violate(const char* what) {
  std::fprintf(stderr, "emulated device: %s\n", what);
  std::fflush(stderr);
  std::_Exit(1);
}

struct Warp {
  FiberBarrier barrier{kLanes};
  uint32_t values[kLanes] = {};
  // Lanes without a proxy fence since they waited for their bulk stores.
  std::atomic<uint32_t> unfenced_deliveries{0};
  std::atomic<uint32_t> observations{0};   // of all lanes so far
  std::atomic<uint32_t> far_pending{0};    // puts and signals under way
  std::atomic<uint32_t> far_awaited{0};    // lanes that wait for all of them
  std::atomic<uint32_t> far_fast{0};       // quick ones so far
  std::atomic<int32_t> ended{0};           // lanes
  std::atomic<bool> far_unordered{false};  // puts that what comes next need not be behind
};

struct Block {
  explicit Block(int32_t num_warps) : barrier(kLanes * num_warps), warps(num_warps) {}
  FiberBarrier barrier;
  std::vector<Warp> warps;
};

struct BulkStore {
  uint8_t* to;
  const uint8_t* from;
  std::vector<uint8_t> bytes;  // read from there
  bool read = false;
};
using Group = std::vector<BulkStore>;

struct Lane {
  int32_t thread = 0, block_x = 0, block_y = 0, num_blocks_x = 0, num_warps = 0;
  Fibers* launch = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  std::vector<Group> groups = std::vector<Group>(1);  // of bulk stores; the last one is open
  uint32_t dice = 1;
  bool all_late = false;
  uint64_t clock_behind = 0;
  uint32_t observed = 0,
           fenced = 0;  // observations that it knows of, and those behind a proxy fence
  uint32_t looks = 0;   // since it last did something that others see
  const std::function<bool(int32_t, const void*)>* is_own = nullptr;  // of the grid
};

UEC_UNSEEN inline Lane& self() { return *static_cast<Lane*>(Fiber::running()->own()); }

inline uint32_t roll() {
  uint32_t& dice = self().dice;
  dice = dice * 1664525 + 1013904223;
  return dice >> 16;  // the low bits go round soon
}

// Delays everything that may be late in some launches, and now and then in others.
inline bool is_late() { return self().all_late || roll() % 4 == 0; }

inline int32_t lane() { return self().thread % kLanes; }
inline uint32_t lane_bit() { return 1u << lane(); }

// Between what a lane does, others go on.
inline void step() {
  if (roll() % 8 == 0) Fibers::yield();
}
inline void look() {
  if (++self().looks % 32 == 0)
    Fibers::pause();
  else
    step();
}
inline void act() {
  self().looks = 0;
  Turns::act();
  step();
}

// What one lane has observed, others may rely on once they have synchronised with it.
inline void observed() {
  self().observed = self().warp->observations.fetch_add(1, std::memory_order_relaxed) + 1;
}
inline void meet() {
  self().warp->barrier.wait();
  self().observed = self().warp->observations.load(std::memory_order_relaxed);
}
inline void fence_observations() { self().fenced = self().observed; }
inline void require_fence(const char* what) {
  if (self().fenced != self().observed) violate(what);
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
  Turns::act();
}

// ---- bulk copies --------------------------------------------------------------------------------

inline void bulk_load(uint8_t* to, const uint8_t* from, uint32_t bytes, uint64_t* barrier) {
  require_fence("a bulk load follows an observation without proxy fence");
  const bool late = is_late();
  self().launch->spawn([=] {
    if (late) Fibers::hold();
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
  self().groups.back().push_back({to, from, std::vector<uint8_t>(bytes), false});
  if (roll() % 4 == 0) read_source(self().groups.back().back());  // now and then at once
}

inline void bulk_commit() { self().groups.emplace_back(); }

inline void bulk_wait(int32_t pending, bool read_only) {
  const auto closed = static_cast<int32_t>(self().groups.size()) - 1;
  for (int32_t i = 0; i < closed - pending; ++i)
    for (BulkStore& store : self().groups[i]) {
      read_source(store);
      if (!read_only) std::memcpy(store.to, store.bytes.data(), store.bytes.size());
    }
  if (read_only) return;
  if (closed > pending)
    self().groups.erase(self().groups.begin(), self().groups.end() - 1 - pending);
  self().warp->unfenced_deliveries.fetch_or(lane_bit(), std::memory_order_relaxed);
}

// ---- far peers ----------------------------------------------------------------------------------

struct Network {
  std::vector<uint8_t*> bases;  // [PE] symmetric memory
  int64_t bytes = 0;            // of each
  static Network& instance() {
    static Network network;
    return network;
  }
  // Once the memory is known.
  void forget_signals() { signals_.assign(bases.size() * bytes / sizeof(uint64_t), 0); }
  // A flag's new value, by a signal, and the last one.
  UEC_UNSEEN void set(uint64_t* flag, uint64_t value) {
    std::atomic_ref(signals_[index(flag)]).store(value, std::memory_order_relaxed);
    std::atomic_ref(*flag).store(value, std::memory_order_release);
  }
  UEC_UNSEEN uint64_t signalled(const uint64_t* flag) {
    return std::atomic_ref(signals_[index(flag)]).load(std::memory_order_relaxed);
  }
  // What `symmetric`, in this rank's memory, is called on a peer.
  uint8_t* translate(const void* symmetric, int32_t pe) const {
    const auto* const at = static_cast<const uint8_t*>(symmetric);
    for (uint8_t* base : bases)
      if (at >= base && at < base + bytes) return bases[pe] + (at - base);
    violate("a put to memory that is not symmetric");
  }

 private:
  UEC_UNSEEN size_t index(const uint64_t* flag) const {
    const auto* const at = reinterpret_cast<const uint8_t*>(flag);
    for (size_t pe = 0; pe < bases.size(); ++pe)
      if (at >= bases[pe] && at < bases[pe] + bytes)
        return (pe * static_cast<size_t>(bytes) + static_cast<size_t>(at - bases[pe])) / 8;
    violate("a signal to memory that is not symmetric");
  }

  std::vector<uint64_t> signals_;  // of each word of all symmetric memories
};

// A slow one arrives when its warp waits for it, or when nothing else runs. A quick one that
// need not come behind it has been there for long by then, unless that one is late too.
inline void submit_far(bool slow, std::function<void()> operation) {
  Warp* const warp = self().warp;
  warp->far_pending.fetch_add(1, std::memory_order_relaxed);
  const uint32_t ahead = warp->far_fast.fetch_add(slow ? 0 : 1, std::memory_order_relaxed);
  const bool late = is_late();
  self().launch->spawn([=, operation = std::move(operation)] {
    if (slow && warp->far_awaited.load(std::memory_order_relaxed) == 0)
      Fibers::await_or_hold(warp->far_awaited, 0);
    if (slow ? warp->far_fast.load(std::memory_order_relaxed) != ahead : late) Fibers::hold();
    operation();
    Turns::act();
    warp->far_pending.fetch_sub(1, std::memory_order_release);
  });
}

inline void far_quiet() {
  Warp& warp = *self().warp;
  warp.far_awaited.fetch_add(1, std::memory_order_relaxed);
  while (const uint32_t pending = warp.far_pending.load(std::memory_order_acquire))
    Fibers::await(warp.far_pending, pending);
  warp.far_awaited.fetch_sub(1, std::memory_order_relaxed);
  warp.far_unordered.store(false, std::memory_order_relaxed);
}

// ---- launches -----------------------------------------------------------------------------------

// A lane that has drawn something is delayed now and then, as by other work on a multiprocessor,
// until the others can get no further ahead of it. Otherwise, what they must not do without it
// would nearly always go well. Differs from launch to launch.
inline void hold_up() {
  if (roll() % 8 == 0) Fibers::hold();
}

struct Grid {
  int32_t blocks = 1, ranks = 1;  // of each rank, a row
  int64_t shared_bytes = 0;
  int32_t warps = kWarps;  // of a block
  int32_t first_rank = 0;  // of the group, in the first row
  bool together = false;   // no block comes later than others
  bool beside = false;     // other kernels of the rank may be running
  // In a transfer: whether an address is in the memory of slots of a row's rank.
  std::function<bool(int32_t row, const void*)> is_own{};
};

// Runs `kernel(shared_memory)` in every thread of the grid, and waits for all.
inline void launch(const Grid& grid, const std::function<void(std::byte*)>& kernel) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::byte*> shared;
  static std::atomic<uint32_t> num_launches{0};
  const uint32_t seed = 2654435761 * num_launches.fetch_add(1, std::memory_order_relaxed);
  Fibers lanes;
  for (int32_t y = 0; y < grid.ranks; ++y)
    for (int32_t x = 0; x < grid.blocks; ++x) {
      blocks.push_back(std::make_unique<Block>(grid.warps));
      const auto size = static_cast<size_t>((grid.shared_bytes + 127) / 128 * 128);
      shared.push_back(static_cast<std::byte*>(std::aligned_alloc(128, size)));
      std::memset(shared.back(), 0xA5, size);
      for (int32_t t = 0; t < grid.warps * kLanes; ++t)
        lanes.spawn([=, &lanes, block = blocks.back().get(), memory = shared.back(), &kernel] {
          Lane lane;
          lane.thread = t;
          lane.block_x = x;
          lane.block_y = y;
          lane.num_blocks_x = grid.blocks;
          lane.num_warps = grid.warps;
          lane.is_own = &grid.is_own;
          lane.launch = &lanes;
          lane.block = block;
          lane.warp = &block->warps[t / kLanes];
          lane.all_late = (seed >> 16) % 3 == 0;
          lane.dice = seed + static_cast<uint32_t>(x * 31 + y * 7 + t + 1);
          Fiber::running()->set_own(&lane);
          kernel(memory);
          for (const Group& group : lane.groups)
            if (!group.empty()) violate("a block ended with bulk stores under way");
          // The next call's signals could overtake them.
          if (lane.warp->ended.fetch_add(1, std::memory_order_acq_rel) == kLanes - 1 &&
              lane.warp->far_pending.load(std::memory_order_relaxed) != 0)
            violate("a warp ended with puts or signals under way");
        });
    }
  lanes.wait();
  for (std::byte* memory : shared) std::free(memory);
}

// The same kernel by its name in the cubin: where the test has a PTX machine, that executes it.
inline void launch(const char* name, void** args, const Grid& grid,
                   const std::function<void(std::byte*)>& kernel) {
  const auto* const machine = ptx_machine::Client::instance();
  if (machine == nullptr) return launch(grid, kernel);
  machine->run({.kernel = name,
                .blocks = static_cast<uint32_t>(grid.blocks),
                .ranks = static_cast<uint32_t>(grid.ranks),
                .threads = static_cast<uint32_t>(grid.warps) * 32,
                .shared_bytes = grid.shared_bytes,
                .args = args,
                .first_rank = grid.first_rank,
                .together = grid.together,
                .beside = grid.beside});
}
template <class Args>
void launch(const char* name, const Args& args, const Grid& grid,
            const std::function<void(std::byte*)>& kernel) {
  void* list[] = {const_cast<Args*>(&args)};
  launch(name, list, grid, kernel);
}

// Lanes of a warp, wherever kernels run.
inline int32_t num_lanes() { return ptx_machine::Client::instance() == nullptr ? kLanes : 32; }

}  // namespace emulation
