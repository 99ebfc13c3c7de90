// How a worker gets its next group of tiles: pieces that can be moved at once are claimed, others
// are polled and skipped. Nothing here blocks.
//
// A `Pieces` says what a call's pieces are, and what each waits for (static, of a Call):
//   int32_t count(call)
//   int32_t length(call, p)                   groups
//   int32_t find_closed(call, p, open)        a rank that the piece touches and whose `open` [G] is
//                                             not set; -1: none
//   bool touches(call, p, r)                  whether the piece stores to rank r, or loads from it
//   Verdict ready(call, memory, p, at, fault) whether the piece's group `at` may be moved
//   bool is_flagged(call, p)                  each group is waited for by itself
//   uint32_t order(call, p, at)               below 1024: pieces with less go first
//   int32_t expert(call, p)
//   Wait wait(call, memory, p, at)            what ready() looks at
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"

namespace uec {

// In parts of 1024; of pieces with more than 2^22 groups only the order suffers.
UEC_HD inline uint32_t progress(int32_t at, int32_t length) {
  return (static_cast<uint32_t>(at) << 10) / static_cast<uint32_t>(length) & 1023;
}

template <class Memory, class Pieces>
class Claimer {
 public:
  // Scratch of the team: `open` [num_ranks] and `state` [pieces], bytes. `worker` is this worker's
  // number among its rank's.
  UEC_HD Claimer(const Call& call, Memory& memory, uint8_t* open, uint8_t* state, int32_t worker)
      : call_(call),
        memory_(memory),
        open_(open),
        state_(state),
        shift_(num_pieces() > 0 ? worker % num_pieces() : 0) {
    for (int32_t r = team_.index(); r < call.num_ranks; r += team_.size())
      open_[r] = !call.work.needs[r];
    for (int32_t p = team_.index(); p < num_pieces(); p += team_.size()) state_[p] = kUnknown;
    team_.sync();
  }

  UEC_HD Fault fault() const { return fault_; }
  // What the last claim was blocked by, or failed at.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader() && waits_with_ >= 0) wait = make_wait(waits_with_);
    return team_.share(wait);
  }

  // Takes the next group of the eligible piece that is first in order, so that experts and hubs
  // progress together. kProgress: group `at` of piece `piece` is this worker's, or (`piece` < 0)
  // another worker was faster. kFinished: all groups have been claimed.
  //
  // Rule: nothing is claimed that cannot be moved at once. A piece that touches a rank that is not
  // open, or whose next group is not ready, is polled and skipped; were it claimed and waited for,
  // two ranks could each hold the other's input behind their own wait.
  UEC_HD Step claim(int32_t* piece, int32_t* group) {
    *piece = -1;
    int32_t best_at = -1, best_closed = -1, best_with = -1;
    Fault fault = Fault::kNone;
    uint32_t best = look_for_openings(&fault, &best_closed, &best_with);
    team_.sync();  // what one member has seen open is open for all
    for (int32_t p = team_.index(); p < num_pieces(); p += team_.size()) {
      if (state_[p] == kSpent) continue;
      const int32_t at = memory_.load(&call_.cursor[p]);
      if (at >= Pieces::length(call_, p)) {
        state_[p] = kSpent;
        continue;
      }
      Fault why = Fault::kNone;
      const int32_t closed = find_closed(p);
      Verdict verdict = closed < 0 ? Verdict::kArrived : Verdict::kWaiting;
      if (closed < 0 && state_[p] != kReady) {
        verdict = Pieces::ready(call_, memory_, p, at, &why);
        if (verdict == Verdict::kArrived && !Pieces::is_flagged(call_, p)) state_[p] = kReady;
      }
      uint32_t found = outcome(kWaits, 0, p);
      if (verdict == Verdict::kArrived) {
        found = outcome(kEligible, Pieces::order(call_, p, at), shifted(p));
      } else if (verdict == Verdict::kFault) {
        found = outcome(kFault, 1, p);  // nobody has claimed a group that is never flagged
      }
      if (found >= best) continue;
      best = found;
      best_at = at;
      best_closed = closed;
      best_with = p;
      fault = why;
    }
    const uint32_t chosen = team_.lowest(best);
    const auto kind = static_cast<Outcome>(chosen >> 30);
    auto id = static_cast<int32_t>(chosen & ((1 << kIdBits) - 1));
    if (kind == kEligible) id = unshifted(id);
    const int32_t member = id % team_.size();
    if (kind == kNothing) return Step::kFinished;
    if (kind != kEligible) {
      waits_with_ = team_.from(member, best_with);
      closed_ = team_.from(member, best_closed);
      fault_ = team_.from(member, fault);
      return kind == kFault ? Step::kFailed : Step::kBlocked;
    }
    // By the member that found it: the load is ordered after that member's look at the group's
    // flag. Of a piece whose groups are not flagged any group will do, so workers that take one at
    // the same time all get one.
    if (best == chosen) {
      if (!Pieces::is_flagged(call_, id))
        best_at = memory_.take(&call_.cursor[id]);
      else if (!memory_.claim(&call_.cursor[id], best_at))
        best_at = -1;
    }
    const int32_t at = team_.from(member, best_at);
    if (at < 0 || at >= Pieces::length(call_, id)) return Step::kProgress;  // another worker's
    *piece = id;
    *group = at;
    return Step::kProgress;
  }

 private:
  // State of a piece, as far as this worker knows. kReady: all its groups may be moved.
  enum State : uint8_t { kUnknown, kOpen, kReady, kSpent };

  // How far a member has come in a claim. Members' outcomes are compared as numbers: a fault comes
  // before a piece to claim, the piece that is first in order before others, and a piece that has
  // to wait before nothing at all. `id` is a rank or a piece, and says whose outcome it is, so that
  // a team decides and reports what a team of one would.
  enum Outcome : uint32_t { kFault, kEligible, kWaits, kNothing };
  static constexpr uint32_t kIdBits = 20;
  UEC_HD static uint32_t outcome(Outcome kind, uint32_t order, int32_t id) {
    return static_cast<uint32_t>(kind) << 30 | order << kIdBits | static_cast<uint32_t>(id);
  }
  UEC_HD int32_t num_pieces() const { return Pieces::count(call_); }
  // Among pieces that are equal in order, workers begin with different ones.
  UEC_HD int32_t shifted(int32_t p) const {
    return p >= shift_ ? p - shift_ : p - shift_ + num_pieces();
  }
  UEC_HD int32_t unshifted(int32_t id) const {
    const int32_t p = id + shift_;
    return p < num_pieces() ? p : p - num_pieces();
  }

  // Notes the ranks that have opened. Each worker looks for itself: an acquire by one thread orders
  // nothing for another. All ranks are checked, so that the death of any ends the call.
  UEC_HD uint32_t look_for_openings(Fault* fault, int32_t* closed, int32_t* with) {
    for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
      if (open_[r]) continue;
      const Verdict verdict = judge_open(r, fault);
      if (verdict == Verdict::kArrived) open_[r] = 1;
      if (verdict != Verdict::kFault) continue;
      // The peer may be past this call because other workers have done all that it needs since we
      // looked. Their claims happened before the flag that let the peer go on, so they are visible
      // now; while groups are unclaimed the peer cannot have finished.
      int32_t p = 0;
      while (p < num_pieces() && !(Pieces::touches(call_, p, r) && !all_claimed(p))) ++p;
      if (p == num_pieces()) continue;
      *closed = r;
      *with = p;
      return outcome(kFault, 0, r);
    }
    return outcome(kNothing, 0, 0);
  }

  // Rule: nobody touches a rank's memory before having seen its record for this epoch with the same
  // digest, nor its slots or main weights before it has opened.
  UEC_HD Verdict judge_open(int32_t r, Fault* fault) {
    const Verdict called = judge_call(memory_, call_.layout.call(r), r, call_.epoch, fault);
    if (called != Verdict::kArrived) return called;
    uint64_t seen = 0;
    return judge_flag(memory_, call_.layout.open(r), call_.layout.call(r), r, call_.epoch, fault,
                      &seen);
  }

  UEC_HD int32_t find_closed(int32_t p) {
    if (state_[p] != kUnknown) return -1;
    const int32_t closed = Pieces::find_closed(call_, p, open_);
    if (closed < 0) state_[p] = kOpen;
    return closed;
  }

  UEC_HD bool all_claimed(int32_t p) {
    return memory_.load(&call_.cursor[p]) >= Pieces::length(call_, p);
  }

  UEC_HD Wait make_wait(int32_t p) {
    const uint64_t epoch = call_.epoch.number;
    if (closed_ < 0) {
      // Other workers may have claimed all since.
      const int32_t at = memory_.load(&call_.cursor[p]), last = Pieces::length(call_, p) - 1;
      return Pieces::wait(call_, memory_, p, at < last ? at : last);
    }
    const int32_t expert = Pieces::expert(call_, p);
    const CallRecord record{memory_.observe(call_.layout.call(closed_))};
    if (record.word != call_.epoch.record.word)
      return {FlagKind::kCall, closed_, expert, p, record.epoch_low(), epoch};
    const uint64_t open = memory_.observe(call_.layout.open(closed_));
    return {FlagKind::kOpen, closed_, expert, p, open, epoch};
  }

  const Call& call_;
  Memory& memory_;
  typename Memory::Team team_;
  uint8_t* open_;   // [num_ranks] this worker has seen it open, or needs it not
  uint8_t* state_;  // [pieces]
  int32_t shift_;
  Fault fault_ = Fault::kNone;
  // wait() is built from these on demand: a team has few registers.
  int32_t waits_with_ = -1;  // a piece
  int32_t closed_ = -1;      // the rank that it needs open; -1: its next group
};

}  // namespace uec
