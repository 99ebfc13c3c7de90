// What the block of the plan kernel keeps in shared memory; the host asks for as much.
#pragma once

#include "core/planner.hpp"

namespace uec::cuda {

// A block may have any number of warps up to this. Each runs probes of its own: with eight a plan
// is nearly always three rounds of them, with one it is ten.
inline constexpr int32_t kMaxPlanWarps = 16;

struct PlanBlock {
  int64_t* load;     // [E] over all sources
  int32_t* by_home;  // [E] mains by home, then id
  int32_t* pool;     // [G] ranks with equal values may hold each other's experts
  int32_t* answers;  // [2][warps] of BlockCrew
  int32_t* num_pools;
  PlannerScratch planner;
  int64_t bytes;

  UEC_HD PlanBlock(const Topology& topology, int32_t num_warps, std::byte* memory)
      : PlanBlock(topology, num_warps, ScratchCutter(memory)) {}

 private:
  UEC_HD PlanBlock(const Topology& topology, int32_t num_warps, ScratchCutter cutter)
      : load(cutter.take<int64_t>(topology.num_experts)),
        by_home(cutter.take<int32_t>(topology.num_experts)),
        pool(cutter.take<int32_t>(topology.num_ranks)),
        answers(cutter.take<int32_t>(2 * num_warps)),
        num_pools(cutter.take<int32_t>(1)),
        planner(topology, cutter.take_bytes(planner_scratch_bytes(topology, num_warps)), num_warps),
        bytes(cutter.used_bytes()) {}
};

// Bytes of dynamic shared memory that a launch asks for. Where they are too many, fewer warps do.
UEC_HD inline int64_t plan_shared_bytes(const Topology& topology, int32_t num_warps) {
  return PlanBlock(topology, num_warps, nullptr).bytes;
}

}  // namespace uec::cuda
