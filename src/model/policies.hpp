// The core's two policies on a modelled machine: flags and bytes take time, and the bytes exist
// only as durations.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "core/base/team.hpp"
#include "core/transfer/call.hpp"
#include "core/transfer/protocol.hpp"
#include "core/transfer/ring.hpp"
#include "model/world.hpp"

namespace uec::model {

// An address says whose memory it is in, and where; there is no memory behind it.
inline constexpr int kRankShift = 44;
inline uint8_t* base_of(int32_t rank) {
  return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(rank + 1) << kRankShift);
}
inline int32_t rank_at(const uint8_t* at) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(at) >> kRankShift) - 1;
}
inline int64_t offset_at(const uint8_t* at) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) & ((uintptr_t{1} << kRankShift) - 1));
}

// What the step of a worker costs that is being taken: nothing where a machine charges nothing.
struct Spent {
  bool counts = false;  // what comes before a worker's steps is part of the call's fixed time
  int64_t ps = 0;
  bool polled = false;  // at flags: all in parallel
};

class ModelMemory {
 public:
  using Team = SingleThread;

  ModelMemory(World& world, int32_t rank, Spent& spent)
      : world_(world), rank_(rank), spent_(spent) {}

  uint64_t observe(int64_t offset) const {
    if (spent_.counts && !spent_.polled) spent_.ps += world_.machine().poll_ps;
    spent_.polled = true;
    return world_.flag(rank_, offset);
  }
  void publish(Delivered, int32_t rank, int64_t offset, uint64_t value) const {
    if (rank != rank_ && spent_.counts) spent_.ps += world_.machine().publish_ps;
    world_.publish(rank_, rank, offset, value, spent_.ps);
  }
  static bool flags_delivered() { return true; }
  static bool peer_gone(int32_t) { return false; }

  static int32_t arrive(Delivered, int32_t* counter, int32_t n) { return *counter += n; }

 private:
  World& world_;
  int32_t rank_;
  Spent& spent_;
};

// A local load takes no time: memory is several times as fast as a link. Where cores copy, loads
// are part of stores. A stage is reusable once its stores are known to be delivered, which is later
// than on a device: tiles are in flight until they arrive.
class ModelMover : public DeliveryPolicy {
 public:
  // `received` [G][S] bytes, `held` of this rank: stages in use.
  ModelMover(World& world, const Call& call, int32_t worker, int64_t* received, int32_t* held,
             int64_t* idle_since, Spent& spent)
      : world_(world),
        call_(call),
        worker_(worker),
        num_stages_(static_cast<uint32_t>(world.machine().stages)),
        received_(received),
        held_(held),
        idle_since_(idle_since),
        spent_(spent),
        stages_(num_stages_) {}

  // ---- fetch side

  bool vacant(uint32_t k) const { return k - released_ < num_stages_; }

  void fetch(uint32_t k, const Stage& stage, const uint8_t*) {
    at(k) = {stage, true, false, false};
    world_.arrivals_of(worker_, k) = {};
    described_ = k + 1;
    if (stage.ends_stream()) return;
    hold();
    spent_.ps += world_.machine().fetch_ps;
    const Piece& piece = call_.work.pieces[stage.piece];
    if (piece.source != Source::kRemote || world_.machine().cores()) {
      if (spent_.ps == 0) return;
      at(k).loaded = false;
      world_.schedule(world_.now() + spent_.ps, EventKind::kLoaded, worker_, k, 0);
      return;
    }
    at(k).loaded = false;
    Copy copy = copy_of(k);
    copy.from = piece.source_rank;
    copy.to = call_.rank;
    copy.is_load = true;
    world_.load(copy, spent_.ps);
  }

  // ---- store side

  bool loaded(uint32_t k) const { return k != described_ && at(k).loaded; }
  const Stage& stage(uint32_t k) const { return at(k).stage; }

  void store(uint32_t k, const uint8_t* destination, int64_t) {
    if (destination == nullptr) return;
    Copy copy = copy_of(k);
    copy.from = call_.rank;
    copy.to = rank_at(destination);
    const int32_t segment = at(k).stage.span.segment;
    const Addresses& a = call_.addresses;
    const int64_t slot =
        (offset_at(destination) - a.slot_offset[segment]) / a.segment_bytes[segment];
    received_[copy.to * call_.layout.slots_per_rank + slot] += copy.bytes;
    const Machine& m = world_.machine();
    if (copy.to == call_.rank && !m.cores()) return;  // a pulling hub's own slot: no link is needed
    if (m.cores() && !at(k).read) {
      at(k).read = true;
      copy.extra = Rate::time(m.read, copy.bytes);
      const bool handed_on = call_.work.pieces[copy.piece].source == Source::kSlot;
      if (handed_on && at(k).stage.ends_group()) copy.extra += m.group_ps;
    }
    ++world_.arrivals_of(worker_, k).pending;
    world_.store(copy);
  }

  uint32_t commit_and_wait_source(uint32_t k) {
    spent_.ps += world_.machine().store_ps_of_tile;
    world_.arrivals_of(worker_, k).closed = true;
    world_.deliver_if_done(worker_, k);
    return k + 1;
  }

  bool reusable(uint32_t k) const { return at(k).delivered; }

  void release(uint32_t k) {
    released_ = k + 1;
    if (!at(k).stage.ends_stream()) release_stage();
  }

  // Tickets count the stages in order; delivery may happen in any order.
  template <class F>
  bool wait_delivered(uint32_t ticket, bool, F&& then) {
    while (delivered_ < ticket && (delivered_ < released_ || at(delivered_).delivered))
      ++delivered_;
    if (delivered_ < ticket) return false;
    then(delivered());
    return true;
  }

  static void loads_complete() {}

  // ---- called by the simulation

  void note_loaded(uint32_t k) { at(k).loaded = true; }
  void note_delivered(uint32_t k) { at(k).delivered = true; }

 private:
  struct Slot {
    Stage stage = {};
    bool loaded = false, delivered = false;
    bool read = false;  // by its first store, where cores copy
  };

  Slot& at(uint32_t k) { return stages_[k % num_stages_]; }
  const Slot& at(uint32_t k) const { return stages_[k % num_stages_]; }

  Copy copy_of(uint32_t k) const {
    const Stage& stage = at(k).stage;
    Copy copy;
    copy.worker = worker_;
    copy.stage = k;
    copy.piece = stage.piece;
    copy.expert = call_.work.tasks[call_.work.pieces[stage.piece].task].expert;
    copy.bytes = stage.span.bytes;
    return copy;
  }

  // A rank that holds no tile waits for others.
  void hold() {
    if ((*held_)++ == 0)
      world_.note({call_.rank, SpanKind::kWait, -1, -1, -1, *idle_since_, world_.now(), 0});
  }
  void release_stage() {
    if (--*held_ == 0) *idle_since_ = world_.now();
  }

  World& world_;
  const Call& call_;
  int32_t worker_;
  uint32_t num_stages_;
  int64_t* received_;
  int32_t* held_;
  int64_t* idle_since_;
  Spent& spent_;
  std::vector<Slot> stages_;
  uint32_t described_ = 0, released_ = 0, delivered_ = 0;
};

// What is in this rank's own memory is delivered at once.
class ModelPublisher : public DeliveryPolicy {
 public:
  template <class F>
  static bool wait_delivered(uint32_t, bool, F&& then) {
    then(delivered());
    return true;
  }
};

// A block's adding warps add one tile after another. They do not wait for each other, so that the
// loads of two tiles are under way; these take links. Sums and main gradients are in its own
// memory.
class ModelAdder : public DeliveryPolicy {
 public:
  ModelAdder(World& world, const Call& call, int32_t worker, Spent& spent)
      : world_(world), call_(call), worker_(worker), spent_(spent) {}

  bool vacant() const { return taken_ - done_ < kAdditions; }
  template <class Source>
  void sum(uint8_t*, int32_t n, Source&& source, int64_t elements, GradType type) {
    take(n, source, elements * bytes_of(type), world_.machine().add_ps * n);
  }
  template <class Source>
  void add(uint8_t*, GradType, int32_t n, Source&& source, int64_t elements, GradType type) {
    take(n, source, elements * bytes_of(type), world_.machine().add_ps * n);
  }
  void zero(uint8_t*, int64_t bytes) {
    take(0, [](int32_t) { return nullptr; }, bytes, world_.machine().clear_ps);
  }
  uint32_t ticket() const { return taken_; }
  template <class F>
  bool try_delivered(uint32_t ticket, F&& then) const {
    if (ticket > done_) return false;
    then(delivered());
    return true;
  }
  static void loads_complete() {}

  // ---- called by the agent

  void note_loaded(uint32_t tile) {
    --tiles_[tile - first_].pending;
    add_up();
  }
  void note_added() {
    adding_ = false;
    done_ += tiles_.front().ends;
    tiles_.pop_front();
    ++first_;
    begin();
  }

 private:
  static constexpr uint32_t kAdditions = 4, kTiles = 2;  // taken ahead, and under way

  struct Tile {
    std::vector<Copy> loads;
    int64_t takes;         // behind them
    bool ends;             // its addition
    int64_t after;         // what its worker does first
    int32_t pending = -1;  // loads; -1: they have not begun
  };

  template <class Source>
  void take(int32_t n, Source&& source, int64_t bytes, int64_t takes) {
    spent_.ps += world_.machine().gather_ps;
    ++taken_;
    for (int64_t left = bytes; left > 0; left -= call_.tiles.tile_bytes) {
      const int64_t size = std::min(left, call_.tiles.tile_bytes);
      Tile tile = {{}, takes, size == left, world_.now() + spent_.ps};
      for (int32_t i = 0; i < n; ++i) {
        Copy copy;
        copy.from = rank_at(source(i));
        copy.to = call_.rank;
        copy.worker = worker_;
        copy.bytes = size;
        copy.is_load = true;
        if (copy.from != copy.to) tile.loads.push_back(copy);
      }
      tiles_.push_back(std::move(tile));
    }
    begin();
  }
  void begin() {
    for (uint32_t i = 0; i < kTiles && i < tiles_.size(); ++i) {
      Tile& tile = tiles_[i];
      if (tile.pending >= 0) continue;
      tile.pending = static_cast<int32_t>(tile.loads.size());
      for (Copy& copy : tile.loads) {
        copy.stage = first_ + i;
        world_.load(copy, std::max(tile.after - world_.now(), int64_t{0}));
      }
    }
    add_up();
  }
  void add_up() {
    if (adding_ || tiles_.empty() || tiles_.front().pending != 0) return;
    adding_ = true;
    const int64_t begins = std::max(world_.now(), tiles_.front().after);
    world_.schedule(begins + tiles_.front().takes, EventKind::kDelivered, worker_, 0, 0);
  }

  World& world_;
  const Call& call_;
  int32_t worker_;
  Spent& spent_;
  std::deque<Tile> tiles_;         // the first is being added
  uint32_t first_ = 0;             // its number
  uint32_t taken_ = 0, done_ = 0;  // additions
  bool adding_ = false;
};

}  // namespace uec::model
