// The streaming steps: one worker of one rank moves groups of tiles, and never blocks.
//
// A step either makes progress or says that there is nothing to do yet. The host engine alternates
// fetch_step() and store_step() in a thread; a device drives each from a lane of its own warp; the
// tests interleave the steps of all ranks.
#pragma once

#include "core/common.hpp"
#include "core/layout.hpp"
#include "core/protocol.hpp"
#include "core/tiles.hpp"
#include "core/worklist.hpp"

namespace uec {

enum class Step : int32_t {
  kProgress,        // something was claimed, loaded, stored or published
  kAwaitDelivered,  // stores are under way, nothing else can be done
  kBlocked,         // a peer has to move first: wait() says which
  kFinished,        // nothing is left to claim, load, store or publish
  kFailed,          // fault() and wait() say why
};

// Where bytes live. `bases` are the symmetric memories of all ranks as seen from this one.
struct Addresses {
  uint8_t* const* bases = nullptr;         // [G], null: no load/store access
  const int64_t* segment_bytes = nullptr;  // [num_segments] of one expert
  const int64_t* slot_offset = nullptr;    // [num_segments]
  const uint8_t* const* mains = nullptr;   // [num_segments][num_mains] this rank's main weights
  int32_t num_mains = 0;
  const uint8_t* const* regions = nullptr;  // [G] pull: main weights that peers can address
  const int64_t* region_offset = nullptr;   // [num_segments]
};

// One call on one rank, shared by its workers. Arrays live in the rank's private memory.
struct Call {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  Epoch epoch;
  SymmetricLayout layout;
  TileMap tiles;
  Addresses addresses;
  Worklist work;
  int32_t* cursor = nullptr;     // [num_pieces] groups claimed
  int32_t* remaining = nullptr;  // [num_tasks] groups not yet delivered

  UEC_HD void reset_counters() {
    for (int32_t p = 0; p < work.num_pieces; ++p) cursor[p] = 0;
    for (int32_t i = 0; i < work.num_tasks; ++i) remaining[i] = work.tasks[i].num_groups;
  }
};

// A rank that failed in this call or before it, and so will not do its part; -1: none. One that
// failed in a later call has finished this one: it owes nothing here any more.
template <class Memory>
UEC_HD int32_t find_abort(Memory& memory, const SymmetricLayout& layout, const Epoch& epoch) {
  for (int32_t r = 0; r < layout.num_ranks; ++r) {
    const AbortWord word{memory.observe(layout.abort(r))};
    if (word.set() && word.ahead_of(epoch.number) <= 0) return r;
  }
  return -1;
}

template <class Memory, class Mover>
class Worker {
 public:
  static constexpr uint32_t kStages = 4;
  static constexpr uint32_t kMaxHeld = 4;  // groups stored but not yet published

  // Scratch: `live` [num_pieces] int32, `gate` [num_pieces] bytes.
  UEC_HD Worker(Call& call, Memory& memory, Mover& mover, int32_t* live, uint8_t* gate)
      : call_(call),
        memory_(memory),
        mover_(mover),
        live_(live),
        gate_(gate),
        num_live_(call.work.num_pieces) {
    for (int32_t p = 0; p < num_live_; ++p) {
      live_[p] = p;
      gate_[p] = 0;
    }
  }

  UEC_HD Fault fault() const { return fault_; }
  UEC_HD const Wait& wait() const { return wait_; }

  // Claims a group if none is in hand, then starts one tile's load.
  UEC_HD Step fetch_step() {
    if (fault_ != Fault::kNone) return Step::kFailed;
    if (item_.piece < 0) {
      const Step claimed = claim();
      if (claimed != Step::kProgress || item_.piece < 0) return claimed;
    }
    if (fetched_ - retired_ == kStages) return Step::kAwaitDelivered;
    const Piece& piece = call_.work.pieces[item_.piece];
    Stage& stage = stages_[fetched_ % kStages];
    stage.span = call_.tiles.span(item_.tile);
    stage.piece = item_.piece;
    stage.group = item_.group;
    stage.ends_group = ++item_.tile == item_.end_tile;
    mover_.fetch(fetched_ % kStages, source(piece, stage.span), stage.span.bytes);
    ++fetched_;
    if (stage.ends_group) item_.piece = -1;
    return Step::kProgress;
  }

  // Publishes what has been delivered, else stores one loaded tile to all its destinations.
  UEC_HD Step store_step() {
    if (fault_ != Fault::kNone) return Step::kFailed;
    while (retired_ != stored_ && mover_.reusable(retired_ % kStages)) ++retired_;
    const bool can_store =
        stored_ != fetched_ && held_ - published_ < kMaxHeld && mover_.loaded(stored_ % kStages);
    if (published_ != held_) {
      // With an empty ring there may be no later store to publish behind: a peer could be waiting
      // for exactly these groups, so they are delivered and published before anything blocks.
      const Held held = groups_[published_ % kMaxHeld];
      if (mover_.when_delivered(held.ticket, !can_store,
                                [&](Delivered token) { publish(token, held); })) {
        ++published_;
        return fault_ == Fault::kNone ? Step::kProgress : Step::kFailed;
      }
    }
    if (can_store) {
      store(stored_ % kStages);
      ++stored_;
      return Step::kProgress;
    }
    if (published_ != held_ || stored_ != fetched_) return Step::kAwaitDelivered;
    return Step::kFinished;
  }

  // After a failure, in place of the other two: ends what is under way and publishes nothing. Until
  // it has finished, loads still read what the call was given and stores still write to peers.
  UEC_HD Step drain_step() {
    while (stored_ != fetched_ && mover_.loaded(stored_ % kStages)) ++stored_;
    if (stored_ != fetched_) return Step::kAwaitDelivered;
    if (!drain_ticket_) drain_ticket_ = mover_.commit();
    return mover_.when_delivered(drain_ticket_, true, [](Delivered) {}) ? Step::kFinished
                                                                        : Step::kAwaitDelivered;
  }

 private:
  struct Item {
    int32_t piece = -1;
    int32_t group = 0;
    int64_t tile = 0, end_tile = 0;
  };
  struct Stage {
    TileSpan span;
    int32_t piece, group;
    bool ends_group;
  };
  struct Held {  // a group whose stores are committed
    int32_t piece, group;
    uint32_t ticket;
  };

  UEC_HD Step fail(Fault fault) {
    fault_ = fault;
    return Step::kFailed;
  }

  // Takes the next group of the eligible piece that is least far along, so that experts and hubs
  // progress together. Rule: nothing is claimed that cannot be moved at once. A piece whose
  // destination is not open, or whose next group is not ready, is polled and skipped; were it
  // claimed and waited for, two ranks could each hold the other's input behind their own wait.
  UEC_HD Step claim() {
    int32_t best = -1, best_at = 0, best_length = 1;
    for (int32_t i = 0; i < num_live_;) {
      const int32_t p = live_[i];
      const Piece& piece = call_.work.pieces[p];
      const int32_t at = memory_.load(&call_.cursor[p]), length = piece.end - piece.begin;
      if (at >= length) {
        live_[i] = live_[--num_live_];
        continue;
      }
      ++i;
      const Wait other = wait_;
      Verdict verdict = gate_open(p, piece);
      if (verdict == Verdict::kArrived && piece.source == Source::kSlot)
        verdict = group_ready(p, piece, piece.begin + at);
      if (verdict == Verdict::kFault) {
        // The peer may be past this call because another worker has sent it the rest of this piece
        // since we looked. That worker's claim happened before the `done` that let the peer go on,
        // so it is seen now; with groups left unclaimed the peer cannot have finished.
        if (memory_.load(&call_.cursor[p]) < length) return Step::kFailed;
        fault_ = Fault::kNone;
        wait_ = other;
        live_[--i] = live_[--num_live_];  // else this step could call itself blocked
        continue;
      }
      if (verdict == Verdict::kWaiting) continue;
      if (best < 0 ||
          static_cast<int64_t>(at) * best_length < static_cast<int64_t>(best_at) * length) {
        best = p;
        best_at = at;
        best_length = length;
      }
    }
    if (num_live_ == 0) return Step::kFinished;
    if (best < 0) return Step::kBlocked;
    if (!memory_.claim(&call_.cursor[best], best_at)) return Step::kProgress;  // another worker's
    const Piece& piece = call_.work.pieces[best];
    const int64_t tiles = call_.work.tasks[piece.task].group_tiles;
    item_.piece = best;
    item_.group = piece.begin + best_at;
    item_.tile = item_.group * tiles;
    item_.end_tile = min64(item_.tile + tiles, call_.tiles.num_tiles());
    return Step::kProgress;
  }

  // Each worker looks for itself: an acquire by one thread orders nothing for another.
  UEC_HD Verdict gate_open(int32_t p, const Piece& piece) {
    if (gate_[p]) return Verdict::kArrived;
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const Verdict verdict = rank_open(p, call_.work.destinations[piece.dst_first + i].rank);
      if (verdict != Verdict::kArrived) return verdict;
    }
    if (piece.source == Source::kRemoteMain) {
      const Verdict verdict = rank_open(p, piece.source_rank);
      if (verdict != Verdict::kArrived) return verdict;
    }
    gate_[p] = 1;
    return Verdict::kArrived;
  }

  UEC_HD Verdict rank_open(int32_t p, int32_t rank) {
    if (rank == call_.rank) return Verdict::kArrived;
    const int64_t call_offset = call_.layout.call(rank);
    Verdict verdict = judge_call(memory_, call_offset, rank, call_.epoch, &fault_);
    if (verdict != Verdict::kArrived) {
      note(FlagKind::kCall, rank, p, CallRecord{memory_.observe(call_offset)}.epoch_low());
      return verdict;
    }
    uint64_t seen = 0;
    verdict = judge_flag(memory_, call_.layout.open(rank), call_offset, rank, call_.epoch, &fault_,
                         &seen);
    if (verdict != Verdict::kArrived) note(FlagKind::kOpen, rank, p, seen);
    return verdict;
  }

  // Pairs with the home's publish of `ready`: after it, the group's bytes in our slot may be read,
  // by this thread, which is the one that will load them.
  UEC_HD Verdict group_ready(int32_t p, const Piece& piece, int32_t group) {
    uint64_t seen = 0;
    const Verdict verdict = judge_flag(memory_, call_.layout.ready(piece.source_idx, group),
                                       call_.layout.call(piece.source_rank), piece.source_rank,
                                       call_.epoch, &fault_, &seen);
    if (verdict != Verdict::kArrived) note(FlagKind::kReady, piece.source_rank, p, seen);
    return verdict;
  }

  UEC_HD void note(FlagKind flag, int32_t peer, int32_t p, uint64_t seen) {
    const int32_t expert = call_.work.tasks[call_.work.pieces[p].task].expert;
    wait_ = {flag, peer, expert, p, seen, call_.epoch.number};
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

  UEC_HD void store(uint32_t stage_idx) {
    const Stage& stage = stages_[stage_idx];
    const Piece& piece = call_.work.pieces[stage.piece];
    const Addresses& a = call_.addresses;
    for (int32_t i = 0; i < piece.dst_count; ++i) {
      const Destination& to = call_.work.destinations[piece.dst_first + i];
      mover_.store(stage_idx,
                   a.bases[to.rank] + a.slot_offset[stage.span.segment] +
                       to.slot * a.segment_bytes[stage.span.segment] + stage.span.offset,
                   stage.span.bytes);
    }
    if (stage.ends_group) groups_[held_++ % kMaxHeld] = {stage.piece, stage.group, mover_.commit()};
  }

  UEC_HD void publish(Delivered token, const Held& held) {
    const Piece& piece = call_.work.pieces[held.piece];
    if (piece.sets_ready) {
      // Pairs with group_ready() at the hub. Before this, the hub must not read the group.
      const Destination& hub = call_.work.destinations[piece.dst_first];
      memory_.publish(token, hub.rank, call_.layout.ready(hub.slot, held.group),
                      call_.epoch.number);
    }
    // Workers of a rank share a task. Each arrives after its own deliveries, and arrive() is
    // acquire-release, so the last one vouches for all of them.
    if (memory_.arrive(token, &call_.remaining[piece.task]) == 0)
      finish_task(token, call_.work.tasks[piece.task]);
  }

  UEC_HD void finish_task(Delivered token, const Task& task) {
    if (task.pulled_home >= 0) {
      // A home that failed may change its weights once its abort is delivered. Our loads are
      // complete before we look, so if no abort is seen here, what we loaded was still good.
      mover_.loads_complete();
      const int32_t aborter = find_abort(memory_, call_.layout, call_.epoch);
      if (aborter >= 0) {
        wait_ = {FlagKind::kOpen, aborter, task.expert, -1, 0, call_.epoch.number};
        fail(Fault::kAborted);
        return;
      }
    }
    // Pairs with Finish::step() at each replica, and at the home for `pulled`.
    for (int32_t i = 0; i < task.done_count; ++i) {
      const Destination& to = call_.work.destinations[task.done_first + i];
      memory_.publish(token, to.rank, call_.layout.done(to.slot, call_.rank), call_.epoch.number);
    }
    if (task.pulled_home >= 0)
      memory_.publish(token, task.pulled_home, call_.layout.pulled(task.pulled_main, call_.rank),
                      call_.epoch.number);
  }

  Call& call_;
  Memory& memory_;
  Mover& mover_;
  int32_t* live_;  // pieces with unclaimed groups, as far as this worker knows
  uint8_t* gate_;  // pieces whose destinations this worker has seen open
  int32_t num_live_;
  Item item_;
  Stage stages_[kStages] = {};
  Held groups_[kMaxHeld] = {};
  uint32_t fetched_ = 0, stored_ = 0, retired_ = 0;  // stages, counted without wrapping
  uint32_t held_ = 0, published_ = 0;                // groups
  uint32_t drain_ticket_ = 0;
  Fault fault_ = Fault::kNone;
  Wait wait_;
};

}  // namespace uec
