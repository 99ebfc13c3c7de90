// The plan kernel: one block makes the plan of a load, the same plan as plan_replicas()
// (core/plan/planner.hpp), with a probe on each of its warps.
#pragma once

#include "cuda/device/plan_sort.cuh"

namespace uec::cuda {

// Empty slots, and every token on its main; no token anywhere if the load has a fault.
UEC_DEVICE void write_empty_plan(const PlanArgs& args, const int64_t* load, bool has_fault) {
  int32_t* const slot_expert = args.slot_expert;
  int32_t* const slot_quota = args.slot_quota;
  int32_t* const home_quota = args.home_quota;
  const int32_t num_slots = args.num_ranks * args.slots_per_rank;
  for (int32_t i = ptx::thread_idx(); i < num_slots; i += ptx::num_threads()) {
    slot_expert[i] = -1;
    slot_quota[i] = 0;
  }
  for (int32_t e = ptx::thread_idx(); e < args.num_experts; e += ptx::num_threads())
    home_quota[e] = has_fault ? 0 : static_cast<int32_t>(load[e]);
}

// Reports a fault to the host, unless one is pending there. The message is a single word, so
// concurrent launches do no harm.
UEC_DEVICE void put_fault(const PlanArgs& args, const PlanStatus& status) {
  uint64_t* const word = args.fault;
  if (status.fault != LoadFault::kNone && ptx::load_acquire_system(word) == 0)
    ptx::store_release_system(word, status.word());
}

UEC_DEVICE void plan(const PlanArgs& args, std::byte* shared_memory) {
  Topology topology;  // its arrays are not looked at
  topology.num_ranks = args.num_ranks;
  topology.num_experts = args.num_experts;
  topology.slots_per_rank = args.slots_per_rank;
  const PlanBlock block(topology, BlockTeams::size(), shared_memory);
  BlockTeams teams(block.answers);

  if (ptx::thread_idx() == 0) {  // sort_load() has barriers
    block.out->slot_expert = args.slot_expert;
    block.out->slot_quota = args.slot_quota;
    block.out->home_quota = args.home_quota;
  }
  const PlanStatus status = sort_load(args, teams, block);
  if (ptx::thread_idx() == 0) put_fault(args, status);
  write_empty_plan(args, block.load, status.fault != LoadFault::kNone);
  if (status.fault != LoadFault::kNone || args.slots_per_rank == 0) return;
  if (BlockTeams::index() == BlockTeams::size() - 1) {  // which has least to write
    const Goal goal = find_goal(Warp{}, *block.sorted, args.objective);
    if (Warp::leader()) *block.goal = goal;
  }
  ptx::sync_block();
  if (block.goal->is_met) return;
  // Its first exchange lets the replicas come after the empty slots.
  search_plan(teams, *block.sorted, args.objective, *block.goal, args.slots_per_rank,
              block.planner.team(topology, BlockTeams::index()), *block.out);
}

}  // namespace uec::cuda
