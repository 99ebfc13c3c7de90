// Plans the loads on standard input, each by one call of plan_once(): for planner_instructions.py.
//
// Input: G, E, S; home [E]; domain [G]; then a load [E] until the end.
#include <cstddef>
#include <iostream>
#include <vector>

#include "core/planner.hpp"

extern "C" __attribute__((noinline)) void plan_once(const uec::Topology& topology,
                                                    const int64_t* load,
                                                    const uec::PlannerScratch& scratch,
                                                    int32_t* slot_expert, int32_t* slot_quota,
                                                    int32_t* home_quota) {
  uec::plan_replicas(topology, load, uec::Objective{}, scratch, slot_expert, slot_quota,
                     home_quota);
}

int main() {
  int32_t num_ranks, num_experts, slots;
  std::cin >> num_ranks >> num_experts >> slots;
  std::vector<int32_t> home(num_experts), domain(num_ranks);
  for (int32_t& rank : home) std::cin >> rank;
  for (int32_t& id : domain) std::cin >> id;
  const uec::Topology topology{.num_ranks = num_ranks,
                               .num_experts = num_experts,
                               .slots_per_rank = slots,
                               .home = home.data(),
                               .domain = domain.data()};
  std::vector<int64_t> memory(uec::planner_scratch_bytes(topology) / 8 + 1), load(num_experts);
  const uec::PlannerScratch scratch(topology, reinterpret_cast<std::byte*>(memory.data()));
  std::vector<int32_t> slot_expert(num_ranks * slots), slot_quota(num_ranks * slots);
  std::vector<int32_t> home_quota(num_experts);
  for (;;) {
    for (int64_t& tokens : load)
      if (!(std::cin >> tokens)) return 0;
    plan_once(topology, load.data(), scratch, slot_expert.data(), slot_quota.data(),
              home_quota.data());
  }
}
