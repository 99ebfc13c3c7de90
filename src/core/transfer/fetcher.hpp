// The fetch side of a worker: takes its groups of tiles and loads them. It waits for no peer: a
// step that cannot go on says for what, and its caller bounds the wait.
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/ring.hpp"
#include "core/transfer/stripe.hpp"

namespace uec {

// The pieces of a transfer, as a WorkQueue uses them.
struct TransferPieces {
  UEC_HD static int32_t count(const Call& call) { return call.work.num_pieces; }
  UEC_HD static int32_t begin(const Call& call, int32_t p) { return call.work.pieces[p].begin; }
  UEC_HD static int32_t length(const Call& call, int32_t p) {
    return call.work.pieces[p].end - call.work.pieces[p].begin;
  }
  // Each piece is a list of its own. Were an expert's groups one list, a worker would have the same
  // place in the ranges of many hubs, and a hub its range from workers that reach it all at once.
  UEC_HD static int32_t list(const Call&, int32_t p) { return p; }
  UEC_HD static int32_t expert(const Call& call, int32_t p) {
    return call.work.tasks[call.work.pieces[p].task].expert;
  }
  UEC_HD static bool is_flagged(const Call& call, int32_t p) {
    return call.work.pieces[p].source == Source::kSlot;
  }
  UEC_HD static bool waits(const Call& call, int32_t p) { return is_flagged(call, p); }
  UEC_HD static uint32_t order(const Call& call, int32_t p, int32_t at) {
    return progress(at, length(call, p));
  }

  UEC_HD static int32_t first_unopened(const Call& call, int32_t p, const uint8_t* open) {
    const Piece& piece = call.work.pieces[p];
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const int32_t r = call.work.destinations[piece.dst_first + i].rank;
      if (!open[r]) return r;
    }
    if (piece.source == Source::kRemote && !open[piece.source_rank]) return piece.source_rank;
    return -1;
  }

  UEC_HD static bool uses_rank(const Call& call, int32_t p, int32_t r) {
    const Piece& piece = call.work.pieces[p];
    for (int32_t i = 0; i < piece.dst_count; ++i)
      if (call.work.destinations[piece.dst_first + i].rank == r) return true;
    return piece.source == Source::kRemote && piece.source_rank == r;
  }

  // Pairs with the source's publish of `ready`: after it, the group's bytes in our slot may be read
  // by this thread, and by threads that synchronise with it.
  template <class Memory>
  UEC_HD static FlagState ready(const Call& call, Memory& memory, int32_t p, int32_t at,
                                Fault* fault) {
    const Piece& piece = call.work.pieces[p];
    uint64_t seen = 0;
    return check_flag(memory, call.layout.ready(~piece.source_idx, piece.begin + at),
                      call.layout.call(piece.source_rank), piece.source_rank, call.epoch, fault,
                      &seen);
  }

  template <class Memory>
  UEC_HD static Wait wait(const Call& call, Memory& memory, int32_t p, int32_t at) {
    const Piece& piece = call.work.pieces[p];
    const uint64_t ready = memory.observe(call.layout.ready(~piece.source_idx, piece.begin + at));
    return {FlagKind::kReady, piece.source_rank, expert(call, p), p, ready, call.epoch.number};
  }
};

template <class Memory, class Mover>
class Fetcher {
 public:
  UEC_HD Fetcher(const Call& call, Memory& memory, Mover& mover, const StripeScratch& scratch,
                 const Stripe& stripe)
      : call_(call), mover_(mover), queue_(call, memory, scratch, stripe) {
    stage_.piece = -1;  // alone: of a whole one a compiler makes an object in memory
  }

  UEC_HD Fault fault() const { return queue_.fault(); }
  // What the last step waited for, or failed at.
  UEC_HD Wait wait() { return queue_.wait(); }

  // Takes a group if there is none, then starts one tile's load. The last fetch of all marks the
  // end of the stream for the store side.
  UEC_HD Step step() {
    if (fault() != Fault::kNone) return Step::kFailed;
    if (ended_) return Step::kFinished;
    const bool vacant = mover_.vacant(fetched_);
    if (stage_.piece < 0 || !vacant) {
      const Step taken = take(!vacant);
      if (!vacant) return Step::kAwaitDelivered;
      if (taken == Step::kFinished) return end();
      if (taken != Step::kProgress) return taken;
    }
    stage_.share = tile_ + 1 == end_tile_ ? share() : -1;
    mover_.fetch(fetched_++, stage_, source_);
    advance();
    return Step::kProgress;
  }

  // After a failure, in place of step(): fetches nothing more, and marks the end.
  UEC_HD Step drain_step() {
    if (ended_) return Step::kFinished;
    return end() == Step::kFinished ? Step::kProgress : Step::kAwaitDelivered;
  }

 private:
  UEC_HD Step end() {
    if (!mover_.vacant(fetched_)) return Step::kAwaitDelivered;
    stage_.piece = -1;
    mover_.fetch(fetched_++, stage_, nullptr);
    ended_ = true;
    return Step::kFinished;
  }

  UEC_HD Step take(bool poll_only) {
    int32_t p = -1, at = 0;
    const Step step = queue_.take(poll_only, &p, &at);
    if (step != Step::kProgress) return step;
    const Piece& piece = call_.work.pieces[p];
    const int32_t tiles = call_.tiles.group_tiles;
    stage_.piece = p;
    stage_.group = piece.begin + at;
    tile_ = stage_.group * tiles;
    end_tile_ = static_cast<int32_t>(min64(tile_ + tiles, call_.tiles.num_tiles()));
    locate();
    return step;
  }

  // How many groups this worker has of the task of the group in hand, if it has taken them all;
  // else 0.
  UEC_HD int32_t share() const {
    const Piece& piece = call_.work.pieces[stage_.piece];
    if (!queue_.all_taken(stage_.piece, stage_.group - piece.begin)) return 0;
    const int32_t task = piece.task;
    uint32_t groups = 0;
    bool left = false;
    for (int32_t p = team_.index(); p < call_.work.num_pieces; p += team_.size()) {
      if (call_.work.pieces[p].task != task) continue;
      groups += static_cast<uint32_t>(queue_.num_taken(p));
      left |= !queue_.all_taken(p);
    }
    groups = team_.sum(groups);
    return team_.count(left).all > 0 ? 0 : static_cast<int32_t>(groups);
  }

  // Advances to the group's next tile, which follows this one unless it is in another segment.
  UEC_HD void advance() {
    if (++tile_ == end_tile_) {
      stage_.piece = -1;
      return;
    }
    const int64_t tile_bytes = call_.tiles.tile_bytes;
    const int64_t offset = stage_.span.offset + tile_bytes;
    const int64_t end = call_.addresses.segment_bytes[stage_.span.segment];
    if (offset >= end) return locate();
    stage_.span.offset = offset;
    stage_.span.bytes = static_cast<int32_t>(min64(tile_bytes, end - offset));
    source_ += tile_bytes;
  }

  UEC_HD void locate() {
    stage_.span = call_.tiles.span(tile_);
    source_ = source(call_.work.pieces[stage_.piece], stage_.span);
  }

  UEC_HD const uint8_t* source(const Piece& piece, const TileSpan& span) const {
    const Addresses& a = call_.addresses;
    const int32_t i = span.segment, at = piece.source_idx;
    const bool is_remote = piece.source == Source::kRemote;
    if (at < 0)
      return a.bases[is_remote ? piece.source_rank : call_.rank] + a.slot_at(i, ~at) + span.offset;
    if (!is_remote) return a.main_ptrs[i * a.num_local_experts + at] + span.offset;
    return a.regions[piece.source_rank] + a.region_offset[i] + at * a.segment_bytes[i] +
           span.offset;
  }

  const Call& call_;
  Mover& mover_;
  WorkQueue<Memory, TransferPieces> queue_;
  typename Memory::Team team_;
  Stage stage_;  // what is fetched next; `piece` < 0: no group is in hand
  const uint8_t* source_ = nullptr;
  int32_t tile_ = 0, end_tile_ = 0;
  uint32_t fetched_ = 0;  // stages, counted without wrapping
  bool ended_ = false;
};

}  // namespace uec
