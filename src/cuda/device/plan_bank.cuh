// The plan kernel for a bank: one block makes the plan of a load on top of what the bank's slots
// hold, the same as plan_with_residents() (core/plan/resident_planner.hpp), with a warp for each
// variant of the search, and for each move that may be undone.
#pragma once

#include "core/plan/resident_search.hpp"
#include "cuda/device/plan.cuh"

namespace uec::cuda {

// Into shared memory. Whether there is one, in all threads.
UEC_DEVICE bool copy_residents(const BankPlanArgs& args, BlockTeams& teams, int32_t* residents) {
  const auto& table = *args.bank;
  const int32_t num_slots = args.plan.num_ranks * args.plan.slots_per_rank;
  const bool is_known = table.segments != 0;
  uint32_t is_empty = 1;
  for (int32_t i = ptx::thread_idx(); i < num_slots; i += ptx::num_threads()) {
    const int32_t expert = is_known ? table.resident[i] : -1;
    residents[i] = expert;
    if (expert >= 0) is_empty = 0;
  }
  return teams.min_sync(is_empty) == 0;
}

UEC_DEVICE void plan_in_bank(const BankPlanArgs& args, std::byte* shared_memory) {
  Topology topology;  // as in plan()
  topology.num_ranks = args.plan.num_ranks;
  topology.num_experts = args.plan.num_experts;
  topology.slots_per_rank = args.plan.slots_per_rank;
  const BankPlanBlock bank(topology, BlockTeams::size(), shared_memory);
  const PlanBlock& block = bank.block;
  BlockTeams teams(block.answers);
  const int32_t num_slots = topology.num_ranks * topology.slots_per_rank;
  int32_t* const slot_expert = args.plan.slot_expert;
  int32_t* const slot_quota = args.plan.slot_quota;
  int32_t* const home_quota = args.plan.home_quota;
  uint8_t* const moves = args.moves;

  const bool is_held = copy_residents(args, teams, bank.residents);
  const PlanStatus status = sort_load(args.plan, teams, block);
  if (ptx::thread_idx() == 0) put_fault(args.plan, status);
  const bool has_fault = status.fault != LoadFault::kNone;
  write_empty_plan(args.plan, block.load, has_fault);
  if (has_fault || topology.slots_per_rank == 0) {
    for (int32_t i = ptx::thread_idx(); i < num_slots; i += ptx::num_threads()) moves[i] = 0;
    return;
  }
  if (BlockTeams::index() == BlockTeams::size() - 1) {
    const Goal goal = find_goal(Warp{}, *block.sorted, args.plan.objective);
    if (Warp::leader()) *block.goal = goal;
  }
  ptx::sync_block();
  if (ptx::thread_idx() == 0) {
    BankPlan& own = *bank.plan;
    own.topology = topology;
    own.topology.home = block.home;
    own.topology.domain = block.pool;
    own.task = {block.load, block.planner.rank_load, bank.residents, block.goal->threshold};
    *block.out = {is_held ? bank.scratch.planned_expert : slot_expert,
                  is_held ? bank.scratch.planned_quota : slot_quota, home_quota};
  }
  ptx::sync_block();
  for (int32_t i = ptx::thread_idx(); i < num_slots && is_held; i += ptx::num_threads()) {
    bank.scratch.planned_expert[i] = -1;
    bank.scratch.planned_quota[i] = 0;
  }
  ResidentSearch<BlockTeams> search(teams, bank.plan->topology, bank.plan->task, bank.scratch,
                                    bank.team(topology, BlockTeams::index()));
  for (bool is_planned = false;; is_planned = true) {
    const bool is_enough = is_held ? search.run(is_planned) : block.goal->is_met;
    if (is_planned || is_enough) break;
    ptx::sync_block();
    search_plan(teams, *block.sorted, args.plan.objective, *block.goal, topology.slots_per_rank,
                block.planner.team(topology, BlockTeams::index()), *block.out);
    ptx::sync_block();
  }
  const Assignment best = search.best();
  for (int32_t i = ptx::thread_idx(); i < num_slots; i += ptx::num_threads()) {
    const int32_t expert = is_held ? best.slot_expert[i] : slot_expert[i];
    moves[i] = expert != bank.residents[i];
    if (!is_held) continue;
    slot_expert[i] = expert;
    slot_quota[i] = best.slot_quota[i];
  }
  for (int32_t e = ptx::thread_idx(); e < topology.num_experts && is_held; e += ptx::num_threads())
    home_quota[e] = best.home_quota[e];
}

}  // namespace uec::cuda
