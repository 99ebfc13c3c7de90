// Which worker of a rank moves which group, and in which order a worker takes its own: those that
// can be moved at once are taken, others are looked at and skipped. Nothing here blocks, and
// nothing that workers share is written: who moves a group is a function of its number.
//
// A `Pieces` says what a call's pieces are, and what each waits for (static, of a Call):
//   int32_t count(call)
//   int32_t begin(call, p)                    the first of its groups, among those of its expert
//   int32_t length(call, p)                   groups
//   int32_t list(call, p)                     which list its groups are of: a group of a list is
//                                             one worker's
//   int32_t find_closed(call, p, open)        a rank that the piece touches and whose `open` [G] is
//                                             not set; -1: none
//   bool touches(call, p, r)                  whether the piece stores to rank r, or loads from it
//   Verdict ready(call, memory, p, at, fault) whether the piece's group `at` may be moved
//   bool waits(call, p)                       whether ready() has to be asked: else all may be
//   moved
//                                             once the piece is open
//   bool is_flagged(call, p)                  each group is waited for by itself
//   uint32_t order(call, p, at)               below 1024: pieces with less go first
//   int32_t expert(call, p)
//   Wait wait(call, memory, p, at)            what ready() looks at
#pragma once

#include <cstddef>

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
  // From group `begin` to the first that is this worker's.
  UEC_HD int32_t first(int32_t list, int32_t begin) const {
    const int32_t ahead = worker - owner(list, begin);
    return ahead < 0 ? ahead + num_workers : ahead;
  }
};

// In parts of 1024; of pieces with more than 2^22 groups only the order suffers.
UEC_HD inline uint32_t progress(int32_t at, int32_t length) {
  return (static_cast<uint32_t>(at) << 10) / static_cast<uint32_t>(length) & 1023;
}

// What a worker knows of its groups of one piece.
struct OwnGroups {
  int32_t next;     // the next one
  int32_t movable;  // bit i: the i-th from there may be moved. The sign: the piece's ranks are open

  static constexpr int32_t kWindow = 31;
  static constexpr int32_t kAll = 0x7FFFFFFF, kOpen = ~kAll;
  UEC_HD bool is_open() const { return movable < 0; }
};

// Scratch of a worker's team.
struct StripeScratch {
  struct Asked {
    int32_t piece[32];  // that members of a team look at
  };

  Asked* asked;
  uint8_t* open;  // [num_ranks] this worker has seen it open, or does not need it

  UEC_HD OwnGroups* groups() const { return reinterpret_cast<OwnGroups*>(asked + 1); }  // [pieces]

  // As CallArrays::cut().
  UEC_HD static int64_t cut(std::byte* base, int64_t num_ranks, int64_t pieces,
                            StripeScratch* scratch) {
    ScratchCutter cutter(base);
    scratch->asked = cutter.take<Asked>(1);
    cutter.take<OwnGroups>(pieces);
    scratch->open = cutter.take<uint8_t>(num_ranks);
    return round_up(cutter.used_bytes(), 8);
  }
};

// A worker's groups, one after another.
template <class Memory, class Pieces>
class OwnStripe {
 public:
  UEC_HD OwnStripe(const Call& call, Memory& memory, const StripeScratch& scratch,
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
  UEC_HD bool is_spent(int32_t p) const {
    return scratch_.groups()[p].next >= Pieces::length(call_, p);
  }
  UEC_HD bool is_spent(int32_t p, int32_t at) const {
    return at + num_workers_ >= Pieces::length(call_, p);
  }
  UEC_HD int32_t num_taken(int32_t p) const { return scratch_.groups()[p].next / num_workers_; }

  // Takes the next of this worker's groups: of the movable ones the first in order, so that experts
  // and hubs progress together. kProgress: it is group `at` of piece `piece`. kFinished: all have
  // been taken. It fails only when nothing else is left to do.
  //
  // With `ahead`, for a worker that has no room for a group: looks for what has arrived, which then
  // need not be looked for later.
  //
  // Rule: nothing is taken that cannot be moved at once. A piece that touches a rank that is not
  // open, or whose next group is not ready, is looked at and skipped; were it taken and waited for,
  // two ranks could each hold the other's input behind their own wait.
  UEC_HD Step take(bool ahead, int32_t* piece, int32_t* at) {
    uint32_t failed = kNone;
    bool looks = !knows_any_ || taken_ >= (ahead ? 1 : kGroupsPerLook);
    for (;; looks = true) {
      if (looks && look(&failed)) knows_any_ = true;
      if (ahead) return Step::kAwaitDelivered;
      const Step taken = knows_any_ ? take_first(piece, at) : Step::kBlocked;
      if (taken != Step::kBlocked) return taken;
      if (looks) break;
    }
    if (failed == kNone) return Step::kBlocked;
    failed_ = failed;
    return Step::kFailed;
  }

  // What the last step was blocked by, or failed at. What a worker waits for may be held up by what
  // another worker of its rank waits for, so it names what its rank waits for: a rank that has not
  // opened, which waits for nobody, if there is one.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader()) {
      int32_t closed = 0, p = 0;
      if (failed_ != kNone) {
        closed = static_cast<int32_t>(failed_ >> kFaultBits);
      } else {
        while (closed < call_.num_ranks && scratch_.open[closed]) ++closed;
      }
      if (closed > call_.num_ranks) p = closed - call_.num_ranks;
      if (closed >= call_.num_ranks) closed = -1;
      while (p < num_pieces() && !(closed < 0 ? waits(p) : touches(p, closed))) ++p;
      if (p < num_pieces()) wait = make_wait(p, closed);
    }
    return team_.broadcast(wait);
  }

 private:
  // A look costs a trip to memory, and groups that wait for nobody shall not wait for one each.
  static constexpr int32_t kGroupsPerLook = 4;
  static constexpr uint32_t kNone = ~0u;
  static constexpr uint32_t kIdBits = 20;

  // Why nothing more can come, as a number: what is looked at first goes before others. In the
  // upper bits the rank that has to open, or the number of ranks and the piece whose next group is
  // awaited.
  static constexpr int32_t kFaultBits = 4;
  static constexpr uint32_t kFaultMask = (1u << kFaultBits) - 1;
  UEC_HD static uint32_t failure(int32_t of, Fault why) {
    return static_cast<uint32_t>(of) << kFaultBits | static_cast<uint32_t>(why);
  }

  UEC_HD int32_t num_pieces() const { return Pieces::count(call_); }
  UEC_HD bool waits(int32_t p) const {
    return !is_spent(p) && (scratch_.groups()[p].movable & 1) == 0;
  }
  UEC_HD bool touches(int32_t p, int32_t r) const { return Pieces::touches(call_, p, r); }
  // Among pieces that are equal in order, workers begin with different ones.
  UEC_HD int32_t shifted(int32_t p) const {
    return p >= shift_ ? p - shift_ : p - shift_ + num_pieces();
  }
  UEC_HD int32_t unshifted(int32_t id) const {
    const int32_t p = id + shift_;
    return p < num_pieces() ? p : p - num_pieces();
  }

  // Among the groups that are known to be movable. Each member has pieces of its own.
  UEC_HD Step take_first(int32_t* piece, int32_t* at) {
    uint32_t best = kNone;
    int32_t best_at = -1;
    bool any_left = false;
    for (int32_t p = team_.index(); p < num_pieces(); p += team_.size()) {
      const OwnGroups own = scratch_.groups()[p];
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
                       : team_.count(any_left).all > 0 ? Step::kBlocked
                                                       : Step::kFinished;
    knows_any_ = taken != Step::kBlocked;
    if (taken != Step::kProgress) return taken;
    const int32_t p = unshifted(static_cast<int32_t>(chosen & ((1u << kIdBits) - 1)));
    *piece = p;
    *at = team_.read_from(p % team_.size(), best_at);
    if (best == chosen) {
      OwnGroups& own = scratch_.groups()[p];
      own.next += num_workers_;
      if (Pieces::is_flagged(call_, p))
        own.movable = (own.movable & OwnGroups::kAll) >> 1 | OwnGroups::kOpen;
    }
    taken_ += closed_ranks_ || awaits_groups_;
    return taken;
  }

  // Looks at all that this worker's groups wait for, as far as it is not known to have come: at
  // openings, and at the flags of as many groups in a row as there are members for. What a member
  // has acquired is all members' after the barriers. Returns whether more may be movable now.
  UEC_HD bool look(uint32_t* why) {
    uint32_t failed = kNone;
    taken_ = 0;
    bool sees_news = false;
    closed_ranks_ = closed_ranks_ && look_for_openings(&failed, &sees_news);
    const bool asks = sees_news || awaits_groups_;
    awaits_groups_ = false;
    for (int32_t first = 0; asks && first < num_pieces(); first += team_.size()) {
      const int32_t asking = ask(first + team_.index());
      if (asking == 0) continue;
      awaits_groups_ = true;
      team_.sync();
      const int32_t each = min32(team_.size() / asking, OwnGroups::kWindow);
      const int32_t nth = team_.index() / each;
      const int32_t p = nth < asking ? scratch_.asked->piece[nth] : -1;
      const OwnGroups own = p < 0 ? OwnGroups{} : scratch_.groups()[p];
      team_.sync();  // members note what they see of one piece together
      const bool arrived = p >= 0 && look_at(p, own, team_.index() - nth * each, &failed);
      sees_news |= team_.count(arrived).all > 0;
    }
    *why = team_.min_sync(failed);
    return sees_news;
  }

  // Notes the ranks that have opened; returns whether some have not. Each worker looks for itself:
  // an acquire by one thread orders nothing for another. All ranks are looked at, so that the death
  // of any ends the call.
  UEC_HD bool look_for_openings(uint32_t* failed, bool* sees_news) {
    bool waits = false, opens = false;
    for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
      if (scratch_.open[r]) continue;
      Fault why = Fault::kNone;
      const Verdict verdict = judge_open(r, &why);
      // The peer may be past this call because all that it needs was up to other workers, who have
      // done it. While this one has a group that touches it, it cannot be.
      int32_t p = verdict == Verdict::kFault ? 0 : num_pieces();
      while (p < num_pieces() && (is_spent(p) || !touches(p, r))) ++p;
      if (p < num_pieces()) *failed = min_u32(*failed, failure(r, why));
      waits |= verdict == Verdict::kWaiting || p < num_pieces();
      if (verdict == Verdict::kWaiting || p < num_pieces()) continue;
      scratch_.open[r] = 1;
      opens = true;
    }
    // What one member has seen open is open for all.
    const uint32_t both = team_.sum(static_cast<uint32_t>(waits) | uint32_t{opens} << 16);
    *sees_news |= both >> 16 != 0;
    return (both & 0xFFFF) != 0;
  }

  // Rule: nobody touches a rank's memory before having seen its record for this epoch with the same
  // digest, nor its slots or main weights before it has opened: which says the same once more.
  UEC_HD Verdict judge_open(int32_t r, Fault* fault) {
    const int64_t open = call_.layout.open(r);
    const uint64_t record = call_.epoch.record.word;
    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    const Verdict called = judge_call(memory_, call_.layout.call(r), r, call_.epoch, fault);
    if (called != Verdict::kArrived) return called;
    if (!memory_.peer_gone(r)) return Verdict::kWaiting;
    if (memory_.observe(open) == record) return arrived(memory_, r, open, record);
    *fault = Fault::kGone;
    return Verdict::kFault;
  }

  // Notes whether piece p, this member's, is open, and then whether its groups have to be looked
  // at. Returns how many members' have to.
  UEC_HD int32_t ask(int32_t p) {
    bool asks = false;
    if (p < num_pieces() && !is_spent(p)) {
      OwnGroups& own = scratch_.groups()[p];
      const bool waits = Pieces::waits(call_, p);
      if (!own.is_open() && Pieces::find_closed(call_, p, scratch_.open) < 0)
        own.movable = OwnGroups::kOpen | (waits ? 0 : OwnGroups::kAll);
      asks = waits && own.is_open() && (Pieces::is_flagged(call_, p) || (own.movable & 1) == 0);
    }
    const MemberCount counted = team_.count(asks);
    if (asks) scratch_.asked->piece[counted.before] = p;
    return counted.all;
  }

  // At the i-th of this worker's groups of a piece; returns whether it is new that it may be moved.
  UEC_HD bool look_at(int32_t p, const OwnGroups& own, int32_t i, uint32_t* failed) {
    const bool flagged = Pieces::is_flagged(call_, p);
    const int32_t at = own.next + i * num_workers_;
    if ((own.movable >> i & 1) != 0 || at >= Pieces::length(call_, p) || (i > 0 && !flagged))
      return false;
    Fault why = Fault::kNone;
    const Verdict verdict = Pieces::ready(call_, memory_, p, at, &why);
    if (verdict == Verdict::kArrived)
      team_.atomic_add(&scratch_.groups()[p].movable, flagged ? 1 << i : OwnGroups::kAll);
    if (verdict == Verdict::kFault && i == 0)
      *failed = min_u32(*failed, failure(call_.num_ranks + p, why));
    return verdict == Verdict::kArrived;
  }

  UEC_HD Wait make_wait(int32_t p, int32_t closed) {
    if (closed < 0) return Pieces::wait(call_, memory_, p, scratch_.groups()[p].next);
    const uint64_t epoch = call_.epoch.number;
    const int32_t expert = Pieces::expert(call_, p);
    const CallRecord record{memory_.observe(call_.layout.call(closed))};
    if (record.word != call_.epoch.record.word)
      return {FlagKind::kCall, closed, expert, p, record.epoch_low(), epoch};
    const CallRecord open{memory_.observe(call_.layout.open(closed))};
    return {FlagKind::kOpen, closed, expert, p, open.epoch_low(), epoch};
  }

  const Call& call_;
  Memory& memory_;
  StripeScratch scratch_;
  typename Memory::Team team_;
  int32_t num_workers_;
  int32_t shift_;
  int32_t taken_ = kGroupsPerLook;  // since the last look, if that left something to look for
  bool closed_ranks_ = true;
  bool awaits_groups_ = true;  // of open pieces, as of the last look
  bool knows_any_ = true;      // of groups that may be moved, perhaps; or that none is left
  uint32_t failed_ = kNone;    // a failure()
};

}  // namespace uec
