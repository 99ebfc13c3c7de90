// The plan kernels on the emulated device.
#pragma once

#include "cuda/device/plan_bank.cuh"
#include "device/host_plan.hpp"
#include "support/check.hpp"

namespace device_tests {

inline uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }

// What the kernels are given for a load [num_sources, E].
struct PlanCall {
  Plan plan;
  std::vector<int32_t> local_begin, local_experts;
  uec::cuda::PlanArgs args;

  PlanCall(const uec::Topology& t, const std::vector<int32_t>& load,
           const uec::Objective& objective, uint64_t* fault)
      : plan(t),
        local_begin(t.num_ranks + 1),
        local_experts(t.num_experts),
        args{
            .home = address(t.home),
            .domain = address(t.domain),
            .local_begin = address(local_begin.data()),
            .local_experts = address(local_experts.data()),
            .load = address(load.data()),
            .slot_expert = address(plan.slot_expert.data()),
            .slot_quota = address(plan.slot_quota.data()),
            .home_quota = address(plan.home_quota.data()),
            .fault = address(fault),
            .objective = objective,
            .num_ranks = t.num_ranks,
            .num_experts = t.num_experts,
            .slots_per_rank = t.slots_per_rank,
            .num_sources = static_cast<int32_t>(load.size()) / t.num_experts,
            .max_local_experts =
                uec::group_local_experts(t, local_begin.data(), local_experts.data()),
            .allow_cross_domain = t.allow_cross_domain,
        } {}
  PlanCall(const PlanCall&) = delete;  // its arguments are its addresses
  PlanCall& operator=(const PlanCall&) = delete;
};

// The kernel's plan of load [num_sources, E]. `fault`: the word that the host looks at. `keeps`:
// the load too.
inline Plan plan_on_device(const uec::Topology& topology, const std::vector<int32_t>& load,
                           const uec::Objective& objective, int32_t num_warps, uint64_t* fault,
                           bool keeps) {
  PlanCall call(topology, load, objective, fault);
  std::vector<int32_t> kept(keeps ? load.size() : 0, 77);
  call.args.kept_load = kept.empty() ? 0 : address(kept.data());
  emulation::launch(
      "ultraep_plan", call.args,
      {.shared_bytes = uec::cuda::plan_shared_bytes(topology, num_warps), .warps = num_warps},
      [&](std::byte* memory) { uec::cuda::plan(call.args, memory); });
  CHECK(kept.empty() || kept == load);
  return call.plan;
}

// Plans in a bank on the device. `moves` [G, S]: out.
inline Plan plan_in_bank_on_device(const uec::Topology& topology, const std::vector<int32_t>& load,
                                   const uec::BankTable& bank, int64_t target_ppm,
                                   int32_t num_warps, uint64_t* fault,
                                   std::vector<uint8_t>* moves) {
  PlanCall call(topology, load, {.target_ppm = target_ppm}, fault);
  moves->assign(call.plan.slot_expert.size(), 77);
  const uec::cuda::BankPlanArgs args{call.args, address(&bank), address(moves->data())};
  emulation::launch(
      "ultraep_plan_in_bank", args,
      {.shared_bytes = uec::cuda::bank_plan_shared_bytes(topology, num_warps), .warps = num_warps},
      [&](std::byte* memory) { uec::cuda::plan_in_bank(args, memory); });
  return call.plan;
}

}  // namespace device_tests
