// The plan kernel on the emulated device.
#pragma once

#include "cuda/device/plan.cuh"
#include "device/host_plan.hpp"
#include "support/check.hpp"

namespace device_tests {

// The kernel's plan of load [num_sources, E]. `fault`: the word that the host looks at. `keeps`:
// the load too.
inline Plan plan_on_device(const uec::Topology& topology, const std::vector<int32_t>& load,
                           const uec::Objective& objective, int32_t num_warps, uint64_t* fault,
                           bool keeps) {
  const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
  Plan plan(topology);
  std::vector<int32_t> kept(keeps ? load.size() : 0, 77);
  std::vector<int32_t> mains_begin(topology.num_ranks + 1), mains(topology.num_experts);
  const uec::cuda::PlanArgs args{
      .home = address(topology.home),
      .domain = address(topology.domain),
      .mains_begin = address(mains_begin.data()),
      .mains = address(mains.data()),
      .load = address(load.data()),
      .kept_load = kept.empty() ? 0 : address(kept.data()),
      .slot_expert = address(plan.slot_expert.data()),
      .slot_quota = address(plan.slot_quota.data()),
      .home_quota = address(plan.home_quota.data()),
      .fault = address(fault),
      .objective = objective,
      .num_ranks = topology.num_ranks,
      .num_experts = topology.num_experts,
      .slots_per_rank = topology.slots_per_rank,
      .num_sources = static_cast<int32_t>(load.size()) / topology.num_experts,
      .max_mains = uec::group_mains(topology, mains_begin.data(), mains.data()),
      .allow_cross_domain = topology.allow_cross_domain,
  };
  emulation::launch(
      "ultraep_plan", args,
      {.shared_bytes = uec::cuda::plan_shared_bytes(topology, num_warps), .warps = num_warps},
      [&](std::byte* memory) { uec::cuda::plan(args, memory); });
  CHECK(kept.empty() || kept == load);
  return plan;
}

}  // namespace device_tests
