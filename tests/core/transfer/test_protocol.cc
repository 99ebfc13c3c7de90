// Records and abort words as they travel, and every verdict that a partner's words can lead to.
#include <deque>
#include <map>

#include "core/transfer/call.hpp"
#include "core/transfer/protocol.hpp"
#include "support/check.hpp"

namespace {

using uec::AbortWord;
using uec::CallRecord;
using uec::Epoch;
using uec::Fault;
using uec::FlagState;
using uec::RecordKind;

// Answers each observe with the next value of the word, and repeats the last one.
struct FakeMemory {
  using Team = uec::SingleThread;

  std::map<int64_t, std::deque<uint64_t>> words;
  bool gone = false;
  int acquires = 0;

  uint64_t observe(int64_t offset) {
    auto& values = words[offset];
    if (values.empty()) return 0;
    const uint64_t value = values.front();
    if (values.size() > 1) values.pop_front();
    return value;
  }
  bool peer_gone(int32_t) const { return gone; }
  void acquire_from(int32_t rank, int64_t offset, uint64_t seen) {
    CHECK_EQ(rank, 3);
    CHECK_EQ(words[offset].front(), seen);
    ++acquires;
  }
};

constexpr int64_t kCall = 128, kFlag = 256;
constexpr uint64_t kDigest = 0xFEDCBA9876543210, kOther = 0x0123456789ABCDEF;

Epoch epoch_of(uint64_t number) {
  return {number, CallRecord::make(number, kDigest, RecordKind::kCall)};
}

uint64_t word(uint64_t number, uint64_t digest = kDigest, RecordKind kind = RecordKind::kCall) {
  return CallRecord::make(number, digest, kind).word;
}

void check_records() {
  for (const uint64_t number : {uint64_t{1}, uint64_t{1} << 31, (uint64_t{1} << 32) - 1,
                                uint64_t{1} << 32, (uint64_t{1} << 32) + 5, uint64_t{1} << 63}) {
    for (const RecordKind kind : {RecordKind::kCall, RecordKind::kRejected, RecordKind::kClosed}) {
      const CallRecord record = CallRecord::make(number, kDigest, kind);
      CHECK(record.epoch_low() == static_cast<uint32_t>(number));
      CHECK(record.kind() == kind);
      CHECK_EQ(record.ahead_of(number), 0);
      CHECK_EQ(record.ahead_of(number + 1), -1);  // also across the wrap of 32 bits
      CHECK_EQ(record.ahead_of(number - 1), 1);
      CHECK_EQ(record.ahead_of(number + 1'000'000), -1'000'000);
      CHECK(record.word != word(number, kOther, kind));
      CHECK(record.word != word(number + 1, kDigest, kind));
    }
  }
  // Fresh memory is zero: behind the first call.
  CHECK_EQ(CallRecord{}.ahead_of(1), -1);
  // The highest bits of the digest travel; bit 34 is the lowest that does.
  CHECK(word(1, kDigest) != word(1, kDigest ^ uint64_t{1} << 34));
  CHECK(word(1, kDigest) != word(1, kDigest ^ uint64_t{1} << 63));
}

void check_abort_words() {
  CHECK(!AbortWord{}.set());
  for (const uint64_t number : {uint64_t{0}, uint64_t{7}, (uint64_t{1} << 32) + 5}) {
    for (const int32_t waited_for : {-1, 0, 1, 71, 32765})
      for (const int32_t aborted_by : {-1, 0, 5, 32765}) {
        const AbortWord abort = AbortWord::make(number, waited_for, aborted_by);
        CHECK(abort.set());
        CHECK_EQ(abort.waited_for(), waited_for);
        CHECK_EQ(abort.aborted_by(), aborted_by);
        CHECK_EQ(abort.by_itself(), waited_for < 0 && aborted_by < 0);
        CHECK(abort.word >> 32 == static_cast<uint32_t>(number));
      }
  }
}

struct Judged {
  FlagState verdict;
  Fault fault;
};

Judged check_call(std::deque<uint64_t> record, uint64_t number, bool gone = false) {
  FakeMemory memory{{{kCall, std::move(record)}}, gone};
  Judged judged{FlagState::kWaiting, Fault::kNone};
  judged.verdict = uec::check_call(memory, kCall, 3, epoch_of(number), &judged.fault);
  CHECK_EQ(memory.acquires, judged.verdict == FlagState::kArrived);  // not at each look
  CHECK_EQ(judged.verdict == FlagState::kFault, judged.fault != Fault::kNone);
  return judged;
}

void test_check_call(uint64_t k) {
  CHECK(check_call({word(k)}, k).verdict == FlagState::kArrived);
  CHECK(check_call({word(k)}, k, true).verdict == FlagState::kArrived);  // what it said stands
  CHECK(check_call({0}, 1).verdict == FlagState::kWaiting);
  CHECK(check_call({word(k - 1)}, k).verdict == FlagState::kWaiting);
  CHECK(check_call({word(k - 1, kOther)}, k).verdict == FlagState::kWaiting);
  CHECK(check_call({word(k - 1)}, k, true).fault == Fault::kGone);
  // It called between the two looks, and then ended.
  CHECK(check_call({word(k - 1), word(k)}, k, true).verdict == FlagState::kWaiting);
  CHECK(check_call({word(k, kOther)}, k).fault == Fault::kMismatch);
  CHECK(check_call({word(k + 1)}, k).fault == Fault::kMismatch);
  CHECK(check_call({word(k, kDigest, RecordKind::kRejected)}, k).fault == Fault::kRejected);
  CHECK(check_call({word(k, kOther, RecordKind::kRejected)}, k).fault == Fault::kRejected);
  CHECK(check_call({word(k, kDigest, RecordKind::kClosed)}, k).fault == Fault::kClosed);
  // It has finished this call, or another one in its place, without us.
  CHECK(check_call({word(k + 1, kOther, RecordKind::kClosed)}, k).fault == Fault::kMismatch);
  CHECK(check_call({word(k + 2, kDigest, RecordKind::kClosed)}, k).fault == Fault::kMismatch);
}

Judged check_flag(std::deque<uint64_t> flag, std::deque<uint64_t> record, uint64_t number,
                  bool gone = false) {
  FakeMemory memory{{{kFlag, std::move(flag)}, {kCall, std::move(record)}}, gone};
  Judged judged{FlagState::kWaiting, Fault::kNone};
  uint64_t seen = ~uint64_t{0};
  judged.verdict = uec::check_flag(memory, kFlag, kCall, 3, epoch_of(number), &judged.fault, &seen);
  CHECK_EQ(judged.verdict == FlagState::kFault, judged.fault != Fault::kNone);
  CHECK_EQ(judged.verdict == FlagState::kArrived, seen == number);
  CHECK_EQ(memory.acquires, seen == number);
  return judged;
}

void test_check_flag(uint64_t k) {
  CHECK(check_flag({k}, {0}, k).verdict == FlagState::kArrived);
  CHECK(check_flag({k - 1}, {word(k)}, k).verdict == FlagState::kWaiting);
  CHECK(check_flag({k - 1}, {word(k - 1)}, k).verdict == FlagState::kWaiting);
  // Epochs are compared whole: the same low 32 bits are another epoch.
  CHECK(check_flag({k + (uint64_t{1} << 32)}, {word(k)}, k).verdict == FlagState::kWaiting);
  CHECK(check_flag({k - 1}, {word(k, kOther)}, k).fault == Fault::kMismatch);
  CHECK(check_flag({k - 1}, {word(k + 1)}, k).fault == Fault::kMismatch);
  CHECK(check_flag({k - 1}, {word(k, kDigest, RecordKind::kRejected)}, k).fault ==
        Fault::kRejected);
  CHECK(check_flag({k - 1}, {word(k, kDigest, RecordKind::kClosed)}, k).fault == Fault::kClosed);
  CHECK(check_flag({k - 1}, {word(k + 1, kDigest, RecordKind::kClosed)}, k).fault ==
        Fault::kMismatch);
  CHECK(check_flag({k - 1, k}, {word(k + 1, kDigest, RecordKind::kClosed)}, k).verdict ==
        FlagState::kArrived);
  CHECK(check_flag({k - 1}, {word(k)}, k, true).fault == Fault::kGone);
  // A record that is ahead is ordered after the flag, so the flag is read again before blaming.
  CHECK(check_flag({k - 1, k}, {word(k + 1)}, k).verdict == FlagState::kArrived);
  CHECK(check_flag({k - 1, k}, {word(k)}, k, true).verdict == FlagState::kArrived);
}

void check_find_abort() {
  const uec::Topology t{.num_ranks = 4, .num_experts = 4, .slots_per_rank = 1};
  const auto layout = uec::SymmetricLayout::make(t, 1, 1, 0, nullptr, nullptr);
  FakeMemory memory;
  const uec::Epoch now{9, {}};
  CHECK_EQ(uec::find_abort(memory, layout, now), -1);
  memory.words[layout.abort(2)] = {AbortWord::make(9, -1, -1).word};
  CHECK_EQ(uec::find_abort(memory, layout, now), 2);
  CHECK_EQ(uec::find_abort(memory, layout, uec::Epoch{10, {}}), 2);  // it will not come that far
  CHECK_EQ(uec::find_abort(memory, layout, uec::Epoch{8, {}}), -1);  // it has finished that one
}

}  // namespace

int main() {
  check_records();
  check_abort_words();
  for (const uint64_t k : {uint64_t{2}, uint64_t{1} << 31, (uint64_t{1} << 32) - 1,
                           uint64_t{1} << 32, (uint64_t{1} << 32) + 1, uint64_t{1} << 40}) {
    test_check_call(k);
    test_check_flag(k);
  }
  check_find_abort();
}
