// The plan of a load by the core's planners, which the plan kernels have to find.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/plan/planner.hpp"
#include "core/plan/resident_planner.hpp"

namespace device_tests {

struct Plan {
  explicit Plan(const uec::Topology& t)
      : slot_expert(t.num_ranks * t.slots_per_rank, 77),
        slot_quota(t.num_ranks * t.slots_per_rank, 77),
        home_quota(t.num_experts, 77) {}
  bool operator==(const Plan&) const = default;

  std::vector<int32_t> slot_expert, slot_quota, home_quota;
};

// Tokens of each expert in a load [num_sources, E].
inline std::vector<int64_t> sums(const std::vector<int32_t>& load, int32_t num_experts) {
  std::vector<int64_t> total(num_experts, 0);
  for (size_t i = 0; i < load.size(); ++i) total[i % num_experts] += load[i];
  return total;
}

inline Plan plan_on_host(const uec::Topology& topology, const std::vector<int64_t>& load,
                         const uec::Objective& objective) {
  Plan plan(topology);
  std::vector<std::byte> memory(uec::planner_scratch_bytes(topology));
  uec::plan_replicas(topology, load.data(), objective, uec::PlannerScratch(topology, memory.data()),
                     plan.slot_expert.data(), plan.slot_quota.data(), plan.home_quota.data());
  return plan;
}

inline Plan plan_in_bank_on_host(const uec::Topology& topology, const std::vector<int64_t>& load,
                                 const std::vector<int32_t>& residents, int64_t target_ppm) {
  Plan plan(topology);
  std::vector<std::byte> memory(uec::resident_scratch_bytes(topology));
  uec::plan_with_residents(topology, load.data(), residents.data(), target_ppm, memory.data(),
                           plan.slot_expert.data(), plan.slot_quota.data(), plan.home_quota.data());
  return plan;
}

}  // namespace device_tests
