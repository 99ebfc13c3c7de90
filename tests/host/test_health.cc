// An engine's health: its counts of calls and waits, and what it knows of its peers.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "engine/health.hpp"
#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using std::chrono::milliseconds;
using uec::CallCounter;
using uec::Fault;
using uec::FlagKind;
using uec::Mode;
using uec::PeerState;
using uec::RecordKind;
using uec::Wait;
using uec::WaitLog;
using uec::WaitMeter;
using uec::Waits;
using uec::host::Engine;

// A wait passes each limit once, and adds only its new time.
void check_meter() {
  WaitLog log;
  WaitMeter meter(log);
  const WaitMeter::Clock::time_point start{};
  const Wait first{FlagKind::kOpen, 3, 7, -1, 4, 5}, second{FlagKind::kDone, 1, 2, -1, 5, 6};
  meter.begin(start);
  meter.count(start + milliseconds(1), first);  // not longer than a limit
  CHECK_EQ(log.read().longer[0], 0);
  meter.count(start + milliseconds(20), first);
  meter.count(start + milliseconds(150), first);
  Waits waits = log.read();
  CHECK(waits.longer == (std::array<int64_t, 4>{1, 1, 1, 0}));
  CHECK(waits.total == milliseconds(150) && waits.longest == milliseconds(150));
  CHECK_EQ(waits.longest_for.peer, 3);

  // A shorter wait counts too, and does not replace the longest.
  meter.begin(start + milliseconds(200));
  meter.count(start + milliseconds(205), second);
  waits = log.read();
  CHECK(waits.longer == (std::array<int64_t, 4>{2, 1, 1, 0}));
  CHECK(waits.total == milliseconds(155) && waits.longest == milliseconds(150));
  CHECK_EQ(waits.longest_for.expert, 7);

  meter.begin(start);
  meter.count(start + milliseconds(1001), second);
  waits = log.read();
  CHECK(waits.longer == (std::array<int64_t, 4>{3, 2, 2, 1}));
  CHECK(waits.longest_for.flag == FlagKind::kDone && waits.longest_for.expected == 6);
}

// Workers count beside each other, and are read meanwhile. ThreadSanitizer watches.
void check_meters_beside_each_other() {
  constexpr int kWorkers = 4, kRounds = 2000;
  WaitLog log;
  CallCounter calls;
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done.load()) {
      const Waits waits = log.read();
      const int64_t longest = waits.longest.count();
      CHECK(longest == 0 || longest == waits.longest_for.expert);  // both of one wait
      CHECK(calls.read().gather <= kWorkers * kRounds);
    }
  });
  std::vector<std::thread> workers;
  for (int32_t w = 0; w < kWorkers; ++w) {
    workers.emplace_back([&, w] {
      WaitMeter meter(log);
      const WaitMeter::Clock::time_point start{};
      for (int32_t i = 1; i <= kRounds; ++i) {
        const int32_t length = i * kWorkers + w;
        meter.begin(start);
        meter.count(start + std::chrono::nanoseconds(length), {FlagKind::kCall, w, length});
        calls.add(uec::Operation::kGather);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  done.store(true);
  reader.join();
  CHECK_EQ(log.read().longest.count(), kWorkers * kRounds + kWorkers - 1);
  CHECK_EQ(calls.read().gather, kWorkers * kRounds);
}

PlanCase ring(int32_t num_ranks) { return make_group(num_ranks, num_ranks, 1); }

class Callers {
 public:
  Callers(int32_t num_ranks, const GroupOptions& options) : ranks(ring(num_ranks), options) {
    regions_ = ranks.make_weights();
  }

  uint64_t submit(int32_t rank, const std::vector<int32_t>& plan) {
    return ranks.replicate(rank, plan, ranks.addresses(rank, regions_[rank].get()), Mode::kDirect,
                           true);
  }

  Ranks ranks;

 private:
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> regions_;
};

// One rank late, one closed, one whose process has ended: rank 0 distinguishes them.
void check_peer_states() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  Callers callers(5,
                  {.call_timeout = 0.2, .peer_pipes = {{-1, -1, -1, ends[0], -1}, {}, {}, {}, {}}});
  const std::vector<int32_t> all{1, 2, 3, 4, 0}, some{1, -1, -1, -1, -1};
  Engine& zero = callers.ranks.engine(0);
  for (const PeerState& words : zero.peer_states())
    CHECK(words.record.word == 0 && !words.abort.set() && !words.gone && words.reached);
  callers.ranks.on_each(
      [&](int32_t rank) { wait_ok(callers.ranks.engine(rank), callers.submit(rank, all)); });
  for (const PeerState& words : zero.peer_states()) CHECK_EQ(words.record.epoch_low(), 1);
  callers.ranks.engine(2).close();
  close(ends[1]);
  const uint64_t failing = callers.submit(0, some);  // rank 1 makes no second call
  wait_ok(callers.ranks.engine(4), callers.submit(4, some));
  CHECK(!zero.wait(failing));
  CHECK(zero.report().fault == Fault::kTimeout);

  const std::vector<PeerState> words = zero.peer_states();
  CHECK_EQ(words.size(), 5);
  CHECK_EQ(words[0].record.epoch_low(), 2);
  CHECK(words[0].abort.set() && words[0].abort.waited_for() == 1);
  CHECK(words[1].record.epoch_low() == 1 && words[1].record.kind() == RecordKind::kCall);
  CHECK(!words[1].abort.set() && !words[1].gone);
  CHECK(words[2].record.kind() == RecordKind::kClosed && words[2].record.is_farewell_of(1));
  CHECK(words[3].gone && words[3].record.epoch_low() == 1);
  CHECK(words[4].record.epoch_low() == 2 && !words[4].abort.set());

  // They stay as they were when the call failed.
  callers.ranks.engine(4).abort();
  CHECK(!zero.peer_states()[4].abort.set());
  close(ends[0]);
}

}  // namespace

int main() {
  check_meter();
  check_meters_beside_each_other();
  check_peer_states();
  return 0;
}
