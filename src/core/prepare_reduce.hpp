// Plan -> schedule -> worklist of a gradient reduction, as prepare.hpp for a transfer.
#pragma once

#include "core/prepare.hpp"
#include "core/reduce_schedule.hpp"
#include "core/reduce_worklist.hpp"

namespace uec {

struct ReduceArgs {
  const int32_t* slot_expert = nullptr;  // [G][S], validated
  uint64_t plan_digest = 0;              // of what else the plan says (quotas)
  uint64_t tag = 0;                      // of the plan's handle: layer and microbatch; 0: none
  const uint64_t* mains = nullptr;       // [segments][M] addresses of main gradients
  const GradType* main_type = nullptr;   // [segments] of this rank's main gradients
  int32_t mode = -1;                     // kPull, kDirect, or -1: by cost
  bool zero = true;                      // slot gradients are cleared
};

// Fills the call's tiles and worklist, but for the addresses of the main gradients. Returns what
// this call adds to the digest that ranks must agree on. Main gradients are a rank's own business.
//
// Run by a team as prepare_replicate() is.
template <class Team>
UEC_HD uint64_t prepare_reduce(Team team, const GroupTables& group, const ReduceArgs& args,
                               const CallArrays& arrays, ScheduleArrays& work, PlanShape* shape,
                               Call* call) {
  const Topology& t = group.topology;
  const Gradients& grads = group.grads;
  if (team.leader()) {  // members meet in make_reduction() before they look at tiles
    call->grads = grads;
    call->tiles.num_segments = grads.num_segments;
    call->tiles.tile_bytes = group.tile_bytes;
    int64_t first_tile = arrays.first_tile[0] = 0;
    for (int32_t i = 0; i < grads.num_segments; ++i) {
      arrays.segment[i] = i;
      arrays.bytes[i] = grads.bytes[i];
      arrays.main_type[i] = args.main_type[i];
      first_tile += ceil_div(grads.bytes[i], group.tile_bytes);
      arrays.first_tile[i + 1] = first_tile;
    }
  }
  make_reduction(team, t, call->tiles, args.slot_expert, args.mode, group.cost, work.scratch, shape,
                 work.schedule);
  build_reductions(team, t, call->tiles, work.schedule, group.main_idx, group.rank, args.zero,
                   call->work);
  uint64_t digest = mix(static_cast<uint64_t>(Operation::kReduce), args.plan_digest);
  digest = mix(digest, args.tag);  // plans that are equal may be of different layers
  digest = digest_ints(team, digest, args.slot_expert, int64_t{t.num_ranks} * t.slots_per_rank);
  return mix(digest, static_cast<uint64_t>(work.schedule.mode) << 1 | args.zero);
}

}  // namespace uec
