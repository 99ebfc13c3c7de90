// The root cause: what a rank's host concludes from the abort words that have reached the rank.
#include <cstdint>

#include "engine/cause.hpp"
#include "support/check.hpp"

namespace {

using uec::AbortWord;
using uec::CallRecord;
using uec::Fault;
using uec::PeerStates;
using uec::RecordKind;
using uec::Report;

constexpr int32_t kRanks = 5;
constexpr uint64_t kEpoch = 9;

// Rank 0 of five, which has seen these abort words.
struct Seen {
  Seen& word(int32_t rank, int32_t waited_for, int32_t aborted_by) {
    states[rank].abort = AbortWord::make(kEpoch, waited_for, aborted_by);
    return *this;
  }
  Seen& later_word(int32_t rank, int32_t waited_for, int32_t aborted_by) {
    states[rank].abort = AbortWord::make(kEpoch + 1, waited_for, aborted_by);
    return *this;
  }
  Seen& gone(int32_t rank) {
    states[rank].gone = true;
    return *this;
  }
  Seen& out_of_reach(int32_t rank) {
    states[rank].reached = false;
    return *this;
  }
  int32_t root() const { return find_root(states, kEpoch, rank); }
  bool written() const { return chain_is_written(states, kEpoch, rank); }

  PeerStates states = PeerStates(kRanks);
  int32_t rank = 0;
};

void check_roots() {
  CHECK_EQ(Seen().word(0, 3, -1).root(), 3);                 // a wait of our own
  CHECK_EQ(Seen().word(0, 1, -1).word(1, 2, -1).root(), 2);  // a chain of waits
  CHECK_EQ(Seen().word(0, -1, -1).root(), 0);                // we failed by ourselves
  CHECK_EQ(Seen().word(0, 1, 2).word(2, -1, -1).root(), 2);  // another did
  CHECK_EQ(Seen().word(0, 1, 2).word(2, 4, -1).root(), 4);   // we were told why
  CHECK_EQ(Seen().word(0, -1, 2).root(), 2);                 // whose word has yet to come
  // We told 1 that we had given up on it; it was waiting for 3 itself.
  CHECK_EQ(Seen().word(0, 1, -1).word(1, 3, 0).root(), 3);
  // 1 had to do with another cause: what it was waiting for would have arrived.
  CHECK_EQ(Seen().word(0, 1, -1).word(1, 0, 2).word(2, 4, -1).root(), 4);
  // Two ranks each wait for what the other's failure has kept from them.
  CHECK_EQ(Seen().word(0, 1, 2).word(1, 0, 0).word(2, 3, -1).root(), 3);
  // 0 and 1 gave up by themselves, on ranks that the other one's word ended while they waited for
  // 3: the causes lead to each other, the waits lead on.
  CHECK_EQ(Seen().word(0, 2, -1).word(1, 4, -1).word(2, 3, 1).word(4, 3, 0).root(), 3);
  // One that failed by itself is the root, whatever chain we are in; we are our own.
  CHECK_EQ(Seen().word(0, 1, -1).word(1, 2, 0).word(3, -1, -1).root(), 3);
  CHECK_EQ(Seen().word(0, 1, -1).word(1, 2, 0).later_word(3, -1, -1).root(), 2);
  CHECK_EQ(Seen().word(0, -1, -1).word(3, -1, -1).root(), 0);
  {
    Seen seen;
    seen.rank = 3;
    CHECK_EQ(seen.word(0, -1, -1).word(3, -1, -1).root(), 3);
  }
  // A rank that failed in a later call has finished this one.
  CHECK_EQ(Seen().word(0, 3, -1).later_word(4, -1, -1).root(), 3);
  CHECK_EQ(Seen().word(0, 3, -1).later_word(3, 4, -1).root(), 3);
  // A cycle must not cause an endless loop.
  const int32_t root = Seen().word(0, 1, -1).word(1, 0, -1).root();
  CHECK(root == 0 || root == 1);
}

void check_chains() {
  CHECK(!Seen().word(0, 1, -1).written());         // 1 may still say whom it waits for
  CHECK(Seen().word(0, 1, -1).gone(1).written());  // never
  CHECK(Seen().word(0, 1, -1).word(1, -1, -1).written());
  CHECK(!Seen().word(0, 1, -1).word(1, 2, 0).word(3, 2, 0).word(4, 2, 0).written());
  CHECK(Seen().word(0, 1, -1).word(1, 2, 0).word(2, 1, 0).word(3, 2, 0).word(4, 2, 0).written());
  // Nobody waits for a rank that this one cannot reach.
  CHECK(Seen().word(0, 1, -1).word(1, 2, 0).word(2, 1, 0).word(3, 2, 0).out_of_reach(4).written());
}

// Told by a rank that had rejected its input: that is what the report says.
void check_rejected() {
  Report report{.fault = Fault::kAborted, .wait = {.peer = 4}, .aborter = 2, .epoch = kEpoch};
  Seen seen = Seen().word(0, 4, 2).word(2, -1, -1);
  seen.states[2].record = CallRecord::make(kEpoch, 1, RecordKind::kRejected);
  name_root(seen.states, 0, &report);
  CHECK(report.fault == Fault::kRejected);
  CHECK_EQ(report.root, 2);
  CHECK_EQ(report.epoch, kEpoch);
}

// Words arrive while the chain is followed; who says nothing ends it, after a bounded time.
void check_waits_for_words() {
  Seen seen;
  seen.word(0, 1, -1);
  Report report{.fault = Fault::kTimeout, .wait = {.peer = 1}, .epoch = kEpoch};
  int32_t reads = 0;
  const auto read = [&] {
    ++reads;
    if (reads == 3) seen.word(1, 2, 0).word(2, -1, -1);
    return seen.states;
  };
  const PeerStates last = await_root(0, &report, read);
  CHECK_EQ(reads, 3);
  CHECK_EQ(report.root, 2);
  CHECK_EQ(last[1].abort.waited_for(), 2);

  for (const Fault fault : {Fault::kAborted, Fault::kMismatch}) {
    reads = 4;
    Seen silent;
    silent.word(0, 1, -1);
    report = {.fault = fault, .wait = {.peer = 1}, .epoch = kEpoch};
    await_root(0, &report, [&] {
      ++reads;
      return silent.states;
    });
    CHECK_EQ(report.root, 1);
    CHECK_EQ(reads == 5, fault == Fault::kMismatch);  // needs no other word
  }
}

}  // namespace

int main() {
  check_roots();
  check_chains();
  check_rejected();
  check_waits_for_words();
}
