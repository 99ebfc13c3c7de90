// Functions of the core that kernels of later stages call, as a device sees them.
#include "core/plan/planner.hpp"
#include "core/reroute/reroute.hpp"

extern "C" __global__ void plan(uec::Topology topology, const int64_t* load,
                                uec::Objective objective, std::byte* memory, int32_t* slot_expert,
                                int32_t* slot_quota, int32_t* home_quota) {
  uec::plan_replicas(topology, load, objective, uec::PlannerScratch(topology, memory), slot_expert,
                     slot_quota, home_quota);
}

extern "C" __global__ void reroute(uec::Topology topology, uec::QuotaPlan plan, int32_t source,
                                   std::byte* memory, const int64_t* ids, int64_t num_ids,
                                   int64_t* out, uec::RerouteStatus* status) {
  const uec::RerouteScratch scratch(topology, memory);
  *status = uec::compute_shares(topology, plan, source, scratch);
  *status = uec::reroute_tokens(ids, num_ids, topology.num_experts, scratch, out);
}

extern "C" __global__ void reroute_map(uec::Topology topology, std::byte* memory,
                                       const uint8_t* map, int64_t num_tokens, int64_t* from,
                                       int64_t* to, uec::RerouteStatus* status) {
  const uec::RerouteScratch scratch(topology, memory);
  *status = uec::reroute_map(topology, map, num_tokens, scratch, from, to);
}
