// Single interleavings of the streaming steps that threads hit only rarely.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/transfer/worker.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/stripes.hpp"

namespace {

using uec::CallRecord;
using uec::Fault;
using uec::RecordKind;
using uec::Step;

constexpr uint64_t kEpoch = 9, kDigest = 0x123456789ABCDEF;

// Rank 0's memory, seen by one worker. `before_look` runs once, ahead of a look at a flag.
struct FakeMemory {
  using Team = uec::SingleThread;

  std::map<int64_t, uint64_t>& words;
  std::map<std::pair<int32_t, int64_t>, uint64_t>& published;
  std::function<void()> before_look;

  uint64_t observe(int64_t offset) {
    if (before_look) std::exchange(before_look, nullptr)();
    return words[offset];
  }
  void publish(uec::Delivered, int32_t rank, int64_t offset, uint64_t value) {
    published[{rank, offset}] = value;
  }
  bool peer_gone(int32_t) const { return false; }
  int32_t arrive(uec::Delivered, int32_t* counter, int32_t n) { return *counter += n; }
};

struct FakeMover : uec::DeliveryPolicy, uec::LocalRing<4> {
  const uint8_t* source[kStages] = {};
  void fetch(uint32_t k, const uec::Stage& stage, const uint8_t* from) {
    describe(k, stage);
    source[k % kStages] = from;
  }
  bool loaded(uint32_t k) const { return described(k); }
  void store(uint32_t k, uint8_t* to, int64_t bytes) {
    std::memcpy(to, source[k % kStages], bytes);
  }
  bool reusable(uint32_t) const { return true; }
  uint32_t commit_and_wait_source(uint32_t) { return 0; }
  template <class F>
  bool wait_delivered(uint32_t, bool, F&& then) {
    then(delivered());
    return true;
  }
  void loads_complete() {}
};

// Rank 0 sends expert 0 to slot 0 of rank 1, in `num_groups` groups.
struct Sender {
  explicit Sender(int64_t num_groups)
      : tiles({num_groups * uec::kGroupBytes}, uec::kGroupBytes),
        group(make_group(2, 2, 1)),
        bytes(num_groups * uec::kGroupBytes),
        weights(bytes, 7) {
    CHECK(group.place(0, 1));
    schedule = std::make_unique<ScheduleArrays>(group, tiles.map(), uec::Mode::kDirect);
    call.layout =
        uec::SymmetricLayout::make(group.topology(), 1, num_groups, 1, &bytes, &slot_offset);
    memory.assign(call.layout.total, 0);
    bases[1] = memory.data();
    main_ptrs[0] = weights.data();
    call.num_ranks = 2;
    call.epoch = {kEpoch, CallRecord::make(kEpoch, kDigest, RecordKind::kCall)};
    call.tiles = tiles.map();
    call.addresses = {.bases = bases,
                      .segment_bytes = &bytes,
                      .slot_offset = &slot_offset,
                      .main_ptrs = main_ptrs,
                      .num_local_experts = 1};
    call.work = {0, 0, 0, 0, tasks, pieces, destinations, expected, opens, involved, needs};
    call.arrived = arrived;
    uec::build_worklist(uec::SingleThread{}, group.topology(), schedule->schedule, local_idx, 0,
                        call.work);
    call.reset_counters(uec::SingleThread{});
    peer_is_at(kEpoch);
  }

  void peer_is_at(uint64_t epoch) {
    const CallRecord record = CallRecord::make(epoch, kDigest, RecordKind::kCall);
    words[call.layout.call(1)] = words[call.layout.open(1)] = record.word;
  }

  Tiles tiles;
  PlanCase group;
  int64_t bytes, slot_offset = 0;
  std::vector<uint8_t> weights, memory;
  std::unique_ptr<ScheduleArrays> schedule;
  uint8_t* bases[2] = {};
  const uint8_t* main_ptrs[1] = {};
  uec::Task tasks[2];
  uec::Piece pieces[4];
  uec::Destination destinations[4];
  uec::Expected expected[4];
  uint8_t opens[2], involved[2], needs[2];
  int32_t arrived[2];
  const int32_t local_idx[2] = {0, 0};
  uec::Call call;
  std::map<int64_t, uint64_t> words;
  std::map<std::pair<int32_t, int64_t>, uint64_t> published;
};

// A worker with its mover and its scratch.
template <class Mover = FakeMover>
struct LoneWith {
  LoneWith(const uec::Call& call, FakeMemory& memory, const uec::Stripe& stripe = {})
      : scratch(2, 4), worker(call, memory, mover, scratch.stripe, stripe) {}

  Mover mover;
  WorkerScratch scratch;
  uec::Worker<FakeMemory, Mover> worker;
};
using Lone = LoneWith<>;

template <class Worker>
Step run(Worker& worker) {
  for (int i = 0; i < 1000; ++i) {
    const Step step = worker.step();
    if (step != Step::kProgress) return step;
  }
  return Step::kWaitsForPeer;
}

// Before a worker looks at the gate of a peer that nothing of its own touches, others send all that
// the peer needs, and it continues with its next call. That is no mismatch.
void check_overtaken_worker() {
  Sender sender(3);
  FakeMemory memory{sender.words, sender.published, nullptr};
  Lone fast[] = {{sender.call, memory, {0, 3}}, {sender.call, memory, {1, 3}}};
  uec::Piece to_nobody = sender.pieces[0];
  to_nobody.source = uec::Source::kSlot;
  to_nobody.source_idx = ~0;
  to_nobody.source_rank = 1;
  to_nobody.dst_count = 0;
  uec::Call own = sender.call;
  own.work.pieces = &to_nobody;
  sender.words[own.layout.ready(0, 2)] = kEpoch;
  FakeMemory slow_memory{sender.words, sender.published, nullptr};
  Lone slow(own, slow_memory, {2, 3});
  slow_memory.before_look = [&] {
    for (Lone& one : fast) CHECK(run(one.worker) == Step::kFinished);
    sender.peer_is_at(kEpoch + 1);
  };
  CHECK(run(slow.worker) == Step::kFinished);
  CHECK(slow.worker.fault() == Fault::kNone);
  CHECK_EQ((sender.published[{1, sender.call.layout.done(0, 0)}]), kEpoch);
  CHECK(std::memcmp(sender.memory.data() + sender.slot_offset, sender.weights.data(),
                    2 * uec::kGroupBytes) == 0);
}

// A mover that knows a stage to be read only once a later commit, or the wait for delivery, says
// so: as a device, whose waits count commits.
struct LateMover : FakeMover {
  uint32_t commits = 0, read = 0;
  uint32_t commit_and_wait_source(uint32_t) {
    read = commits;
    return ++commits;
  }
  bool reusable(uint32_t k) const { return k < read || k >= commits; }
  template <class F>
  bool wait_delivered(uint32_t ticket, bool may_block, F&& then) {
    if (ticket > read && !may_block) return false;
    read = std::max(read, ticket);
    then(delivered());
    return true;
  }
};

// The call fails with a full ring behind a tile that has just been stored. Both sides terminate.
void check_drain_of_a_full_ring() {
  Sender sender(12);
  FakeMemory memory{sender.words, sender.published, nullptr};
  LoneWith<LateMover> lone(sender.call, memory);
  auto& [mover, scratch, worker] = lone;
  CHECK(worker.fetch_step() == Step::kProgress);
  while (mover.commits == 0) CHECK(worker.store_step() == Step::kProgress);
  for (uint32_t i = 0; i < LateMover::kStages - 1; ++i)
    while (worker.fetch_step() != Step::kAwaitDelivered && mover.vacant(i + 1)) {
    }
  int steps = 0;
  while (worker.drain_step() != Step::kFinished) CHECK(++steps < 100);
}

// Either side stops when the other has failed.
void check_sides_see_each_other() {
  {
    Sender sender(1);
    FakeMemory memory{sender.words, sender.published, nullptr};
    Lone lone(sender.call, memory);
    auto& worker = lone.worker;
    sender.peer_is_at(kEpoch + 1);
    CHECK(worker.store_step() == Step::kNeedsFetch);
    CHECK(worker.fetch_step() == Step::kFailed);
    CHECK(worker.store_step() == Step::kFailed);
  }
  // The same for a hub whose home has failed by the time that everything has been pulled.
  Sender sender(2);
  FakeMemory memory{sender.words, sender.published, nullptr};
  Lone lone(sender.call, memory);
  auto& worker = lone.worker;
  sender.tasks[0].pulled_rank = 1;
  sender.tasks[0].pulled_idx = 0;
  for (int i = 0; i < 2; ++i) CHECK(worker.fetch_step() == Step::kProgress);
  sender.words[sender.call.layout.abort(1)] = uec::AbortWord::make(kEpoch, -1, -1).word;
  for (int i = 0; i < 2; ++i) CHECK(worker.store_step() == Step::kProgress);
  CHECK(worker.store_step() == Step::kFailed);
  CHECK(worker.fault() == Fault::kAborted);
  CHECK_EQ(worker.wait().peer, 1);
  CHECK(worker.fetch_step() == Step::kFailed);
  CHECK(worker.step() == Step::kFailed);
  for (int i = 0; worker.drain_step() != Step::kFinished; ++i) CHECK(i < 10);
  CHECK(sender.published.empty());
}

}  // namespace

int main() {
  check_sides_see_each_other();
  check_overtaken_worker();
  check_drain_of_a_full_ring();
}
