// No wake-up is lost, wherever a publish falls between a waiting rank's looks at its flags and its
// sleep. Every sleep is made an hour long, so that a lost wake-up is a hang and not a delay.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

// What else happens on the thread that sleeps or wakes, just then. A sleep on a word that has moved
// ends at once: `sleeps` is false.
thread_local std::function<void(bool sleeps)> before_sleep;
thread_local std::function<void()> after_wake;

long hour_long_futex(long number, uint32_t* word, int operation, uint32_t value, const timespec*,
                     void*, int) {
  static constexpr timespec kHour{3600, 0};
  if (operation == FUTEX_WAIT && before_sleep) before_sleep(std::atomic_ref(*word).load() == value);
  const timespec* const limit = operation == FUTEX_WAIT ? &kHour : nullptr;
  const long result = syscall(number, word, operation, value, limit, nullptr, 0);
  if (operation == FUTEX_WAKE && after_wake) after_wake();
  return result;
}

}  // namespace

#define syscall hour_long_futex
#include "host/backoff.hpp"
#include "host/policies.hpp"
#undef syscall

#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Delivered;
using uec::host::Backoff;
using uec::host::Doorbell;
using uec::host::HostMemory;
using uec::host::HostMover;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Memories of a few ranks: a flag and a doorbell each.
class Flags {
 public:
  explicit Flags(int32_t num_ranks) : memory_(num_ranks), gone_(num_ranks) {
    for (Memory& memory : memory_) bases_.push_back(memory.bytes);
  }

  HostMemory of(int32_t rank) const { return {bases_.data(), rank, kDoorbell, gone_.data()}; }
  Doorbell doorbell(int32_t rank) const { return Doorbell(bases_[rank] + kDoorbell); }
  bool arrived(int32_t rank, uint64_t epoch) const { return of(rank).observe(0) == epoch; }

  void publish(int32_t from, int32_t to, uint64_t epoch) const {
    HostMover mover;
    mover.wait_delivered(0, true, [&](Delivered token) { of(from).publish(token, to, 0, epoch); });
  }

  // Waits as an engine does.
  void wait(int32_t rank, uint64_t epoch) const {
    for (Backoff backoff(doorbell(rank)); !arrived(rank, epoch);) backoff.pause();
  }

 private:
  static constexpr int64_t kDoorbell = 64;
  struct alignas(128) Memory {
    uint8_t bytes[128] = {};
  };

  std::vector<Memory> memory_;
  std::vector<uint8_t*> bases_;
  std::vector<std::atomic<bool>> gone_;
};

// A publish right after the n-th look, for every n up to the one before a sleep, and one between
// that look and the sleep.
void check_publish_after_every_look() {
  Flags flags(2);
  int last_look = 0;
  bool at_sleep = false;
  for (uint64_t epoch = 1; !at_sleep; ++epoch, ++last_look) {
    bool published = false;
    const auto publish = [&] {
      flags.publish(1, 0, epoch);
      published = true;
    };
    before_sleep = [&](bool sleeps) {
      CHECK(!published || !sleeps);
      if (published) return;
      at_sleep = true;
      publish();
    };
    Backoff backoff(flags.doorbell(0));
    for (int look = 0; !flags.arrived(0, epoch); ++look) {
      if (look == last_look) publish();
      backoff.pause();
    }
    CHECK(published);
  }
  before_sleep = nullptr;
  CHECK(last_look > 1);
}

// All of a rank's workers are woken, whether they are asleep or about to be.
void check_wakes_every_sleeper() {
  Flags flags(2);
  Random random(1);
  constexpr uint32_t kSleepers = 3;
  for (uint64_t epoch = 1; epoch <= 60; ++epoch) {
    std::atomic<uint32_t> asleep{0};
    std::vector<std::thread> sleepers;
    for (uint32_t i = 0; i < kSleepers; ++i)
      sleepers.emplace_back([&] {
        before_sleep = [&](bool) { ++asleep; };
        flags.wait(0, epoch);
      });
    while (asleep.load() < kSleepers) sleep_us(10);
    if (epoch % 2 == 0) sleep_us(draw(random, 0, 3000));
    flags.publish(1, 0, epoch);
    for (std::thread& sleeper : sleepers) sleeper.join();
  }
}

// A woken thread finds the flag: it was stored before the ring. The ringer delays until the
// sleeper has either found it or gone back to sleep.
void check_flag_is_there_when_woken() {
  Flags flags(2);
  for (uint64_t epoch = 1; epoch <= 20; ++epoch) {
    std::atomic<int> sleeps{0};
    std::atomic<bool> found{false};
    std::thread sleeper([&] {
      before_sleep = [&](bool) { ++sleeps; };
      flags.wait(0, epoch);
      found.store(true);
    });
    while (sleeps.load() == 0) sleep_us(10);
    sleep_us(1000);
    after_wake = [&] {
      while (!found.load() && sleeps.load() < 2) sleep_us(10);
      CHECK(found.load());
    };
    flags.publish(1, 0, epoch);
    after_wake = nullptr;
    sleeper.join();
  }
}

// Which epoch of a stress is its last: that of many rounds, or of a second on a busy machine.
class Rounds {
 public:
  explicit Rounds(uint64_t most) : most_(most) {}
  // Asked by one thread, before anything of this epoch; the answer is there for all others after.
  void begin(uint64_t epoch) {
    if (epoch == most_ || std::chrono::steady_clock::now() > limit_) last_.store(epoch);
  }
  bool is_last(uint64_t epoch) const { return last_.load() == epoch; }

 private:
  const uint64_t most_;
  const std::chrono::steady_clock::time_point limit_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(1);
  std::atomic<uint64_t> last_{UINT64_MAX};
};

// The publish and the announcement of a sleeper at the same moment, over and over, on processors
// that may keep a store back while they load: either the ringer sees the sleeper, or the sleeper
// sees the flag.
void check_publish_while_announcing() {
  const Flags flags(2);
  Rounds rounds(scaled(200'000));
  std::atomic<uint64_t> entered[2] = {0, 0};
  // Both enter a round at once, and then are a few dozen instructions apart, this way or that.
  const auto enter = [&](int32_t rank, uint64_t epoch, Random& random) {
    entered[rank].store(epoch);
    for (int spins = 0; entered[1 - rank].load() < epoch; ++spins)
      if (spins > 1000) std::this_thread::yield();
    for (std::atomic<int32_t> delay{draw(random, 0, 20)}; delay.load() > 0;) --delay;
  };
  std::thread sleeper([&] {
    Random random(2);
    const Doorbell doorbell = flags.doorbell(0);
    for (uint64_t epoch = 1; !rounds.is_last(epoch - 1); ++epoch) {
      enter(0, epoch, random);
      while (!flags.arrived(0, epoch)) {
        const uint32_t heard = doorbell.listen();
        if (!flags.arrived(0, epoch)) doorbell.sleep(heard, 0);
        doorbell.leave();
      }
    }
  });
  Random random(3);
  for (uint64_t epoch = 1; !rounds.is_last(epoch - 1); ++epoch) {
    rounds.begin(epoch);
    enter(1, epoch, random);
    flags.publish(1, 0, epoch);
  }
  sleeper.join();
}

// Ranks in a ring that do not spin before they announce themselves: nearly every publish has to
// wake a rank.
void check_ring_of_ranks() {
  constexpr int32_t kRanks = 3;
  Rounds rounds(scaled(20'000));
  const Flags flags(kRanks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      const Doorbell doorbell = flags.doorbell(rank);
      for (uint64_t epoch = 1; !rounds.is_last(epoch - 1); ++epoch) {
        if (rank == 0) {
          rounds.begin(epoch);
          flags.publish(0, 1, epoch);
        }
        while (!flags.arrived(rank, epoch)) {
          const uint32_t heard = doorbell.listen();
          if (!flags.arrived(rank, epoch)) doorbell.sleep(heard, 0);
          doorbell.leave();
        }
        if (rank != 0) flags.publish(rank, (rank + 1) % kRanks, epoch);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  const Watchdog watchdog("a waiting rank sleeps although its flag is set: a wake-up was lost");
  check_publish_after_every_look();
  check_flag_is_there_when_woken();
  check_wakes_every_sleeper();
  check_publish_while_announcing();
  check_ring_of_ranks();
}
