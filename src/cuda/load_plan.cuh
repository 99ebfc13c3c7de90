// From ids to the plan in one launch: the block that has gathered the table plans it.
#pragma once

#include "cuda/load.cuh"
#include "cuda/plan.cuh"

namespace uec::cuda {

UEC_DEVICE void load_plan(const LoadPlanArgs& args, std::byte* shared_memory) {
  const LoadEnd end = load<false>(args.load, shared_memory);
  if (end == LoadEnd::kElsewhere) return;
  PlanArgs own = args.plan;
  const PlanOutput out = PlanOutput::cut(args.plans[ptx::block_y()], own.num_ranks,
                                         own.slots_per_rank, own.num_experts);
  own.load = args.load.calls[ptx::block_y()].load;
  own.num_sources = own.num_ranks;
  own.slot_expert = out.slot_expert;
  own.slot_quota = out.slot_quota;
  own.home_quota = out.home_quota;
  own.fault = args.faults[ptx::block_y()];
  // As of a load that has a fault, so that whoever follows this plan does nothing.
  if (end == LoadEnd::kFailed) return write_empty_plan(own, nullptr, true);
  // What each thread has copied of the table comes before what others add up of it.
  ptx::sync_block();
  // Over what the load kept, but for the head: barriers are there, which must not be written over.
  plan(own, shared_memory + kLoadHeadBytes);
}

}  // namespace uec::cuda
