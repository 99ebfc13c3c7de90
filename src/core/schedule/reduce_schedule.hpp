// A plan -> the schedule of its gradient reduction.
//
// The same arrays as a transfer's (schedule.hpp); hub i's range is what that hub sums. Either the
// replicas of an expert are its hubs, in equal shares, and the home loads their sums (kPull), or
// the home is the only hub, and loads every replica itself (kDirect, and where there is one
// replica). The result is the same, bit for bit.
#pragma once

#include "core/schedule/cost.hpp"
#include "core/schedule/schedule.hpp"

namespace uec {

// Fills `boundary` and `egress` of a schedule whose replicas have been collected: here what each
// rank loads from others, in kEgressUnit per expert.
template <class Team>
UEC_HD_NOINLINE void assign_sums(Team team, const Topology& t, int32_t num_groups, Mode mode,
                                 Schedule& s) {
  if (team.leader()) s.mode = mode;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size()) s.egress[r] = 0;
  team.sync();
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size()) {
    const int32_t n = s.num_replicas(x);
    const bool shared = mode != Mode::kDirect && n > 1;
    int32_t* const bounds = s.boundaries(x);
    bounds[0] = 0;
    bounds[1] = shared ? 0 : num_groups;
    for (int32_t hub = 1; hub <= n; ++hub) {
      bounds[hub + 1] = shared ? static_cast<int32_t>(int64_t{hub} * num_groups / n) : num_groups;
      if (shared)
        team.atomic_add(&s.egress[s.replica_rank[s.first[x] + hub - 1]], (n - 1) * kEgressUnit / n);
    }
    team.atomic_add(&s.egress[s.source[x].rank], (shared ? 1 : n) * kEgressUnit);
  }
  team.sync();
}

// Modelled time of a reduction, in picoseconds, like modelled_time() of a transfer. What both modes
// have in common counts too, because it may dominate: every main gradient is read and written,
// every slot is cleared.
template <class Team>
UEC_HD_NOINLINE int64_t modelled_reduction(Team team, const Topology& t, const TileMap& tiles,
                                           int32_t num_groups, const PlanShape& shape,
                                           const Schedule& s, const CostModel& cost) {
  if (s.num_experts == 0) return 0;
  const int64_t kib = ceil_div(tiles.expert_bytes(), 1024);
  const int64_t store = kib * cost.store_per_kib, load = kib * cost.load_per_kib;
  uint64_t most = 0, added = 0, flagged = 0;
  UEC_ROLLED
  for (int32_t r = team.index(); r < t.num_ranks; r += team.size())
    most = s.egress[r] > static_cast<int64_t>(most) ? static_cast<uint64_t>(s.egress[r]) : most;
  UEC_ROLLED
  for (int32_t x = team.index(); x < s.num_experts; x += team.size()) {
    const bool shared = s.boundaries(x)[1] == 0;
    added += shared;
    flagged += shared ? static_cast<uint64_t>(num_groups) : 0;
  }
  const auto busiest = static_cast<int64_t>(highest(team, most));
  // Sums are stored, flagged and loaded again.
  const auto sums = static_cast<int64_t>(team.sum(added));
  const auto flags = static_cast<int64_t>(team.sum(flagged)) * cost.group;
  const int64_t add_to_main = load + store;
  const int64_t alone =
      busiest * load / kEgressUnit + shape.max_exports * add_to_main + shape.max_imports * store;
  const int64_t percent = max64(min64(cost.parallel_percent, int64_t{100} * t.num_ranks), 1);
  const int64_t together = (shape.num_replicas * (load + store) + s.num_experts * add_to_main +
                            sums * (load + store) + flags) /
                           percent * 100;
  return max64(alone, together) + (sums > 0 ? 3 : 2) * cost.hop;
}

// Chooses who sums in the mode asked for (kPull or kDirect), or (`mode` < 0) in the cheaper one.
template <class Team>
UEC_HD void choose_sums(Team team, const Topology& t, const TileMap& tiles, const PlanShape& own,
                        int32_t mode, const CostModel& cost, Schedule& s) {
  const int32_t num_groups = tiles.num_groups();
  const bool has_choice = mode < 0 && own.max_fanout > 1;
  Mode next = mode >= 0 ? static_cast<Mode>(mode) : Mode::kDirect;
  int64_t direct = 0;
  UEC_ROLLED
  for (int32_t round = 0;; ++round) {  // direct, through hubs, and direct again if that was cheaper
    assign_sums(team, t, num_groups, next, s);
    if (!has_choice || round == 2) return;
    const int64_t time = modelled_reduction(team, t, tiles, num_groups, own, s, cost);
    if (round == 1 && time < direct) return;
    direct = time;
    next = round == 0 ? Mode::kPull : Mode::kDirect;
  }
}

// Makes the whole schedule of a reduction, as make_schedule() does. `quota`: as in SlotsWithTokens.
template <class Team>
UEC_HD void make_reduction(Team team, const Topology& t, const TileMap& tiles,
                           const int32_t* slot_expert, const int32_t* quota, int32_t mode,
                           const CostModel& cost, const ScheduleScratch& scratch, PlanShape* shape,
                           Schedule& s) {
  const PlanShape own = collect_entries(team, t, slot_expert, SlotsWithTokens{quota}, scratch, s);
  if (team.leader()) *shape = own;
  choose_sums(team, t, tiles, own, mode, cost, s);
}

}  // namespace uec
