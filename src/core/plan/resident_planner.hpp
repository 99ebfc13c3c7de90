// The planner on top of residents: experts that slots still hold from earlier calls.
//
// The readable definition of the same algorithm is `tests/reference/resident_planner.py`; the two
// agree in every integer. The residents first: if tokens can flow to them (resident_flow.hpp) until
// no rank has too many, nothing moves. Otherwise one expert at a time moves (resident_search.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"
#include "core/base/local_experts.hpp"
#include "core/base/team.hpp"
#include "core/plan/planner.hpp"
#include "core/plan/resident_search.hpp"

namespace uec {

// ---------------------------------------------------------------------------------------------
// Contract

UEC_HD inline int64_t resident_scratch_bytes(const Topology& topology) {
  return planner_scratch_bytes(topology) + ResidentTeamScratch(topology, nullptr).bytes +
         ResidentScratch(topology, nullptr).bytes;
}

// Chooses the replicas and every instance's quota for one microbatch, given what the slots hold.
// A slot "moves" if its expert is not the resident: then it has to be written.
//
//   load        [E] as in plan_replicas()
//   residents   [G, S] expert in the slot, or -1: never at home, never twice on a rank, only where
//               Topology::may_hold allows
//   target_ppm  as in Objective, which has the words for what follows, too
//   scratch     resident_scratch_bytes(), aligned to 8 bytes; nothing in it needs to be initialised
//   slot_expert [G, S] out: expert in the slot or -1; a resident stays until its slot is needed
//   slot_quota  [G, S] out: tokens of that replica, 0 where a resident is not needed
//   home_quota  [E] out: tokens that stay on the main instance
//
// What is looked for, in this order: the least imbalance, down to the target; the least transfer of
// the moves; the fewest moves; the fewest instances in use. Guarantees: those of plan_replicas()
// on quotas and instances; a slot that moves has a quota; the fullest rank has no more tokens than
// under plan_replicas(), or no more than the target allows; without residents the plan is that of
// plan_replicas().
UEC_HD inline void plan_with_residents(const Topology& topology, const int64_t* load,
                                       const int32_t* residents, int64_t target_ppm,
                                       std::byte* scratch, int32_t* slot_expert,
                                       int32_t* slot_quota, int32_t* home_quota);

// ---------------------------------------------------------------------------------------------
// Implementation

UEC_HD inline void plan_with_residents(const Topology& topology, const int64_t* load,
                                       const int32_t* residents, int64_t target_ppm,
                                       std::byte* scratch, int32_t* slot_expert,
                                       int32_t* slot_quota, int32_t* home_quota) {
  const Objective objective{.target_ppm = target_ppm};
  const PlannerScratch planner(topology, scratch);
  const int32_t num_slots = topology.num_ranks * topology.slots_per_rank;
  bool is_empty = true;
  for (int32_t i = 0; i < num_slots && is_empty; ++i) is_empty = residents[i] < 0;
  if (is_empty) {
    plan_replicas(topology, load, objective, planner, slot_expert, slot_quota, home_quota);
    return;
  }
  const SortedLoad sorted = detail::sort_load(topology, load, planner);
  if (objective.is_exact() && sorted.num_pools == 1) detail::pad_ranks(topology, planner);
  const int64_t threshold = find_goal(SingleThread{}, sorted, objective).threshold;
  const ResidentTask task{load, planner.rank_load, residents, threshold};
  std::byte* const memory = scratch + planner_scratch_bytes(topology);
  const ResidentTeamScratch own(topology, memory);
  const ResidentScratch shared(topology, memory + own.bytes);
  SingleTeam teams;
  ResidentSearch<SingleTeam> search(teams, topology, task, shared, own);
  if (!search.run(false)) {
    plan_replicas(topology, load, objective, planner, shared.planned_expert, shared.planned_quota,
                  home_quota);
    search.run(true);
  }
  const Assignment best = search.best();
  for (int32_t i = 0; i < num_slots; ++i) {
    slot_expert[i] = best.slot_expert[i];
    slot_quota[i] = best.slot_quota[i];
  }
  for (int32_t e = 0; e < topology.num_experts; ++e) home_quota[e] = best.home_quota[e];
}

}  // namespace uec
