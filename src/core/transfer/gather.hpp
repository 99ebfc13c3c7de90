// The exchange of loads: every rank's row of token counts to every rank, in one hop.
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/ring.hpp"

namespace uec {

// Steps of one rank, run by a team: its members look at the flags of different peers, and store and
// publish to different peers, in parallel. `row` [num_experts] is this rank's own counts; null:
// the mover's first stage holds them already. When finished, the table at layout.load(0) of this
// rank's symmetric memory holds all rows, visible to all members.
//
// The rule that nobody stores to a rank before having seen its record for this epoch also keeps
// rows of two calls apart: a rank announces call k + 1 only after it has copied the table of k.
template <class Memory, class Mover>
class Gather {
 public:
  static constexpr int32_t kMaxUnpublished = 4;  // a team's stores whose rows are not yet published

  // Scratch of the team: `sent` [num_ranks].
  UEC_HD Gather(const Call& call, Memory& memory, Mover& mover, const int32_t* row,
                int32_t num_experts, uint8_t* sent)
      : call_(call),
        memory_(memory),
        mover_(mover),
        next_(team_.index()),
        row_(row),
        num_experts_(num_experts),
        sent_(sent) {
    for (int32_t r = team_.index(); r < call.num_ranks; r += team_.size()) sent_[r] = kUnsent;
  }

  UEC_HD Fault fault() const { return fault_; }
  // What the last step waited for, or failed at.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader() && waits_for_ >= 0) {
      const uint64_t seen =
          memory_.observe(flag_ == FlagKind::kCall ? call_.layout.call(waits_for_)
                                                   : call_.layout.gathered(waits_for_));
      wait = {flag_, waits_for_, -1, -1, seen, call_.epoch.number};
      if (flag_ == FlagKind::kCall) wait.seen = CallRecord{seen}.epoch_low();
    }
    return team_.broadcast(wait);
  }

  UEC_HD Step step() {
    if (!fetched_) fetch();
    const Step sent = all_sent_                            ? Step::kFinished
                      : num_unpublished_ < kMaxUnpublished ? send_step()
                                                           : Step::kAwaitDelivered;
    if (sent == Step::kProgress || sent == Step::kFailed) return sent;
    // Publishes before anything blocks, so that waits and reports name the rank that is late.
    if (num_unpublished_ > 0) return publish_step();
    return sent == Step::kFinished ? arrive_step() : sent;
  }

  // After a failure, in place of step(): as Storer::drain_step().
  UEC_HD Step drain_step() {
    if (fetched_ && !mover_.loaded(0)) return Step::kAwaitDelivered;
    return mover_.wait_delivered(last_ticket_, true, [](Delivered) {}) ? Step::kFinished
                                                                       : Step::kAwaitDelivered;
  }

 private:
  enum Sent : uint8_t { kUnsent, kStored, kPublished };       // each member's own ranks
  enum Outcome : uint32_t { kFailed, kReady, kWaits, kAll };  // of a member's share

  UEC_HD int64_t row_bytes() const { return int64_t{4} * num_experts_; }

  UEC_HD void fetch() {
    fetched_ = true;
    Stage stage = {};
    stage.span.bytes = static_cast<int32_t>(row_bytes());
    stage.piece = 0;
    mover_.fetch(0, stage, reinterpret_cast<const uint8_t*>(row_));
  }

  // Each member stores our row to one more rank that has called.
  UEC_HD Step send_step() {
    Outcome mine = kAll;
    int32_t at = 0;
    Fault fault = Fault::kNone;
    for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
      if (sent_[r] != kUnsent) continue;
      const FlagState state =
          r == call_.rank ? FlagState::kArrived
                          : check_call(memory_, call_.layout.call(r), r, call_.epoch, &fault);
      if (state == FlagState::kWaiting && mine == kWaits) continue;  // the first is named
      mine = state == FlagState::kFault ? kFailed : state == FlagState::kArrived ? kReady : kWaits;
      at = r;
      if (mine != kWaits) break;
    }
    const Outcome kind = choose(mine, at, fault, FlagKind::kCall);
    if (kind == kAll) {
      all_sent_ = true;
      return Step::kFinished;
    }
    if (kind == kFailed) return Step::kFailed;
    if (kind == kWaits) return Step::kWaitsForPeer;
    // After reading the records: what members have observed comes before their stores.
    if (!mover_.loaded(0)) return Step::kAwaitDelivered;
    store(mine == kReady ? at : -1);
    return Step::kProgress;
  }

  // The rank that this member stores to; -1: none.
  UEC_HD void store(int32_t rank) {
    const int64_t offset = call_.layout.load(call_.rank, num_experts_);
    uint8_t* const base = rank < 0 ? nullptr : call_.addresses.bases[rank];
    const bool is_far = Mover::kFar && rank >= 0 && base == nullptr;
    mover_.store(0, base == nullptr ? nullptr : base + offset, row_bytes());
    if constexpr (Mover::kFar) store_far(is_far ? static_cast<uint32_t>(rank) : ~0u, offset);
    if (rank >= 0) sent_[rank] = is_far ? kPublished : kStored;
    last_ticket_ = mover_.commit_and_wait_source(0);
    ++num_unpublished_;
  }

  // One rank after another, each by all members: the flag travels behind the row.
  UEC_HD void store_far(uint32_t mine, int64_t offset) {
    for (uint32_t r = team_.min_sync(mine); r != ~0u; r = team_.min_sync(mine)) {
      mover_.store_far(0, static_cast<int32_t>(r), offset, row_bytes(),
                       call_.layout.gathered(call_.rank), call_.epoch.number);
      if (r == mine) mine = ~0u;
    }
  }

  // Rule: a row may be read once its flag is seen, so the flag is published only once the row is
  // delivered. Pairs with arrive_step() at the receiver.
  UEC_HD Step publish_step() {
    if (!mover_.wait_delivered(last_ticket_, true, [&](Delivered token) {
          for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
            if (sent_[r] != kStored) continue;
            memory_.publish(token, r, call_.layout.gathered(call_.rank), call_.epoch.number);
            sent_[r] = kPublished;
          }
        }))
      return Step::kAwaitDelivered;
    num_unpublished_ = 0;
    return Step::kProgress;
  }

  UEC_HD Step arrive_step() {
    const int32_t first = next_;
    Fault fault = Fault::kNone;
    Outcome mine = kAll;
    for (; next_ < call_.num_ranks; next_ += team_.size()) {
      uint64_t seen = 0;
      const FlagState state =
          check_flag(memory_, call_.layout.gathered(next_), call_.layout.call(next_), next_,
                     call_.epoch, &fault, &seen);
      if (state == FlagState::kArrived) continue;
      mine = state == FlagState::kFault ? kFailed : kWaits;
      break;
    }
    const Outcome kind = choose(mine, next_, fault, FlagKind::kGathered);
    if (kind == kAll) return Step::kFinished;
    if (kind == kFailed) return Step::kFailed;
    // Every wait has its own clock: any arrival is progress.
    return team_.min_sync(next_ == first) == 0 ? Step::kProgress : Step::kWaitsForPeer;
  }

  // The team's outcome is the worst of its members'; the first rank in the list that has it is
  // named, as a team of one would name it.
  UEC_HD Outcome choose(Outcome mine, int32_t at, Fault fault, FlagKind flag) {
    const uint32_t chosen =
        team_.min_sync(static_cast<uint32_t>(mine) << 30 | static_cast<uint32_t>(at));
    const auto kind = static_cast<Outcome>(chosen >> 30);
    flag_ = flag;
    waits_for_ = kind == kFailed || kind == kWaits ? static_cast<int32_t>(chosen & 0x3FFFFFFF) : -1;
    if (kind == kFailed) fault_ = team_.read_from(waits_for_ % team_.size(), fault);
    return kind;
  }

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  typename Memory::Team team_;
  int32_t next_;  // of this member's ranks: whose row has to arrive
  const int32_t* row_;
  int32_t num_experts_;
  uint8_t* sent_;  // [G] of Sent
  bool fetched_ = false, all_sent_ = false;
  int32_t num_unpublished_ = 0;
  uint32_t last_ticket_ = 0;
  Fault fault_ = Fault::kNone;
  FlagKind flag_ = FlagKind::kCall;  // what wait() is made of
  int32_t waits_for_ = -1;
};

}  // namespace uec
