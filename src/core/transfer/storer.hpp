// The store side of a worker: stores tiles to their destinations, publishes what has been
// delivered, and never blocks.
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/ring.hpp"
#include "core/transfer/stripe.hpp"

namespace uec {

template <class Memory, class Mover>
class Storer {
 public:
  // Scratch of the team: `held` [kMaxHeld] and `left` [num_tasks].
  UEC_HD Storer(const Call& call, Memory& memory, Mover& mover, HeldGroup* held, int32_t* left,
                const Stripe& stripe)
      : call_(call), memory_(memory), mover_(mover), held_(held), left_(left), stripe_(stripe) {
    for (int32_t t = team_.index(); t < call.work.num_tasks; t += team_.size()) left[t] = 0;
    team_.sync();
    for (int32_t p = team_.index(); p < call.work.num_pieces; p += team_.size()) {
      const Piece& piece = call.work.pieces[p];
      team_.add(&left[piece.task], stripe.count(p, piece.begin, piece.end));
    }
    team_.sync();
  }

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD Wait wait() const {
    return {FlagKind::kOpen, aborter_, aborted_expert_, -1, 0, call_.epoch.number};
  }

  // Publishes what has been delivered, else stores one loaded tile to all its destinations.
  UEC_HD Step step() {
    if (fault_ != Fault::kNone) return Step::kFailed;
    release_stages();
    bool can_store = false;
    if (!ended_ && num_held_ - num_published_ < kMaxHeld && mover_.loaded(stored_)) {
      ended_ = mover_.stage(stored_).ends_stream();
      can_store = !ended_;
    }
    if (num_published_ != num_held_) {
      // With an empty ring there may be no later store to publish behind: a peer could be waiting
      // for exactly these groups, so they are delivered and published before anything blocks.
      const HeldGroup held = held_[num_published_ % kMaxHeld];
      if (mover_.when_delivered(held.ticket, !can_store,
                                [&](Delivered token) { publish(token, held); })) {
        ++num_published_;
        return fault_ == Fault::kNone ? Step::kProgress : Step::kFailed;
      }
    }
    if (can_store) {
      store();
      return Step::kProgress;
    }
    if (num_published_ != num_held_) return Step::kAwaitDelivered;
    return ended_ ? Step::kFinished : Step::kIdle;
  }

  // After a failure, in place of step(): drains what is in flight, publishes nothing. Until it has
  // finished, loads still read what the call was given and stores still write to peers.
  UEC_HD Step drain_step() {
    // This comes first: a mover may learn that a stage has been read only through a later commit,
    // which never comes, while the fetch side waits for the stage.
    if (!mover_.when_delivered(last_ticket_, true, [](Delivered) {})) return Step::kAwaitDelivered;
    release_stages();
    if (ended_) return Step::kFinished;
    if (!mover_.loaded(stored_)) return Step::kAwaitDelivered;
    ended_ = mover_.stage(stored_).ends_stream();
    if (!ended_) ++stored_;
    return Step::kProgress;
  }

 private:
  // Rule: a stage is loaded into again only when its stores have read it. That says nothing of
  // delivery: see when_delivered().
  UEC_HD void release_stages() {
    while (released_ != stored_ && mover_.reusable(released_)) mover_.release(released_++);
  }

  UEC_HD bool is_far(int32_t rank) const {
    return Mover::kFar && call_.addresses.bases[rank] == nullptr;
  }

  UEC_HD void store() {
    const Stage& stage = mover_.stage(stored_);
    const bool ends_group = stage.ends_group;
    const int32_t group = stage.group, piece_idx = stage.piece;
    const Piece& piece = call_.work.pieces[stage.piece];
    for (int32_t first = 0; first < piece.dst_count; first += team_.size())
      mover_.store(stored_, destination(piece, first + team_.index(), stage.span),
                   stage.span.bytes);
    if constexpr (Mover::kFar) store_far(piece, stage);
    last_ticket_ = mover_.commit(stored_++);
    if (!ends_group) return;
    if (team_.leader()) held_[num_held_ % kMaxHeld] = {piece_idx, group, last_ticket_};
    team_.sync();
    ++num_held_;
  }

  // Where these bytes go at the piece's i-th destination; null: it is far, or there is no i-th one.
  UEC_HD uint8_t* destination(const Piece& piece, int32_t i, const TileSpan& span) const {
    if (i >= piece.dst_count) return nullptr;
    const Destination& to = call_.work.destinations[piece.dst_first + i];
    if (is_far(to.rank)) return nullptr;
    return call_.addresses.bases[to.rank] + slot_offset(to, span);
  }

  UEC_HD int64_t slot_offset(const Destination& to, const TileSpan& span) const {
    const Addresses& a = call_.addresses;
    return a.slot_offset[span.segment] + to.slot * a.segment_bytes[span.segment] + span.offset;
  }

  UEC_HD void store_far(const Piece& piece, const Stage& stage) {
    const bool flags = piece.sets_ready && stage.ends_group;
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const Destination& to = call_.work.destinations[piece.dst_first + i];
      if (!is_far(to.rank)) continue;
      mover_.store_far(stored_, to.rank, slot_offset(to, stage.span), stage.span.bytes,
                       flags ? call_.layout.ready(to.slot, stage.group) : -1, call_.epoch.number);
    }
  }

  UEC_HD void publish(Delivered token, const HeldGroup& held) {
    const Piece& piece = call_.work.pieces[held.piece];
    if (piece.sets_ready && team_.leader()) {
      // Pairs with TransferPieces::ready() at the hub. Before this, the hub must not read the
      // group.
      const Destination& hub = call_.work.destinations[piece.dst_first];
      if (!is_far(hub.rank))
        memory_.publish(token, hub.rank, call_.layout.ready(hub.slot, held.group),
                        call_.epoch.number);
    }
    const int32_t left = left_[piece.task] - 1;
    team_.sync();  // all have read it
    if (team_.leader()) left_[piece.task] = left;
    if (left == 0) finish_share(token, piece.task);
  }

  // Workers of a rank share a task. Each arrives after all its own deliveries, and arrive() is
  // acquire-release, so the last one vouches for all of them.
  UEC_HD void finish_share(Delivered token, int32_t t) {
    const Task& task = call_.work.tasks[t];
    int32_t arrived = 0;
    if (team_.leader()) arrived = memory_.arrive(token, &call_.arrived[t]);
    const int32_t all = num_sharers(t);
    if (team_.share(arrived) == all) finish_task(token, task);
  }

  // How many workers have groups of a task.
  UEC_HD int32_t num_sharers(int32_t t) const {
    uint32_t sharers = 0;
    for (int32_t w = team_.index(); w < stripe_.num_workers; w += team_.size()) {
      const Stripe other = {w, stripe_.num_workers};
      bool shares = false;
      for (int32_t p = 0; p < call_.work.num_pieces && !shares; ++p) {
        const Piece& piece = call_.work.pieces[p];
        shares = piece.task == t && other.count(p, piece.begin, piece.end) > 0;
      }
      sharers += shares;
    }
    return static_cast<int32_t>(team_.sum(sharers));
  }

  UEC_HD void finish_task(Delivered token, const Task& task) {
    if (task.pulled_home >= 0) {
      // A home that failed may change its weights once its abort is delivered. Our loads are
      // complete before we look, so if no abort is seen here, what we loaded was still good.
      mover_.loads_complete();
      const int32_t aborter = find_abort(memory_, call_.layout, call_.epoch);
      if (aborter >= 0) {
        aborter_ = aborter;
        aborted_expert_ = task.expert;
        fault_ = Fault::kAborted;
        return;
      }
    }
    // Pairs with Finish::step() at each replica, and at the home for `pulled`.
    for (int32_t i = team_.index(); i < task.done_count; i += team_.size()) {
      const Destination& to = call_.work.destinations[task.done_first + i];
      memory_.publish(token, to.rank, call_.layout.done(to.slot, call_.rank), call_.epoch.number);
    }
    if (task.pulled_home >= 0 && team_.leader())
      memory_.publish(token, task.pulled_home, call_.layout.pulled(task.pulled_main, call_.rank),
                      call_.epoch.number);
  }

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  typename Memory::Team team_;
  HeldGroup* held_;
  int32_t* left_;  // [num_tasks] this worker's groups that are not yet published
  Stripe stripe_;
  uint32_t num_held_ = 0, num_published_ = 0;  // groups, counted without wrapping
  uint32_t stored_ = 0, released_ = 0;         // stages, counted without wrapping
  uint32_t last_ticket_ = 0;
  bool ended_ = false;  // the fetch side has nothing more
  Fault fault_ = Fault::kNone;
  int32_t aborter_ = -1, aborted_expert_ = -1;
};

}  // namespace uec
