// Random groups, plans and tile maps, shared by the C++ tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "core/base/common.hpp"
#include "core/schedule/hubs.hpp"
#include "core/schedule/schedule.hpp"
#include "core/schedule/tiles.hpp"

// Tests make one in kPart of their repetitions under a sanitizer, which slows them, and in the
// first tier.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
inline const int kPart = kSanitized ? 8 : std::getenv("UEC_FEW_CASES") != nullptr ? 4 : 1;
inline int scaled(int count) { return (count + kPart - 1) / kPart; }

using Random = std::mt19937;

inline int32_t draw(Random& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

// A group's constants and one plan for it.
struct PlanCase {
  int32_t num_ranks = 0, num_experts = 0, slots_per_rank = 0;
  bool allow_cross_domain = false;
  std::vector<int32_t> home{}, domain{}, slot_expert{};
  std::vector<int32_t> resident{};  // [G][S]; empty: none

  uec::Topology topology() const {
    return {num_ranks, num_experts, slots_per_rank, home.data(), domain.data(), allow_cross_domain};
  }

  std::vector<int32_t> num_local_experts() const {
    std::vector<int32_t> count(num_ranks, 0);
    for (const int32_t r : home) ++count[r];
    return count;
  }

  std::vector<int32_t> local_idx() const {
    std::vector<int32_t> count(num_ranks, 0), idx(num_experts);
    for (int32_t e = 0; e < num_experts; ++e) idx[e] = count[home[e]]++;
    return idx;
  }

  // That plans may cross.
  int32_t num_domains() const {
    if (!allow_cross_domain) return 1;
    return static_cast<int32_t>(std::set<int32_t>(domain.begin(), domain.end()).size());
  }

  const int32_t* residents() const { return resident.empty() ? nullptr : resident.data(); }

  // Whether the slot is to be filled.
  bool moves(size_t at) const {
    return slot_expert[at] >= 0 && (resident.empty() || resident[at] != slot_expert[at]);
  }

  // That are to be filled.
  int32_t num_replicas() const {
    int32_t count = 0;
    for (size_t at = 0; at < slot_expert.size(); ++at) count += moves(at);
    return count;
  }

  // Puts `expert` into the first free slot of `rank`; false where that is not legal.
  bool place(int32_t expert, int32_t rank) {
    int32_t* const row = slot_expert.data() + rank * slots_per_rank;
    int32_t* const end = row + slots_per_rank;
    int32_t* const free = std::find(row, end, -1);
    if (free == end || !topology().may_hold(expert, rank) || std::find(row, end, expert) != end)
      return false;
    *free = expert;
    return true;
  }

  void clear() { slot_expert.assign(num_ranks * slots_per_rank, -1); }
};

inline PlanCase make_group(int32_t num_ranks, int32_t num_experts, int32_t slots_per_rank) {
  PlanCase c{.num_ranks = num_ranks, .num_experts = num_experts, .slots_per_rank = slots_per_rank};
  c.domain.assign(num_ranks, 0);
  for (int32_t e = 0; e < num_experts; ++e)
    c.home.push_back(static_cast<int32_t>(int64_t{e} * num_ranks / num_experts));
  c.clear();
  return c;
}

// Replaces the plan by a random one. Any rank may both export and import: about half of the plans
// have chains. Now and then the plan is empty, or one expert goes to every rank that may hold it.
inline void draw_plan(PlanCase& c, Random& random) {
  c.clear();
  const int32_t shape = draw(random, 0, 9);
  if (shape == 0 || c.slots_per_rank == 0) return;
  if (shape <= 3) {
    const int32_t hot = draw(random, 0, c.num_experts - 1);
    for (int32_t r = 0; r < c.num_ranks; ++r) c.place(hot, r);
  }
  const int32_t filled = draw(random, 1, 10);  // tenths
  for (int32_t i = 0; i < c.num_ranks * c.slots_per_rank; ++i) {
    if (draw(random, 1, 10) > filled) continue;
    // Few candidates, so that experts with several replicas are common.
    const int32_t expert = draw(random, 0, c.num_experts - 1);
    c.place(shape <= 6 ? expert / 3 : expert, i / c.slots_per_rank);
  }
  for (int32_t r = 0; r < c.num_ranks; ++r)  // holes between filled slots
    std::shuffle(c.slot_expert.begin() + r * c.slots_per_rank,
                 c.slot_expert.begin() + (r + 1) * c.slots_per_rank, random);
}

// A group of any shape with a random plan. Home maps may be uneven, and leave ranks without local
// experts.
inline PlanCase draw_case(Random& random, int32_t max_ranks) {
  const int32_t num_ranks = draw(random, 1, max_ranks);
  PlanCase c = make_group(num_ranks, draw(random, 1, 4 * num_ranks), draw(random, 0, 4));
  if (draw(random, 0, 1) == 1)
    for (int32_t& home : c.home) home = draw(random, 0, num_ranks - 1);
  if (draw(random, 0, 3) == 0) {
    for (int32_t r = 0; r < num_ranks; ++r) c.domain[r] = r % 2;
    c.allow_cross_domain = draw(random, 0, 1) == 1;
  }
  draw_plan(c, random);
  return c;
}

// What slots hold before a call with the case's plan: now and then what the plan has there, or what
// it replaces.
inline void draw_residents(PlanCase& c, Random& random) {
  c.resident.assign(c.slot_expert.size(), -1);
  const int32_t kept = draw(random, 0, 10);  // tenths
  for (size_t at = 0; at < c.slot_expert.size(); ++at) {
    if (draw(random, 1, 10) <= kept) c.resident[at] = c.slot_expert[at];
    const int32_t other = draw(random, -1, c.num_experts - 1);
    if (draw(random, 1, 10) <= 3) c.resident[at] = other;
  }
}

// The tiles of some segments.
class Tiles {
 public:
  Tiles(std::vector<int64_t> segment_bytes, int64_t tile_bytes)
      : bytes_(std::move(segment_bytes)), first_tile_{0} {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      segment_.push_back(static_cast<int32_t>(i));
      first_tile_.push_back(first_tile_.back() + uec::ceil_div(bytes_[i], tile_bytes));
    }
    map_ = {static_cast<int32_t>(bytes_.size()),
            segment_.data(),
            bytes_.data(),
            first_tile_.data(),
            tile_bytes,
            uec::TileMap::tiles_per_group(tile_bytes)};
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  const uec::TileMap& map() const { return map_; }

 private:
  std::vector<int64_t> bytes_;
  std::vector<int32_t> segment_;
  std::vector<int64_t> first_tile_;
  uec::TileMap map_;
};

// A schedule with arrays of exactly the capacities that schedule.hpp states, so that the sanitizers
// see a step beyond them.
struct ScheduleArrays {
  ScheduleArrays(const PlanCase& c, const uec::TileMap& tiles, uec::Mode mode)
      : num_replicas(c.num_ranks * c.slots_per_rank),
        max_experts(std::min(c.num_experts * c.num_domains(), num_replicas)),
        expert(max_experts),
        first(max_experts + 1),
        replica_rank(num_replicas),
        replica_slot(num_replicas),
        boundary(num_replicas + 2 * max_experts),
        count(std::max(c.num_experts, max_experts) + 1),
        exports(c.num_ranks),
        order(max_experts),
        egress(c.num_ranks),
        extra(num_replicas + max_experts),
        source(max_experts) {
    schedule.expert = expert.data();
    schedule.first = first.data();
    schedule.replica_rank = replica_rank.data();
    schedule.replica_slot = replica_slot.data();
    schedule.boundary = boundary.data();
    schedule.egress = egress.data();
    schedule.source = source.data();
    const uec::ScheduleScratch scratch{count.data(), exports.data(), order.data(), extra.data()};
    shape = uec::collect_entries(uec::SingleThread{}, c.topology(), c.slot_expert.data(),
                                 uec::SlotsToFill{c.residents()}, scratch, schedule);
    uec::assign_hubs(uec::SingleThread{}, c.topology(), tiles.num_groups(), shape, mode, scratch,
                     schedule);
  }
  ScheduleArrays(const ScheduleArrays&) = delete;
  ScheduleArrays& operator=(const ScheduleArrays&) = delete;

  int32_t num_replicas, max_experts;
  std::vector<int32_t> expert, first, replica_rank, replica_slot, boundary, count, exports, order;
  std::vector<int64_t> egress, extra;
  std::vector<uec::Sender> source;
  uec::Schedule schedule;
  uec::PlanShape shape;
};
