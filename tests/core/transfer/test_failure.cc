// What a failed call reports and publishes, and what a rank sees of its peers' failures.
#include <map>

#include "core/transfer/failure.hpp"
#include "support/check.hpp"

namespace {

using uec::AbortWord;
using uec::Call;
using uec::CallRecord;
using uec::Fault;
using uec::RecordKind;
using uec::Report;

constexpr int32_t kRanks = 5;
constexpr uint64_t kEpoch = 9;

struct FakeMemory {
  using Team = uec::SingleThread;

  std::map<int64_t, uint64_t> words{};
  uint64_t observe(int64_t offset) { return words[offset]; }
};

// Rank 0 of five, which has seen these abort words.
struct Seen {
  Seen() {
    const uec::Topology t{.num_ranks = kRanks, .num_experts = kRanks, .slots_per_rank = 1};
    call.num_ranks = kRanks;
    call.epoch = {kEpoch, CallRecord::make(kEpoch, 7, RecordKind::kCall)};
    call.layout = uec::SymmetricLayout::make(t, 1, 1, 0, nullptr, nullptr);
    call.addresses.bases = bases;
    for (uint8_t*& base : bases) base = &byte;
  }
  Seen& word(int32_t rank, int32_t waited_for, int32_t aborted_by) {
    memory.words[call.layout.abort(rank)] = AbortWord::make(kEpoch, waited_for, aborted_by).word;
    return *this;
  }
  Seen& later_word(int32_t rank, int32_t waited_for, int32_t aborted_by) {
    memory.words[call.layout.abort(rank)] =
        AbortWord::make(kEpoch + 1, waited_for, aborted_by).word;
    return *this;
  }
  Seen& record(int32_t rank, CallRecord record) {
    memory.words[call.layout.call(rank)] = record.word;
    return *this;
  }

  FakeMemory memory;
  Call call;
  uint8_t byte = 0;
  uint8_t* bases[kRanks];
};

void check_before_a_call() {
  const CallRecord last = CallRecord::make(kEpoch - 1, 7, RecordKind::kCall);
  const auto check = [&](Seen& seen) {
    return check_peers(seen.memory, seen.call.layout, seen.call.epoch, last);
  };
  Seen fine, failed, later, disagrees;
  CHECK(check(fine).fault == Fault::kNone);
  Report report = check(failed.word(2, 1, -1));
  CHECK(report.fault == Fault::kAborted);
  CHECK_EQ(report.aborter, 2);
  CHECK(check(later.later_word(2, 1, -1)).fault == Fault::kNone);
  report =
      check(disagrees.record(4, CallRecord::make(kEpoch - 1, ~uint64_t{7}, RecordKind::kCall)));
  CHECK(report.fault == Fault::kMismatch);
  CHECK_EQ(report.wait.peer, 4);
}

void check_who_has_called() {
  uint8_t involved[kRanks] = {1, 1, 0, 1, 0};
  Seen seen;
  seen.call.work.involved = involved;
  const auto called = [&] { return all_called(seen.memory, seen.call); };
  CHECK(!called());
  seen.record(1, CallRecord::make(kEpoch, 7, RecordKind::kCall));
  seen.record(3, CallRecord::make(kEpoch - 1, 7, RecordKind::kCall));
  CHECK(!called());
  seen.record(3, CallRecord::make(kEpoch + 1, 7, RecordKind::kCall));
  CHECK(called());  // the others are not needed, and we are
}

void check_reports() {
  Seen seen;
  Report report = report_step(seen.memory, seen.call, Fault::kNone, {});
  CHECK(report.fault == Fault::kNone);
  report = report_step(seen.memory, seen.call, Fault::kGone, {.peer = 3});
  CHECK(report.fault == Fault::kGone && report.aborter == -1);
  // A peer that failed first and then ended has said why.
  seen.word(2, 3, -1);
  report = report_step(seen.memory, seen.call, Fault::kGone, {.peer = 2});
  CHECK(report.fault == Fault::kAborted);
  CHECK_EQ(report.aborter, 2);
  report = report_step(seen.memory, seen.call, Fault::kMismatch, {.peer = 4});
  CHECK(report.fault == Fault::kMismatch);
  CHECK_EQ(report.aborter, -1);

  report = {.fault = Fault::kAborted, .wait = {.peer = 4}, .aborter = 2, .epoch = kEpoch};
  const AbortWord word = abort_word(0, report);
  CHECK(word.waited_for() == 4 && word.aborted_by() == 2 && word.ahead_of(kEpoch) == 0);
  CHECK(uec::abort_word(0, {.fault = Fault::kCancelled, .wait = {.peer = 4}}).by_itself());
  CHECK(uec::abort_word(0, {.fault = Fault::kRejected, .wait = {.peer = 0}}).by_itself());
}

void check_disagreements() {
  constexpr uint64_t kOurs = uint64_t{5} << 40, kTheirs = uint64_t{6} << 40;
  const CallRecord last = CallRecord::make(kEpoch, kOurs, RecordKind::kCall);
  const auto find = [&](CallRecord record) {
    Seen seen;
    seen.record(3, record);
    return find_disagreement(seen.memory, seen.call.layout, last);
  };
  CHECK_EQ(find({}), -1);
  CHECK_EQ(find(last), -1);
  CHECK_EQ(find(CallRecord::make(kEpoch, kTheirs, RecordKind::kCall)), 3);
  CHECK_EQ(find(CallRecord::make(kEpoch - 1, kTheirs, RecordKind::kCall)), -1);
  CHECK_EQ(find(CallRecord::make(kEpoch + 1, kTheirs, RecordKind::kCall)), -1);
  CHECK_EQ(find(CallRecord::farewell(kEpoch, last)), -1);
  CHECK_EQ(find(CallRecord::farewell(kEpoch, CallRecord::make(kEpoch, kTheirs, RecordKind::kCall))),
           3);
}

}  // namespace

int main() {
  check_before_a_call();
  check_who_has_called();
  check_reports();
  check_disagreements();
}
