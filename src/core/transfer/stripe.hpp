// Decides which worker of a rank moves which group, and in which order a worker takes its own: it
// takes those that can be moved at once, and polls and skips the others. Nothing here blocks or
// writes what workers share: who moves a group is a function of its number.
//
// A `Pieces` says what a call's pieces are, and what each waits for (static, of a Call):
//   int32_t count(call)
//   int32_t begin(call, p)                    the first of its groups, among those of its expert
//   int32_t length(call, p)                   groups
//   int32_t list(call, p)                     which list its groups are of: a group of a list is
//                                             one worker's
//   int32_t first_unopened(call, p, open)     a rank that the piece uses and whose `open` [G] is
//   not
//                                             set; -1: none
//   bool uses_rank(call, p, r)                whether the piece stores to rank r, or loads from it
//   FlagState ready(call, memory, p, at, fault)
//                                             whether the piece's group `at` may be moved
//   bool waits(call, p)                       whether ready() has to be called: else all groups may
//                                             be moved once the piece is open
//   bool is_flagged(call, p)                  each group is waited for by itself
//   uint32_t order(call, p, at)               below 1024: pieces with less go first
//   int32_t expert(call, p)
//   Wait wait(call, memory, p, at)            what ready() looks at
#pragma once

#include <cstddef>

#include "core/base/bounds.hpp"
#include "core/base/scratch.hpp"
#include "core/base/team.hpp"
#include "core/transfer/call.hpp"

namespace uec {

// A worker's share of its rank's groups: every num_workers-th of a list, so that `n` groups in a
// row are shared by min(n, num_workers). Lists begin with different workers, so that short ones do
// not all fall on the first.
struct Stripe {
  int32_t worker = 0, num_workers = 1;

  // Whose a group of a list is.
  UEC_HD int32_t owner(int32_t list, int32_t group) const {
    const uint32_t spread = static_cast<uint32_t>(list) * 0x9E3779B9u;  // by the golden ratio
    const auto n = static_cast<uint32_t>(num_workers);
    const auto from = static_cast<uint32_t>(uint64_t{spread} * n >> 32);
    return static_cast<int32_t>((from + static_cast<uint32_t>(group)) % n);
  }
  // Distance from group `begin` to the first that is this worker's.
  UEC_HD int32_t first(int32_t list, int32_t begin) const {
    const int32_t ahead = worker - owner(list, begin);
    return ahead < 0 ? ahead + num_workers : ahead;
  }
};

// Progress in parts of 1024; in pieces with more than 2^22 groups only the order suffers.
UEC_HD inline uint32_t progress(int32_t at, int32_t length) {
  return (static_cast<uint32_t>(at) << 10) / static_cast<uint32_t>(length) & 1023;
}

// What a worker knows of its groups of one piece.
struct QueuedGroups {
  int32_t next;     // the next one
  int32_t movable;  // bit i: the i-th from there may be moved. The sign: the piece's ranks are open

  static constexpr int32_t kWindow = 31;
  static constexpr int32_t kAll = 0x7FFFFFFF, kOpen = ~kAll;
  UEC_HD bool is_open() const { return movable < 0; }
};

// Scratch of a worker's team.
struct StripeScratch {
  struct PollList {
    int32_t piece[32];  // that members of a team look at
  };

  PollList* poll_list;
  uint8_t* open;  // [num_ranks] this worker has seen it open, or does not need it

  UEC_HD QueuedGroups* groups() const {
    return reinterpret_cast<QueuedGroups*>(poll_list + 1);
  }  // [pieces]

  // Works as CallArrays::cut().
  UEC_HD static int64_t cut(std::byte* base, int64_t num_ranks, int64_t pieces,
                            StripeScratch* scratch) {
    ScratchCutter cutter(base);
    scratch->poll_list = cutter.take<PollList>(1);
    cutter.take<QueuedGroups>(pieces);
    scratch->open = cutter.take<uint8_t>(num_ranks);
    return round_up(cutter.used_bytes(), 8);
  }
};

// A worker's groups, one after another.
template <class Memory, class Pieces>
class WorkQueue {
 public:
  UEC_HD WorkQueue(const Call& call, Memory& memory, const StripeScratch& scratch,
                   const Stripe& stripe)
      : call_(call),
        memory_(memory),
        scratch_(scratch),
        num_workers_(stripe.num_workers),
        shift_(num_pieces() > 0 ? stripe.worker % num_pieces() : 0) {
    for (int32_t r = team_.index(); r < call.num_ranks; r += team_.size())
      scratch_.open[r] = !call.work.needs[r];
    for (int32_t p = team_.index(); p < num_pieces(); p += team_.size())
      scratch_.groups()[p] = {stripe.first(Pieces::list(call, p), Pieces::begin(call, p)), 0};
    team_.sync();
  }

  UEC_HD Fault fault() const {
    return failed_ == kNone ? Fault::kNone : static_cast<Fault>(failed_ & kFaultMask);
  }

  // Whether the worker has taken all its groups of a piece; of one that it has taken, whether that
  // was the last. How many it has taken. Of piece p by the member that it is of.
  UEC_HD bool all_taken(int32_t p) const {
    return scratch_.groups()[p].next >= Pieces::length(call_, p);
  }
  UEC_HD bool all_taken(int32_t p, int32_t at) const {
    return at + num_workers_ >= Pieces::length(call_, p);
  }
  UEC_HD int32_t num_taken(int32_t p) const { return scratch_.groups()[p].next / num_workers_; }

  // Takes the next of this worker's groups: of the movable ones the first in order, so that experts
  // and hubs progress together. kProgress: it is group `at` of piece `piece`. kFinished: all have
  // been taken. It fails only when nothing else is left to do.
  //
  // With `poll_only`, for a worker without room for a group: polls for what has arrived, which then
  // need not be polled for later.
  //
  // Rule: nothing is taken that cannot be moved at once. A piece that uses a rank that is not
  // open, or whose next group is not ready, is polled and skipped; were it taken and waited for,
  // two ranks could each hold the other's input behind their own wait.
  UEC_HD Step take(bool poll_only, int32_t* piece, int32_t* at) {
    uint32_t failed = kNone;
    bool polls = !may_have_movable_ || taken_ >= (poll_only ? 1 : kGroupsPerPoll);
    for (;; polls = true) {
      if (polls && poll(&failed)) may_have_movable_ = true;
      if (poll_only) return Step::kAwaitDelivered;
      const Step taken = may_have_movable_ ? take_first(piece, at) : Step::kWaitsForPeer;
      if (taken != Step::kWaitsForPeer) return taken;
      if (polls) break;
    }
    if (failed == kNone) return Step::kWaitsForPeer;
    failed_ = failed;
    return Step::kFailed;
  }

  // What the last step waited for, or failed at. What a worker waits for may be held up by what
  // another worker of its rank waits for, so it names what its rank waits for: a rank that has not
  // opened, which waits for nobody, if there is one.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader()) {
      int32_t unopened = 0, p = 0;
      if (failed_ != kNone) {
        unopened = static_cast<int32_t>(failed_ >> kFaultBits);
      } else {
        while (unopened < call_.num_ranks && scratch_.open[unopened]) ++unopened;
      }
      if (unopened > call_.num_ranks) p = unopened - call_.num_ranks;
      if (unopened >= call_.num_ranks) unopened = -1;
      while (p < num_pieces() && !(unopened < 0 ? waits(p) : uses_rank(p, unopened))) ++p;
      if (p < num_pieces()) wait = make_wait(p, unopened);
    }
    return team_.broadcast(wait);
  }

 private:
  static constexpr uint32_t kNone = ~0u;
  static constexpr uint32_t kIdBits = 20;

  // Encodes a failure so that the smallest goes first: the upper bits hold the rank that has to
  // open, or the number of ranks plus the piece whose next group is awaited; the lower, the fault.
  static constexpr int32_t kFaultBits = 4;
  static constexpr uint32_t kFaultMask = (1u << kFaultBits) - 1;
  UEC_HD static uint32_t failure(int32_t of, Fault why) {
    return static_cast<uint32_t>(of) << kFaultBits | static_cast<uint32_t>(why);
  }

  UEC_HD int32_t num_pieces() const { return Pieces::count(call_); }
  UEC_HD bool waits(int32_t p) const {
    return !all_taken(p) && (scratch_.groups()[p].movable & 1) == 0;
  }
  UEC_HD bool uses_rank(int32_t p, int32_t r) const { return Pieces::uses_rank(call_, p, r); }
  // Among pieces of equal order, workers start with different ones.
  UEC_HD int32_t shifted(int32_t p) const {
    return p >= shift_ ? p - shift_ : p - shift_ + num_pieces();
  }
  UEC_HD int32_t unshifted(int32_t id) const {
    const int32_t p = id + shift_;
    return p < num_pieces() ? p : p - num_pieces();
  }

  // Takes the first of the groups that are known to be movable. Each member has its own pieces.
  UEC_HD Step take_first(int32_t* piece, int32_t* at) {
    uint32_t best = kNone;
    int32_t best_at = -1;
    bool any_left = false;
    for (int32_t p = team_.index(); p < num_pieces(); p += team_.size()) {
      const QueuedGroups own = scratch_.groups()[p];
      if (own.next >= Pieces::length(call_, p)) continue;
      any_left = true;
      if ((own.movable & 1) == 0) continue;
      const uint32_t found =
          Pieces::order(call_, p, own.next) << kIdBits | static_cast<uint32_t>(shifted(p));
      if (found >= best) continue;
      best = found;
      best_at = own.next;
    }
    const uint32_t chosen = team_.min_sync(best);
    const Step taken = chosen != kNone                 ? Step::kProgress
                       : team_.count(any_left).all > 0 ? Step::kWaitsForPeer
                                                       : Step::kFinished;
    may_have_movable_ = taken != Step::kWaitsForPeer;
    if (taken != Step::kProgress) return taken;
    const int32_t p = unshifted(static_cast<int32_t>(chosen & ((1u << kIdBits) - 1)));
    *piece = p;
    *at = team_.read_from(p % team_.size(), best_at);
    if (best == chosen) {
      QueuedGroups& own = scratch_.groups()[p];
      own.next += num_workers_;
      if (Pieces::is_flagged(call_, p))
        own.movable = (own.movable & QueuedGroups::kAll) >> 1 | QueuedGroups::kOpen;
    }
    taken_ += unopened_ranks_ || awaits_groups_;
    return taken;
  }

  // Polls all that this worker's groups wait for and that is not known to have arrived: openings,
  // and the flags of as many groups in a row as there are members for. After the barriers, what one
  // member has acquired is ordered for all. Returns whether more may be movable now.
  UEC_HD bool poll(uint32_t* why) {
    uint32_t failed = kNone;
    taken_ = 0;
    bool found_new = false;
    unopened_ranks_ = unopened_ranks_ && poll_openings(&failed, &found_new);
    const bool needs_poll = found_new || awaits_groups_;
    awaits_groups_ = false;
    for (int32_t first = 0; needs_poll && first < num_pieces(); first += team_.size()) {
      const int32_t num_listed = list_for_poll(first + team_.index());
      if (num_listed == 0) continue;
      awaits_groups_ = true;
      team_.sync();
      const int32_t each = min32(team_.size() / num_listed, QueuedGroups::kWindow);
      const int32_t nth = team_.index() / each;
      const int32_t p = nth < num_listed ? scratch_.poll_list->piece[nth] : -1;
      const QueuedGroups own = p < 0 ? QueuedGroups{} : scratch_.groups()[p];
      team_.sync();  // members note what they see of one piece together
      const bool arrived = p >= 0 && poll_group(p, own, team_.index() - nth * each, &failed);
      found_new |= team_.count(arrived).all > 0;
    }
    *why = team_.min_sync(failed);
    return found_new;
  }

  // Notes the ranks that have opened; returns whether some have not. Each worker polls for itself:
  // an acquire by one thread orders nothing for another. All ranks are polled, so that the death
  // of any ends the call.
  UEC_HD bool poll_openings(uint32_t* failed, bool* found_new) {
    bool waits = false, opens = false;
    for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
      if (scratch_.open[r]) continue;
      Fault why = Fault::kNone;
      const FlagState state = check_open(r, &why);
      // The peer may be past this call because all that it needs was up to other workers, who have
      // done it. While this one has a group that uses it, it cannot be.
      int32_t p = state == FlagState::kFault ? 0 : num_pieces();
      while (p < num_pieces() && (all_taken(p) || !uses_rank(p, r))) ++p;
      if (p < num_pieces()) *failed = min_u32(*failed, failure(r, why));
      waits |= state == FlagState::kWaiting || p < num_pieces();
      if (state == FlagState::kWaiting || p < num_pieces()) continue;
      scratch_.open[r] = 1;
      opens = true;
    }
    // What one member has seen open is open for all.
    const uint32_t both = team_.sum(static_cast<uint32_t>(waits) | uint32_t{opens} << 16);
    *found_new |= both >> 16 != 0;
    return (both & 0xFFFF) != 0;
  }

  // Rule: nobody touches a rank's memory before having seen its record for this epoch with the same
  // digest, nor its slots or main weights before it has opened: which says the same once more.
  UEC_HD FlagState check_open(int32_t r, Fault* fault) {
    const int64_t open = call_.layout.open(r);
    const uint64_t record = call_.epoch.record.word;
    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    const FlagState called = check_call(memory_, call_.layout.call(r), r, call_.epoch, fault);
    if (called != FlagState::kArrived) return called;
    if (!memory_.peer_gone(r)) return FlagState::kWaiting;
    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    *fault = Fault::kGone;
    return FlagState::kFault;
  }

  // Notes whether piece p, this member's, is open, and lists it if its groups have to be polled.
  // Returns how many members have listed one.
  UEC_HD int32_t list_for_poll(int32_t p) {
    bool needs_poll = false;
    if (p < num_pieces() && !all_taken(p)) {
      QueuedGroups& own = scratch_.groups()[p];
      const bool waits = Pieces::waits(call_, p);
      if (!own.is_open() && Pieces::first_unopened(call_, p, scratch_.open) < 0)
        own.movable = QueuedGroups::kOpen | (waits ? 0 : QueuedGroups::kAll);
      needs_poll =
          waits && own.is_open() && (Pieces::is_flagged(call_, p) || (own.movable & 1) == 0);
    }
    const MemberCount counted = team_.count(needs_poll);
    if (needs_poll) scratch_.poll_list->piece[counted.before] = p;
    return counted.all;
  }

  // Polls the i-th of this worker's groups of a piece; returns whether it has become movable now.
  UEC_HD bool poll_group(int32_t p, const QueuedGroups& own, int32_t i, uint32_t* failed) {
    const bool flagged = Pieces::is_flagged(call_, p);
    const int32_t at = own.next + i * num_workers_;
    if ((own.movable >> i & 1) != 0 || at >= Pieces::length(call_, p) || (i > 0 && !flagged))
      return false;
    Fault why = Fault::kNone;
    const FlagState state = Pieces::ready(call_, memory_, p, at, &why);
    if (state == FlagState::kArrived)
      team_.atomic_add(&scratch_.groups()[p].movable, flagged ? 1 << i : QueuedGroups::kAll);
    if (state == FlagState::kFault && i == 0)
      *failed = min_u32(*failed, failure(call_.num_ranks + p, why));
    return state == FlagState::kArrived;
  }

  UEC_HD Wait make_wait(int32_t p, int32_t unopened) {
    if (unopened < 0) return Pieces::wait(call_, memory_, p, scratch_.groups()[p].next);
    const uint64_t epoch = call_.epoch.number;
    const int32_t expert = Pieces::expert(call_, p);
    const CallRecord record{memory_.observe(call_.layout.call(unopened))};
    if (record.word != call_.epoch.record.word)
      return {FlagKind::kCall, unopened, expert, p, record.epoch_low(), epoch};
    const CallRecord open{memory_.observe(call_.layout.open(unopened))};
    return {FlagKind::kOpen, unopened, expert, p, open.epoch_low(), epoch};
  }

  const Call& call_;
  Memory& memory_;
  StripeScratch scratch_;
  typename Memory::Team team_;
  int32_t num_workers_;
  int32_t shift_;
  int32_t taken_ = kGroupsPerPoll;  // since the last poll, if that left something to poll for
  bool unopened_ranks_ = true;
  bool awaits_groups_ = true;     // of open pieces, as of the last poll
  bool may_have_movable_ = true;  // some group may be movable, or none is left
  uint32_t failed_ = kNone;       // a failure()
};

}  // namespace uec
