// The exchange of loads: every rank's row of token counts to every rank, in one hop.
#pragma once

#include "core/call.hpp"

namespace uec {

// Steps of one rank. `row` [num_experts] is this rank's own counts. When finished, the table at
// layout.load(0) of this rank's symmetric memory holds all rows.
//
// The rule that nobody stores to a rank before having seen its record for this epoch also keeps
// rows of two calls apart: a rank announces call k + 1 only after it has copied the table of k.
template <class Memory, class Mover>
class Gather {
 public:
  UEC_HD Gather(const Call& call, Memory& memory, Mover& mover, const int32_t* row,
                int32_t num_experts, uint8_t* sent)
      : call_(call),
        memory_(memory),
        mover_(mover),
        row_(row),
        num_experts_(num_experts),
        sent_(sent) {
    for (int32_t r = 0; r < call.num_ranks; ++r) sent_[r] = 0;
  }

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD const Wait& wait() const { return wait_; }

  UEC_HD Step step() {
    bool blocked = false, progress = false;
    for (int32_t r = 0; r < call_.num_ranks; ++r) {
      if (sent_[r]) continue;
      const int64_t call_offset = call_.layout.call(r);
      const Verdict verdict = r == call_.rank
                                  ? Verdict::kArrived
                                  : judge_call(memory_, call_offset, r, call_.epoch, &fault_);
      if (verdict == Verdict::kArrived) {
        send(r);
        progress = true;
        continue;
      }
      wait_ = {FlagKind::kCall,   r, -1, -1, CallRecord{memory_.observe(call_offset)}.epoch_low(),
               call_.epoch.number};
      if (verdict == Verdict::kFault) return Step::kFailed;
      blocked = true;
    }
    if (progress) return Step::kProgress;
    if (blocked) return Step::kBlocked;
    const int32_t first = arrived_;
    for (; arrived_ < call_.num_ranks; ++arrived_) {
      uint64_t seen = 0;
      const Verdict verdict =
          judge_flag(memory_, call_.layout.gathered(arrived_), call_.layout.call(arrived_),
                     arrived_, call_.epoch, &fault_, &seen);
      if (verdict == Verdict::kArrived) continue;
      wait_ = {FlagKind::kGathered, arrived_, -1, -1, seen, call_.epoch.number};
      if (verdict == Verdict::kFault) return Step::kFailed;
      return arrived_ > first ? Step::kProgress : Step::kBlocked;
    }
    return Step::kFinished;
  }

 private:
  UEC_HD void send(int32_t r) {
    mover_.fetch(0, reinterpret_cast<const uint8_t*>(row_), int64_t{4} * num_experts_);
    mover_.store(0, call_.addresses.bases[r] + call_.layout.load(call_.rank, num_experts_),
                 int64_t{4} * num_experts_);
    // Pairs with step() at the receiver: after it, our row may be read there.
    mover_.when_delivered(mover_.commit(), true, [&](Delivered token) {
      memory_.publish(token, r, call_.layout.gathered(call_.rank), call_.epoch.number);
    });
    sent_[r] = 1;
  }

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  const int32_t* row_;
  int32_t num_experts_;
  uint8_t* sent_;  // [G]
  int32_t arrived_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

}  // namespace uec
