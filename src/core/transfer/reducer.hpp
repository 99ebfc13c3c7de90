// A worker of a gradient reduction: sums tiles, and publishes what has been delivered.
//
// Hubs sum their replicas' tiles, in their own memory; homes add the sums to the main gradients;
// owners clear their slots. Data flows the other way round than in a transfer: a hub's work waits
// only for openings, and goes first; a home's work waits for sums, and clearing waits for readers.
// Both are polled and skipped.
//
// An Adder, made for one worker, takes additions, and does them in the order in which it got them,
// at once or later. It provides to its team
//   bool vacant()                   whether it takes another one
//   void sum(uint8_t* to, n, source, elements, type)
//                                   stores source(0) + ... + source(n - 1), in this order, in fp32.
//                                   source(i): where the i-th addend is, `elements` of `type`;
//                                   `to` may be one of them, if that is fp32
//   void add(uint8_t* main, main_type, n, source, elements, type)
//                                   main + (source(0) + ... + source(n - 1)), rounded once
//   void zero(uint8_t* to, bytes)
//   uint32_t ticket()               of all that it has taken so far
//   bool try_delivered(ticket, f)   calls f(Delivered) in all members, and returns true, once what
//                                   the ticket is of has been read, and what it stores is visible
//   void loads_complete()           orders what has been read, as try_delivered() has said, before
//                                   what follows
#pragma once

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/gradients.hpp"
#include "core/transfer/ring.hpp"
#include "core/transfer/stripe.hpp"

namespace uec {

// The pieces of a reduction, as a WorkQueue uses them.
struct ReductionPieces {
  UEC_HD static const Reduction& piece(const Call& call, int32_t p) {
    return call.work.reductions[p];
  }
  UEC_HD static int32_t count(const Call& call) { return call.work.num_reductions; }
  UEC_HD static int32_t begin(const Call& call, int32_t p) { return piece(call, p).begin; }
  // One list for all pieces of an expert (one of each hub at a home), which are shared evenly as a
  // whole.
  UEC_HD static int32_t list(const Call& call, int32_t p) { return piece(call, p).expert; }
  UEC_HD static int32_t length(const Call& call, int32_t p) {
    return piece(call, p).end - piece(call, p).begin;
  }
  UEC_HD static int32_t expert(const Call& call, int32_t p) { return piece(call, p).expert; }
  UEC_HD static bool is_flagged(const Call& call, int32_t p) { return piece(call, p).of_hub; }
  UEC_HD static bool waits(const Call& call, int32_t p) {
    return is_flagged(call, p) || piece(call, p).kind == Reduction::kZero;
  }
  // Hubs first: others wait for their sums.
  UEC_HD static uint32_t order(const Call& call, int32_t p, int32_t at) {
    return static_cast<uint32_t>(piece(call, p).kind) << 8 | progress(at, length(call, p)) >> 2;
  }

  UEC_HD static int32_t first_unopened(const Call& call, int32_t p, const uint8_t* open) {
    const Reduction& r = piece(call, p);
    if (r.kind == Reduction::kZero) return -1;
    for (int32_t i = 0; i < r.count; ++i) {
      const int32_t rank = call.work.destinations[r.first + i].rank;
      if (!open[rank]) return rank;
    }
    // The flags of its sums may be another hub's until the home is in this call.
    return r.kind == Reduction::kSum && !open[r.home] ? r.home : -1;
  }

  UEC_HD static bool uses_rank(const Call& call, int32_t p, int32_t rank) {
    const Reduction& r = piece(call, p);
    if (r.kind == Reduction::kZero) return false;
    for (int32_t i = 0; i < r.count; ++i)
      if (call.work.destinations[r.first + i].rank == rank) return true;
    return r.kind == Reduction::kSum && r.home == rank;
  }

  // Pairs with Reducer::publish_group() of the hub, and with Reducer::finish_piece() of all readers
  // of a slot.
  template <class Memory>
  UEC_HD static FlagState ready(const Call& call, Memory& memory, int32_t p, int32_t at,
                                Fault* fault) {
    const Reduction& r = piece(call, p);
    uint64_t seen = 0;
    if (r.of_hub) {
      // Rule: nobody loads a sum before it is whole.
      const int32_t hub = call.work.destinations[r.first].rank;
      return check_flag(memory, call.layout.summed(r.local_idx, r.begin + at),
                        call.layout.call(hub), hub, call.epoch, fault, &seen);
    }
    // Rule: nothing of a slot is cleared before all its readers have said that they are done.
    for (int32_t i = 0; i < r.count; ++i) {
      const Expected& reader = call.work.expected[r.first + i];
      const FlagState state =
          check_flag(memory, call.layout.consumed(r.idx, reader.peer),
                     call.layout.call(reader.peer), reader.peer, call.epoch, fault, &seen);
      if (state != FlagState::kArrived) return state;
    }
    return FlagState::kArrived;
  }

  template <class Memory>
  UEC_HD static Wait wait(const Call& call, Memory& memory, int32_t p, int32_t at) {
    const Reduction& r = piece(call, p);
    const uint64_t epoch = call.epoch.number;
    if (r.of_hub) {
      const uint64_t seen = memory.observe(call.layout.summed(r.local_idx, r.begin + at));
      return {FlagKind::kSummed, call.work.destinations[r.first].rank, r.expert, p, seen, epoch};
    }
    for (int32_t i = 0; i < r.count; ++i) {
      const int32_t peer = call.work.expected[r.first + i].peer;
      const uint64_t seen = memory.observe(call.layout.consumed(r.idx, peer));
      if (seen != epoch || i + 1 == r.count)
        return {FlagKind::kConsumed, peer, r.expert, p, seen, epoch};
    }
    Wait none;
    return none;
  }
};

template <class Memory, class Adder>
class Reducer {
 public:
  // The team's scratch: `scratch`, and `unpublished` [kMaxUnpublished].
  UEC_HD Reducer(const Call& call, Memory& memory, Adder& adder, const StripeScratch& scratch,
                 UnpublishedGroup* unpublished, const Stripe& stripe)
      : call_(call),
        memory_(memory),
        adder_(adder),
        queue_(call, memory, scratch, stripe),
        num_workers_(stripe.num_workers),
        unpublished_(unpublished) {}

  UEC_HD Fault fault() const { return fault_ != Fault::kNone ? fault_ : queue_.fault(); }
  // What the last step waited for, or failed at.
  UEC_HD Wait wait() {
    if (fault_ == Fault::kNone) return queue_.wait();
    return {FlagKind::kOpen, aborter_, aborted_, -1, 0, call_.epoch.number};
  }

  // Publishes a finished group, else hands a tile of the current one to the adder, else takes one.
  // Several groups may be in flight: they wait only for this worker's adder.
  UEC_HD Step step() {
    if (fault() != Fault::kNone) return Step::kFailed;
    if (num_published_ != num_done_) {
      const UnpublishedGroup pending = unpublished_[num_published_ % kMaxUnpublished];
      if (adder_.try_delivered(pending.ticket,
                               [&](Delivered token) { publish_group(token, pending); })) {
        ++num_published_;
        return fault_ == Fault::kNone ? Step::kProgress : Step::kFailed;
      }
    }
    const bool has_room = num_done_ - num_published_ != kMaxUnpublished && adder_.vacant();
    if (piece_ >= 0 && !has_room) return Step::kAwaitDelivered;
    if (piece_ < 0) {
      int32_t at = 0;
      const Step taken = queue_.take(!has_room, &piece_, &at);
      if (taken != Step::kProgress)
        return num_published_ != num_done_ && taken != Step::kFailed ? Step::kAwaitDelivered
                                                                     : taken;
      begin_group(at);
    }
    do_tiles(call_.work.reductions[piece_]);
    if (tile_ == end_tile_) keep_unpublished();
    return Step::kProgress;
  }

  // After a failure, in place of step(): drains what is in flight and publishes nothing.
  UEC_HD Step drain_step() {
    return adder_.try_delivered(adder_.ticket(), [](Delivered) {}) ? Step::kFinished
                                                                   : Step::kAwaitDelivered;
  }

 private:
  UEC_HD void begin_group(int32_t at) {
    const Reduction& r = call_.work.reductions[piece_];
    group_ = r.begin + at;
    tile_ = r.tile + at * r.group_tiles;
    end_tile_ = min32(tile_ + r.group_tiles, r.end_tile);
  }

  UEC_HD void keep_unpublished() {
    if (team_.leader())
      unpublished_[num_done_ % kMaxUnpublished] = {piece_, group_, 0, adder_.ticket()};
    team_.sync();
    ++num_done_;
    piece_ = -1;
  }

  // The group's next tiles, up to the end of their segment: one addition.
  UEC_HD_NOINLINE void do_tiles(const Reduction& r) {
    const int32_t tile = tile_;
    const TileSpan span = call_.tiles.span(tile, end_tile_);
    tile_ += static_cast<int32_t>(
        divide(span.bytes + call_.tiles.tile_bytes - 1, call_.tiles.tile_bytes));
    const GradType type = call_.grads.type[span.segment];
    const int64_t elements = elements_of(span.bytes, type);
    const Destination* const from = call_.work.destinations + r.first;
    const auto slot = [&](int32_t i) { return in_slot(from[i], span); };
    switch (r.kind) {
      case Reduction::kSum:
        adder_.sum(in_sums(r, {call_.rank, r.idx}, span, tile), r.count, slot, elements, type);
        break;
      case Reduction::kAdd: {
        const GradType main_type = call_.main_type[span.segment];
        uint8_t* const main = in_main(r, span, main_type);
        const auto sums = [&](int32_t) -> const uint8_t* {
          return in_sums(r, from[0], span, tile);
        };
        if (r.of_hub)
          adder_.add(main, main_type, 1, sums, elements, GradType::kFloat32);
        else
          adder_.add(main, main_type, r.count, slot, elements, type);
        break;
      }
      case Reduction::kZero:
        adder_.zero(in_slot({call_.rank, r.idx}, span), span.bytes);
        break;
    }
  }

  UEC_HD uint8_t* in_slot(const Destination& at, const TileSpan& span) const {
    const Gradients& g = call_.grads;
    return call_.addresses.bases[at.rank] + g.offset[span.segment] +
           at.slot * g.bytes[span.segment] + span.offset;
  }

  // Where the hub of a range keeps the sum of a tile: fp32 gradients are summed in place, where no
  // other rank reads them; other types have separate memory for their sums.
  UEC_HD uint8_t* in_sums(const Reduction& r, const Destination& hub, const TileSpan& span,
                          int32_t tile) const {
    if (call_.grads.type[span.segment] == GradType::kFloat32) return in_slot(hub, span);
    const int64_t nth = tile - r.tile;
    return call_.addresses.bases[hub.rank] + call_.layout.sums(hub.slot) +
           nth * call_.tiles.tile_bytes *
               (bytes_of(GradType::kFloat32) / bytes_of(GradType::kBFloat16));
  }

  UEC_HD uint8_t* in_main(const Reduction& r, const TileSpan& span, GradType type) const {
    const Addresses& a = call_.addresses;
    const int64_t element = elements_of(span.offset, call_.grads.type[span.segment]);
    // A transfer only reads what it is given; these are written to.
    auto* const main =
        const_cast<uint8_t*>(a.main_ptrs[span.segment * a.num_local_experts + r.local_idx]);
    return main + element * bytes_of(type);
  }

  UEC_HD void publish_group(Delivered token, const UnpublishedGroup& pending) {
    const Reduction& r = call_.work.reductions[pending.piece];
    // Pairs with ReductionPieces::ready() at the home. Before this, it must not load the sum.
    if (r.kind == Reduction::kSum && team_.leader())
      memory_.publish(token, r.home, call_.layout.summed(r.local_idx, pending.group),
                      call_.epoch.number);
    if (r.kind == Reduction::kZero) return;            // nobody waits for it
    if (r.end - pending.group > num_workers_) return;  // not this worker's last one
    // Workers of a rank share a piece. Each arrives after all its own groups, and arrive() is
    // acquire-release, so the last one vouches for all of them.
    int32_t arrived = 0;
    if (team_.leader()) arrived = memory_.arrive(token, &call_.arrived[pending.piece], 1);
    if (team_.broadcast(arrived) == min32(r.end - r.begin, num_workers_)) finish_piece(token, r);
  }

  UEC_HD void finish_piece(Delivered token, const Reduction& r) {
    if (r.kind == Reduction::kAdd) {
      // A rank that failed may change its slots once its abort is delivered, while a hub or we
      // still load from them. Our loads are complete before we look, so if no abort is seen here,
      // what was added is good. Hubs need not look: their sums go to the home alone, which looks
      // after it has loaded them.
      adder_.loads_complete();
      aborter_ = find_abort(memory_, call_.layout, call_.epoch);
      if (aborter_ >= 0) {
        fault_ = Fault::kAborted;
        aborted_ = r.expert;
        return;
      }
    }
    // Pairs with ReductionPieces::ready() and Finish::step() at the owners of the slots. Rule: this
    // rank will read no more of them, so they may be cleared, or written to again.
    for (int32_t i = team_.index(); i < r.count; i += team_.size()) {
      const Destination& slot = call_.work.destinations[r.first + i];
      if (slot.rank != call_.rank)
        memory_.publish(token, slot.rank, call_.layout.consumed(slot.slot, call_.rank),
                        call_.epoch.number);
    }
  }

  const Call& call_;
  Memory& memory_;
  Adder& adder_;
  WorkQueue<Memory, ReductionPieces> queue_;
  int32_t num_workers_;
  typename Memory::Team team_;
  UnpublishedGroup* unpublished_;
  uint32_t num_done_ = 0, num_published_ = 0;  // groups, counted without wrapping
  int32_t piece_ = -1, group_ = 0;
  int32_t tile_ = 0, end_tile_ = 0;
  Fault fault_ = Fault::kNone;
  int32_t aborter_ = -1, aborted_ = -1;  // a rank, and the expert that we added
};

}  // namespace uec
