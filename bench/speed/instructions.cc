// Plans the loads on standard input, and makes each plan's schedules and shares: for
// instructions.py, which counts the instructions of what counted() calls.
//
// Input: G, E, S; home [E]; domain [G]; then a load [E] until the end.
// Output: a line for each of those calls, in their order, that names what was called.
#include <array>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <utility>
#include <vector>

#include "core/plan/planner.hpp"
#include "core/reroute/reroute.hpp"
#include "core/schedule/cost.hpp"

namespace {

// An expert of 37.75 MB in two segments, of the published measurements, and any constants that are
// like a rack's: only `auto` looks at them.
constexpr std::array<int32_t, 2> kSegments{0, 1};
constexpr std::array<int64_t, 2> kSegmentBytes{25165824, 12582912};
constexpr int64_t kTileBytes = 32 << 10;
constexpr uec::CostModel kCost{.store_per_kib = 1442,
                               .load_per_kib = 300,
                               .group = 50'000,
                               .hop = 2'000'000,
                               .parallel_percent = 6400};

struct Work {
  uec::Topology topology;
  uec::TileMap tiles;
  const uec::PlannerScratch* planner_scratch;
  const uec::RerouteScratch* reroute_scratch;
  uec::ScheduleScratch schedule_scratch;
  uec::Schedule schedule;
  uec::PlanShape shape;
  const int64_t* load;          // [E]
  const int32_t* load_by_rank;  // [G, E]
  int32_t* slot_expert;
  int32_t* slot_quota;
  int32_t* home_quota;
};

using Call = bool (*)(Work&);  // false: the call found a fault

bool make_plan(Work& w) {
  uec::plan_replicas(w.topology, w.load, uec::Objective{}, *w.planner_scratch, w.slot_expert,
                     w.slot_quota, w.home_quota);
  return true;
}

template <int32_t mode>
bool make_schedule(Work& w) {
  uec::make_schedule(uec::SingleThread{}, w.topology, w.tiles, w.slot_expert, /*resident=*/nullptr,
                     mode,
                     /*may_pull=*/true, kCost, w.schedule_scratch, &w.shape, w.schedule);
  return true;
}

bool make_shares(Work& w) {
  const uec::QuotaPlan plan{.load = w.load_by_rank,
                            .slot_expert = w.slot_expert,
                            .slot_quota = w.slot_quota,
                            .home_quota = w.home_quota};
  const int32_t source = w.topology.num_ranks - 1;
  return uec::compute_shares(w.topology, plan, source, *w.reroute_scratch).fault ==
         uec::RerouteFault::kNone;
}

constexpr std::array<std::pair<const char*, Call>, 4> kSchedules{
    {{"schedule push", make_schedule<0>},
     {"schedule pull", make_schedule<1>},
     {"schedule direct", make_schedule<2>},
     {"schedule auto", make_schedule<-1>}}};

}  // namespace

// What is counted: from its entry to its return, which `!` keeps from being the call's own.
extern "C" __attribute__((noinline)) bool counted(Call call, Work& work) { return !call(work); }

int main() {
  int32_t num_ranks, num_experts, slots;
  if (!(std::cin >> num_ranks >> num_experts >> slots)) return 1;
  std::vector<int32_t> home(num_experts), domain(num_ranks);
  for (int32_t& rank : home) std::cin >> rank;
  for (int32_t& id : domain) std::cin >> id;
  const uec::Topology topology{.num_ranks = num_ranks,
                               .num_experts = num_experts,
                               .slots_per_rank = slots,
                               .home = home.data(),
                               .domain = domain.data()};
  const std::array<int64_t, 3> first_tile{0, kSegmentBytes[0] / kTileBytes,
                                          (kSegmentBytes[0] + kSegmentBytes[1]) / kTileBytes};

  std::vector<int64_t> planner_memory(uec::planner_scratch_bytes(topology) / 8 + 1),
      reroute_memory(uec::reroute_scratch_bytes(topology) / 8 + 1), load(num_experts);
  const uec::PlannerScratch planner_scratch(topology,
                                            reinterpret_cast<std::byte*>(planner_memory.data()));
  const uec::RerouteScratch reroute_scratch(topology,
                                            reinterpret_cast<std::byte*>(reroute_memory.data()));
  using Ints = std::vector<int32_t>;
  const auto replicas = static_cast<size_t>(num_ranks * slots);
  Ints slot_expert(replicas), slot_quota(replicas), home_quota(num_experts);
  Ints load_by_rank(static_cast<size_t>(num_ranks) * num_experts);
  Ints expert(replicas + 1), first(replicas + 2), rank(replicas + 1), slot(replicas + 1),
      boundary(3 * replicas + 2), count(num_experts + 1), exports(num_ranks), order(replicas + 1);
  std::vector<int64_t> egress(num_ranks), extra(2 * replicas + 2);
  std::vector<uec::Sender> source(replicas + 1);
  Work work{.topology = topology,
            .tiles = {2, kSegments.data(), kSegmentBytes.data(), first_tile.data(), kTileBytes,
                      uec::TileMap::tiles_per_group(kTileBytes)},
            .planner_scratch = &planner_scratch,
            .reroute_scratch = &reroute_scratch,
            .schedule_scratch = {count.data(), exports.data(), order.data(), extra.data()},
            .schedule = {uec::Mode::kDirect, 0, expert.data(), first.data(), rank.data(),
                         slot.data(), boundary.data(), egress.data(), source.data()},
            .shape = {},
            .load = load.data(),
            .load_by_rank = load_by_rank.data(),
            .slot_expert = slot_expert.data(),
            .slot_quota = slot_quota.data(),
            .home_quota = home_quota.data()};

  for (;;) {
    for (int64_t& tokens : load)
      if (!(std::cin >> tokens)) return 0;
    for (int32_t r = 0; r < num_ranks; ++r)  // all source ranks alike
      for (int32_t e = 0; e < num_experts; ++e)
        load_by_rank[r * num_experts + e] =
            static_cast<int32_t>(load[e] / num_ranks + (r < load[e] % num_ranks));
    const auto count = [&](const char* name, Call call) {
      if (counted(call, work)) std::exit(1);
      std::cout << name;
    };
    count("plan\n", make_plan);
    for (const auto& [name, call] : kSchedules) {
      count(name, call);
      std::cout << (work.shape.chained ? " chained\n" : "\n");
    }
    count("shares\n", make_shares);
  }
}
