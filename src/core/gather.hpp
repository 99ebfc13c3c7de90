// The exchange of loads: every rank's row of token counts to every rank, in one hop.
#pragma once

#include "core/call.hpp"
#include "core/ring.hpp"

namespace uec {

// Steps of one rank, for a team of one. `row` [num_experts] is this rank's own counts. When
// finished, the table at layout.load(0) of this rank's symmetric memory holds all rows.
//
// The rule that nobody stores to a rank before having seen its record for this epoch also keeps
// rows of two calls apart: a rank announces call k + 1 only after it has copied the table of k.
template <class Memory, class Mover>
class Gather {
 public:
  static constexpr uint32_t kMaxHeld = 4;  // rows stored but not yet published

  UEC_HD Gather(const Call& call, Memory& memory, Mover& mover, const int32_t* row,
                int32_t num_experts, uint8_t* sent)
      : call_(call),
        memory_(memory),
        mover_(mover),
        row_(row),
        row_bytes_(int64_t{4} * num_experts),
        num_experts_(num_experts),
        sent_(sent) {
    for (int32_t r = 0; r < call.num_ranks; ++r) sent_[r] = 0;
  }

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD const Wait& wait() const { return wait_; }

  UEC_HD Step step() {
    if (!fetched_) {
      fetched_ = true;
      Stage stage;
      stage.span.bytes = row_bytes_;
      stage.piece = 0;
      mover_.fetch(0, stage, reinterpret_cast<const uint8_t*>(row_));
    }
    const Step sent = num_sent_ == call_.num_ranks ? Step::kFinished : send_step();
    if (sent == Step::kFailed) return sent;
    if (published_ != held_) {
      const Held held = rows_[published_ % kMaxHeld];
      // Pairs with arrive_step() at the receiver: after it, our row may be read there.
      if (mover_.when_delivered(held.ticket, sent != Step::kProgress, [&](Delivered token) {
            memory_.publish(token, held.rank, call_.layout.gathered(call_.rank),
                            call_.epoch.number);
          })) {
        ++published_;
        return Step::kProgress;
      }
      if (sent != Step::kProgress) return Step::kAwaitDelivered;
    }
    return sent == Step::kFinished ? arrive_step() : sent;
  }

  // After a failure, in place of step(): as Storer::drain_step().
  UEC_HD Step drain_step() {
    if (fetched_ && !mover_.loaded(0)) return Step::kAwaitDelivered;
    return mover_.when_delivered(last_ticket_, true, [](Delivered) {}) ? Step::kFinished
                                                                       : Step::kAwaitDelivered;
  }

 private:
  struct Held {
    int32_t rank;
    uint32_t ticket;
  };

  // Stores our row to one more rank that has called.
  UEC_HD Step send_step() {
    if (!mover_.loaded(0) || held_ - published_ == kMaxHeld) return Step::kAwaitDelivered;
    for (int32_t r = 0; r < call_.num_ranks; ++r) {
      if (sent_[r]) continue;
      const int64_t call_offset = call_.layout.call(r);
      const Verdict verdict = r == call_.rank
                                  ? Verdict::kArrived
                                  : judge_call(memory_, call_offset, r, call_.epoch, &fault_);
      if (verdict == Verdict::kArrived) {
        mover_.store(0, call_.addresses.bases[r] + call_.layout.load(call_.rank, num_experts_),
                     row_bytes_);
        last_ticket_ = mover_.commit(0);
        rows_[held_++ % kMaxHeld] = {r, last_ticket_};
        sent_[r] = 1;
        ++num_sent_;
        return Step::kProgress;
      }
      wait_ = {FlagKind::kCall,   r, -1, -1, CallRecord{memory_.observe(call_offset)}.epoch_low(),
               call_.epoch.number};
      if (verdict == Verdict::kFault) return Step::kFailed;
    }
    return Step::kBlocked;
  }

  UEC_HD Step arrive_step() {
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

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  const int32_t* row_;
  int64_t row_bytes_;
  int32_t num_experts_;
  uint8_t* sent_;  // [G]
  bool fetched_ = false;
  Held rows_[kMaxHeld] = {};
  uint32_t held_ = 0, published_ = 0;
  int32_t num_sent_ = 0, arrived_ = 0;
  uint32_t last_ticket_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

}  // namespace uec
