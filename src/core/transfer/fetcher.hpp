// The fetch side of a worker: claims groups of tiles and loads them, and never blocks.
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/claimer.hpp"
#include "core/transfer/ring.hpp"

namespace uec {

// The pieces of a transfer, as a Claimer asks for them.
struct TransferPieces {
  UEC_HD static int32_t count(const Call& call) { return call.work.num_pieces; }
  UEC_HD static int32_t length(const Call& call, int32_t p) {
    return call.work.pieces[p].end - call.work.pieces[p].begin;
  }
  UEC_HD static int32_t expert(const Call& call, int32_t p) {
    return call.work.tasks[call.work.pieces[p].task].expert;
  }
  UEC_HD static bool is_flagged(const Call& call, int32_t p) {
    return call.work.pieces[p].source == Source::kSlot;
  }
  UEC_HD static uint32_t order(const Call& call, int32_t p, int32_t at) {
    return progress(at, length(call, p));
  }

  UEC_HD static int32_t find_closed(const Call& call, int32_t p, const uint8_t* open) {
    const Piece& piece = call.work.pieces[p];
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const int32_t r = call.work.destinations[piece.dst_first + i].rank;
      if (!open[r]) return r;
    }
    if (piece.source == Source::kRemoteMain && !open[piece.source_rank]) return piece.source_rank;
    return -1;
  }

  UEC_HD static bool touches(const Call& call, int32_t p, int32_t r) {
    const Piece& piece = call.work.pieces[p];
    for (int32_t i = 0; i < piece.dst_count; ++i)
      if (call.work.destinations[piece.dst_first + i].rank == r) return true;
    return piece.source == Source::kRemoteMain && piece.source_rank == r;
  }

  // Pairs with the home's publish of `ready`: after it, the group's bytes in our slot may be read
  // by this thread, and by threads that synchronise with it.
  template <class Memory>
  UEC_HD static Verdict ready(const Call& call, Memory& memory, int32_t p, int32_t at,
                              Fault* fault) {
    const Piece& piece = call.work.pieces[p];
    if (piece.source != Source::kSlot) return Verdict::kArrived;
    uint64_t seen = 0;
    return judge_flag(memory, call.layout.ready(piece.source_idx, piece.begin + at),
                      call.layout.call(piece.source_rank), piece.source_rank, call.epoch, fault,
                      &seen);
  }

  template <class Memory>
  UEC_HD static Wait wait(const Call& call, Memory& memory, int32_t p, int32_t at) {
    const Piece& piece = call.work.pieces[p];
    const uint64_t ready = memory.observe(call.layout.ready(piece.source_idx, piece.begin + at));
    return {FlagKind::kReady, piece.source_rank, expert(call, p), p, ready, call.epoch.number};
  }
};

template <class Memory, class Mover>
class Fetcher {
 public:
  // As Claimer.
  UEC_HD Fetcher(const Call& call, Memory& memory, Mover& mover, uint8_t* open, uint8_t* state,
                 int32_t worker = 0)
      : call_(call), mover_(mover), claimer_(call, memory, open, state, worker) {}

  UEC_HD Fault fault() const { return claimer_.fault(); }
  // What the last step was blocked by, or failed at.
  UEC_HD Wait wait() { return claimer_.wait(); }

  // Claims a group if none is in hand, then starts one tile's load. The last fetch of all tells the
  // store side that there are no more.
  UEC_HD Step step() {
    if (fault() != Fault::kNone) return Step::kFailed;
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

  UEC_HD Step claim() {
    int32_t at = 0;
    const Step step = claimer_.claim(&item_.piece, &at);
    if (item_.piece < 0) return step;
    const Piece& piece = call_.work.pieces[item_.piece];
    const int32_t tiles = call_.work.tasks[piece.task].group_tiles;
    item_.group = piece.begin + at;
    item_.tile = item_.group * tiles;
    item_.end_tile = static_cast<int32_t>(min64(item_.tile + tiles, call_.tiles.num_tiles()));
    return step;
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
  Mover& mover_;
  Claimer<Memory, TransferPieces> claimer_;
  Item item_;
  uint32_t fetched_ = 0;  // stages, counted without wrapping
  bool ended_ = false;
};

}  // namespace uec
