// Calls of a group of three that cannot succeed.
#pragma once

#include <atomic>

#include "device/emulated_group.hpp"
#include "support/fibers.hpp"

namespace device_tests {

// Rank 0 is home of expert 0, which rank 1 and rank 2 hold.
inline PlanCase three_ranks() {
  PlanCase group = make_group(3, 3, 1);
  CHECK(group.place(0, 1));
  CHECK(group.place(0, 2));
  return group;
}

// Rank 2 is not launched: the others' waits expire, they name it, and the group is poisoned.
inline void launch_without_the_last(EmulatedGroup& ranks) {
  ranks.launch(2, 2);
  for (const int32_t r : {0, 1}) {
    CHECK_EQ(ranks.status(r).failed_call, uint64_t{1});
    const uec::Report report = ranks.report(r);
    CHECK(report.fault == Fault::kTimeout || report.fault == Fault::kAborted);
    CHECK_EQ(report.root, 2);
    CHECK_EQ(report.epoch, uint64_t{1});
  }
  const std::vector<uint8_t> before = ranks.results();
  ranks.launch(2);  // at once: nothing is waited for, moved or added
  CHECK(ranks.results() == before);
  CHECK_EQ(ranks.status(2).failed_call, uint64_t{1});
  CHECK(ranks.report(2).fault == Fault::kAborted);
  CHECK_EQ(ranks.state(0).epoch, uint64_t{0});
}

// One rank has been given another call: some rank says so, and no rank succeeds.
inline void launch_mismatch(EmulatedGroup& ranks, int32_t num_blocks, uint64_t call = 1) {
  ranks.launch(num_blocks);
  int mismatches = 0;
  for (int32_t r = 0; r < 3; ++r) {
    CHECK_EQ(ranks.status(r).failed_call, call);
    const Fault fault = ranks.report(r).fault;
    CHECK(fault == Fault::kMismatch || fault == Fault::kAborted);
    mismatches += fault == Fault::kMismatch;
  }
  CHECK(mismatches > 0);
}

// The host ends the waits of rank 0 once it has told rank 1 of its call.
template <class Launch>
void cancel_while(EmulatedGroup& ranks, const Launch& launch) {
  Fibers threads;
  threads.spawn(launch);
  threads.spawn([&] {
    while (ranks.flag(1, ranks.state(1).layout.call(0)) == 0) Fibers::yield();
    for (int i = 0; i < 10; ++i) Fibers::yield();
    std::atomic_ref(ranks.status(0).cancelled).store(1);
  });
  threads.wait();
}

// Rank 2 never comes.
inline void launch_and_cancel(EmulatedGroup& ranks) {
  cancel_while(ranks, [&] { ranks.launch(2, 2); });
  CHECK(ranks.report(0).fault == Fault::kCancelled);
  CHECK_EQ(ranks.report(0).root, 0);
  CHECK(ranks.report(1).fault == Fault::kAborted);
  CHECK_EQ(ranks.report(1).root, 0);
}

}  // namespace device_tests
