// What the host engine's orderings promise, for ThreadSanitizer to see: everything that a caller
// may do once a call has ended is done at once, and as plain memory accesses. Small, so that it can
// be run many times with one of the orderings broken.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Mode;
using uec::host::Engine;
using uec::host::HostMemory;
using uec::host::HostMover;

constexpr int32_t kRanks = 3;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// The policies by themselves, with nothing around them that would order the threads by chance: two
// workers write, and the last to arrive publishes for both.
void check_policies() {
  struct alignas(128) Memory {
    uint8_t bytes[128] = {};
  } memory[2];
  uint8_t* const bases[] = {memory[0].bytes, memory[1].bytes};
  const std::atomic<bool> gone[2] = {};
  constexpr int64_t kFlag = 0, kDoorbell = 64;
  int32_t written[2] = {};
  const HostMemory zero(bases, 0, kDoorbell, gone), one(bases, 1, kDoorbell, gone);
  for (int32_t epoch = 1; epoch <= 20; ++epoch) {
    int32_t arrived = 0;
    std::vector<std::thread> threads;
    for (int worker = 0; worker < 2; ++worker)
      threads.emplace_back([&, worker] {
        HostMover mover;
        written[worker] = epoch;
        mover.wait_delivered(0, true, [&](uec::Delivered token) {
          if (zero.arrive(token, &arrived, 1) == 2) zero.publish(token, 1, kFlag, epoch);
        });
      });
    threads.emplace_back([&] {
      while (one.observe(kFlag) != static_cast<uint64_t>(epoch)) std::this_thread::yield();
      for (int32_t* at : {&written[0], &written[1]}) {
        CHECK_EQ(*at, epoch);
        *at = 0;
      }
    });
    for (std::thread& thread : threads) thread.join();
  }
}

class Calls {
 public:
  explicit Calls(const GroupOptions& options)
      : ranks(group(), options),
        payload_(options.segment_bytes[0]),
        regions_(ranks.make_weights()),
        rows_(kRanks * kRanks) {}

  static PlanCase group() { return make_group(kRanks, kRanks, kRanks - 1); }

  // Every rank has every other rank's expert.
  static int32_t expert_in(int32_t rank, int32_t slot) { return (rank + slot + 1) % kRanks; }

  uint64_t replicate(int32_t rank, uint64_t seed, Mode mode, bool background) {
    std::vector<int32_t> plan;
    for (int32_t r = 0; r < kRanks; ++r)
      for (int32_t slot = 0; slot < kRanks - 1; ++slot) plan.push_back(expert_in(r, slot));
    ranks.fill_weights(rank, regions_[rank].get(), payload_, seed);
    return ranks.replicate(rank, plan, ranks.addresses(rank, regions_[rank].get()), mode,
                           background);
  }

  // What the call promised, then what it allows: reading and writing the slots.
  void use_slots(int32_t rank, uint64_t seed) {
    for (int32_t slot = 0; slot < kRanks - 1; ++slot)
      ranks.check_slot(rank, slot, 0, expert_in(rank, slot), payload_, seed);
    ranks.fill_slots(rank);
  }

  void rewrite_weights(int32_t rank) {
    ranks.fill_weights(rank, regions_[rank].get(), payload_, 0);
  }

  // Whether a group of the expert's tiles has been sent to the rank, to be handed on in call 1.
  bool has_part_of(int32_t rank, int32_t expert) {
    const uec::SymmetricLayout& layout = ranks.layout().symmetric;
    const int32_t slot = expert_in(rank, 0) == expert ? 0 : 1;
    for (int64_t group = 0; group < layout.max_groups; ++group) {
      auto* const flag = reinterpret_cast<uint64_t*>(ranks.base(rank) + layout.ready(slot, group));
      if (std::atomic_ref(*flag).load() == 1) return true;
    }
    return false;
  }

  void gather(int32_t rank, int32_t count, bool background) {
    int32_t* const row = rows_.data() + rank * kRanks;
    for (int32_t e = 0; e < kRanks; ++e) row[e] = count + rank;
    std::vector<int32_t> table(kRanks * kRanks);
    wait_ok(ranks.engine(rank), ranks.engine(rank).gather(row, table.data(), background));
    for (int32_t i = 0; i < kRanks * kRanks; ++i) CHECK_EQ(table[i], count + i / kRanks);
    for (int32_t e = 0; e < kRanks; ++e) row[e] = -1;
  }

  Ranks ranks;

 private:
  Payload payload_;
  decltype(ranks.make_weights()) regions_;
  std::vector<int32_t> rows_;
};

// Waits with nothing but is_completed(), which takes no lock.
void poll(const Engine& engine, uint64_t epoch) {
  while (!engine.is_completed(epoch)) sleep_us(10);
}

void check_calls(int32_t num_workers) {
  // Several groups of tiles, so that workers share an expert.
  Calls calls({.segment_bytes = {300'000}, .num_workers = num_workers});
  calls.ranks.on_each([&](int32_t rank) {
    for (int32_t k = 1; k <= 24; ++k) {
      const Mode mode = static_cast<Mode>(k % uec::kNumModes);
      const bool background = k % 4 >= 2;
      const uint64_t epoch = calls.replicate(rank, k, mode, background);
      if (background) poll(calls.ranks.engine(rank), epoch);
      wait_ok(calls.ranks.engine(rank), epoch);
      calls.rewrite_weights(rank);
      calls.use_slots(rank, k);
      if (k % 4 == 0) calls.gather(rank, k, background);
    }
  });
}

// Weights are rewritten as soon as a call is seen to have failed, again without a lock. Rank 0
// fails once each of the others has begun to read its weights, and sent a part of them to the
// other.
void check_failures() {
  for (int repeat = 0; repeat < 4; ++repeat) {
    Calls calls({.segment_bytes = {300'000}, .num_workers = 2});
    calls.ranks.on_each([&](int32_t rank) {
      if (rank == 0) {
        for (const int32_t peer : {1, 2})
          while (!calls.has_part_of(peer, 3 - peer)) sleep_us(50);
        calls.ranks.engine(rank).abort();
        return;
      }
      poll(calls.ranks.engine(rank), calls.replicate(rank, 1, Mode::kPush, true));
      CHECK_EQ(calls.ranks.engine(rank).failed_epoch(), 1);
      calls.rewrite_weights(rank);
    });
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a call does not end");
  check_policies();
  check_failures();
  for (const int32_t num_workers : {2, 3, 1}) check_calls(num_workers);
}
