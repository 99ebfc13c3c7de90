// Calls that cannot succeed: each ends soon, with the right reason, and poisons the group.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::Fault;
using uec::FlagKind;
using uec::Mode;
using uec::Report;

constexpr int32_t kPush = static_cast<int32_t>(Mode::kPush);
constexpr int32_t kDirect = static_cast<int32_t>(Mode::kDirect);

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// A group whose ranks call by hand.
class Calls {
 public:
  Calls(const PlanCase& group, const GroupOptions& options) : ranks(group, options) {
    regions_ = ranks.make_weights();
    for (size_t i = 0; i < options.segment_bytes.size(); ++i)
      segments_.push_back(static_cast<int32_t>(i));
  }

  struct Variation {
    int32_t mode = kDirect;
    bool background = false;
  };

  uint64_t submit(int32_t rank, const std::vector<int32_t>& plan) {
    return submit(rank, plan, Variation{});
  }
  uint64_t submit(int32_t rank, const std::vector<int32_t>& plan, const Variation& v) {
    const std::vector<uint64_t> main_ptrs = ranks.addresses(rank, regions_[rank].get());
    Mode mode;
    return ranks.engine(rank).replicate({.slot_expert = plan.data(),
                                         .plan_digest = 0,
                                         .main_ptrs = main_ptrs.data(),
                                         .segments = segments_.data(),
                                         .num_segments = static_cast<int32_t>(segments_.size()),
                                         .mode = v.mode,
                                         .region = -1},
                                        v.background, &mode);
  }

  bool replicate(int32_t rank, const std::vector<int32_t>& plan) {
    return ranks.engine(rank).wait(submit(rank, plan));
  }
  bool replicate(int32_t rank, const std::vector<int32_t>& plan, const Variation& v) {
    return ranks.engine(rank).wait(submit(rank, plan, v));
  }

  Report report(int32_t rank) { return ranks.engine(rank).report(); }
  Fault fault(int32_t rank) { return report(rank).fault; }

  // Later calls fail at once, and reject() and abort() change nothing.
  void check_poisoned(int32_t rank, const std::vector<int32_t>& plan) {
    const Report before = report(rank);
    CHECK(before.fault != Fault::kNone);
    CHECK(!replicate(rank, plan));
    CHECK(!replicate(rank, plan, {.background = true}));
    ranks.engine(rank).reject();
    ranks.engine(rank).abort();
    CHECK(report(rank).fault == before.fault && report(rank).epoch == before.epoch);
  }

  Ranks ranks;

 private:
  std::vector<int32_t> segments_;
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> regions_;
};

// Expert e lives on rank e; one slot each.
PlanCase ring(int32_t num_ranks) { return make_group(num_ranks, num_ranks, 1); }

// Two ranks that call differently: both fail, and one of them knows why.
template <class First, class Second>
void check_mismatch(First&& first, Second&& second) {
  const PlanCase group = ring(2);
  Calls calls(group, {.segment_bytes = {200'000, 3}});
  const std::vector<int32_t> plan{1, 0};
  calls.ranks.on_each([&](int32_t rank) { CHECK(calls.replicate(rank, plan)); });
  calls.ranks.on_each([&](int32_t rank) {
    CHECK(!(rank == 0 ? first(calls, rank) : second(calls, rank)));
    CHECK(calls.fault(rank) == Fault::kMismatch || calls.fault(rank) == Fault::kAborted);
    CHECK_EQ(calls.report(rank).wait.peer, 1 - rank);
    CHECK_EQ(calls.report(rank).epoch, 2);
    CHECK_EQ(calls.ranks.engine(rank).failed_epoch(), 2);
  });
  CHECK(calls.fault(0) == Fault::kMismatch || calls.fault(1) == Fault::kMismatch);
  for (int32_t rank : {0, 1}) {
    calls.check_poisoned(rank, plan);
    calls.ranks.engine(rank).close();
  }
}

void check_mismatches() {
  const std::vector<int32_t> both{1, 0}, one{-1, 0};
  const auto usual = [&](Calls& c, int32_t r) { return c.replicate(r, both); };
  const auto gather = [](Calls& c, int32_t r) {
    std::vector<int32_t> row(2), table(4);
    return c.ranks.engine(r).wait(c.ranks.engine(r).gather(row.data(), table.data(), false));
  };
  check_mismatch(usual, [&](Calls& c, int32_t r) { return c.replicate(r, one); });
  check_mismatch(usual, gather);
  check_mismatch(gather, usual);
}

// A peer whose process ended cannot make the call that others need.
void check_gone() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  Calls lonely(ring(2), {.peer_pipes = {{-1, ends[0]}, {-1, -1}}});
  const uint64_t epoch = lonely.submit(0, {-1, 0}, {.background = true});
  sleep_ms(30);
  CHECK(!lonely.ranks.engine(0).is_completed(epoch));
  close(ends[1]);
  CHECK(!lonely.ranks.engine(0).wait(epoch));
  CHECK(lonely.fault(0) == Fault::kGone);
  CHECK_EQ(lonely.report(0).wait.peer, 1);
  CHECK_EQ(lonely.report(0).root, 1);
  close(ends[0]);
}

// A rank that died may have forked a child that holds its pipe: its process tells.
void check_gone_with_a_child() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  CHECK(child > 0);
  const int process = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  CHECK(process >= 0);
  GroupOptions options;
  options.peer_pipes = {{-1, ends[0]}, {}};
  options.peer_processes = {{-1, process}, {}};
  Calls calls(ring(2), options);
  const uint64_t epoch = calls.submit(0, {-1, 0}, {.background = true});
  sleep_ms(30);
  CHECK(!calls.ranks.engine(0).is_completed(epoch));
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK(!calls.ranks.engine(0).wait(epoch));  // before anybody has waited for the child
  CHECK(calls.fault(0) == Fault::kGone);
  CHECK_EQ(calls.report(0).wait.peer, 1);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  for (const int fd : {ends[0], ends[1], process}) close(fd);
}

// With as many calls under way as there may be, submitting waits, and so does a rejection.
void check_interrupted_in_the_queue() {
  for (const bool rejects : {false, true}) {
    Calls calls(ring(2), {});
    for (int i = 0; i < 4; ++i) calls.submit(0, {-1, 0}, {.background = true});
    int asked = 0;
    const auto interrupted = [&] { return ++asked > 1; };
    if (rejects) {
      calls.ranks.engine(0).reject(interrupted);
    } else {
      const int32_t row[2] = {};
      int32_t table[4];
      const uint64_t epoch = calls.ranks.engine(0).gather(row, table, false, interrupted);
      CHECK(!calls.ranks.engine(0).wait(epoch));
    }
    CHECK(asked > 1);
    CHECK(calls.fault(0) == Fault::kCancelled);
    CHECK(!calls.replicate(1, {-1, 0}));  // the peer has been told
    CHECK_EQ(calls.report(1).root, 0);
  }
}

// abort() ends waits on its own rank and on its peers.
void check_abort() {
  for (const bool background : {false, true}) {
    Calls calls(ring(2), {});
    std::thread waiting([&] {
      CHECK(!calls.replicate(0, {-1, 0}, {.background = background}));
      CHECK(calls.fault(0) == Fault::kAborted);
      CHECK_EQ(calls.report(0).wait.peer, 1);
      CHECK_EQ(calls.report(0).root, 1);
    });
    sleep_ms(20);
    calls.ranks.engine(1).abort();
    waiting.join();
    CHECK(calls.fault(1) == Fault::kCancelled);

    Calls own(ring(2), {});
    std::atomic<bool> failed{false};
    std::thread stuck([&] {
      CHECK(!own.replicate(0, {-1, 0}, {.background = background}));
      failed.store(true);
    });
    sleep_ms(20);
    CHECK(!failed.load());
    own.ranks.engine(0).abort();
    stuck.join();
    CHECK(own.fault(0) == Fault::kCancelled);
    CHECK(!own.replicate(1, {-1, 0}));  // the peer sees it when it calls
    CHECK(own.fault(1) == Fault::kAborted);
  }
}

// An interruption of the caller (a signal handler's flag) ends a call that it runs itself.
void check_interrupted() {
  Calls calls(ring(2), {});
  const uint64_t epoch = calls.submit(0, {-1, 0});
  int polls = 0;
  CHECK(!calls.ranks.engine(0).wait(epoch, [&] { return ++polls == 3; }));
  CHECK_EQ(polls, 3);
  CHECK(calls.fault(0) == Fault::kCancelled);
}

// A rank that never calls: the others name it, also those that wait for it only through another.
void check_timeout() {
  // Rank 1 sends expert 1 to ranks 0 and 2, and waits for rank 2; rank 0 waits for rank 1.
  const std::vector<int32_t> plan{1, -1, 1};
  Calls calls(ring(3), {.num_workers = 2, .call_timeout = 0.3});
  calls.ranks.on_each([&](int32_t rank) {
    if (rank == 2) return;
    if (rank == 0) {  // its clock starts well after rank 1's, however late that thread is
      const std::atomic_ref<uint64_t> record(*reinterpret_cast<uint64_t*>(
          calls.ranks.base(0) + calls.ranks.layout().symmetric.call(1)));
      while (record.load() == 0) sleep_ms(1);
      sleep_ms(200);
    }
    CHECK(!calls.replicate(rank, plan));
  });
  const Report one = calls.report(1);
  CHECK(one.fault == Fault::kTimeout);
  CHECK(one.wait.flag == FlagKind::kCall);
  CHECK_EQ(one.wait.peer, 2);
  CHECK_EQ(one.wait.expert, 1);
  CHECK(one.wait.expected == 1 && one.wait.seen == 0);
  CHECK_EQ(one.root, 2);
  CHECK(one.seconds > 0.3);
  CHECK(!one.all_called);
  const Report zero = calls.report(0);
  CHECK(zero.fault == Fault::kAborted || zero.fault == Fault::kTimeout);
  CHECK_EQ(zero.wait.peer, 1);
  CHECK_EQ(zero.root, 2);
  CHECK(!calls.replicate(2, plan));  // the late one sees that the group has failed
  CHECK(calls.fault(2) == Fault::kAborted);
}

// A rank that calls and then stalls: the shorter limit applies, and the flag is named.
void check_timeout_after_call() {
  const std::vector<int32_t> plan{-1, 0};
  Calls calls(ring(2), {.call_timeout = 60, .wait_timeout = 0.2});
  std::thread zero([&] { CHECK(!calls.replicate(0, plan)); });
  // Rank 1 announces the call as rank 0 did, by hand, and does nothing else.
  const auto& layout = calls.ranks.layout().symmetric;
  const auto word = [](uint8_t* at) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at));
  };
  uint64_t record = 0;
  while ((record = word(calls.ranks.base(1) + layout.call(0)).load()) == 0) sleep_ms(1);
  word(calls.ranks.base(0) + layout.call(1)).store(record);
  zero.join();
  const Report report = calls.report(0);
  CHECK(report.fault == Fault::kTimeout);
  CHECK(report.wait.flag == FlagKind::kOpen);
  CHECK_EQ(report.wait.peer, 1);
  CHECK_EQ(report.root, 1);
  CHECK(report.all_called);
  CHECK(report.seconds > 0.2 && report.seconds < 60);
}

// A failure while other ranks are in the middle of many transfers: all of them end.
void check_failure_in_full_flight() {
  Random random(6);
  for (int repeat = 0; repeat < scaled(40); ++repeat) {
    PlanCase group = make_group(5, 10, 2);
    Calls calls(group, {.segment_bytes = {300'000, 77}, .num_workers = 1 + repeat % 3});
    const int32_t culprit = draw(random, 0, 4), last_call = draw(random, 0, 3);
    std::vector<std::vector<int32_t>> plans;
    for (int i = 0; i < 100; ++i) {
      draw_plan(group, random);
      for (int32_t r = 0; r < 5; ++r) group.place((2 * r + 2) % 10, r);  // all ranks take part
      plans.push_back(group.slot_expert);
    }
    calls.ranks.on_each([&](int32_t rank) {
      for (int k = 0; k < 100; ++k) {
        if (rank == culprit && k == last_call) {
          if (repeat % 2 == 0)
            calls.ranks.engine(rank).reject();
          else
            calls.ranks.engine(rank).abort();
          return;
        }
        if (!calls.replicate(rank, plans[k], {.mode = k % 2 == 0 ? kPush : kDirect})) {
          CHECK(k >= last_call);
          return;
        }
      }
    });
    for (int32_t rank = 0; rank < 5; ++rank) {
      // Gaps in a plan's ring of transfers let a rank finish; then its next call fails.
      CHECK(calls.fault(rank) != Fault::kNone && calls.fault(rank) != Fault::kTimeout);
    }
  }
}

// abort() also ends calls that were submitted and have not run, for this rank and for its peers.
void check_abort_before_the_call_runs() {
  for (const bool background : {false, true}) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      const PlanCase group = ring(2);
      Calls calls(group, {});
      const uint64_t epoch = calls.submit(0, {1, 0}, {.background = background});
      calls.ranks.engine(0).abort();
      CHECK(!calls.ranks.engine(0).wait(epoch));
      CHECK(!calls.replicate(1, {1, 0}));
      CHECK(calls.fault(1) == Fault::kAborted);
      CHECK_EQ(calls.report(1).root, 0);
    }
  }
}

// With helpers: a failed call is over, workers and all, before its wait() returns, and close()
// does not wait for a helper that never heard of the call.
void check_failure_with_helpers() {
  const PlanCase group = ring(2);
  for (int repeat = 0; repeat < 20; ++repeat) {
    Calls calls(group, {.segment_bytes = {4 << 20}, .num_workers = 1 + repeat % 4});
    calls.ranks.engine(1).close();
    const uint64_t epoch = calls.submit(0, {1, 0}, {.background = repeat % 2 == 0});
    CHECK(!calls.ranks.engine(0).wait(epoch));
    CHECK(calls.fault(0) == Fault::kClosed);
    calls.ranks.engine(0).close();
  }
}

// A full queue behind a failed call: the arrays of a call that is still running are not rebuilt.
void check_submitting_behind_a_failure() {
  const PlanCase group = ring(2);
  Calls calls(group, {.segment_bytes = {4 << 20}, .num_workers = 2});
  calls.ranks.engine(1).close();
  std::vector<uint64_t> epochs;
  for (int i = 0; i < 6; ++i) epochs.push_back(calls.submit(0, {1, 0}, {.background = true}));
  for (const uint64_t epoch : epochs) CHECK(!calls.ranks.engine(0).wait(epoch));
}

// Rank 0 waits for rank 1, which waits for rank 2, which is stuck. Whichever times out first, both
// name rank 2.
void check_chain_of_waits() {
  for (const int32_t first : {0, 1}) {
    const PlanCase group = ring(3);
    Calls calls(group, {.call_timeout = 0.6, .wait_timeout = 0.6});
    const std::vector<int32_t> from_two_to_one{-1, 2, -1}, from_one_to_zero{1, -1, -1};
    std::thread one([&] {
      if (first == 0) sleep_ms(200);
      CHECK(!calls.replicate(1, from_two_to_one));
    });
    if (first == 1) sleep_ms(200);
    CHECK(calls.replicate(0, from_two_to_one));
    CHECK(!calls.replicate(0, from_one_to_zero));
    one.join();
    for (const int32_t rank : {0, 1}) CHECK_EQ(calls.report(rank).root, 2);
    CHECK(calls.fault(first) == Fault::kTimeout);
  }
}

// A peer that closed a call earlier is not waited for.
void check_closed_a_call_earlier() {
  const PlanCase group = ring(2);
  Calls calls(group, {.call_timeout = 60});
  calls.ranks.engine(1).close();
  CHECK(calls.replicate(0, {-1, -1}));
  CHECK(!calls.replicate(0, {1, 0}));
  CHECK(calls.fault(0) == Fault::kClosed);
  CHECK_EQ(calls.report(0).wait.peer, 1);
}

// Each wait has its own clock: three senders, each within the limit of the one before.
void check_each_wait_has_its_clock() {
  PlanCase group = make_group(4, 4, 3);
  Calls calls(group, {.call_timeout = 1.0, .wait_timeout = 1.0});
  std::vector<int32_t> plan(12, -1);
  for (int32_t slot = 0; slot < 3; ++slot) plan[slot] = slot + 1;
  calls.ranks.on_each([&](int32_t rank) {
    sleep_ms(600 * rank);
    CHECK(calls.replicate(rank, plan));
  });
}

// An interrupted wait leaves no call behind that could still write to the caller's table.
void check_interrupted_behind_the_background() {
  const PlanCase group = ring(2);
  Calls calls(group, {});
  calls.submit(0, {1, 0}, {.background = true});
  const std::vector<int32_t> row(2);
  std::vector<int32_t> table(4);
  uec::host::Engine& engine = calls.ranks.engine(0);
  const uint64_t epoch = engine.gather(row.data(), table.data(), false);
  CHECK(!engine.wait(epoch, [] { return true; }));
  CHECK(engine.is_completed(epoch));
  CHECK(calls.fault(0) == Fault::kCancelled);
}

}  // namespace

int main() {
  check_abort_before_the_call_runs();
  check_failure_with_helpers();
  check_submitting_behind_a_failure();
  check_chain_of_waits();
  check_closed_a_call_earlier();
  check_each_wait_has_its_clock();
  check_interrupted_behind_the_background();
  check_mismatches();
  check_gone();
  check_gone_with_a_child();
  check_interrupted_in_the_queue();
  check_abort();
  check_interrupted();
  check_timeout();
  check_timeout_after_call();
  check_failure_in_full_flight();
}
