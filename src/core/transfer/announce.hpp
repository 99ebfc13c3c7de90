// The two ends of a call: announcing it to the peers, and waiting for what they owe.
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"

namespace uec {

// Publishes a word of this rank to every rank that it can reach but itself.
template <class Token, class Memory>
UEC_HD void publish_record(Token token, const Call& call, Memory& memory, uint64_t word) {
  typename Memory::Team team;
  for (int32_t r = team.index(); r < call.num_ranks; r += team.size())
    if (r != call.rank && call.addresses.reaches(r))
      memory.publish(token, r, call.layout.call(call.rank), word);
}

template <class Token, class Memory>
UEC_HD void publish_open(Token token, const Call& call, Memory& memory) {
  typename Memory::Team team;
  for (int32_t r = team.index(); r < call.num_ranks; r += team.size())
    if (call.work.opens[r])
      memory.publish(token, r, call.layout.open(call.rank), call.epoch.record.word);
}

// Publishes this rank's `call` record. Pairs with check_call(). It is stored after this rank's
// flags of the previous call to the same peer, by a release, so that a record that is ahead vouches
// for everything before it.
template <class Memory, class Mover>
UEC_HD void announce_call(const Call& call, Memory& memory, Mover& mover) {
  mover.wait_delivered(
      0, true, [&](auto token) { publish_record(token, call, memory, call.epoch.record.word); });
}

// Publishes `open` to the ranks that will write to this one's slots or read them or its main
// weights, once its own earlier work is done: the caller has finished with the slots, their
// gradients and the main weights are final, and this rank's reads of its slots in the previous call
// are complete. The word is the record, so that who sees it need not look at both. Pairs with
// WorkQueue::check_open().
template <class Memory, class Mover>
UEC_HD void announce_open(const Call& call, Memory& memory, Mover& mover) {
  mover.wait_delivered(0, true, [&](auto token) { publish_open(token, call, memory); });
}

// Publishes both at once. A peer may see them in either order.
template <class Memory, class Mover>
UEC_HD void announce_call_and_open(const Call& call, Memory& memory, Mover& mover) {
  mover.wait_delivered(0, true, [&](auto token) {
    publish_record(token, call, memory, call.epoch.record.word);
    publish_open(token, call, memory);
  });
}

// Publishes a record that is not a call: this rank's input was bad, or its group is closing.
template <class Memory, class Mover>
UEC_HD void announce_absence(const Call& call, Memory& memory, Mover& mover, uint64_t word) {
  mover.wait_delivered(0, true, [&](auto token) { publish_record(token, call, memory, word); });
}

// Publishes this rank's failure to every rank that it can reach. The call returns only once
// memory.flags_delivered(): from then on no peer can miss the abort, so the caller may change what
// peers were reading. Pairs with find_abort() in Storer::finish_task() and Reducer::finish_piece().
template <class Memory, class Mover>
UEC_HD void announce_abort(const Call& call, Memory& memory, Mover& mover, AbortWord word) {
  mover.wait_delivered(0, true, [&](auto token) {
    typename Memory::Team team;
    for (int32_t r = team.index(); r < call.num_ranks; r += team.size())
      if (call.addresses.reaches(r))
        memory.publish(token, r, call.layout.abort(call.rank), word.word);
  });
}

// Waits for everything that others owe this rank. Runs when its own workers have finished; after it
// the slots are complete, no peer reads its main weights or its slots' gradients, and its own sends
// are delivered and published.
template <class Memory>
class Finish {
 public:
  UEC_HD Finish(const Call& call, Memory& memory)
      : call_(call), memory_(memory), next_(team_.index()) {}

  UEC_HD Fault fault() const { return fault_; }
  // What the last step waited for, or failed at.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader() && waits_for_ >= 0) {
      const Expected& e = call_.work.expected[waits_for_];
      wait = {flag_of(e), e.peer, e.expert, -1, memory_.observe(offset_of(e)), call_.epoch.number};
    }
    return team_.broadcast(wait);
  }

  UEC_HD Step step() {
    const int32_t first = next_;
    Fault fault = Fault::kNone;
    Outcome mine = kAll;
    for (; next_ < call_.work.num_expected; next_ += team_.size()) {
      mine = check_expected(call_.work.expected[next_], &fault);
      if (mine != kAll) break;
    }
    const uint32_t chosen =
        team_.min_sync(static_cast<uint32_t>(mine) << 30 | static_cast<uint32_t>(next_));
    const auto kind = static_cast<Outcome>(chosen >> 30);
    if (kind == kAll) return Step::kFinished;
    // Names the first in the list, as a single thread would.
    waits_for_ = static_cast<int32_t>(chosen & 0x3FFFFFFF);
    fault_ = team_.read_from(waits_for_ % team_.size(), fault);
    if (kind == kFailed) return Step::kFailed;
    // Every wait has its own clock: any arrival is progress.
    return team_.min_sync(next_ == first) == 0 ? Step::kProgress : Step::kWaitsForPeer;
  }

 private:
  enum Outcome : uint32_t { kFailed, kWaits, kAll };  // of a member's share

  UEC_HD static FlagKind flag_of(const Expected& e) {
    if (e.kind == Expected::kConsumed) return FlagKind::kConsumed;
    return e.kind == Expected::kDone ? FlagKind::kDone : FlagKind::kPulled;
  }
  UEC_HD int64_t offset_of(const Expected& e) const {
    if (e.kind == Expected::kConsumed) return call_.layout.consumed(e.idx, e.peer);
    return e.kind == Expected::kDone ? call_.layout.done(e.idx, e.peer)
                                     : call_.layout.pulled(e.idx, e.peer);
  }

  UEC_HD Outcome check_expected(const Expected& e, Fault* fault) {
    uint64_t seen = 0;
    const FlagState state = check_flag(memory_, offset_of(e), call_.layout.call(e.peer), e.peer,
                                       call_.epoch, fault, &seen);
    if (state == FlagState::kArrived) return kAll;
    return state == FlagState::kFault ? kFailed : kWaits;
  }

  const Call& call_;
  Memory& memory_;
  typename Memory::Team team_;
  int32_t next_;
  Fault fault_ = Fault::kNone;
  int32_t waits_for_ = -1;  // what wait() is made of: among those expected
};

}  // namespace uec
