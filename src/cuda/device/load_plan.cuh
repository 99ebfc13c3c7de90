// Turns ids into the plan in one launch: the block that has gathered the table plans it.
#pragma once

#include "cuda/device/load.cuh"
#include "cuda/device/plan.cuh"

namespace uec::cuda {

UEC_DEVICE void load_plan(const LoadPlanArgs& args, std::byte* shared_memory) {
  const LoadEnd end = load<false>(args.load, shared_memory);
  if (end == LoadEnd::kElsewhere) return;
  PlanArgs own = args.plan;
  const PlanOutput out = PlanOutput::cut(args.plans[ptx::block_y()], own.num_ranks,
                                         own.slots_per_rank, own.num_experts);
  own.load = args.load.calls[ptx::block_y()].load.address;
  own.num_sources = own.num_ranks;
  own.slot_expert = out.slot_expert;
  own.slot_quota = out.slot_quota;
  own.home_quota = out.home_quota;
  own.fault = args.faults[ptx::block_y()];
  // A failed call gets the empty plan of a faulty load, so that nothing acts on it.
  if (end == LoadEnd::kFailed) return write_empty_plan(own, nullptr, true);
  // Reuses the load's memory, except for the head: its barriers must not be overwritten. Its first
  // barrier also comes between what each thread has copied of the table and what others sum of it.
  plan(own, shared_memory + kLoadHeadBytes);
}

}  // namespace uec::cuda
