// Set-up of tests of teams: a group in plain memory, and the policies of a team's members.
#pragma once

#include <atomic>
#include <barrier>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/digest.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/fetcher.hpp"
#include "core/transfer/storer.hpp"
#include "core/transfer/team_flags.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/stripes.hpp"
#include "support/worklists.hpp"

namespace team_tests {

using uec::AbortWord;
using uec::Call;
using uec::CallRecord;
using uec::Delivered;
using uec::Fault;
using uec::FlagKind;
using uec::Mode;
using uec::RecordKind;
using uec::SingleThread;
using uec::Step;
using uec::Wait;

// ---- a group in plain memory --------------------------------------------------------------------

// The tile buffers between the two sides of a rank, and how its mover behaves.
struct Ring {
  static constexpr uint32_t kStages = 3;

  std::atomic<uint32_t> described{0}, released{0};
  uec::Stage stages[kStages] = {};
  const uint8_t* source[kStages] = {};
  uint32_t commits = 0;
  Random dice{};
};

// One rank's part of one call.
struct Part {
  Part(const PlanCase& c, const Tiles& tiles, Mode mode, int32_t rank)
      : schedule(c, tiles.map(), mode),
        worklist(c, schedule.schedule, rank),
        arrived(worklist.tasks.size() + 1),
        scratch(c.num_ranks, worklist.list.num_pieces) {}

  ScheduleArrays schedule;
  WorklistArrays worklist;
  std::vector<int32_t> arrived;
  WorkerScratch scratch;
  uec::UnpublishedGroup held[uec::kMaxUnpublished] = {};
  Ring ring;
  Call call;
};

struct World {
  World(const PlanCase& group, std::vector<int64_t> segments, int64_t tile_bytes)
      : base_case(group),
        segment_bytes(segments),
        tiles(std::move(segments), tile_bytes),
        local_idx(group.local_idx()),
        num_local_experts(group.num_local_experts()),
        gone(group.num_ranks) {
    const int32_t max_local_experts =
        *std::max_element(num_local_experts.begin(), num_local_experts.end());
    slot_offset.resize(segment_bytes.size());
    int64_t region = 0;
    for (const int64_t bytes : segment_bytes) {
      region_offset.push_back(region);
      region += max_local_experts * bytes;
    }
    const int64_t finest = uec::TileMap::tiles_per_group(tile_bytes);
    layout = uec::SymmetricLayout::make(
        group.topology(), max_local_experts, uec::ceil_div(tiles.map().num_tiles(), finest),
        static_cast<int32_t>(segment_bytes.size()), segment_bytes.data(), slot_offset.data());
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      memory.emplace_back(uec::ceil_div(layout.total, 8));
      counts.emplace_back(uec::ceil_div(layout.load_base, 8));
      bases.push_back(reinterpret_cast<uint8_t*>(memory[r].data()));
      weights.emplace_back(region);
      regions.push_back(weights[r].data());
      main_ptrs.emplace_back();
      for (size_t i = 0; i < segment_bytes.size(); ++i)
        for (int32_t m = 0; m < num_local_experts[r]; ++m)
          main_ptrs[r].push_back(regions[r] + region_offset[i] + m * segment_bytes[i]);
    }
  }

  int32_t num_ranks() const { return base_case.num_ranks; }

  void add_call(const std::vector<int32_t>& slot_expert, Mode mode) {
    const uint64_t epoch = kFirstEpoch + plans.size();
    plans.push_back(slot_expert);
    parts.emplace_back();
    PlanCase c = base_case;
    c.slot_expert = slot_expert;
    for (int32_t r = 0; r < num_ranks(); ++r) {
      parts.back().push_back(std::make_unique<Part>(c, tiles, mode, r));
      Part& part = *parts.back().back();
      Call& call = part.call;
      call.rank = r;
      call.num_ranks = num_ranks();
      call.epoch = {epoch, {record_of(epoch)}};
      call.layout = layout;
      call.tiles = tiles.map();
      call.addresses = {.bases = bases.data(),
                        .segment_bytes = segment_bytes.data(),
                        .slot_offset = slot_offset.data(),
                        .main_ptrs = main_ptrs[r].data(),
                        .num_local_experts = num_local_experts[r],
                        .regions = regions.data(),
                        .region_offset = region_offset.data()};
      call.work = part.worklist.list;
      call.arrived = part.arrived.data();
      part.ring.dice.seed(static_cast<uint32_t>(r));
    }
  }

  std::atomic_ref<uint64_t> word(int32_t rank, int64_t offset) {
    return std::atomic_ref(memory[rank][offset / 8]);
  }

  // Bytes that belong to one call, expert, and place.
  static uint8_t payload(uint64_t epoch, int32_t expert, size_t segment, int64_t at) {
    const uint64_t place = at / 64 * 7 + at % 64;
    return static_cast<uint8_t>(epoch * 101 + expert * 31 + segment * 17 + place + 1);
  }

  void fill_weights(int32_t rank, uint64_t epoch) {
    for (int32_t e = 0; e < base_case.num_experts; ++e)
      for (size_t i = 0; i < segment_bytes.size() && base_case.home[e] == rank; ++i)
        for (int64_t at = 0; at < segment_bytes[i]; ++at)
          weights[rank][region_offset[i] + local_idx[e] * segment_bytes[i] + at] =
              payload(epoch, e, i, at);
  }

  // The slots hold their experts; then the caller overwrites them.
  void use_slots(int32_t rank, int32_t call) {
    for (int32_t s = 0; s < base_case.slots_per_rank; ++s) {
      const int32_t expert = plans[call][rank * base_case.slots_per_rank + s];
      for (size_t i = 0; i < segment_bytes.size(); ++i) {
        uint8_t* const slot = bases[rank] + slot_offset[i] + s * segment_bytes[i];
        for (int64_t at = 0; at < segment_bytes[i]; ++at)
          CHECK_EQ(slot[at], expert < 0 ? 0 : payload(kFirstEpoch + call, expert, i, at));
        std::memset(slot, 0, segment_bytes[i]);
      }
    }
  }

  PlanCase base_case;
  std::vector<int64_t> segment_bytes, slot_offset, region_offset;
  Tiles tiles;
  uec::SymmetricLayout layout;
  std::vector<int32_t> local_idx, num_local_experts;
  std::vector<std::vector<uint64_t>> memory;
  std::vector<std::vector<std::atomic<int32_t>>> counts;  // publishes to each flag
  std::vector<std::vector<uint8_t>> weights;
  std::vector<uint8_t*> bases;
  std::vector<const uint8_t*> regions;
  std::vector<std::vector<const uint8_t*>> main_ptrs;
  std::vector<std::atomic<bool>> gone;
  std::vector<std::vector<int32_t>> plans;
  std::vector<std::vector<std::unique_ptr<Part>>> parts;  // [call][rank]
};

// ---- the policies -------------------------------------------------------------------------------

template <class Team>
class TeamMemory : public FlagMemory<World, Team> {
 public:
  using FlagMemory<World, Team>::FlagMemory;

  bool flags_delivered() { return true; }
  int32_t arrive(Delivered, int32_t* counter, int32_t n) {
    return std::atomic_ref(*counter).fetch_add(n, std::memory_order_acq_rel) + n;
  }
};

// The leader does everything and shares the results.
template <class Team>
class TeamMover : public uec::DeliveryPolicy {
 public:
  explicit TeamMover(Ring& ring) : ring_(ring) {}

  bool vacant(uint32_t k) {
    return told([&] { return k - ring_.released.load(std::memory_order_acquire) < Ring::kStages; });
  }
  void fetch(uint32_t k, const uec::Stage& stage, const uint8_t* source) {
    if (team_.leader()) {
      ring_.stages[k % Ring::kStages] = stage;
      ring_.source[k % Ring::kStages] = source;
      ring_.described.store(k + 1, std::memory_order_release);
    }
    team_.sync();
  }
  bool loaded(uint32_t k) {
    return told([&] { return ring_.described.load(std::memory_order_acquire) - k - 1 < 1u << 31; });
  }
  const uec::Stage& stage(uint32_t k) const { return ring_.stages[k % Ring::kStages]; }
  void store(uint32_t k, uint8_t* destination, int64_t bytes) {
    if (destination != nullptr) std::memcpy(destination, ring_.source[k % Ring::kStages], bytes);
    team_.sync();
  }
  uint32_t commit_and_wait_source(uint32_t) {
    return team_.broadcast(team_.leader() ? ++ring_.commits : 0);
  }
  bool reusable(uint32_t) {
    return told([&] { return draw(ring_.dice, 0, 2) > 0; });
  }
  void release(uint32_t k) {
    if (team_.leader()) ring_.released.store(k + 1, std::memory_order_release);
  }
  template <class F>
  bool wait_delivered(uint32_t, bool may_block, F&& then) {
    if (!told([&] { return may_block || draw(ring_.dice, 0, 2) == 0; })) return false;
    then(delivered());
    return true;
  }
  void loads_complete() { team_.sync(); }

 private:
  template <class F>
  bool told(F&& look) {
    return team_.broadcast(team_.leader() && look());
  }

  Ring& ring_;
  Team team_;
};

using Fields = std::vector<int64_t>;

Fields fields_of(const Wait& w) {
  return {static_cast<int64_t>(w.flag),    w.peer, w.expert, w.piece, static_cast<int64_t>(w.seen),
          static_cast<int64_t>(w.expected)};
}

template <class Team, class Side>
void agree_on(Side& side, Step step) {
  uint64_t answer = uec::mix(static_cast<uint64_t>(step), static_cast<uint64_t>(side.fault()));
  if (step == Step::kWaitsForPeer || step == Step::kFailed)
    for (const int64_t field : fields_of(side.wait())) answer = uec::mix(answer, field);
  agree<Team>(answer);
}

// What one member runs of one rank's call.
template <class Team>
struct Steps {
  Steps(World& world, int32_t call_idx, int32_t rank)
      : part(*world.parts[call_idx][rank]),
        memory(world, rank),
        mover(part.ring),
        fetcher(part.call, memory, mover, part.scratch.stripe, {}),
        storer(part.call, memory, mover, part.held),
        finish(part.call, memory) {}

  Part& part;
  TeamMemory<Team> memory;
  TeamMover<Team> mover;
  uec::Fetcher<TeamMemory<Team>, TeamMover<Team>> fetcher;
  uec::Storer<TeamMemory<Team>, TeamMover<Team>> storer;
  uec::Finish<TeamMemory<Team>> finish;
};

}  // namespace team_tests
