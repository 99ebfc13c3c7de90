// The fetch side of a worker: claims groups of tiles and loads them, and never blocks.
#pragma once

#include "core/ring.hpp"
#include "core/stream.hpp"
#include "core/team.hpp"

namespace uec {

template <class Memory, class Mover>
class Fetcher {
 public:
  // Scratch of the team: `open` [num_ranks] and `state` [num_pieces], bytes. `worker` is this
  // worker's number among its rank's.
  UEC_HD Fetcher(const Call& call, Memory& memory, Mover& mover, uint8_t* open, uint8_t* state,
                 int32_t worker = 0)
      : call_(call),
        memory_(memory),
        mover_(mover),
        open_(open),
        state_(state),
        shift_(call.work.num_pieces > 0 ? worker % call.work.num_pieces : 0) {
    for (int32_t r = team_.index(); r < call.num_ranks; r += team_.size())
      open_[r] = !call.work.needs[r];
    for (int32_t p = team_.index(); p < call.work.num_pieces; p += team_.size())
      state_[p] = kUnknown;
    team_.sync();
  }

  UEC_HD Fault fault() const { return fault_; }
  // What the last step was blocked by, or failed at.
  UEC_HD Wait wait() {
    Wait wait;
    if (team_.leader() && waits_with_ >= 0) wait = make_wait(waits_with_);
    return team_.share(wait);
  }

  // Claims a group if none is in hand, then starts one tile's load. The last fetch of all tells the
  // store side that there are no more.
  UEC_HD Step step() {
    if (fault_ != Fault::kNone) return Step::kFailed;
    if (ended_) return Step::kFinished;
    if (item_.piece < 0) {
      const Step claimed = claim();
      if (claimed == Step::kFinished) return end();
      if (claimed != Step::kProgress || item_.piece < 0) return claimed;
    }
    if (!mover_.vacant(fetched_)) return Step::kAwaitDelivered;
    const Piece& piece = call_.work.pieces[item_.piece];
    Stage stage;
    stage.span = call_.tiles.span(item_.tile);
    stage.piece = item_.piece;
    stage.group = item_.group;
    stage.ends_group = ++item_.tile == item_.end_tile;
    mover_.fetch(fetched_++, stage, source(piece, stage.span));
    if (stage.ends_group) item_.piece = -1;
    return Step::kProgress;
  }

  // After a failure, in place of step(): fetches nothing more, and says so.
  UEC_HD Step drain_step() {
    if (ended_) return Step::kFinished;
    return end() == Step::kFinished ? Step::kProgress : Step::kAwaitDelivered;
  }

 private:
  enum State : uint8_t { kUnknown, kOpen, kSpent };  // of a piece, as far as this worker knows

  struct Item {
    int32_t piece = -1;
    int32_t group = 0;
    int32_t tile = 0, end_tile = 0;
  };

  UEC_HD Step end() {
    if (!mover_.vacant(fetched_)) return Step::kAwaitDelivered;
    mover_.fetch(fetched_++, Stage{}, nullptr);
    ended_ = true;
    return Step::kFinished;
  }

  // How far a member has come in a claim. Members' outcomes are compared as numbers: a fault goes
  // before a piece to claim, the piece that is least far along before others, and a piece that has
  // to wait before nothing at all. `id` is a rank or a piece, and says whose outcome it is: a team
  // decides and reports what a team of one would.
  enum Outcome : uint32_t { kFault, kEligible, kWaits, kNothing };
  static constexpr uint32_t kIdBits = 20;
  UEC_HD static uint32_t outcome(Outcome kind, uint32_t far_along, int32_t id) {
    return static_cast<uint32_t>(kind) << 30 | far_along << kIdBits | static_cast<uint32_t>(id);
  }
  // Of pieces that are equally far along, workers begin with different ones.
  UEC_HD int32_t shifted(int32_t p) const {
    return p >= shift_ ? p - shift_ : p - shift_ + call_.work.num_pieces;
  }
  UEC_HD int32_t unshifted(int32_t id) const {
    const int32_t p = id + shift_;
    return p < call_.work.num_pieces ? p : p - call_.work.num_pieces;
  }
  // In parts of 1024; of pieces with more than 2^22 groups only the order suffers.
  UEC_HD static uint32_t progress(int32_t at, int32_t length) {
    return (static_cast<uint32_t>(at) << 10) / static_cast<uint32_t>(length) & 1023;
  }

  // Takes the next group of the eligible piece that is least far along, so that experts and hubs
  // progress together. Rule: nothing is claimed that cannot be moved at once. A piece whose
  // destination is not open, or whose next group is not ready, is polled and skipped; were it
  // claimed and waited for, two ranks could each hold the other's input behind their own wait.
  UEC_HD Step claim() {
    int32_t best_at = -1, best_closed = -1, best_with = -1;
    Fault fault = Fault::kNone;
    uint32_t best = look_for_openings(&fault, &best_closed, &best_with);
    team_.sync();  // what one member has seen open is open for all
    for (int32_t p = team_.index(); p < call_.work.num_pieces; p += team_.size()) {
      if (state_[p] == kSpent) continue;
      const Piece& piece = call_.work.pieces[p];
      const int32_t at = memory_.load(&call_.cursor[p]), length = piece.end - piece.begin;
      if (at >= length) {
        state_[p] = kSpent;
        continue;
      }
      Fault why = Fault::kNone;
      const int32_t closed = find_closed(p, piece);
      Verdict verdict = closed < 0 ? Verdict::kArrived : Verdict::kWaiting;
      if (closed < 0 && piece.source == Source::kSlot)
        verdict = group_ready(piece, piece.begin + at, &why);
      uint32_t found = outcome(kWaits, 0, p);
      if (verdict == Verdict::kArrived) {
        found = outcome(kEligible, progress(at, length), shifted(p));
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
    const Piece& piece = call_.work.pieces[id];
    // By the member that found it: its look at the group's flag is what the load comes after. Any
    // group of a home's piece will do, so that workers that take at once all get one.
    if (best == chosen) {
      if (piece.source != Source::kSlot)
        best_at = memory_.take(&call_.cursor[id]);
      else if (!memory_.claim(&call_.cursor[id], best_at))
        best_at = -1;
    }
    const int32_t at = team_.from(member, best_at);
    if (at < 0 || at >= piece.end - piece.begin) return Step::kProgress;  // another worker's
    const int32_t tiles = call_.work.tasks[piece.task].group_tiles;
    item_.piece = id;
    item_.group = piece.begin + at;
    item_.tile = item_.group * tiles;
    item_.end_tile = static_cast<int32_t>(min64(item_.tile + tiles, call_.tiles.num_tiles()));
    return Step::kProgress;
  }

  // Notes the ranks that have opened. Each worker looks for itself: an acquire by one thread orders
  // nothing for another. All are looked at, so that the death of any ends the call.
  UEC_HD uint32_t look_for_openings(Fault* fault, int32_t* closed, int32_t* with) {
    for (int32_t r = team_.index(); r < call_.num_ranks; r += team_.size()) {
      if (open_[r]) continue;
      const Verdict verdict = judge_open(r, fault);
      if (verdict == Verdict::kArrived) open_[r] = 1;
      if (verdict != Verdict::kFault) continue;
      // The peer may be past this call because another worker has sent it all since we looked.
      // That worker's claims happened before the `done` that let the peer go on, so they are seen
      // now; with groups left unclaimed the peer cannot have finished.
      int32_t p = 0;
      while (p < call_.work.num_pieces && !(involves(call_.work.pieces[p], r) && !all_claimed(p)))
        ++p;
      if (p == call_.work.num_pieces) continue;
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

  // A rank that a piece touches and that has not been seen open; -1: none.
  UEC_HD int32_t find_closed(int32_t p, const Piece& piece) {
    if (state_[p] == kOpen) return -1;
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const int32_t r = call_.work.destinations[piece.dst_first + i].rank;
      if (!open_[r]) return r;
    }
    if (piece.source == Source::kRemoteMain && !open_[piece.source_rank]) return piece.source_rank;
    state_[p] = kOpen;
    return -1;
  }

  // Pairs with the home's publish of `ready`: after it, the group's bytes in our slot may be read,
  // by this thread, and by those that come after it.
  UEC_HD Verdict group_ready(const Piece& piece, int32_t group, Fault* fault) {
    uint64_t seen = 0;
    return judge_flag(memory_, call_.layout.ready(piece.source_idx, group),
                      call_.layout.call(piece.source_rank), piece.source_rank, call_.epoch, fault,
                      &seen);
  }

  UEC_HD bool all_claimed(int32_t p) {
    const Piece& piece = call_.work.pieces[p];
    return memory_.load(&call_.cursor[p]) >= piece.end - piece.begin;
  }

  UEC_HD bool involves(const Piece& piece, int32_t r) const {
    for (int32_t i = 0; i < piece.dst_count; ++i)
      if (call_.work.destinations[piece.dst_first + i].rank == r) return true;
    return piece.source == Source::kRemoteMain && piece.source_rank == r;
  }

  UEC_HD Wait make_wait(int32_t p) {
    const Piece& piece = call_.work.pieces[p];
    const int32_t expert = call_.work.tasks[piece.task].expert;
    const uint64_t epoch = call_.epoch.number;
    if (closed_ < 0) {
      // Other workers may have claimed all since.
      const int32_t at = memory_.load(&call_.cursor[p]), last = piece.end - piece.begin - 1;
      const int32_t group = piece.begin + (at < last ? at : last);
      const uint64_t ready = memory_.observe(call_.layout.ready(piece.source_idx, group));
      return {FlagKind::kReady, piece.source_rank, expert, p, ready, epoch};
    }
    const CallRecord record{memory_.observe(call_.layout.call(closed_))};
    if (record.word != call_.epoch.record.word)
      return {FlagKind::kCall, closed_, expert, p, record.epoch_low(), epoch};
    const uint64_t open = memory_.observe(call_.layout.open(closed_));
    return {FlagKind::kOpen, closed_, expert, p, open, epoch};
  }

  UEC_HD const uint8_t* source(const Piece& piece, const TileSpan& span) const {
    const Addresses& a = call_.addresses;
    const int64_t row = piece.source_idx * a.segment_bytes[span.segment] + span.offset;
    switch (piece.source) {
      case Source::kMain:
        return a.mains[span.segment * a.num_mains + piece.source_idx] + span.offset;
      case Source::kSlot:
        return a.bases[call_.rank] + a.slot_offset[span.segment] + row;
      default:
        return a.regions[piece.source_rank] + a.region_offset[span.segment] + row;
    }
  }

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  typename Memory::Team team_;
  uint8_t* open_;   // [num_ranks] this worker has seen it open, or needs it not
  uint8_t* state_;  // [num_pieces]
  int32_t shift_;
  Item item_;
  uint32_t fetched_ = 0;  // stages, counted without wrapping
  bool ended_ = false;
  Fault fault_ = Fault::kNone;
  // What wait() is made of, when it is asked for: a team's registers are few.
  int32_t waits_with_ = -1;  // a piece
  int32_t closed_ = -1;      // the rank that it needs open; -1: its next group
};

}  // namespace uec
