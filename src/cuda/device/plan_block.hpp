// What the block of the plan kernel keeps in shared memory; the host requests that much.
#pragma once

#include "core/plan/planner.hpp"
#include "core/plan/resident_search.hpp"

namespace uec::cuda {

// A block may have any number of warps up to this. Each runs probes of its own: with seven or more
// a plan nearly always takes three rounds of probes, with one nine.
inline constexpr int32_t kMaxPlanWarps = 16;

// Bounds the kernel that plans for a bank, whose warps take more registers.
inline constexpr int32_t kMaxBankPlanWarps = 8;

struct PlanBlock {
  int64_t* load;           // [E] over all sources
  int32_t* home;           // [E]
  int32_t* by_home;        // [E] local experts by home, then id
  int32_t* pool;           // [G] ranks with equal values may hold each other's experts
  int32_t* answers;        // [2][warps] of BlockTeams
  uint8_t* is_split;       // [1] into more than one pool
  int64_t* tokens_before;  // [G] in a rank's pool, of those that go before it
  int32_t* before;         // [G] how many they are
  SortedLoad* sorted;      // [1] for all threads, and the next two: too many registers
  Goal* goal;              // [1]
  PlanOut* out;            // [1]
  int32_t* rank_tokens;    // [G], and the next two, as SortedLoad has them
  LocalRow* rows;          // [G]
  int32_t* local_tokens;   // [E]
  PlannerScratch planner;
  int64_t bytes;

  UEC_HD PlanBlock(const Topology& topology, int32_t num_warps, std::byte* memory,
                   int64_t least_team_bytes = 0)
      : PlanBlock(topology, num_warps, ScratchCutter(memory), least_team_bytes) {}

 private:
  UEC_HD PlanBlock(const Topology& topology, int32_t num_warps, ScratchCutter cutter,
                   int64_t least_team_bytes)
      : load(cutter.take<int64_t>(topology.num_experts)),
        home(cutter.take<int32_t>(topology.num_experts)),
        by_home(cutter.take<int32_t>(topology.num_experts)),
        pool(cutter.take<int32_t>(topology.num_ranks)),
        answers(cutter.take<int32_t>(2 * num_warps)),
        is_split(cutter.take<uint8_t>(1)),
        tokens_before(cutter.take<int64_t>(topology.num_ranks)),
        before(cutter.take<int32_t>(topology.num_ranks)),
        sorted(cutter.take<SortedLoad>(1)),
        goal(cutter.take<Goal>(1)),
        out(cutter.take<PlanOut>(1)),
        rank_tokens(cutter.take<int32_t>(topology.num_ranks)),
        rows(cutter.take<LocalRow>(topology.num_ranks)),
        local_tokens(cutter.take<int32_t>(topology.num_experts)),
        planner(topology,
                cutter.take_bytes(planner_scratch_bytes(topology, num_warps, least_team_bytes)),
                num_warps, least_team_bytes),
        bytes(cutter.used_bytes()) {}
};

// Bytes of dynamic shared memory that a launch requests. If they are too many, use fewer warps.
UEC_HD inline int64_t plan_shared_bytes(const Topology& topology, int32_t num_warps) {
  return PlanBlock(topology, num_warps, nullptr).bytes;
}

// What a plan for a bank keeps besides.
struct BankPlan {
  Topology topology;
  ResidentTask task;
};

// Its teams have the memory of the planner's: they search in turns with it.
struct BankPlanBlock {
  PlanBlock block;
  BankPlan* plan;      // [1] for all threads
  int32_t* residents;  // [G, S]
  ResidentScratch scratch;
  int64_t bytes;

  UEC_HD BankPlanBlock(const Topology& topology, int32_t num_warps, std::byte* memory)
      : BankPlanBlock(topology, num_warps, ScratchCutter(memory)) {}

  UEC_HD ResidentTeamScratch team(const Topology& topology, int32_t index) const {
    return ResidentTeamScratch(topology, block.planner.of_team(index));
  }

 private:
  UEC_HD static int64_t team_bytes(const Topology& topology) {
    return ResidentTeamScratch(topology, nullptr).bytes;
  }
  UEC_HD BankPlanBlock(const Topology& t, int32_t num_warps, ScratchCutter cutter)
      : block(t, num_warps,
              cutter.take_bytes(PlanBlock(t, num_warps, nullptr, team_bytes(t)).bytes),
              team_bytes(t)),
        plan(cutter.take<BankPlan>(1)),
        residents(cutter.take<int32_t>(int64_t{t.num_ranks} * t.slots_per_rank)),
        scratch(t, cutter.take_bytes(ResidentScratch(t, nullptr).bytes)),
        bytes(cutter.used_bytes()) {}
};

UEC_HD inline int64_t bank_plan_shared_bytes(const Topology& topology, int32_t num_warps) {
  return BankPlanBlock(topology, num_warps, nullptr).bytes;
}

}  // namespace uec::cuda
