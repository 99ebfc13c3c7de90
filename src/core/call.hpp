// The two ends of a call: announcing it to the peers, and waiting for what they owe.
#pragma once

#include "core/stream.hpp"

namespace uec {

// Publishes this rank's `call` record to every rank that it can reach. Pairs with judge_call(). It
// is stored after this rank's flags of the previous call, by release stores to the same peer, so
// that a record that is ahead vouches for everything before it.
template <class Memory, class Mover>
UEC_HD void announce_call(const Call& call, Memory& memory, Mover& mover) {
  mover.when_delivered(0, true, [&](Delivered token) {
    for (int32_t r = 0; r < call.num_ranks; ++r)
      if (r != call.rank && call.addresses.bases[r] != nullptr)
        memory.publish(token, r, call.layout.call(call.rank), call.epoch.record.word);
  });
}

// Publishes `open` to the ranks that will write to this one's slots or read its main weights, once
// its own earlier work is done: the caller has finished with the slots, the main weights are final,
// and this rank's reads of its slots in the previous call are complete. Pairs with
// Worker::gate_open().
template <class Memory, class Mover>
UEC_HD void announce_open(const Call& call, Memory& memory, Mover& mover) {
  mover.when_delivered(0, true, [&](Delivered token) {
    for (int32_t r = 0; r < call.num_ranks; ++r)
      if (call.work.opens[r])
        memory.publish(token, r, call.layout.open(call.rank), call.epoch.number);
  });
}

// Publishes a record that is no call: this rank's input was bad, or its group is closing.
template <class Memory, class Mover>
UEC_HD void announce_absence(const Call& call, Memory& memory, Mover& mover, uint64_t word) {
  mover.when_delivered(0, true, [&](Delivered token) {
    for (int32_t r = 0; r < call.num_ranks; ++r)
      if (r != call.rank && call.addresses.bases[r] != nullptr)
        memory.publish(token, r, call.layout.call(call.rank), word);
  });
}

// Tells every rank that it can reach not to wait for this one. The call returns only once
// memory.flags_delivered(): from then on no peer can miss the abort, so the caller may change what
// peers were reading. Pairs with the look at the aborts in Worker::finish_task().
template <class Memory, class Mover>
UEC_HD void announce_abort(const Call& call, Memory& memory, Mover& mover, AbortWord word) {
  mover.when_delivered(0, true, [&](Delivered token) {
    for (int32_t r = 0; r < call.num_ranks; ++r)
      if (call.addresses.bases[r] != nullptr)
        memory.publish(token, r, call.layout.abort(call.rank), word.word);
  });
}

// Everything that others owe this rank. Runs when its own workers have finished; then the slots
// are complete, nobody reads its main weights, and its own sends are delivered and published.
template <class Memory>
class Finish {
 public:
  UEC_HD Finish(const Call& call, Memory& memory) : call_(call), memory_(memory) {}

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD const Wait& wait() const { return wait_; }

  UEC_HD Step step() {
    const int32_t first = next_;
    for (; next_ < call_.work.num_expected; ++next_) {
      const Expected& e = call_.work.expected[next_];
      const bool done = e.kind == Expected::kDone;
      uint64_t seen = 0;
      const Verdict verdict = judge_flag(
          memory_, done ? call_.layout.done(e.idx, e.peer) : call_.layout.pulled(e.idx, e.peer),
          call_.layout.call(e.peer), e.peer, call_.epoch, &fault_, &seen);
      if (verdict == Verdict::kArrived) continue;
      wait_ = {done ? FlagKind::kDone : FlagKind::kPulled,
               e.peer,
               e.expert,
               -1,
               seen,
               call_.epoch.number};
      if (verdict == Verdict::kFault) return Step::kFailed;
      return next_ > first ? Step::kProgress : Step::kBlocked;  // every wait has its own clock
    }
    return Step::kFinished;
  }

 private:
  const Call& call_;
  Memory& memory_;
  int32_t next_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

}  // namespace uec
