// The store side of a worker: stores tiles to their destinations, and publishes what has been
// delivered. It waits for no peer, but may wait for its own stores: until they have read a stage
// (commit_and_wait_source), and until they have arrived (wait_delivered).
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/ring.hpp"

namespace uec {

template <class Memory, class Mover>
class Storer {
 public:
  // The team's scratch: `unpublished` [kMaxUnpublished].
  UEC_HD Storer(const Call& call, Memory& memory, Mover& mover, UnpublishedGroup* unpublished)
      : call_(call), memory_(memory), mover_(mover), unpublished_(unpublished) {}

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD Wait wait() const {
    return {FlagKind::kOpen, aborter_, aborted_expert_, -1, 0, call_.epoch.number};
  }

  // Publishes what has been delivered, else stores one loaded tile to all its destinations.
  UEC_HD Step step() {
    if (fault_ != Fault::kNone) return Step::kFailed;
    release_stages();
    const bool can_store = is_next_loaded();
    // With an empty ring there may be no later store to publish behind: a peer could be waiting
    // for exactly these groups, so they are delivered and published before anything blocks.
    if (num_published_ != num_stored_ && publish_next(!can_store))
      return fault_ == Fault::kNone ? Step::kProgress : Step::kFailed;
    if (can_store) {
      store();
      return Step::kProgress;
    }
    if (num_published_ != num_stored_) return Step::kAwaitDelivered;
    return ended_ ? Step::kFinished : Step::kNeedsFetch;
  }

  // After a failure, in place of step(): drains what is in flight, publishes nothing. Until it has
  // finished, loads still read what the call was given and stores still write to peers.
  UEC_HD Step drain_step() {
    // This comes first: a mover may learn that a stage has been read only through a later commit,
    // which never comes, while the fetch side waits for the stage.
    if (!mover_.wait_delivered(last_ticket_, true, [](Delivered) {})) return Step::kAwaitDelivered;
    release_stages();
    if (ended_) return Step::kFinished;
    if (!mover_.loaded(stored_)) return Step::kAwaitDelivered;
    ended_ = mover_.stage(stored_).ends_stream();
    if (!ended_) ++stored_;
    return Step::kProgress;
  }

 private:
  // Rule: a stage is loaded into again only when its stores have read it. That says nothing of
  // delivery: see wait_delivered().
  UEC_HD void release_stages() {
    while (released_ != stored_ && mover_.reusable(released_)) mover_.release(released_++);
  }

  UEC_HD bool is_far(int32_t rank) const {
    return Mover::kFar && call_.addresses.bases[rank] == nullptr;
  }

  // A tile's way: loaded, stored, delivered, published.

  UEC_HD bool is_next_loaded() {
    if (ended_ || num_stored_ - num_published_ >= kMaxUnpublished || !mover_.loaded(stored_))
      return false;
    ended_ = mover_.stage(stored_).ends_stream();
    return !ended_;
  }

  UEC_HD void store() {
    const Stage& stage = mover_.stage(stored_);
    UnpublishedGroup pending = {stage.piece, stage.group, stage.share, 0};
    const Piece& piece = call_.work.pieces[stage.piece];
    for (int32_t first = 0; first < piece.dst_count; first += team_.size())
      mover_.store(stored_, destination(piece, first + team_.index(), stage.span),
                   stage.span.bytes);
    if constexpr (Mover::kFar) store_far(piece, stage);
    last_ticket_ = mover_.commit_and_wait_source(stored_++);
    // A group that publishes nothing is not held: the worker's last one of the task comes after it.
    if (pending.share < 0 || (pending.share == 0 && !piece.sets_ready)) return;
    pending.ticket = last_ticket_;
    if (team_.leader()) unpublished_[num_stored_ % kMaxUnpublished] = pending;
    team_.sync();
    ++num_stored_;
  }

  // Where these bytes go at the piece's i-th destination; null: it is far, or there is no i-th one.
  UEC_HD uint8_t* destination(const Piece& piece, int32_t i, const TileSpan& span) const {
    if (i >= piece.dst_count) return nullptr;
    const Destination& to = call_.work.destinations[piece.dst_first + i];
    if (is_far(to.rank)) return nullptr;
    return call_.addresses.bases[to.rank] + slot_offset(to, span);
  }

  UEC_HD int64_t slot_offset(const Destination& to, const TileSpan& span) const {
    return call_.addresses.slot_at(span.segment, to.slot) + span.offset;
  }

  UEC_HD void store_far(const Piece& piece, const Stage& stage) {
    const bool flags = piece.sets_ready && stage.ends_group();
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const Destination& to = call_.work.destinations[piece.dst_first + i];
      if (!is_far(to.rank)) continue;
      mover_.store_far(stored_, to.rank, slot_offset(to, stage.span), stage.span.bytes,
                       flags ? call_.layout.ready(to.slot, stage.group) : -1, call_.epoch.number);
    }
  }

  // Publishes the oldest group that is not, once its stores have arrived; `waits` for that.
  UEC_HD bool publish_next(bool waits) {
    const UnpublishedGroup pending = unpublished_[num_published_ % kMaxUnpublished];
    const bool is_delivered = mover_.wait_delivered(
        pending.ticket, waits, [&](Delivered token) { publish(token, pending); });
    num_published_ += is_delivered;
    return is_delivered;
  }

  UEC_HD void publish(Delivered token, const UnpublishedGroup& pending) {
    const Piece& piece = call_.work.pieces[pending.piece];
    if (piece.sets_ready && team_.leader()) {
      // Pairs with TransferPieces::ready() at the hub. Before this, the hub must not read the
      // group.
      const Destination& hub = call_.work.destinations[piece.dst_first];
      if (!is_far(hub.rank))
        memory_.publish(token, hub.rank, call_.layout.ready(hub.slot, pending.group),
                        call_.epoch.number);
    }
    if (pending.share > 0) finish_share(token, piece.task, pending.share);
  }

  // Workers of a rank share a task. Each arrives after all its own deliveries, with the number of
  // its groups, and arrive() is acquire-release, so the last one vouches for all of them.
  UEC_HD void finish_share(Delivered token, int32_t t, int32_t share) {
    const Task& task = call_.work.tasks[t];
    int32_t arrived = 0;
    if (team_.leader()) arrived = memory_.arrive(token, &call_.arrived[t], share);
    if (team_.broadcast(arrived) == task.num_groups) finish_task(token, task);
  }

  UEC_HD void finish_task(Delivered token, const Task& task) {
    if (task.pulled_rank >= 0) {
      // A source that failed may change what it has once its abort is delivered. Our loads are
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
    // Pairs with Finish::step() at each replica, and at the source for `pulled`.
    for (int32_t i = team_.index(); i < task.done_count; i += team_.size()) {
      const Destination& to = call_.work.destinations[task.done_first + i];
      memory_.publish(token, to.rank, call_.layout.done(to.slot, call_.rank), call_.epoch.number);
    }
    if (task.pulled_rank >= 0 && team_.leader())
      memory_.publish(token, task.pulled_rank, call_.layout.pulled(task.pulled_idx, call_.rank),
                      call_.epoch.number);
  }

  const Call& call_;
  Memory& memory_;
  Mover& mover_;
  typename Memory::Team team_;
  UnpublishedGroup* unpublished_;
  uint32_t num_stored_ = 0, num_published_ = 0;  // groups, counted without wrapping
  uint32_t stored_ = 0, released_ = 0;           // stages, counted without wrapping
  uint32_t last_ticket_ = 0;
  bool ended_ = false;  // the fetch side has nothing more
  Fault fault_ = Fault::kNone;
  int32_t aborter_ = -1, aborted_expert_ = -1;
};

}  // namespace uec
